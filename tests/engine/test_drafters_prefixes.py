"""Prefix hits in the KV caches of drafters: fewer rows, equal draft tokens, nothing shared across
salts.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from drafting.drafting import Watched, watch_draft
from drafting.helpers import within
from engine.cases import assert_same, drafter, step_until_ended, text
from engine.test_shared_pool import ALONE, WITH_POOLS, Pools
from pronk.base.arrays import BFLOAT16, FLOAT32, DType
from pronk.cache.budget import KVBudget
from pronk.cache.paged import PagedCache
from pronk.drafting import Drafter
from pronk.drafting.from_draft.draft_model import ModelProposer
from pronk.drafting.target import Target
from pronk.engine.engine import Engine
from pronk.engine.options import BatchOptions
from pronk.engine.request import Request
from pronk.models.decoder import Decoder
from pronk.models.model_runner import ModelRunner
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, make_request, run, run_alone, tiny_decoder

FIRST = text(3, 100)
NEW = text(4, 23)
ONCE = SamplingParams(max_tokens=40, seed=1, temperature=0.7, logprobs=2)
AGAIN = replace(ONCE, seed=2)


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of cached tokens of each prefix hit in a drafter's KV cache."""
    Pools.install(monkeypatch)
    return Pools.found


def second_turn(
    engine: Engine,
    made: Drafter,
    prompts: Sequence[Sequence[int]],
    salts: tuple[bytes, bytes] = (b"", b""),
) -> tuple[Request, list[Any]]:
    """Run a conversation of two turns; return the second request and its proposals."""
    proposer = Watched(made.bind(engine.target))
    batch = [
        make_request(prompt, params, proposer)
        for prompt, params in zip(prompts, (ONCE, AGAIN), strict=True)
    ]
    for request, salt in zip(batch, salts, strict=True):
        request.salt = salt
        run(engine, [request])
    return batch[1], [
        (note.tokens, note.tree.tokens, note.tree.parents, note.path)
        for note in proposer.of(batch[1])
    ]


def conversation(decoder: Decoder, first: Sequence[int] = FIRST) -> list[list[int]]:
    """Return the prompts of two turns."""
    return [list(first), [*run_alone(decoder, first, ONCE).tokens, *NEW]]


def compare(
    decoder: Decoder, made: Drafter, pools: list[int], first: Sequence[int] = FIRST, **options: Any
) -> Request:
    """Run the second turn with and without shared prefixes, check for equal results, and return the
    shared one.
    """
    prompts = conversation(decoder, first)
    plain = run_alone(decoder, prompts[1], AGAIN)
    unshared, trees = second_turn(make_engine(decoder), made, prompts)
    assert not any(pools)
    pools.clear()
    got, others = second_turn(make_engine(decoder, share_prefixes=True, **options), made, prompts)
    assert_same([got, unshared], [plain, plain])
    assert others == trees
    assert got.stats.drafted > 0
    assert got.stats.cached_tokens > 0
    return got


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [pytest.param(FLOAT32, marks=pytest.mark.slow), BFLOAT16])
@pytest.mark.parametrize("name", WITH_POOLS)
def test_draft_tokens_are_equal(name: str, dtype: DType, pools: list[int]) -> None:
    got = compare(tiny_decoder(dtype), drafter(name, ()), pools)
    assert got.stats.cached_tokens == 128
    # a block less: the first turn ended before the drafter read its last tokens
    assert max(pools) >= 112


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALONE)
def test_only_committed_text_is_cached(name: str, pools: list[int]) -> None:
    """Requests are aborted after different numbers of steps; no cached block contains draft
    tokens.
    """
    engine = make_engine(tiny_decoder(), share_prefixes=True)
    proposer = drafter(name, ()).bind(engine.target)
    # A row of these belongs to the next token.
    known = set[tuple[int, ...]]()
    first = int(proposer.name in ("eagle3", "mtp"))
    for steps in range(3, 30):
        request = make_request(
            text(steps, 20), replace(ONCE, seed=steps, temperature=1.5), proposer
        )
        engine.add(request)
        for _ in range(steps):
            engine.step()
        engine.abort(request)
        known |= {
            tuple(request.tokens[at : at + 16]) for at in range(first, len(request.tokens), 16)
        }
    (pool,) = Pools.opened
    assert pool.prefix_cache is not None
    found = {tuple(entry.tokens) for entry in pool.prefix_cache._entries.values()}
    assert len(found) > 30
    assert found <= known


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WITH_POOLS)
def test_nothing_is_shared_across_salts(name: str, pools: list[int]) -> None:
    decoder = tiny_decoder()
    made = drafter(name, ())
    prompts = conversation(decoder)
    found = list[bool]()
    for salts in ((b"one", b"other"), (b"one", b""), (b"", b"one"), (b"one", b"one")):
        pools.clear()
        got, _ = second_turn(make_engine(decoder, share_prefixes=True), made, prompts, salts)
        found.append(any(pools))
        assert bool(got.stats.cached_tokens) == found[-1]
    assert found == [False, False, False, True]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", ["draft_model"])
