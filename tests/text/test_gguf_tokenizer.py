"""Tokenizers from GGUF files have the ids of the original tokenizers; unknown ones are refused."""

import json
import random
import re
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from gemma4_files import write_gemma4_bpe
from gguf_files import finish, write_bytes_bpe
from hard_texts import hard_texts
from pronk.base.errors import TokenizerError
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.gguf.vocabulary import TokenKind
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.text import gguf_tokenizer as tokenizer
from pronk.text.patterns import PRE_TOKENIZERS
from pronk.text.tokenizer import Tokenizer

TINY = tiny_model()
TEXTS = [
    "", " ", "\n", "  \n\n\t x", ("def add(a, b):\n    return a + "
        "b\n"), ("I'll say IT'S they've; He'D "
        "we'Re"),
    "12345 3.14159 1,000,000 \uff12\uff13 ½ ²", "naïve café e\u0301 Å A\u030a",
    "Grüße aus Köln — „ja“", "東京と大阪 汉字漢字 한국어",
    ("🙂🙃 👩‍👩‍👧 \u200b "
    "zero"), "a" * 50 + "  " * 20 + "b", "<|endoftext|>x<|user|> y", "\r\nwin\r\n\r\n  dos \r x",
    "$%^ += <=> ~|~ `code` #!/",
    "</s> <s> <unk> <0x0A> ▁low▁", ("camelCase HTTPServer snake_case "
        "ABCdef"), "\x00\x01\x7f\ufffd", "ﬁ ﬂ ㎏ ｶﾞ",
]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with cases are those that DeepSeek LLM lists, in the texts of these tests.
DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)
KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}*{KIMI_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}+{KIMI_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|user|>"]
HARD_TEXTS = [each.text for each in hard_texts(360)]
# Names of pre-tokenizers with the rules of another one.
SAME_RULES = {
    "a.x-4.0": "gpt-2",
    "chatglm-bpe": "dbrx",
    "deepseek-r1-qwen": "qwen2",
    "f2llmv2": "qwen2",
    "falcon-h1": "llama-bpe",
    "falcon3": "llama-bpe",
    "gigachat": "gpt-2",
    "granite-docling": "gpt-2",
    "joyai-llm": "deepseek-v3",
    "kanana2": "gpt-4o",
    "megrez": "qwen2",
    "mellum": "gpt-2",
    "midm-2.0": "llama-bpe",
    "minerva-7b": "starcoder",
    "pixtral": "llama-bpe",
    "trillion": "gpt-2",
}
# The pre-tokenizer in tokenizer.json of DeepSeek V3.
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)


def random_texts(count: int) -> list[str]:
    """Return random texts of characters at which the pre-tokenizers split differently."""
    draw = random.Random(0)
    letters = "aAbBéßЖж漢字'’sTdll 0123½ \t\n\r  .,!$+<|~ \u0301\u200d🙂_▁"
    return ["".join(draw.choices(letters, k=draw.randrange(1, 60))) for _ in range(count)]


