"""Preemptions and prefix hits: requests have the tokens of plain decoding."""

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from drafting.trees import TreeDrafter, oracle_trees
from engine.cases import (
    DRAFTERS,
    ask,
    assert_same,
    drafter,
    params,
    plain,
    step_until_ended,
    text,
    texts,
    total,
)
from pronk.base.arrays import BFLOAT16, FLOAT32
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.drafting import Suffix
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, make_request, run, run_alone, tiny_decoder

# Nine blocks hold the longest of these requests, but no two of them.
SHORT = tuple(tuple(text(seed, length)) for seed, length in enumerate((1, 20, 33, 40, 60, 95)))
TIGHT: dict[str, Any] = {"num_blocks": 9, "block_size": 16}
CLOSE = ("suffix", "draft_model", "oracle")
# Drafters with a KV cache of their own, alone and as parts of others.
ALONE = ("draft_model", "eagle3", "mtp")
WITH_POOLS = (*ALONE, "eagle3 tree")
NAMES = [name if name in CLOSE else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS]


def serve(engine: Engine, name: str, options: str, want: Sequence[Request]) -> list[Request]:
    """Run all prompts at once with one drafter."""
    proposer = drafter(name, want).bind(engine.target)
    got = [
        ask(request.prompt, params(options, index), proposer) for index, request in enumerate(want)
    ]
    run(engine, got)
    return got


