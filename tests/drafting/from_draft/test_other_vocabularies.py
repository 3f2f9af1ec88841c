"""Draft models with another vocabulary or of another family, beside pronk-tiny."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import MakeCheckpoint
from drafting.helpers import context
from pronk import LLM, OptionError, SamplingParams
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.drafting.from_draft.draft_model import ModelProposer

DRAFT = tiny_model().parent / "pronk-tiny-draft"
PROMPTS = [
    "def fibonacci(n):\n",
    "Die Größe — 42 🙂 of it",
    "import os\nimport sys\n\n\nclass Reader:\n",
]
KINDS = (
    "draft_model({}, num_tokens=4)",
    "threshold(draft_model({}))",
)
OPTIONS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.8, "top_p": 0.95}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(budget="all")


def params_of(options: str) -> SamplingParams:
    return SamplingParams(max_tokens=48, seed=3, ignore_eos=True, **OPTIONS[options])


@cache
def plain_text(llm: LLM, options: str) -> list[list[int]]:
    """Return the tokens of plain decoding."""
    return [
        each.token_ids
        for each in llm.generate(PROMPTS, params_of(options), drafter="autoregressive")
    ]


@cache
def decode(llm: LLM, drafter: str, options: str) -> tuple[int, int, int]:
    """Return forward passes, draft tokens and accepted ones; the tokens must equal plain
    decoding.
    """
    got = llm.generate(PROMPTS, params_of(options), drafter=drafter)
    assert [each.token_ids for each in got] == plain_text(llm, options)
    stats = [each.stats for each in got]
    return (
        sum(s.target_steps for s in stats),
        sum(s.drafted for s in stats),
        sum(s.accepted for s in stats),
    )


def write(
    folder: Path,
    weights: Callable[[dict[str, Tensor]], None],
    tokenizer: Callable[[dict[str, Any]], None],
) -> str:
    """Write pronk-tiny-draft after ``weights`` and ``tokenizer`` have changed its files; return the
    model option.
    """
    shutil.copytree(DRAFT, folder)
    tensors = load_file(folder / "model.safetensors")
    weights(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = len(tensors["model.embed_tokens.weight"])
    (folder / "config.json").write_text(json.dumps(config))
    document = json.loads((folder / "tokenizer.json").read_text())
    tokenizer(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return f"model={str(folder)!r}"


def shuffle_vocabulary(folder: Path) -> str:
    """Write pronk-tiny-draft with its ids in another order."""
    order = list(range(4, 4096))  # the first ones are special
    random.Random(0).shuffle(order)
    new = [0, 1, 2, 3, *order]  # old id to new id

    def shuffle(tensors: dict[str, Tensor]) -> None:
        table = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = torch.empty_like(table).index_copy_(
            0, torch.tensor(new), table
        )

    def rename(document: dict[str, Any]) -> None:
        vocab = document["model"]["vocab"]
        document["model"]["vocab"] = {token: new[i] for token, i in vocab.items()}

    return write(folder, shuffle, rename)


@pytest.mark.parametrize("options", [pytest.param("greedy", marks=pytest.mark.slow), "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shuffled_vocabulary_drafts_as_well(
    llm: LLM, kind: str, options: str, tmp_path: Path
) -> None:
    """Chains of shuffled token ids need as many forward passes as those of the original ids, within
    10 %.
    """
    shuffled = shuffle_vocabulary(tmp_path / "shuffled")
    steps, drafted, accepted = decode(llm, kind.format(shuffled), options)
    assert accepted > 20
    # the other kinds re-encode draft tokens, perhaps differently
    if kind.startswith("draft_model"):
        plain = decode(llm, kind.format(f"model={str(DRAFT)!r}"), options)
        assert abs(steps - plain[0]) <= 0.1 * plain[0]
    assert drafted > 0


def test_the_drafts_prefix_cache_uses_its_own_tokens(llm: LLM, tmp_path: Path) -> None:
    spec = KINDS[0].format(shuffle_vocabulary(tmp_path / "shuffled"))
    prompts = ["".join(PROMPTS * count) for count in (6, 8)]  # the first is a prefix of the second
    caching = LLM(budget="all", prefix_cache=True)
    for options in OPTIONS:
        for prompt in prompts:
            want, got = (
                each.generate(prompt, params_of(options), drafter=spec) for each in (llm, caching)
            )
            assert got.token_ids == want.token_ids
            assert [step[1:5] for step in got.stats.steps] == [
                step[1:5] for step in want.stats.steps
            ]
            assert got.stats.accepted > 0
    assert got.stats.cached_tokens > 100
    proposer = caching.get_proposer(spec)
    assert isinstance(proposer, ModelProposer)
    cache = proposer.start([])
    ids = caching.request_factory.encode_prompt(prompts[-1])
    (pending,) = proposer.draft.align([context(cache, ids)])
    assert pending is not None
    assert len(cache.tokens) > 100
    assert len(pending) < 64
    proposer.stop(cache)


def test_padded_embeddings_are_ignored(llm: LLM, tmp_path: Path) -> None:
    """The embeddings beyond the tokenizer's vocabulary would have the largest logits."""

    def pad(tensors: dict[str, Tensor]) -> None:
        table = tensors["model.embed_tokens.weight"]
        more = torch.full((64, table.shape[1]), 3.0, dtype=table.dtype)
        tensors["model.embed_tokens.weight"] = torch.cat((table, more)).contiguous()

    padded = write(tmp_path / "padded", pad, lambda _: None)
    for options in OPTIONS:
        plain = decode(llm, KINDS[0].format(f"model={str(DRAFT)!r}"), options)
        assert plain[2] > 20
        assert decode(llm, KINDS[0].format(padded), options) == plain


def test_a_random_model_with_another_tokenizer(llm: LLM, checkpoint: MakeCheckpoint) -> None:
    check_random_model(llm, checkpoint, KINDS)


def test_a_recurrent_model_with_another_tokenizer(llm: LLM, checkpoint: MakeCheckpoint) -> None:
    """Its text may change at the end, before the tokens that its states have taken over."""
    check_random_model(llm, checkpoint, KINDS, "qwen3_5_text")


def check_random_model(
    llm: LLM, checkpoint: MakeCheckpoint, kinds: Sequence[str], name: str = "gpt2"
) -> None:
    """The byte-level tokenizer with few merges shares some tokens; almost no draft token is
    right.
    """
    folder = checkpoint(name)
    for kind, options in zip(kinds, cycle(OPTIONS), strict=False):
        _, drafted, _ = decode(llm, kind.format(f"model={str(folder)!r}"), options)
        assert drafted > 0


def test_a_vocabulary_that_shares_too_little_is_refused(llm: LLM, tmp_path: Path) -> None:
    def scramble(document: dict[str, Any]) -> None:
        document["model"]["vocab"] = {
            f"{token}ξ{i}" if i > 259 else token: i
            for token, i in document["model"]["vocab"].items()
        }
        document["model"]["merges"] = []

    other = write(tmp_path / "other", lambda _: None, scramble)
    with pytest.raises(
        OptionError,
        match=r"draft_model: expected a draft model with a similar vocabulary.*4096.*4096",
    ) as caught:
        llm.generate("x", SamplingParams(max_tokens=2), drafter=KINDS[0].format(other))
    assert "\n" not in str(caught.value)
