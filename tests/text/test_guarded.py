"""Tokenizers with unknown components: the same ids and texts as without guard, and an error at a
limit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pronk.base.errors import PromptError, TokenizerError
from pronk.testing import byte_tokenizer
from pronk.text import guarded
from pronk.text.guarded import GuardedTokenizer, load_backend
from pronk.text.spelling import without_prefix
from pronk.text.tokenizer import Tokenizer
from waiting import eventually

Result = TypeVar("Result")

PLAIN = json.loads(Backend(models.BPE({"a": 0, "l": 1, "ll": 2, " ": 3}, [("l", "l")])).to_str())
TEXTS = ["", "hello  world", "naïve 東京 🙂\n", "a" * 5000, "<s>x</s>", "\ufffd"]


def load(folder: Path, **changed: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps({**PLAIN, **changed}), encoding="utf-8")
    return Tokenizer.load(folder)


def unigram() -> Backend:
    letters = [chr(each) for each in range(33, 127)]
    vocab = [("<unk>", 0.0), *((letter, -3.0) for letter in letters), ("▁hello", -1.0), ("▁", -2.0)]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def word_piece() -> Backend:
    vocab = {"[UNK]": 0, "hello": 1, "wor": 2, "##ld": 3, "x": 4, "[SEP]": 5}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", 5)]
    )
    backend.decoder = decoders.WordPiece()
    return backend


def other_pattern() -> Backend:
    backend = byte_tokenizer()
    split = pre_tokenizers.Split(Regex(r"[a-z]{1,3}|\s"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return backend


@pytest.mark.parametrize("make", [unigram, word_piece, other_pattern])
def test_ids_and_texts_are_the_same(make: Any) -> None:
    backend = make()
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    made = load_backend(backend.to_str())
    assert isinstance(made, GuardedTokenizer)
    tokenizer = Tokenizer(made)
    for text in TEXTS:
        expected = backend.encode(text)
        encoding = made.encode(text)
        assert encoding == (expected.ids, expected.offsets, expected.special_tokens_mask)
        assert (
            tokenizer.encode(text, add_special_tokens=False)
            == backend.encode(text, add_special_tokens=False).ids
        )
        for skip in (False, True):
            decoded = backend.decode(expected.ids, skip_special_tokens=skip)
            assert tokenizer.decode(expected.ids, skip_special_tokens=skip) == decoded
        assert made.decode_batch([expected.ids]) == [backend.decode(expected.ids)]
        assert tokenizer.encode_batch([text] * 2) == [expected.ids] * 2
    assert tokenizer.fingerprint == Tokenizer(backend).fingerprint
    assert tokenizer.digest == Tokenizer(backend).digest


def test_a_copy_is_guarded_too() -> None:
    """A copy that takes names of special tokens as text is that of the original in this process."""
    backend = other_pattern()
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    copy = without_prefix(Tokenizer(load_backend(backend.to_str())))
    assert isinstance(copy.backend, GuardedTokenizer)
    backend.encode_special_tokens = True
    assert copy.encode("<s>ab") == backend.encode("<s>ab").ids


def test_guides_get_the_tokens_only() -> None:
    backend = other_pattern()
    guarded_one = Tokenizer(load_backend(backend.to_str()))
    plain = Tokenizer(backend)
    assert json.loads(guarded_one.vocabulary_json) == json.loads(plain.vocabulary_json) | {
        "pre_tokenizer": None
    }


def in_time(call: Callable[[], Result]) -> Result:
    """Call a function; again if the machine was too busy for the limit of time."""
    results = list[Result]()

    def is_done() -> bool:
        with suppress(TokenizerError, PromptError):
            results.append(call())
        return bool(results)

    assert eventually(is_done)
    return results[0]


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def precompiled(table: str) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": table}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def token_of_template(name: str) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}


LONG = replace("l", "l" * 100)
PREFIX = {
    "continuing_subword_prefix": "é",
    "vocab": {"a": 0, "é": 1, "漢": 2},
    "merges": [["a", "漢"]],
}
UNUSABLE: dict[str, dict[str, Any]] = {
    ("normalizers that make texts "
    "long"): {"normalizer": {"type": "Sequence", "normalizers": [LONG] * 5}},
    "an expression that is none": {"normalizer": replace("(", "", "Regex")},
    "a damaged table": {"normalizer": precompiled("EAAAAP///////////////////2FiYwA=")},
    "decoders that make texts long": {"decoder": {"type": "Sequence", "decoders": [LONG] * 5}},
    "an empty table": {"normalizer": precompiled("AAAA")},
    "pieces without length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a cut beyond the "
    "text": {"decoder": {"type": "Strip", "content": "l", "start": 0, "stop": 10**12}},
    "cuts that overlap": {"decoder": {"type": "Strip", "content": "l", "start": 1, "stop": 1}},
    "a template with an undefined token": {"post_processor": token_of_template("x")},
    ("merges without the prefix of "
    "subwords"): {"model": {**PLAIN["model"], "continuing_subword_prefix": "##"}},
    "merges within a character": {"model": {**PLAIN["model"], **PREFIX}},
}  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("changed", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_files_are_refused(
    tmp_path: Path, changed: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json: .*expected .*, found .*; restore it"
    ) as caught:
        load(tmp_path, **changed)
    assert str(caught.value).isprintable()
    assert capfd.readouterr() == ("", "")


WORDS = {"[UNK]": 0, "l": 1, "##l": 2}
WORD_PIECE = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "vocab": WORDS,
    "continuing_subword_prefix": "##",
}
RUNS = [["<unk>", 0.0], *(["l" * length, -1.0] for length in range(1, 2000))]
SLOW: dict[str, tuple[dict[str, Any], str]] = {
    "an expression": ({"pre_tokenizer": split(r"\s+$")}, " " * 200_000 + "l"),
    "an expression in a sequence": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"\s+$")]}},
        " " * 200_000 + "l",
    ),
    "an expression of a normalizer": (
        {"normalizer": replace(r"\s+$", "", "Regex")},
        " " * 200_000 + "l",
    ),
    "splits": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("l")] * 500}},
        "l" * 100_000,
    ),
    "words": ({"model": {**WORD_PIECE, "max_input_chars_per_word": 10**9}}, "l" * 60_000),
    "long tokens": ({"model": {"type": "Unigram", "unk_id": 0, "vocab": RUNS}}, "l" * 100_000),
    "memory": ({"normalizer": {"type": "Sequence", "normalizers": [LONG] * 2}}, "l" * 200_000),
}


@pytest.mark.few(3)
@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not enforce the limit of memory"
)
@pytest.mark.parametrize(("changed", "text"), SLOW.values(), ids=SLOW)
def test_texts_beyond_a_limit_are_refused(
    tmp_path: Path, changed: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load(tmp_path, **changed)
    monkeypatch.setattr(guarded, "SECONDS", 0.35)
    hasty = in_time(lambda: load(tmp_path, **changed))
    with pytest.raises(
        PromptError, match="found one that exceeds a limit with this prompt; use a shorter prompt"
    ):
        hasty.encode(text)
    short = text[-1]
    assert in_time(lambda: hasty.encode(short)) == tokenizer.encode(short)


def test_tokens_beyond_a_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are decoded in another process than texts are encoded in."""
    monkeypatch.setattr(guarded, "SECONDS", 0.35)
    decoder = {"type": "Sequence", "decoders": [{"type": "Fuse"}, replace(r" +x", "", "Regex")]}
    tokenizer = in_time(lambda: load(tmp_path, decoder=decoder))
    in_time(lambda: tokenizer.decode([2]))
    with pytest.raises(
        TokenizerError, match="exceeds a limit as it decodes tokens; use a model that you trust"
    ):
        tokenizer.decode([3] * 200_000)
    assert in_time(lambda: tokenizer.decode([2])) == "ll"


