"""Tokenizers of well-known models are known, so that they load without a child process; other
components are not.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pronk.text.guarded import load_backend
from pronk.text.known import decodes_as_known, is_known
from pronk.text.patterns import PATTERNS, PRE_TOKENIZERS

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
TEXTS = [
    "",
    "\n",
    " " * 500,
    "a" * 500,
    "1" * 50,
    "Don't panic, naïve 東京 🙂!\r\n\t",
    "".join(map(chr, range(1, 2000))),
]


def bpe(**options: Any) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    return Tokenizer(models.BPE({**vocab, "<unk>": len(vocab)}, [], unk_token="<unk>", **options))


def byte_level(*patterns: str) -> Tokenizer:
    """Return a byte-level tokenizer, as of Llama 3, Qwen and GPT-2."""
    backend = bpe(ignore_merges=True)
    backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, BYTES])
    template = processors.TemplateProcessing(
        single="<unk> $A", pair="<unk> $A $B", special_tokens=[("<unk>", 256)]
    )
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece() -> Tokenizer:
    """Return a tokenizer as of Llama 2, Mistral and Phi-3."""
    backend = bpe(byte_fallback=True, fuse_unk=True)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    return backend


def metaspace() -> Tokenizer:
    """Return a tokenizer as of Gemma and later files of Llama 2."""
    backend = bpe(byte_fallback=True, fuse_unk=True)
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps: list[Any] = [
        pre_tokenizers.Split(" ", "merged_with_previous"),
        pre_tokenizers.Digits(True),
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    return backend


def gpt2() -> dict[str, Any]:
    """Return a file of the first version, whose model has no type."""
    file = json.loads(byte_level().to_str())
    del file["model"]["type"]
    return file | {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    }


def parsed(backend: Tokenizer) -> dict[str, Any]:
    return json.loads(backend.to_str())


KNOWN = {
    **{name: parsed(byte_level(*each.patterns)) for name, each in PRE_TOKENIZERS.items()},
    **{pattern: parsed(byte_level(pattern)) for pattern in sorted(PATTERNS)},
    "sentencepiece": parsed(sentencepiece()),
    "metaspace": parsed(metaspace()),
    "gpt-2 of 2019": gpt2(),
    "deepseek-coder": parsed(
        byte_level("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")
    ),
    "words": parsed(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))),
}


@pytest.mark.parametrize("file", KNOWN.values(), ids=KNOWN)
def test_well_known_tokenizers_start_no_process(
    file: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(subprocess, "Popen", start)
    assert is_known(file)
    backend = load_backend(json.dumps(file))
    assert isinstance(backend, Tokenizer)
    for text in TEXTS:
        backend.decode(backend.encode(text).ids)


def test_the_packaged_models_are_known() -> None:
    for path in (Path(__file__).parents[2] / "models").glob("*/tokenizer.json"):
        assert is_known(json.loads(path.read_text(encoding="utf-8"))), path


PLAIN = KNOWN["words"]
REGEX = {"Regex": "(a+)+b"}
NFC = {"type": "NFC"}


def sequence(key: str, *members: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: [*members]}


def pieces(names: str) -> list[dict[str, Any]]:
    """Return the pieces of a template: the texts ``A`` and ``B``, and the special token ``x``."""
    return [
        {"SpecialToken" if name == "x" else "Sequence": {"id": name, "type_id": 0}}
        for name in names
    ]


def template(single: Any = "xA", pair: Any = "xAxB", **changed: Any) -> dict[str, Any]:
    token = {"id": "x", "ids": [0], "tokens": ["a"]}
    parts = {"single": single, "pair": pair}
    made = {
        name: pieces(value) if isinstance(value, str) else value for name, value in parts.items()
    }
    return {"type": "TemplateProcessing", **made, "special_tokens": {"x": token}, **changed}


TOKEN = {
    "id": 0,
    "content": "a",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
}
UNKNOWN_ENCODERS = {
    "normalizer": [
        1,
        {},
        {"type": "Other"},
        {"type": ["NFC"]},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Prepend", "prepend": "ab"},
        {"type": "Replace", "pattern": {"String": "a"}, "content": "ab"},
        {"type": "Replace", "pattern": {"String": ""}, "content": ""},
        {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""},
        {"type": "Replace", "pattern": {"String": "a", "Regex": "a"}, "content": ""},
        sequence("normalizers", sequence("normalizers", NFC)),
        sequence("normalizers", *[NFC] * 17),
        sequence("normalizers", NFC, {"type": "Replace", "pattern": REGEX, "content": ""}),
        {"type": "Sequence", "normalizers": NFC},
        sequence(
            "normalizers",
            {"type": "NFKD"},
            {"type": "Replace", "pattern": {"String": "ل"}, "content": "ﷺ"},
            NFC,
        ),
    ],
    "pre_tokenizer": [
        {"type": "FixedLength", "length": 0},
        {"type": "Split", "pattern": REGEX, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": "a", "behavior": "Isolated", "invert": False},
        {"pattern": REGEX, "behavior": "Isolated", "invert": False},
        sequence(
            "pretokenizers",
            {"type": "Split", "pattern": REGEX, "behavior": "Isolated", "invert": False},
        ),
    ],
    "post_processor": [
        template(special_tokens={}),
        template(special_tokens={"x": {"id": "x", "ids": [0] * 99, "tokens": ["a"] * 99}}),
        template(special_tokens={"x": {"id": "x", "ids": [0, 0], "tokens": ["a"]}}),
        template(special_tokens=[]),
        template(single="A" + "x" * 16),
        template(pair=[*pieces("AB"), {"SpecialToken": {"id": "other", "type_id": 0}}]),
        template(single=[*pieces("A"), {"Other": {"id": "x"}}]),
        template(single=[*pieces("A"), {"SpecialToken": {"id": ["x"], "type_id": 0}}]),
        template(single=[{"Sequence": "A"}]),
        template(single=None),
        template(single=["$A"]),
        *(template(single=names) for names in ("", "x", "B", "AA", "AB", "xAxA", "C")),
        *(template(pair=names) for names in ("A", "B", "AA", "BB", "AAB", "ABB", "AC")),
    ],
    "model": [
        {"type": "Unigram", "vocab": [["a", 0.0]]},
        {"type": "WordPiece", "vocab": {"a": 0}},
        {"vocab": {"a": 0}, "max_input_chars_per_word": 1},
        {"type": "BPE", "vocab": {}, "merges": [], "continuing_subword_prefix": "##"},
        {"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "</w>"},
    ],
    "added_tokens": [
        {},
        [1],
        [{}],
        [{**TOKEN, "lstrip": True}],
        [{**TOKEN, "single_word": True}],
        [{**TOKEN, "content": "a" * 2**21}],
        [TOKEN] * 20_000,
    ],
}
UNKNOWN_DECODERS = [
    {"type": "Replace", "pattern": REGEX, "content": ""},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
    {"type": "Strip", "content": "a", "start": 0, "stop": 1},
    {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    sequence("decoders", sequence("decoders", {"type": "Fuse"})),
]


@pytest.mark.parametrize(
    ("single", "pair"), [("A", "AB"), ("xAx", "xAxBx"), ("Ax", "BxA"), ("xA", "")]
)
def test_templates_with_each_text_once_are_known(single: str, pair: str) -> None:
    file = {**PLAIN, "post_processor": template(single, pair)}
    assert is_known(file)
    assert load_backend(json.dumps(file)).encode("a").ids == [0] * len(single)


@pytest.mark.parametrize(
    ("key", "component"), [(key, each) for key, group in UNKNOWN_ENCODERS.items() for each in group]
)
def test_other_components_are_unknown(key: str, component: Any) -> None:
    file = {**PLAIN, key: component}
    assert not is_known(file)
    assert decodes_as_known(file)


@pytest.mark.parametrize(
    "model",
    [
        None,
        {"type": "WordLevel"},
        {"type": "WordLevel", "vocab": {"a" * 2000: 0}},
        {"type": "Unigram", "vocab": [["a" * 2000, 0.0]]},
        {"type": "Unigram", "vocab": [[1]]},
    ],
)
def test_models_without_usual_tokens_are_unknown(model: Any) -> None:
    file = {**PLAIN, "model": model}
    assert not is_known(file)
    assert not decodes_as_known(file)


@pytest.mark.parametrize("component", UNKNOWN_DECODERS)
def test_other_decoders_are_unknown(component: Any) -> None:
    file = {**PLAIN, "decoder": component}
    assert not is_known(file)
    assert not decodes_as_known(file)