def split(*steps: Any) -> Any:
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def by(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


# As in tokenizer.json of the models.
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
SPLITS = {
    "dbrx": split(by(LLAMA3)),
    "deepseek-coder": split(
        *map(by, [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_LLM[-1]]),
        pre_tokenizers.Digits(individual_digits=True),
    ),
    "deepseek-v3": split(*map(by, DEEPSEEK3)),
    "deepseek-llm": split(*map(by, DEEPSEEK_LLM), pre_tokenizers.Digits(individual_digits=True)),
    "glm4": split(by(LLAMA3)),
    "gpt-2": GPT2,
    "gpt-4o": split(by(GPT4O)),
    "kimi-k2": split(by(KIMI)),
    "lfm2": split(by(LLAMA3)),
    "llama-bpe": split(by(LLAMA3)),
    "llama3": split(by(LLAMA3)),
    "llama-v3": split(by(LLAMA3)),
    "qwen2": split(by(QWEN2)),
    "qwen35": split(by(QWEN35)),
    "refact": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "smaug-bpe": split(by(LLAMA3)),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "starcoder": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "tekken": split(by(TEKKEN)),
}


def trained(pre: str) -> tokenizers.Tokenizer:
    """Return a trained byte-level BPE with the pre-tokenizer of this name."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            ignore_merges=pre
            in ("kimi-k2", "lfm2", "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")
        )
    )
    tokenizer.pre_tokenizer = SPLITS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS * 3, *random_texts(300)], trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def write(path: Path, fill: Any, *, architecture: str = "llama", **pairs: Any) -> Path:
    """Write a file with a tokenizer and no tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    for key, value in pairs.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(f"tokenizer.{key.replace('__', '.')}", value)
    finish(writer)
    return path


def same(mine: Tokenizer, theirs: tokenizers.Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = theirs.encode(text).ids
        assert mine.encode(text) == ids, repr(text)
        for silent in (True, False):
            assert mine.decode(ids, skip_special_tokens=silent) == theirs.decode(
                ids, skip_special_tokens=silent
            )


@pytest.mark.few(7)
@pytest.mark.parametrize("pre", SPLITS)
def test_ids_equal_those_of_the_original(pre: str, tmp_path: Path) -> None:
    theirs = trained(pre)
    path = write(
        tmp_path / "a.gguf", lambda w: write_bytes_bpe(w, theirs, pre), ggml__add_bos_token=False
    )
    mine = Tokenizer.load(path, 701)
    same(mine, theirs, [*TEXTS, *HARD_TEXTS, *random_texts(500), "a<tool>b <tool>"])
    plain = Tokenizer(theirs)
    assert mine.fingerprint == plain.fingerprint
    assert mine.special_ids == plain.special_ids == {0, 1}


def test_every_pre_tokenizer_is_compared() -> None:
    """Each supported name has rules of an original, or those of a name that is compared."""
    for name, compared in SAME_RULES.items():
        assert PRE_TOKENIZERS[name] == PRE_TOKENIZERS[compared], name
    assert PRE_TOKENIZERS.keys() == {"default", *SPLITS, *SAME_RULES}


@pytest.mark.parametrize("name", ["bloom", "olmo", "qwen2-1", "superbpe", "tiny_aya"])
def test_other_pre_tokenizers_are_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", lambda w: write_bytes_bpe(w, trained("gpt-2"), name))
    with pytest.raises(TokenizerError, match=f"tokenizer.ggml.pre to be one of .*found '{name}'"):
        Tokenizer.load(path)


@pytest.mark.parametrize(("pre", "is_whole"), [("smaug-bpe", True), ("dbrx", False)])
def test_words_that_no_merges_make(pre: str, is_whole: bool, tmp_path: Path) -> None:
    """Llama 3 has such tokens. ``tokenizer.json`` says ``ignore_merges``; GGUF files do not."""

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*"word", "word", "wo"])
        writer.add_token_merges(["w o"])
        writer.add_string("tokenizer.ggml.pre", pre)

    ids = Tokenizer.load(write(tmp_path / "a.gguf", fill)).encode("word")
    assert ids == ([4] if is_whole else [5, 2, 3])


def test_a_word_of_gemma4_that_no_merges_make(tmp_path: Path) -> None:
    """In the vocabulary of Gemma 4, ``</div>`` is such a token."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [3, 3, 3, 2, *[6] * 256]
    words = ["</div>", *"</div>", "</"]
    path = write_gemma4_bpe(
        tmp_path / "a.gguf", [*tokens, *words], ["< /"], [*kinds, *[1] * len(words)]
    )
    mine = Tokenizer.load(path)
    found = [mine.token_text(token) for token in mine.encode("</div>", add_special_tokens=False)]
    assert found == ["</", "d", "i", "v", ">"]


def test_user_defined_runs_of_spaces(tmp_path: Path) -> None:
    """Gemma 3: visible spaces in a text and spaces are the same to merges, as in the original."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "  ", "   ", "a", "\u2581a"]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0, 0.0, 0.0, -5.0, -1000.0, -1000.0, -6.0, -1.0])
        writer.add_token_types([2, 3, 3, 1, 4, 4, 1, 1])

    mine = Tokenizer.load(
        write(tmp_path / "a.gguf", fill, ggml__add_space_prefix=False, ggml__add_bos_token=False)
    )
    expected = {
        "  a": [4, 6],
        "   ": [5],
        "\u2581 a": [4, 6],
        " \u2581 ": [5],
        "a \u2581": [6, 4],
        " a": [7],
        "\u2581\u2581a": [4, 6],
    }
    assert {text: mine.encode(text) for text in expected} == expected
    assert [mine.decode(ids) for ids in expected.values()] == [
        text.replace("\u2581", " ") for text in expected
    ]


