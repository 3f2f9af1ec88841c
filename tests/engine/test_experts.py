"""Mixtures of experts: same seed, same tokens and bits, whatever rows share a pass; and which
experts passes read.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from engine.cases import (
    MIXED,
    PROMPTS,
    assert_not_vacuous,
    assert_same,
    drafter,
    plain,
    total,
    watch,
)
from engine.test_equality import DTYPES, decode
from pronk import LLM, SamplingParams
from pronk.base.arrays import BFLOAT16, FLOAT32, INT8, DType
from pronk.models.forward_batch import ForwardBatch
from pronk.models.model_runner import ForwardResult
from tiny_models import make_engine, tiny_decoder

EXPERTS = {"special": "experts", "windows": (None, None, 40)}
# Drafters that need no training for a model.
NAMES = (
    "prompt_lookup",
    "suffix",
    "recycling",
    "merged",
    "oracle",
    "adversarial",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("options", ["temperature", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_drafters(name: str, options: str) -> None:
    want = plain(FLOAT32, options, **EXPERTS)
    got = decode(make_engine(tiny_decoder(**EXPERTS)), [drafter(name, want)], options)
    assert_same(got, want)
    assert_not_vacuous(name, got)


@pytest.mark.few(4)
@DTYPES
@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch": 2},
        {"max_batch": 1, "max_tree": 4},
        {"prefill_chunk": 16},
        {"prefill_chunk": 48, "max_batch": 3},
        {"num_blocks": 48},  # memory for one long request at a time
        {"kv_dtype": INT8},
    ],
    ids=str,
)
def test_settings(settings: dict[str, Any], dtype: DType) -> None:
    want = plain(dtype, "temperature", kv_dtype=settings.get("kv_dtype"), **EXPERTS)
    engine = make_engine(tiny_decoder(dtype, **EXPERTS), **settings)
    got = decode(engine, [drafter(name, want) for name in MIXED], "temperature")
    assert_same(got, want)
    assert total(got, "accepted") > 0


@DTYPES
def test_prefix_cache(dtype: DType) -> None:
    want = plain(dtype, "temperature", **EXPERTS)
    engine = make_engine(tiny_decoder(dtype, **EXPERTS), share_prefixes=True)
    for _ in range(2):
        got = decode(engine, [drafter("oracle", want)], "temperature")
        assert_same(got, want)
    assert total(got, "cached_tokens") > 500


def test_passes_know_how_many_experts_they_read() -> None:
    """A row reads 3 of 9 experts in two of the three layers, so several rows read at most three
    times as many.
    """
    engine = make_engine(tiny_decoder(**EXPERTS))
    seen = dict[int, set[float]]()

    def check(batch: ForwardBatch, result: ForwardResult) -> None:
        rows = sum(len(entry.tree) - entry.num_computed for entry in batch.entries)
        assert result.experts_read is not None
        seen.setdefault(rows, set()).add(result.experts_read)

    watch(engine, check)
    known = plain(FLOAT32, "temperature", PROMPTS[:3], **EXPERTS)
    decode(engine, [drafter("autoregressive", known)], "temperature", PROMPTS[:1])
    decode(engine, [drafter("random", known)], "temperature", PROMPTS[:3])
    assert seen[1] == {1.0}
    assert len(seen) > 5
    for rows, found in seen.items():
        assert all(1.0 <= experts_read <= min(rows, 3.0) for experts_read in found)
        assert rows < 50 or max(found) > 2.5
    assert max(seen[2]) > 1.2


def test_a_dense_model_reads_no_experts() -> None:
    engine = make_engine(tiny_decoder(BFLOAT16))
    seen = set[float | None]()
    watch(engine, lambda _, result: seen.add(result.experts_read))
    decode(engine, [drafter("random", ())], "temperature", PROMPTS[:2])
    assert seen == {None}


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("weights", ["plain", "int4"])
def test_checkpoints_in_batches_chunks_and_trees(
    family: str, weights: str, checkpoint: MakeCheckpoint
) -> None:
    """Sinks, biases and clamped gates do not depend on the other rows either."""
    check_checkpoint(
        family, weights, checkpoint, ["autoregressive", "prompt_lookup(min_ngram=1, num_chains=3)"]
    )


def check_checkpoint(
    family: str, weights: str, checkpoint: MakeCheckpoint, drafters: Sequence[str]
) -> None:
    """Compare the texts of drafters in a batch, with a prompt in chunks, with those of plain
    decoding.
    """
    folder = checkpoint(family, max_position_embeddings=512)
    dice = random.Random(1)
    prompts = [[dice.randrange(300) for _ in range(12)] * repeats for repeats in (1, 3, 9)]
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3, logprobs=2, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "bfloat16", "weights": weights, "threads": 1}
    llm = LLM(folder, **options)
    alone = [llm.generate([prompt], params, drafter="autoregressive")[0] for prompt in prompts]
    other = LLM(folder, prefill_chunk=16, budget="all", **options)
    for drafter_name in drafters:
        for got, want in zip(
            other.generate(prompts, params, drafter=drafter_name), alone, strict=True
        ):
            assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
    assert len({tuple(each.token_ids) for each in alone}) == 3
