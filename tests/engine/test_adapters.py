"""Requests with different LoRA adapters in one engine: tokens and bits are those of each request
alone.
"""

from collections.abc import Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from adapters import adapt
from covering import covering
from engine.cases import (
    DRAFTERS,
    PROMPTS,
    ask,
    assert_not_vacuous,
    assert_same,
    drafter,
    params,
    step_until_ended,
    total,
)
from pronk.base.arrays import BFLOAT16, FLOAT32, INT8, DType
from pronk.cache.block_store import BlockStore
from pronk.cache.prompt_cache import PromptCache
from pronk.drafting.acceptance_stats import AcceptanceStats
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.models.adapters import Adapter
from pronk.models.decoder import Decoder
from tiny_models import assert_idle, decoder_of, kernels, make_engine, run, tiny_module

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "classic": {"heads": 4, "kv_heads": 4, "classic": True},
    "norms": {"qk_norm": True, "heads": 4},
    "gemma": {"special": "gemma", "windows": (50, None)},
    "experts": {"special": "experts"},
    "int4": {"weights": "int4"},
}


@cache
def adapted(dtype: DType, variant: str = "plain") -> tuple[Decoder, tuple[Adapter | None, ...]]:
    """Return a decoder with three adapters; the numbers of requests modulo four choose one of
    them or none.
    """
    shape = dict(VARIANTS[variant])
    weights = shape.pop("weights", "plain")
    decoder = decoder_of(tiny_module(dtype, **shape), kernels(), weights)
    adapters = adapt(decoder, **({"names": ("qkv", "out")} if variant == "experts" else {}))
    return decoder, (adapters[0], None, *adapters[1:])


def requests(
    dtype: DType,
    options: str,
    proposers: Sequence[Any] = (None,),
    variant: str = "plain",
    prompts: Sequence[Sequence[int]] = PROMPTS,
    shift: int = 0,
) -> list[Request]:
    """Return a request per prompt, each with its own seed, drafter and adapter."""
    proposer = cycle(proposers)
    made = []
    _, adapters = adapted(dtype, variant)
    for index, prompt in enumerate(prompts):
        made.append(ask(prompt, params(options, index), next(proposer)))
        made[-1].adapter = adapters[(index + shift) % len(adapters)]
    return made


@cache
def alone(
    dtype: DType, options: str, variant: str = "plain", shift: int = 0
) -> tuple[Request, ...]:
    """Return the finished requests of plain decoding, each alone in a fresh engine."""
    made = requests(dtype, options, variant=variant, shift=shift)
    for request in made:
        run(make_engine(adapted(dtype, variant)[0]), [request])
    return tuple(made)


def bind(engine: Engine, names: Sequence[str], known: Sequence[Request]) -> list[Any]:
    """Bind drafters; one that is told the texts gets those of ``known``, which have other
    prompts per adapter.
    """
    return [drafter(name, known).bind(engine.target) for name in names]


def test_adapters_change_the_texts() -> None:
    texts = [
        [tuple(each.output) for each in alone(FLOAT32, "greedy", shift=shift)] for shift in range(4)
    ]
    for by_adapter in zip(*texts, strict=True):
        assert len({*by_adapter}) == 4