def gemma4_model() -> dict[str, Any]:
    """Return vocabulary and merges of a small BPE with visible spaces, a token for each byte, and
    no token with line ends and other characters.
    """
    trained_bpe = tokenizers.Tokenizer(models.BPE())
    trained_bpe.normalizer = normalizers.Replace(" ", "\u2581")
    trained_bpe.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    lines = [*TEXTS, "a\n\nb\n\n\nc" * 9, Path(__file__).read_text()]
    trained_bpe.train_from_iterator(lines, trainer)
    model: dict[str, Any] = json.loads(trained_bpe.to_str())["model"]
    return model


def test_the_tokenizer_of_gemma4(tmp_path: Path) -> None:
    """Ids are those of a tokenizer with the components of the original ``tokenizer.json``, which
    splits no lines: its vocabulary has no token across line ends.
    """
    model = gemma4_model()
    vocab = model["vocab"]
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    theirs = tokenizers.Tokenizer(bpe)
    theirs.normalizer = normalizers.Replace(" ", "\u2581")
    theirs.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    theirs.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    theirs.post_processor = processors.TemplateProcessing(
        single=["<bos>", "$A"], special_tokens=[("<bos>", vocab["<bos>"])]
    )
    special = {"<pad>": 3, "<eos>": 3, "<bos>": 3, "<unk>": 2}
    control = [name for name, kind in special.items() if kind == TokenKind.CONTROL]
    theirs.add_special_tokens([*control, "<unk>"])
    tokens = sorted(vocab, key=vocab.__getitem__)
    is_byte = re.compile(r"<0x[0-9A-F]{2}>").fullmatch
    kinds = [special.get(token, 6 if is_byte(token) else 1) for token in tokens]
    path = write_gemma4_bpe(
        tmp_path / "a.gguf", tokens, [" ".join(merge) for merge in merges], kinds
    )
    mine = Tokenizer.load(path, len(tokens))
    assert any("\n\n" in token for token in tokens)
    same(
        mine,
        theirs,
        [*TEXTS, *random_texts(500), "a\n\n\nb\n", "\n" * 9, "  two  spaces ", "\u20ac"],
    )
    assert mine.bos_id == vocab["<bos>"]


def test_marks_belong_to_words_of_qwen35(tmp_path: Path) -> None:
    """Vowel signs of Thai and Hindi and accents without a composed letter do not split a word.

    The words are those that the rules of llama.cpp give. The original vocabulary is not at hand.
    """
    words = {
        "สวัสดีครับ ผมชื่อ": ["สวัสดีครับ", " ผมชื่อ"],
        "नमस्ते दुनिया": ["नमस्ते", " दुनिया"],
        "x\u0304q\u0304 = 12": ["x\u0304q\u0304", " =", " ", "1", "2"],
        "_\u0304j e\u0301": ["_\u0304j", " é"],
        "it's\n\n  I'LL": ["it", "'s", "\n\n", " ", " I", "'LL"],
    }
    pieces = {}
    for pre in ("qwen35", "qwen2"):
        theirs = trained(pre)
        path = write(tmp_path / f"{pre}.gguf", lambda w: write_bytes_bpe(w, theirs, pre))  # noqa: B023
        backend = Tokenizer.load(path, 701).backend
        assert isinstance(backend, tokenizers.Tokenizer)
        for text in words:
            normalized = backend.normalizer.normalize_str(text)
            split_text = backend.pre_tokenizer.pre_tokenize_str(normalized)
            pieces[pre, text] = [normalized[start:stop] for _, (start, stop) in split_text]
    assert {text: pieces["qwen35", text] for text in words} == words
    assert [pieces["qwen2", text] != split_words for text, split_words in words.items()] == [
        True, True, True, True, False,
    ]  # fmt: skip