def test_the_draft_model_computes_new_tokens_only(name: str, shares: bool) -> None:
    engine = make_engine(tiny_decoder(), share_prefixes=shares)
    proposer = drafter(name, ()).bind(engine.target)
    (model,) = within(proposer, ModelProposer)
    passes = watch_draft(model.draft)
    first = make_request(FIRST, ONCE, proposer)
    run(engine, [first])
    passes.clear()
    second = make_request([*first.tokens, *NEW], AGAIN, proposer)
    run(engine, [second])
    read = {place for each in passes for texts in each.texts for place in map(len, texts)}
    assert second.stats.drafted > 0
    assert min(read) == (129 if shares else 1)
    assert passes[0].rows == [len(second.prompt) + 1 - (128 if shares else 0)]


def test_a_preempted_request_hits_its_own_prefix_in_both_caches(pools: list[int]) -> None:
    engine = make_engine(tiny_decoder(), num_blocks=24, max_batch=1, share_prefixes=True)
    proposer = drafter("draft_model", ()).bind(engine.target)
    low, urgent = (
        make_request(text(seed, 60), replace(ONCE, seed=seed), proposer) for seed in (1, 2)
    )
    urgent.priority = 1
    engine.add(low)
    while low.num_generated < 20:
        engine.step()
    engine.add(urgent)
    pools.clear()
    step_until_ended(engine, [low, urgent])
    assert low.stats.preemptions == 1
    assert low.stats.cached_tokens >= 64
    assert max(pools) >= 64
    assert_same(
        [low, urgent],
        [run_alone(tiny_decoder(), each.prompt, each.params) for each in (low, urgent)],
    )


def test_prefix_hits_and_evictions_in_small_caches(pools: list[int]) -> None:
    check_small_caches(pools, ["draft_model", "eagle3"])


def check_small_caches(pools: list[int], drafters: Sequence[str]) -> None:
    """Run requests with shared prefixes, twice for each drafter, in caches that evict blocks."""
    decoder = tiny_decoder()
    prompts = [text(7, 48)[: 20 + 9 * number] + text(number, 10) for number in range(8)]
    want = [
        run_alone(decoder, prompt, replace(ONCE, seed=seed)) for seed, prompt in enumerate(prompts)
    ]
    engine = make_engine(decoder, num_blocks=20, share_prefixes=True)
    for name in drafters:
        proposer = drafter(name, ()).bind(engine.target)
        for _ in range(2):
            pools.clear()
            got = [make_request(request.prompt, request.params, proposer) for request in want]
            run(engine, got)
            assert_same(got, want)
        assert any(pools)


def test_draft_caches_share_prefixes_if_the_target_does() -> None:
    decoder = tiny_decoder()
    for shares in (True, False):
        budget = KVBudget("4MB", 4)
        cache = budget.add(
            decoder.config,
            FLOAT32,
            partial(PagedCache, kernels=decoder.kernels),
            share_prefixes=shares,
        )
        engine = Engine(Target(ModelRunner(decoder, cache), budget=budget), BatchOptions())
        (model,) = within(drafter("draft_model", ()).bind(engine.target), ModelProposer)
        assert (model.draft.runner.cache.prefix_cache is not None) == shares