def test_expressions_that_the_search_gives_up(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        normalizer=replace("(l+)+x", "", "Regex"),
        decoder={
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, replace("(l+)+x", "", "Regex")],
        },
    )
    with pytest.raises(
        PromptError, match=r"expected text that the tokenizer can encode, found 'lll.*retry-limit"
    ):
        tokenizer.encode("l" * 1000)
    with pytest.raises(
        TokenizerError,
        match=r"expected one that decodes all tokens, found that it fails .*retry-limit",
    ):
        tokenizer.decode([2] * 1000)
    assert tokenizer.decode(tokenizer.encode("lll")) == "lll"


@pytest.mark.parametrize("pre_tokenizer", [None, split("x")])
def test_texts_that_cannot_be_encoded(tmp_path: Path, pre_tokenizer: dict[str, Any] | None) -> None:
    tokenizer = load(tmp_path, pre_tokenizer=pre_tokenizer)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["l", text])):
        with pytest.raises(
            PromptError, match=r"expected text that the tokenizer can encode, found '.ud800x'"
        ):
            encode("\ud800x")


@pytest.mark.parametrize("pre_tokenizer", [None, split("x")])
def test_settings_of_training_are_switched_off(
    tmp_path: Path, pre_tokenizer: dict[str, Any] | None
) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    model = {**PLAIN["model"], "dropout": 0.5}
    tokenizer = load(tmp_path, model=model, pre_tokenizer=pre_tokenizer, truncation=truncation)
    assert {tuple(tokenizer.encode("llllllll")) for _ in range(20)} == {(2, 2, 2, 2)}


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"model": {}}'])
def test_files_that_are_no_tokenizers(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match="restore it from its source"):
        Tokenizer.load(tmp_path)