FAST = ("suffix", "draft_model", "eagle3 tree", "auto", "oracle")
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS]


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_drafters_in_a_mixed_batch(name: str, dtype: DType) -> None:
    """Chunks of prompts and decoding rows of requests with and without adapters share forward
    passes.
    """
    want = alone(dtype, "temperature")
    engine = make_engine(adapted(dtype)[0], prefill_chunk=48)
    got = requests(dtype, "temperature", bind(engine, [name], want))
    run(engine, got)
    assert_same(got, want)
    assert_not_vacuous(name, got)
    assert_idle(engine)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("variant", "options"),
    covering([*VARIANTS], ["greedy", "all", "penalties", "guided", "repetitive"], strength=1),
)
def test_variants_and_options(variant: str, options: str) -> None:
    want = alone(FLOAT32, options, variant)
    engine = make_engine(adapted(FLOAT32, variant)[0], max_batch=4)
    got = requests(
        FLOAT32, options, bind(engine, ["oracle", "adversarial", "prompt_lookup"], want), variant
    )
    run(engine, got)
    assert_same(got, want)
    assert total(got, "accepted") > 0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "preempts"),
    covering(
        ["autoregressive", "suffix", "oracle", "draft_model", "eagle3"], [False, True], strength=1
    ),
)
def test_prefix_cache_and_preemption(name: str, preempts: bool) -> None:
    """Equal prompts with other adapters take no blocks of each other; with the same adapter they
    do.
    """
    engine = make_engine(
        adapted(FLOAT32)[0], share_prefixes=True, max_batch=2 if preempts else 16, prefill_chunk=64
    )
    rounds = []
    for shift in (0, 1, 0):
        want = alone(FLOAT32, "temperature", shift=shift)
        got = requests(FLOAT32, "temperature", bind(engine, [name], want), shift=shift)
        for priority, request in enumerate(got):
            request.priority = priority if preempts else 0
            engine.add(request)
            for _ in range(3 if preempts else 0):
                engine.step()
        step_until_ended(engine, got)
        assert_same(got, want)
        rounds.append(got)
    cached = [
        total([request for request in got if not request.stats.preemptions], "cached_tokens")
        for got in rounds
    ]
    assert cached[0] == cached[1] == 0
    assert cached[2] > 0
    assert (total(rounds[0], "preemptions") > 0) == preempts
    assert (sum(total(got, "drafted") for got in rounds) > 0) == (name != "autoregressive")


@pytest.mark.parametrize("kv_dtype", [None, INT8], ids=["auto", "int8"])
def test_prompt_cache_on_disk(
    kv_dtype: DType | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted engine reads the blocks of the same adapter, and none of another."""
    monkeypatch.setattr(PromptCache, "_pays", lambda *_: True)
    first = list[Request]()
    read = []
    for shift in (0, 0, 1):
        store = BlockStore(tmp_path, 1 << 30)
        engine = make_engine(adapted(FLOAT32)[0], share_prefixes=True, kv_dtype=kv_dtype)
        PromptCache(store, "tiny").attach(engine.cache)
        got = requests(FLOAT32, "temperature", shift=shift)
        run(engine, got)
        if shift == 0:
            first = first or got
            assert_same(got, first)
        read.append(total(got, "disk_tokens"))
        store.close()
    assert read[0] == read[2] == 0
    assert read[1] > 1000


def test_samples_of_a_prompt_share_blocks_and_the_adapter() -> None:
    decoder, adapters = adapted(FLOAT32)
    outputs = []
    for parent in (False, True):
        engine = make_engine(decoder)
        made = list[Request]()
        for index in range(3):
            made.append(ask(PROMPTS[2], params("temperature", index)))
            made[-1].adapter = adapters[2]
            made[-1].parent = made[0] if parent and index else None
        run(engine, made)
        outputs.append([(request.output, request.result.logprobs) for request in made])
        shared = total(made[1:], "cached_tokens")
        assert (shared > 0) == parent
    assert outputs[0] == outputs[1]


def test_measured_acceptance_is_that_of_requests_with_the_same_adapter() -> None:
    decoder, adapters = adapted(FLOAT32)
    stats = AcceptanceStats()
    engine = make_engine(decoder, acceptance_stats=stats)
    got = requests(FLOAT32, "repetitive", bind(engine, ["suffix"], []))
    run(engine, [request for request in got if request.adapter is not None])
    assert not stats.counts
    found = engine.speculator._stats_by_adapter
    assert found is not None
    assert {*found} == {*adapters} | {None}
    assert all(each.counts for each in found.values() if each is not stats)