@pytest.mark.parametrize("options", [pytest.param("greedy", marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("name", NAMES)
def test_preempted_requests(name: str, options: str) -> None:
    want = plain(BFLOAT16, options, SHORT)
    got = serve(make_engine(tiny_decoder(BFLOAT16), **TIGHT), name, options, want)
    assert_same(got, want)
    assert total(got, "preemptions") > 0
    if name in ("oracle", "adversarial"):
        assert total(got, "accepted") > 0


class Pools(PagedCache):
    """Records the KV caches of drafters and their prefix hits in tokens."""

    opened: ClassVar[list[PagedCache]] = []
    found: ClassVar[list[int]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.opened.append(self)

    def match_prefix(
        self, tokens: Sequence[int], salt: bytes = b"", digests: list[bytes] | None = None
    ) -> BlockTable | None:
        block_table = super().match_prefix(tokens, salt, digests)
        self.found.append(0 if block_table is None else block_table.length)
        return block_table

    @classmethod
    def held(cls) -> int:
        """Return the number of blocks in use in all recorded caches."""
        return sum(pool.allocator.num_blocks - pool.allocator.num_free for pool in cls.opened)

    @classmethod
    def install(cls, patch: pytest.MonkeyPatch) -> None:
        cls.opened.clear()
        cls.found.clear()
        patch.setattr("pronk.drafting.shared.draft_cache.PagedCache", cls)
        patch.setattr("pronk.models.model_runner.PagedCache", cls)  # of draft models


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> type[Pools]:
    Pools.install(monkeypatch)
    return Pools


@pytest.mark.parametrize("name", WITH_POOLS)
def test_preempted_requests_hold_no_block_of_a_drafter(name: str, pools: type[Pools]) -> None:
    """A preemption frees the blocks of the drafter's caches; the restarted request has draft tokens
    again.
    """
    want = plain(BFLOAT16, "all", SHORT)
    engine = make_engine(tiny_decoder(BFLOAT16), **TIGHT)
    proposer = drafter(name, want).bind(engine.target)
    assert pools.opened
    got = [ask(want[index].prompt, params("all", index), proposer) for index in (4, 5)]
    request, urgent = got
    urgent.priority = 1
    engine.add(request)
    while not request.stats.drafted:
        assert not request.ended
        engine.step()
    assert pools.held() > 0
    engine.add(urgent)
    engine.scheduler.schedule()
    assert engine.scheduler.preempted == [request]
    engine.speculator.begin([], [request])
    assert pools.held() == 0
    before = len(request.stats.steps)
    step_until_ended(engine, got)
    assert_same(got, want[4:])
    assert request.stats.preemptions == 1
    assert any(step.drafted for step in request.stats.steps[before:])
    assert not any(each.stats.draft_error for each in got)
    assert pools.held() == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [pytest.param("greedy", marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("name", NAMES)
def test_prefix_hits(name: str, options: str) -> None:
    """All prompts run twice, in a large cache and in a small one that evicts idle blocks."""
    want = plain(BFLOAT16, options, SHORT)
    for settings in ({}, {"num_blocks": 18}):
        engine = make_engine(tiny_decoder(BFLOAT16), share_prefixes=True, **settings)
        for _ in range(2):
            got = serve(engine, name, options, want)
            assert_same(got, want)
        assert total(got, "cached_tokens") > 0
        if settings:
            assert (
                sum(len(request.tokens) // 16 for request in got)
                > engine.cache.allocator.num_blocks
            ), "evictions"


def test_a_second_turn_computes_new_tokens_only() -> None:
    engine = make_engine(tiny_decoder(), share_prefixes=True)
    first = make_request(text(3, 100), SamplingParams(max_tokens=30, seed=1))
    run(engine, [first])
    second = make_request([*first.tokens, *text(4, 20)], SamplingParams(max_tokens=30, seed=2))
    run(engine, [second])
    alone = run_alone(tiny_decoder(), second.prompt, second.params)
    assert second.output == alone.output
    # 8 blocks of 16; the first turn computed 129 of 130 tokens
    assert second.stats.cached_tokens == 128
    assert alone.stats.cached_tokens == 0


class Hashes:
    """Records the hashed tokens and the number of lookups of a prefix cache."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        prefix = engine.cache.prefix_cache
        assert prefix is not None
        digest = prefix._digest
        match = prefix.match
        self.texts = list[bytes]()
        self.lookups = 0

        def counted(before: bytes, tokens: bytes) -> bytes:
            self.texts.append(tokens)
            return digest(before, tokens)

        def counting(*arguments: Any) -> Any:
            self.lookups += 1
            return match(*arguments)

        monkeypatch.setattr(prefix, "_digest", counted)
        monkeypatch.setattr(prefix, "match", counting)


def test_a_waiting_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting prompt is looked up again only if more blocks are free or more of the prompt is
    cached.
    """
    engine = make_engine(tiny_decoder(), num_blocks=20, share_prefixes=True, max_tree=1)
    beginning = text(3, 64)
    run(engine, [make_request(beginning, SamplingParams(max_tokens=16, seed=0))])
    running = make_request(text(5, 100), SamplingParams(max_tokens=100, seed=1))
    waiting = make_request(beginning + text(6, 130), SamplingParams(max_tokens=20, seed=2))
    engine.add(running)
    for _ in range(20):
        engine.step()
    hashes = Hashes(engine, monkeypatch)
    engine.add(waiting)
    engine.step()
    assert hashes.lookups == 1
    assert sum(map(bool, hashes.texts)) == 5, "four cached blocks and the next one"
    hashes.texts.clear()
    for _ in range(40):
        engine.step()
    assert waiting in engine.scheduler.waiting
    assert not running.ended
    assert hashes.lookups == 1
    assert 0 < len(hashes.texts) <= 3, "blocks that the running request has filled"
    step_until_ended(engine, [running])
    hashes.texts.clear()
    step_until_ended(engine, [waiting])
    assert hashes.lookups == 2
    assert waiting.stats.cached_tokens == 64
    assert sum(map(bool, hashes.texts)) == len(waiting.tokens) // 16 - 4
    assert waiting.output == run_alone(tiny_decoder(), waiting.prompt, waiting.params).output


@pytest.mark.parametrize("name", ["autoregressive", "oracle"])
def test_rows_of_draft_tokens_evict_no_block(name: str) -> None:
    """In a cache full of idle blocks, a short text evicts only the blocks that it fills."""
    engine = make_engine(tiny_decoder(), num_blocks=24, share_prefixes=True)
    for seed in range(8):
        run(engine, [make_request(text(seed, 40), SamplingParams(max_tokens=10, seed=seed))])
    assert engine.cache.prefix_cache is not None
    assert len(engine.cache.prefix_cache) == len(engine.cache.allocator.evictable) == 23
    known = run_alone(tiny_decoder(), text(99, 20), SamplingParams(max_tokens=20, seed=1))
    proposer = TreeDrafter(oracle_trees(0.7), texts([known]))
    request = make_request(known.prompt, known.params, proposer if name == "oracle" else None)
    run(engine, [request])
    assert request.output == known.output
    assert (request.stats.accepted > 0) == (name == "oracle")
    assert len(engine.cache.prefix_cache) == 23, (
        "39 rows fill the empty block and two others, two of which are now cached"
    )


def test_prefix_hits_do_not_depend_on_draft_tokens() -> None:
    want = plain(FLOAT32, "greedy")
    hits = []
    for name in ("autoregressive", "oracle"):
        engine = make_engine(tiny_decoder(), share_prefixes=True)
        serve(engine, name, "greedy", want)
        hits.append(
            [request.stats.cached_tokens for request in serve(engine, name, "greedy", want)]
        )
    assert hits[0] == hits[1]
    assert sum(hits[0]) > 0


def test_prompts_with_prompt_logprobs_are_computed() -> None:
    engine = make_engine(tiny_decoder(), share_prefixes=True)
    options = SamplingParams(max_tokens=4, seed=0, prompt_logprobs=2)
    one, other = (make_request(text(3, 100), options) for _ in range(2))
    run(engine, [one])
    run(engine, [other])
    assert other.stats.cached_tokens == 0
    assert other.result.prompt_logprobs == one.result.prompt_logprobs


def test_prompt_logprobs_after_a_preemption_in_prefill() -> None:
    shared = make_request(text(3, 100), SamplingParams(max_tokens=4, seed=0, prompt_logprobs=1))
    alone = run_alone(tiny_decoder(), shared.prompt, shared.params)
    engine = make_engine(tiny_decoder(), **TIGHT, prefill_chunk=16, max_batch=1)
    engine.add(shared)
    for _ in range(3):
        engine.step()
    urgent = make_request(text(5, 60), SamplingParams(max_tokens=4, seed=0))
    urgent.priority = 1
    engine.add(urgent)
    step_until_ended(engine, [urgent])
    assert not shared.ended
    assert 0 < len(shared.result.prompt_logprobs) < 100
    step_until_ended(engine, [shared])
    assert shared.stats.preemptions == 1
    assert shared.result.prompt_logprobs == alone.result.prompt_logprobs
    assert shared.output == alone.output


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_any_traffic(seed: int) -> None:
    """Requests with common prefixes arrive and are aborted in a small cache."""
    dice = random.Random(seed)
    decoder = tiny_decoder()
    engine = make_engine(
        decoder, num_blocks=12, share_prefixes=bool(seed % 2), max_batch=4, max_tree=8
    )
    proposer = Suffix().bind(engine.target)
    beginnings = [text(9, 40), text(8, 70)]
    alive = list[Request]()
    done = list[Request]()
    for step in range(160):
        if step < 120 and dice.random() < 0.35:
            prompt = dice.choice(beginnings)[: dice.randint(1, 70)] + text(
                step, dice.randint(1, 20)
            )
            options = SamplingParams(
                max_tokens=dice.randint(1, 60), seed=step, temperature=dice.choice([0.0, 0.9])
            )
            request = make_request(prompt, options, dice.choice([None, proposer]))
            request.priority = dice.randint(0, 2)
            request.tenant = dice.choice("abc")
            engine.add(request)
            alive.append(request)
        if alive and dice.random() < 0.05:
            engine.abort(alive.pop(dice.randrange(len(alive))))
        engine.step()
        done += [request for request in alive if request.ended]
        alive = [request for request in alive if not request.ended]
    step_until_ended(engine, alive)
    done += alive
    assert total(done, "preemptions") > 0
    assert (total(done, "cached_tokens") > 0) == bool(seed % 2)
    assert engine.cache.allocator.num_free == 12
    for request in done:
        assert request.result.error is None
        assert request.output == run_alone(decoder, request.prompt, request.params).output


def test_a_block_that_is_written_again_gives_no_prefix_hit() -> None:
    engine = make_engine(tiny_decoder(), share_prefixes=True)
    cache = engine.cache
    tokens = text(3, 40)
    first = make_request(tokens, SamplingParams(max_tokens=20, seed=1))
    run(engine, [first])
    block_table = cache.match_prefix(first.tokens)
    assert block_table is not None
    # 2 whole blocks, and the third one, which ``child`` writes again
    child = cache.allocator.fork(block_table, 39)
    cache.release(block_table)
    assert cache.prefix_cache is not None
    assert cache.prefix_cache.is_cached(child.blocks[2])
    cache.prepare(child, 45)
    assert not cache.prefix_cache.is_cached(child.blocks[2])
    assert cache.prefix_cache.is_cached(child.blocks[1])
    cache.release(child)


def test_dynamic_rotations_share_no_prefixes() -> None:
    """Keys with dynamic rotations depend on the prompt's length, so equal prefixes have different
    keys.
    """
    engine = make_engine(tiny_decoder(dynamic=True), share_prefixes=True)
    assert engine.cache.prefix_cache is None


def test_a_prefix_larger_than_the_cache_with_a_window() -> None:
    """A request holds only the window's blocks of a prefix hit, so a request alone never lacks
    blocks.
    """
    decoder = tiny_decoder(windows=(32, 32))
    engine = make_engine(decoder, num_blocks=9, share_prefixes=True, prefill_chunk=32, max_tree=1)
    tokens = text(1, 16 * 9 - 1)
    run(engine, [make_request(tokens[:-4], SamplingParams(max_tokens=4, seed=0))])
    again = make_request(tokens[:-9] + text(7, 100), SamplingParams(max_tokens=5, seed=0))
    engine.add(again)
    for _ in range(50):
        engine.step()
    assert again.ended
    assert again.output == run_alone(decoder, again.prompt, again.params).output
    assert again.stats.preemptions == 0


def test_no_token_after_a_stop_token_is_cached() -> None:
    """A text that ends within an accepted path gives the same prefix hits as without draft
    tokens.
    """
    want = plain(FLOAT32, "all")
    for name in ("oracle", "autoregressive"):
        engine = make_engine(tiny_decoder(), share_prefixes=True)
        got = serve(engine, name, "all", want)
        known = [engine.cache.match_prefix([*request.tokens, 0]) for request in got]
        found = [0 if block_table is None else block_table.length for block_table in known]
        assert found == [(len(request.tokens) - 1) // 16 * 16 for request in got]
        for block_table in known:
            if block_table is not None:
                engine.cache.release(block_table)