def test_words_of_deepseek_llm_have_letters_with_cases() -> None:
    """All Latin, Greek and Cyrillic letters with cases are listed, and no other characters are."""
    listed = re.compile(PRE_TOKENIZERS["deepseek-llm"].patterns[1]).fullmatch
    kinds = ("Lu", "Ll", "Lt")
    for code in range(0x20, 0x110000):
        is_cased = unicodedata.category(chr(code)) in kinds
        is_listed = listed(chr(code)) is not None
        if code < 0x530:
            assert is_listed == is_cased, hex(code)
        assert is_cased or not is_listed, hex(code)


def test_words_of_kimi() -> None:
    """Chinese characters are words of their own; combining marks belong to other words."""
    steps = split(*map(by, PRE_TOKENIZERS["kimi-k2"].patterns))
    text = "中文English混合 x\u0301y 'LL 1234 /\n a//\n"
    pieces = [text[start:stop] for _, (start, stop) in steps.pre_tokenize_str(text)]
    assert pieces == [
        "中文", "English", "混合", " x\u0301y", " '", "LL", " ", "123", "4", " /\n", " a", "//\n"
    ]  # fmt: skip


def test_the_vocabulary_of_pronk_tiny(tmp_path: Path) -> None:
    theirs = Tokenizer.load(TINY)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    path = write(
        tmp_path / "a.gguf",
        lambda w: write_bytes_bpe(w, theirs.backend, "gpt-2"),
        chat_template=config["chat_template"],
    )
    mine = Tokenizer.load(path, 4096)
    same(mine, theirs.backend, [*TEXTS, *random_texts(1500), Path(__file__).read_text()])
    assert mine.fingerprint == theirs.fingerprint
    assert (mine.eos_ids, mine.bos_id) == (theirs.eos_ids, theirs.bos_id) == ((0,), 0)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert mine.chat(messages) == theirs.chat(messages)
    assert mine.chat_ids(messages) == theirs.chat_ids(messages)


def test_no_template(tmp_path: Path) -> None:
    """The error names the key of the GGUF file, which has no ``tokenizer_config.json``."""
    backend = Tokenizer.load(TINY).backend
    tokenizer = Tokenizer.load(
        write(tmp_path / "a.gguf", lambda w: write_bytes_bpe(w, backend, "gpt-2"))
    )
    with pytest.raises(
        TokenizerError,
        match=r"no chat template: expected tokenizer.chat_template in the metadata of",
    ):
        tokenizer.chat([{"role": "user", "content": "Hi"}])


def test_pre_tokenizers_differ_on_these_texts(tmp_path: Path) -> None:
    pieces = {
        name: [[piece for piece, _ in SPLITS[name].pre_tokenize_str(text)] for text in TEXTS]
        for name in ("gpt-2", "gpt-4o", "llama-bpe", "qwen2", "smollm", "tekken")
    }
    assert len({json.dumps(each) for each in pieces.values()}) == 6


def test_default_splits_as_llama_cpp(tmp_path: Path) -> None:
    """The four patterns of ``default`` split one after the other; the expected pieces are by
    hand.
    """
    path = write(tmp_path / "a.gguf", lambda w: write_bytes_bpe(w, trained("gpt-2"), "default"))
    pieces = Tokenizer.load(path).backend.pre_tokenizer.pre_tokenize_str("ab12345 x+=y'll  z")
    found = [piece.replace("Ġ", " ") for piece, _ in pieces]
    assert found == ["ab", "123", "45", " x", "+=", "y", "'", "ll", " ", " z"]


def test_padding_tokens(tmp_path: Path) -> None:
    theirs = trained("gpt-2")
    mine = Tokenizer.load(
        write(tmp_path / "a.gguf", lambda w: write_bytes_bpe(w, theirs, "gpt-2", pad=9)), 710
    )
    assert mine.fingerprint == Tokenizer(theirs).fingerprint
    assert mine.token_text(705) is None
    assert mine.encode("[PAD705]") == theirs.encode("[PAD705]").ids


