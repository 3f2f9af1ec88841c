"""Tokens that end a generation, in GGUF files and in model folders."""

from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken

from checkpoints import MakeCheckpoint
from gguf_files import finish
from pronk import LLM, SamplingParams
from pronk.checkpoint.config import llama_config
from pronk.checkpoint.end_tokens import find_end_tokens
from pronk.checkpoint.gguf.reader import GgufFile
from pronk.checkpoint.gguf.vocabulary import TokenKind, Vocabulary
from pronk.testing import byte_tokenizer
from pronk.text.tokenizer import Tokenizer

# Vocabularies of well-known models, without ordinary tokens; those that end a generation in
# llama.cpp are marked.
VOCABULARIES = {
    "qwen": [
        "*<|endoftext|>", "<|im_start|>", "*<|im_end|>", "<tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
        "<|fim_suffix|>", "*<|fim_pad|>", "*<|repo_name|>", "*<|file_sep|>", "<think>",
    ],
    "smollm": ["*<|endoftext|>", "<|im_start|>", "*<|im_end|>", "<repo_name>", "*<reponame>", "<file_sep>"],
    "starcoder": ["*<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "*<fim_pad>", "<filename>"],
    "codellama": ["<s>", "*</s>", "▁<PRE>", "▁<MID>", "▁<SUF>", "*▁<EOT>", "*<PAD>"],
    "santacoder": ["*<|endoftext|>", "<fim-prefix>", "<fim-suffix>", "*<fim-pad>", "*<fim-repo>"],
    "llama": ["<|begin_of_text|>", "*<|end_of_text|>", "*<|eom_id|>", "*<|eot_id|>", "<|python_tag|>"],
    "phi": ["*<|endoftext|>", "<|user|>", "*<|end|>", "<|assistant|>"],
    "gemma": ["<pad>", "*<eos>", "<bos>", "<start_of_turn>", "*<end_of_turn>"],
    "deepseek": ["<\uff5cfim▁hole\uff5c>", "*<\uff5cend▁of▁sentence\uff5c>"],
    "gpt-oss": ["<|start|>", "<|end|>", "*<|return|>", "*<|call|>", "<|channel|>", "*<|endoftext|>"],
    "solar": ["<|end|>", "*<|calls|>", "*<|flush|>"],
    "gemma 4": ["*<eos>", "*<turn|>", "*<|tool_response>", "</s>"],
    "kimi": ["[BOS]", "*[EOS]", "*[EOT]", "*[PAD]"],
}  # fmt: skip

VOCABULARY = pytest.mark.parametrize("model", VOCABULARIES)


def names_and_ends(model: str) -> tuple[list[str], tuple[int, ...]]:
    marked = VOCABULARIES[model]
    return [name.removeprefix("*") for name in marked], tuple(
        i for i, name in enumerate(marked) if name[0] == "*"
    )


@VOCABULARY
@pytest.mark.parametrize("kind", TokenKind)
def test_gguf(model: str, kind: TokenKind, tmp_path: Path) -> None:
    """Added tokens count: those that the tokenizer finds before it splits a text."""
    names, ends = names_and_ends(model)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(names)
    writer.add_token_types([int(kind)] * len(names))
    finish(writer)
    is_added = kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
    assert Vocabulary.read(GgufFile(tmp_path / "a.gguf")).eos_ids == (ends if is_added else ())


@VOCABULARY
@pytest.mark.parametrize("special", [True, False])
def test_folder(model: str, special: bool) -> None:
    names, ends = names_and_ends(model)
    backend = byte_tokenizer()
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    expected = [name for i, name in enumerate(names) if i in ends]
    if "<|endoftext|>" not in names:
        expected.insert(0, "<|endoftext|>")  # of ``byte_tokenizer``
    config = llama_config(
        hidden=8, layers=1, heads=1, kv_heads=1, mlp=8, vocab=400, context=8, eos_ids=(7, 5)
    )
    found = Tokenizer(backend).add_end_tokens(config).eos_ids
    assert found[:2] == (7, 5)
    assert {backend.id_to_token(token) for token in found[2:]} == {*expected}


def test_stated_tokens_come_first() -> None:
    added = {3: "<|fim_pad|>", 4: "<|file_sep|>", 5: "</s>"}
    assert find_end_tokens(added, [9, 5, 9]) == (9, 5, 3, 4)
    assert find_end_tokens({1: "<|return|>", 2: "<|end|>", 3: "<|call|>"}, [2, 1]) == (1, 3)


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_keys_of_gguf(key: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "c"])
    writer.add_uint32(f"tokenizer.ggml.{key}_token_id", 1)
    writer.add_uint32("tokenizer.ggml.fim_pre_token_id", 2)
    finish(writer)
    assert Vocabulary.read(GgufFile(tmp_path / "a.gguf")).eos_ids == (1,)


@pytest.mark.parametrize("name", ["<|file_sep|>", "<fim_pad>", "▁<EOT>"])
def test_a_text_ends_at_such_a_token(name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The token in the prompt does not count, and ``ignore_eos`` goes on."""
    folder = checkpoint("llama")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").unlink()
    backend = byte_tokenizer(299)
    backend.add_special_tokens([name])
    backend.save(str(tmp_path / "tokenizer.json"))
    llm = LLM(tmp_path)
    end = llm.tokenizer.backend.token_to_id(name)
    params = SamplingParams(
        max_tokens=20, temperature=1.0, seed=1, logit_bias={end: 7.0, 0: -100.0}
    )
    done = llm.generate(f"a{name}b", params)
    assert end in done.prompt_token_ids
    assert (done.finish_reason, done.stop_reason, done.token_ids.index(end)) == (
        "stop",
        end,
        len(done.token_ids) - 1,
    )
    on = llm.generate(f"a{name}b", SamplingParams(**(params.to_dict() | {"ignore_eos": True})))
    assert on.finish_reason == "length"
    assert on.token_ids[: len(done.token_ids)] == done.token_ids
