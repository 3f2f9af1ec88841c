"""Prompts for filling in the middle have the form that each family was trained on."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from gguf_files import finish, write_bytes_bpe
from pronk.base.errors import OptionError
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.text.infill import ContextFile, InfillFormat
from pronk.text.tokenizer import Tokenizer

PREFIX = "def add(a, b):\n    return "
SUFFIX = "\n\nprint(add(1, 2))\n"
FILES = [ContextFile("x = 1\n", "one.py"), ContextFile("y = 2\n")]
QWEN = "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|repo_name|> <|file_sep|>".split()
STARCODER2 = "<fim_prefix> <fim_suffix> <fim_middle> <repo_name> <file_sep>".split()
GRANITE = "<fim_prefix> <fim_suffix> <fim_middle> <reponame> <filename>".split()
DEEPSEEK = [
    "<\uff5cfim\u2581begin\uff5c>",
    "<\uff5cfim\u2581hole\uff5c>",
    "<\uff5cfim\u2581end\uff5c>",
]
CODELLAMA = ["\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"]
CODESTRAL = ["[PREFIX]", "[SUFFIX]", "[MIDDLE]"]


def tiny_with(names: Sequence[str]) -> Tokenizer:
    """Return the byte-level tokenizer of pronk-tiny with further special tokens."""
    backend = tokenizers.Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return Tokenizer(backend)


def sentencepiece_with(names: Sequence[str], bos: str = "<s>") -> Tokenizer:
    """Return a tokenizer of characters that puts ``<s>`` and a space before a text."""
    letters = sorted({*"\u2581abcdexyz\u263a"})
    vocab = {name: number for number, name in enumerate(["<unk>", bos, *letters, *names])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
    )
    return Tokenizer(backend, special_tokens={"bos_token": bos})


@pytest.mark.parametrize("names", [QWEN, STARCODER2, GRANITE, DEEPSEEK])
def test_parts_are_those_of_the_text_with_the_marks(names: Sequence[str]) -> None:
    tokenizer = tiny_with(names)
    ids = InfillFormat.of(tokenizer).encode(PREFIX, SUFFIX)
    pre, suf, mid = names[:3]
    assert ids == tokenizer.encode(f"{pre}{PREFIX}{suf}{SUFFIX}{mid}")


@pytest.mark.parametrize("names", [QWEN, STARCODER2])
def test_files_of_context_stand_before_the_marks(names: Sequence[str]) -> None:
    tokenizer = tiny_with(names)
    ids = InfillFormat.of(tokenizer).encode(PREFIX, SUFFIX, FILES)
    pre, suf, mid, repository, file = names
    context = f"{repository}myproject\n{file}one.py\nx = 1\n{file}tmp\ny = 2\n{file}filename\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        f"{context}{pre}{PREFIX}{suf}{SUFFIX}{mid}"
    )


def test_files_of_context_without_tokens_for_them() -> None:
    tokenizer = tiny_with(DEEPSEEK)
    ids = InfillFormat.of(tokenizer).encode("a", "b", FILES)
    snippet = "\n\n--- snippet ---\n\n"
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith(f"{snippet}x = 1\n{snippet}y = 2\n{DEEPSEEK[0]}a")


def test_codellama_reads_the_suffix_without_a_space() -> None:
    tokenizer = sentencepiece_with(CODELLAMA)
    ids = InfillFormat.of(tokenizer).encode("ab", "cd")
    names = [tokenizer.token_name(token) for token in ids]
    pre, suf, mid = CODELLAMA
    assert names == ["<s>", pre, "\u2581", "a", "b", suf, "c", "d", mid]


def test_codestral_has_the_suffix_first_and_no_mark_before_the_middle() -> None:
    tokenizer = sentencepiece_with(CODESTRAL)
    ids = InfillFormat.of(tokenizer).encode("ab", "cd")
    names = [tokenizer.token_name(token) for token in ids]
    assert names == ["<s>", "[SUFFIX]", "c", "d", "[PREFIX]", "\u2581", "a", "b"]


def test_names_of_marks_in_a_text_are_ordinary_tokens() -> None:
    tokenizer = tiny_with(QWEN)
    format_ = InfillFormat.of(tokenizer)
    marks = {*format_.stop_ids}
    ids = format_.encode("a<|fim_middle|>", "<|fim_prefix|>b", [ContextFile("<|file_sep|>")])
    assert [token for token in ids if token in marks] == [
        format_.repository,
        format_.file,
        format_.file,
        format_.prefix,
        format_.suffix,
        format_.middle,
    ]


def test_token_ids_as_prefix_are_taken_as_they_are() -> None:
    format_ = InfillFormat.of(tiny_with(QWEN))
    assert format_.encode([5, 6], "")[:3] == [format_.prefix, 5, 6]


@pytest.mark.parametrize("names", [[], QWEN[:1], QWEN[:2], QWEN[1:], STARCODER2[3:]], ids=" ".join)
def test_a_model_without_the_tokens_is_refused_in_one_line(names: Sequence[str]) -> None:
    with pytest.raises(
        OptionError, match=r"^suffix: expected .*, found none .*; use a model for"
    ) as e:
        InfillFormat.of(tiny_with(names))
    assert "\n" not in str(e.value)


def test_config_may_state_the_tokens() -> None:
    names = ["[A]", "[B]", "[C]"]
    stated = dict(zip(("prefix_token", "suffix_token", "middle_token"), names, strict=True))
    tokenizer = Tokenizer(tiny_with(names).backend, special_tokens=stated)
    ids = InfillFormat.of(tokenizer).encode("x", "y")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[A]x[B]y[C]"


def test_keys_of_a_gguf_file_state_the_tokens(tmp_path: Path) -> None:
    names = ["[A]", "[B]", "[C]", "[D]", "[E]"]
    backend = tiny_with(names).backend
    assert isinstance(backend, tokenizers.Tokenizer)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    write_bytes_bpe(writer, backend, "gpt-2")
    for key, name in zip(("pre", "suf", "mid", "rep", "sep"), names, strict=True):
        writer.add_uint32(f"tokenizer.ggml.fim_{key}_token_id", backend.token_to_id(name))
    finish(writer)
    format_ = InfillFormat.of(Tokenizer.load(tmp_path / "a.gguf"))
    assert format_.stop_ids == tuple(map(backend.token_to_id, names))