@pytest.mark.parametrize(("pre", "says", "begins"), [
    ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True),
    ("tekken", None, True),
])  # fmt: skip
def test_add_bos_and_eos_token(pre: str, says: bool | None, begins: bool, tmp_path: Path) -> None:
    pairs = {} if says is None else {"ggml__add_bos_token": says}
    tokenizer = trained(pre)
    mine = Tokenizer.load(
        write(tmp_path / "a.gguf", lambda w: write_bytes_bpe(w, tokenizer, pre), **pairs)
    )
    assert (mine.encode("x")[0] == 0) == begins
    assert mine.encode("x", add_special_tokens=False)[0] != 0
    ends = write(
        tmp_path / "b.gguf", lambda w: write_bytes_bpe(w, tokenizer, pre), ggml__add_eos_token=True
    )
    assert Tokenizer.load(ends).encode("x")[-1] == 0


LLAMA_TEXTS = [text for text in TEXTS if "\x00" not in text]


def pieces_vocabulary() -> dict[str, float]:
    """Return tokens of a SentencePiece BPE with their scores; the first merge has the best
    score.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=400, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator([*LLAMA_TEXTS * 3, *random_texts(200)], trainer)
    learned = [
        token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    ]
    singles = [token for token in learned if len(token) == 1]
    merged = [token for token in learned if len(token) > 1]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return (
        dict.fromkeys(special, 0.0)
        | {token: -float(i) for i, token in enumerate(merged)}
        | dict.fromkeys(singles, -1e6)
    )


def write_pieces(writer: gguf.GGUFWriter, vocabulary: dict[str, float]) -> None:
    kinds = {"<unk>": TokenKind.UNKNOWN, "<s>": TokenKind.CONTROL, "</s>": TokenKind.CONTROL}
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(vocabulary))
    writer.add_token_scores(list(vocabulary.values()))
    writer.add_token_types(
        [
            int(kinds.get(token, TokenKind.BYTE if token.startswith("<0x") else TokenKind.NORMAL))
            for token in vocabulary
        ]
    )


def by_sentencepiece(text: str, vocabulary: dict[str, float], *, prefix: bool = True) -> list[int]:
    """Return ids by a slow loop that merges the pair of best score, the leftmost of equal ones."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    symbols = list((" " * prefix + text).replace(" ", "▁"))
    while True:
        pairs = [
            (vocabulary[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        i
        for s in symbols
        for i in ([ids[s]] if s in ids else [ids[f"<0x{byte:02X}>"] for byte in s.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    vocabulary = pieces_vocabulary()
    path = write(
        tmp_path / "a.gguf", lambda w: write_pieces(w, vocabulary), ggml__add_space_prefix=prefix
    )
    mine = Tokenizer.load(path, len(vocabulary))
    assert (mine.bos_id, mine.eos_ids) == (1, (2,))
    fallen = 0
    for text in [text for text in [*TEXTS, *random_texts(400)] if text and "<s>" not in text]:
        ids = by_sentencepiece(text, vocabulary, prefix=prefix)
        fallen += any(3 <= i < 259 for i in ids)
        assert mine.encode(text) == [1, *ids], repr(text)
        assert mine.decode(ids) == text.replace("▁", " ")
    assert fallen > 3, "no character fell back to bytes"
    assert mine.encode("</s>a")[:2] == [1, 2]
    assert mine.encode("x", add_special_tokens=False)[0] != 1


def test_sentencepiece_equals_transformers_conversion(tmp_path: Path) -> None:
    from transformers.tokenization_utils_base import generate_merges

    vocabulary = pieces_vocabulary()
    ids = {token: i for i, token in enumerate(vocabulary)}
    merges = generate_merges(ids, vocabulary)
    theirs = tokenizers.Tokenizer(
        models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    theirs.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    theirs.decoder = decoders.Sequence(parts)
    theirs.add_special_tokens(["<unk>", "<s>", "</s>"])
    theirs.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    mine = Tokenizer.load(write(tmp_path / "a.gguf", lambda w: write_pieces(w, vocabulary)))
    same(mine, theirs, [*TEXTS, *random_texts(1500)])


def test_special_tokens_of_phi_3_take_the_space_after_them(tmp_path: Path) -> None:
    """As in ``tokenizer.json`` of Phi-3; the file does not say so, and llama.cpp goes by the name
    of the model.
    """
    vocabulary = pieces_vocabulary() | {"<|user|>": 0.0, "<|end|>": 0.0, "<|endoftext|>": 0.0}

    def fill(writer: gguf.GGUFWriter) -> None:
        write_pieces(writer, vocabulary)
        types = writer.kv_data[0]["tokenizer.ggml.token_type"].value
        types[-3:] = [int(TokenKind.CONTROL)] * 3

    made = []
    for architecture in ("phi3", "llama"):
        path = tmp_path / f"{architecture}.gguf"
        made.append(Tokenizer.load(write(path, fill, architecture=architecture)))
    ids = {token: i for i, token in enumerate(vocabulary)}
    phi, other = made
    assert phi.encode("<|user|>\n  a<|end|>\n") == [
        1,
        ids["<|user|>"],
        *phi.encode("a")[1:],
        ids["<|end|>"],
    ]
    assert phi.encode("<|endoftext|>\na") == other.encode("<|endoftext|>\na")
    assert phi.encode("<|user|>\na") != other.encode("<|user|>\na")
    ends = GgufCheckpoint(tmp_path / "phi3.gguf").vocabulary.eos_ids
    assert ends == (2, ids["<|end|>"], ids["<|endoftext|>"])


# more words than any vocabulary has that no merges make
WORDS = [f"word{number}" for number in range(1001)]


def no_merges(
    writer: gguf.GGUFWriter, *tokens: str, pre: str | None = "gpt-2", model: str = "gpt2"
) -> None:
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))


def scored(writer: gguf.GGUFWriter, scores: list[float]) -> None:
    no_merges(writer, "<unk>", "<s>", "</s>", model="llama")
    writer.add_token_scores(scores)


def crossed(writer: gguf.GGUFWriter) -> None:
    no_merges(writer, "a", "b")
    writer.add_token_merges(["a c"])


def unlike(writer: gguf.GGUFWriter) -> None:
    no_merges(writer, "a", "b")
    writer.add_token_types([1])


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no "
    "tokenizer": (lambda w: None, {}, ("expected tokenizer.ggml.model to be one of gpt2, llama, gemma4, found none; "
        "use the or")),
    "no "
    "vocabulary": (lambda w: w.add_tokenizer_model("no_vocab"), {}, ("to be one of gpt2, llama, gemma4, found "
        "none")),
    "another kind": (lambda w: no_merges(w, "a", model="bert"), {}, ("to be one of gpt2, llama, gemma4, found "
        "'bert'")),
    "a way to split": (lambda w: no_merges(w, "a", pre="poro-chat"), {}, ("ggml.pre to be one of "
        ".*'poro-chat'")),
    "no way to "
    "split": (lambda w: no_merges(w, "a", pre=None), {}, ("ggml.pre to be one of .*, found None; "
        "use")),
    "a token "
    "twice": (lambda w: no_merges(w, "a", "b", "a"), {}, ("expected every token once, found 'a' "
        "twice")),
    "a long "
    "token": (lambda w: no_merges(w, "a" * 1025), {}, ("tokens of at most 1024 characters, found one of "
        "1025")),
    "no merges": (lambda w: no_merges(w, *WORDS), {}, ("tokenizer.ggml.merges: expected merges, of which 1001 "
        "tokens are made, found none")),
    "no merges of Gemma": (lambda w: no_merges(w, *WORDS, model="gemma4"), {}, "expected merges, of which 1001"),
    "other merges": (crossed, {}, "expected merges that match the tokens, found a mismatch"),
    "few kinds": (unlike, {}, ("tokenizer.ggml.token_type: expected one for each of 2 tokens, "
        "found 1")),
    "few "
    "scores": (lambda w: scored(w, [0.0]), {}, ("tokenizer.ggml.scores: expected one for each of 3 tokens, "
        "found 1")),
    "no "
    "scores": (lambda w: scored(w, [0.0, 0.0, float("nan")]), {}, ("tokenizer.ggml.scores: expected a finite "
        "number")),
    "no "
    "bos": (lambda w: no_merges(w, "a"), {"ggml__add_bos_token": True}, ("add_bos_token: expected "
        "bos_token_id")),
    "words": (lambda w: no_merges(w, "a"), {"ggml__add_bos_token": "yes"}, ("add_bos_token: expected true or "
        "false")),
    "template": (lambda w: no_merges(w, "a"), {"chat_template": True}, ("chat_template: expected a string, found "
        "bool")),
    "tools": (lambda w: no_merges(w, "a"), {"chat_template__tool_use": True}, ("tool_use: expected a string, "
        "found")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    fill, pairs, message = REFUSED[name]
    path = write(tmp_path / "a.gguf", fill, **pairs)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_more_tokens_than_the_model_has(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", lambda w: no_merges(w, "a", "b", "c"))
    with pytest.raises(TokenizerError, match=r"ids up to 2, but the model's vocabulary has 2"):
        Tokenizer.load(path, 2)


@pytest.mark.parametrize(
    ("tokens", "kinds", "pairs", "expected"),
    [
        (["a", "<|im_end|>"], [1, 3], {}, (1,)),
        (["a", "<|im_end|>"], [1, 1], {}, ()),
        (["a", "b", "<|endoftext|>", "<|eot_id|>"], [1, 3, 3, 3], {"eos": 1}, (1, 2, 3)),
        (["a", "b", "c"], [1, 3, 3], {"eos": 2, "eot": 1}, (2, 1)),
        # Gemma, Phi-3 and Phi-4-mini, Granite, Ministral; others are above.
        (
            ["a", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "</s>"],
            [1, 3, 3, 3, 3],
            {},
            (1, 2, 3, 4),
        ),
        # gpt-oss: ``<|end|>`` ends a message, after which the next one begins.
        (
            ["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"],
            [3, 3, 3, 3],
            {"eos": 0, "eot": 1},
            (0, 2, 3),
        ),
    ],
)
def test_stop_tokens(
    tokens: list[str],
    kinds: list[int],
    pairs: dict[str, int],
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    from pronk.checkpoint.gguf.reader import GgufFile
    from pronk.checkpoint.gguf.vocabulary import Vocabulary

    def fill(writer: gguf.GGUFWriter) -> None:
        no_merges(writer, *tokens)
        writer.add_token_types(kinds)
        for name, value in pairs.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)

    assert Vocabulary.read(GgufFile(write(tmp_path / "a.gguf", fill))).eos_ids == expected


def test_chat_templates(tmp_path: Path) -> None:
    """As gguf-py writes the list of templates in ``tokenizer_config.json``; ``tool_use`` is for
    requests with tools.
    """
    text = "{{ messages[0].content }}"
    named = [
        {"name": "default", "template": f"default, {text}"},
        {"name": "tool_use", "template": f"tool_use, {text}, {{{{ tools[0].function.name }}}}"},
        {"name": "rag", "template": f"rag, {text}"},
    ]

    def fill(writer: gguf.GGUFWriter) -> None:
        no_merges(writer, *"abcdefghijklmnopqrstuvwxyz_, ")
        writer.add_chat_template(named)

    loaded = Tokenizer.load(write(tmp_path / "a.gguf", fill))
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert loaded.chat(messages) == "default, hi"
    assert loaded.chat(messages, tools=tools) == "tool_use, hi, f"


NAMES_OF_PARTS = [f"fim_{part}" for part in ("pre", "suf", "mid", "pad", "rep", "sep")]
NAMES_OF_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", *NAMES_OF_PARTS)


@pytest.mark.parametrize("name", NAMES_OF_IDS)
@pytest.mark.parametrize("wrong", [4, 2**32 - 1, "x"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_ids_that_are_no_tokens_are_ignored_with_a_warning(
    name: str, wrong: int | str, model: str, tmp_path: Path
) -> None:
    """As in llama.cpp, the id is then the default; other special tokens are unchanged."""

    def fill(writer: gguf.GGUFWriter) -> None:
        no_merges(writer, "<unk>", "<s>", "</s>", "b", model=model)
        writer.add_token_scores([0.0] * 4)
        for each in NAMES_OF_IDS:
            key = f"tokenizer.ggml.{each}_token_id"
            value = wrong if each == name else 3
            _ = (
                writer.add_uint32(key, value)
                if isinstance(value, int)
                else writer.add_string(key, value)
            )

    path = write(tmp_path / "a.gguf", fill, ggml__add_bos_token=model == "llama")
    with pytest.warns(
        UserWarning, match=rf"{name}_token_id: expected the id of a token in 0..3, found {wrong!r}"
    ):
        vocabulary = GgufCheckpoint(path).vocabulary
    defaults = {"unknown": 0, "bos": 1, "eos": 2} if model == "llama" else {}
    default = {name: defaults[name]} if name in defaults else {}
    assert vocabulary.special_ids == {each: 3 for each in NAMES_OF_IDS if each != name} | default
    with pytest.warns(UserWarning, match=name):
        assert Tokenizer.load(path).decode([3]) == "b"


def test_unused_ids_do_not_matter(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        no_merges(writer, "a")
        for name in (
            "seperator",
            "separator",
            "cls",
            "mask",
            "image",
        ):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", 99)

    assert Tokenizer.load(write(tmp_path / "a.gguf", fill)).encode("a") == [0]


@pytest.mark.parametrize(
    "merges",
    [
        [],
        [""],
        ["a b"],
        ["a b", "ab c"],
        ["  a"],
        [" a"],
        ["a "],
        ["a b c"],
        ["a\n b"],
        ["a  b", "ab"],
        ["a b", "\nc d"],
    ],
    ids=repr,
)
def test_merges_are_split_as_one_by_one(merges: list[str]) -> None:
    assert tokenizer._parse_merges(merges) == [tokenizer._parse_merge(merge) for merge in merges]


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (
            ["l" * length for length in range(1, 1023)],
            "expected tokens that a second suffices to split, found too many",
        ),
        (
            ["l" * length + text for length in range(1, 100) for text in ("", *"abcdefghi")],
            "expected at most 3000 pairs of tokens that are a token together, found more",
        ),
    ],
    ids=["long", "pairs"],
)
def test_vocabularies_of_runs_are_refused(
    tokens: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without limits, the merges of a file of a megabyte took a minute and gigabytes.

    Texts need no table of merges.
    """
    monkeypatch.setattr(tokenizer, "_MAX_PAIRS", 3000)
    path = write(
        tmp_path / "a.gguf", lambda writer: write_pieces(writer, dict.fromkeys(tokens, 0.0))
    )
    loaded = Tokenizer.load(path)
    assert loaded.encode("l" * 3000)
    with pytest.raises(TokenizerError, match=problem):
        loaded.backend.to_str()


@pytest.mark.parametrize("kind", [TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED])
def test_too_long_special_tokens_are_refused(
    kind: TokenKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is for the sum of their lengths; ordinary tokens may be longer."""
    monkeypatch.setattr(tokenizer, "_MAX_ADDED_CHARACTERS", 1000)

    def write_tokens(count: int) -> Path:
        names = ["b" * 1000, *(f"<{'a' * 97}{number}>" for number in range(count))]

        def fill(writer: gguf.GGUFWriter) -> None:
            no_merges(writer, *names)
            writer.add_token_types([int(TokenKind.NORMAL), *[int(kind)] * count])

        return write(tmp_path / f"{count}.gguf", fill)

    assert Tokenizer.load(write_tokens(10)).vocab_size == 11
    with pytest.raises(
        TokenizerError,
        match="at most 1000 characters of special and user-defined tokens, found more",
    ):
        Tokenizer.load(write_tokens(11))
