"""The scheduler with requests that have lengths only: order, limits, reserved KV slots, and
released blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pronk.base.errors import CacheFullError, DeadlineError
from pronk.cache.blocks import BlockAllocator, BlockTable
from pronk.engine.request import Queueing, RequestResult
from pronk.engine.scheduler import ScheduledRequest, Scheduler
from pronk.engine.stats import Stats
from tiny_models import Clock

BLOCK = 4


@dataclass(eq=False)
class Fake:
    """A request with a length and no tokens."""

    length: int
    max_tokens: int
    parent: Fake | None = None
    priority: int = 0
    deadline: float | None = None
    tokens: int = 0
    tenant: str = ""
    paused: bool = False
    start_time: float = 0.0
    cache_salt: bytes = b""
    adapter: None = None
    branch_positions: tuple[int, ...] = ()
    has_samples: bool = False
    computes_whole_prompt: bool = False
    needs_draft_slots: bool = True
    stats: Stats = field(default_factory=Stats)
    block_table: BlockTable = field(default_factory=BlockTable)
    digests: list[bytes] = field(default_factory=list)
    queueing: Queueing = field(default_factory=Queueing)
    result: RequestResult = field(default_factory=lambda: RequestResult(cast("Any", None)))

    def __post_init__(self) -> None:
        self.tokens = self.length

    @property
    def prompt(self) -> range:
        return range(self.length)

    @property
    def params(self) -> Any:
        return SimpleNamespace(max_tokens=self.max_tokens)

    @property
    def num_pending(self) -> int:
        return self.tokens - self.block_table.length

    @property
    def num_generated(self) -> int:
        return self.tokens - self.length

    @property
    def ended(self) -> bool:
        return self.result.ended

    @property
    def has_new_turn(self) -> bool:
        return self.queueing.turn_end > -inf and self.num_generated == self.queueing.turn_start

    def has_turn(self, now: float) -> bool:
        return self.queueing.turn_end > now or self.has_new_turn

    @property
    def is_startable(self) -> bool:
        return not self.ended and not self.paused


class FakeCache:
    """A KV cache of blocks without contents."""

    block_size = BLOCK
    version = 0
    prompt_cache = None
    states = None
    num_free_updates = None

    def __init__(self, num_blocks: int, window: int | None = None) -> None:
        self.allocator = BlockAllocator(num_blocks, BLOCK)
        self.window = window

    def prepare(self, block_table: BlockTable, tokens: int) -> None:
        self.allocator.allocate(block_table, tokens)
        first = block_table.length // BLOCK - block_table.num_released
        for index in range(max(0, first), len(block_table.blocks)):
            if self.allocator.references[block_table.blocks[index]] > 1:
                self.allocator.replace_shared(block_table, index)

    def match_prefix(self, tokens: object, salt: bytes, digests: object) -> None:
        return None

    def has_cached_block(self, digest: bytes) -> bool:
        return False

    def has_states(self, block_table: BlockTable) -> bool:
        return True

    def want_checkpoints(
        self, block_table: BlockTable, positions: tuple[int, ...], fork_at: int | None
    ) -> None:
        pass

    def fork(self, block_table: BlockTable, tokens: int) -> BlockTable | None:
        return self.allocator.fork(block_table, tokens)

    def release_outside_window(self, block_table: BlockTable) -> None:
        if self.window is not None:
            self.allocator.release_before(block_table, block_table.length - self.window + 1)

    def trim(self, block_table: BlockTable, tokens: int) -> None:
        self.allocator.trim(block_table, tokens)

    def release(self, block_table: BlockTable) -> None:
        self.allocator.release(block_table)

    def reset(self) -> None:
        self.allocator.reset()


def scheduler(
    num_blocks: int = 64,
    *,
    window: int | None = None,
    max_batch: int = 4,
    chunk: int = 16,
    tree: int = 4,
    clock: Callable[[], float] = Clock(),  # noqa: B008 - it always shows 0
) -> Scheduler:
    return Scheduler(FakeCache(num_blocks, window), window, max_batch, chunk, tree, clock=clock)  # type: ignore[arg-type]


def add(plan: Scheduler, *requests: Fake) -> None:
    for request in requests:
        plan.add(request)  # type: ignore[arg-type]


def advance(
    plan: Scheduler, batch: Sequence[ScheduledRequest], dice: random.Random | None = None
) -> None:
    """Write all scheduled rows and accept a random number of draft tokens, or none without
    ``dice``.
    """
    free = plan.cache.allocator.num_free
    for scheduled in batch:
        table: Any = scheduled.request.block_table
        plan.cache.prepare(table, table.length + scheduled.num_tokens + scheduled.num_draft_slots)
        assert plan.cache.allocator.num_free == free, "the scheduler reserves all blocks"
    for scheduled in batch:
        request: Any = scheduled.request
        decodes = scheduled.includes_last_token
        request.block_table.length += scheduled.num_tokens
        if decodes:
            left = request.max_tokens - (request.tokens - request.length)
            accepted = (
                0 if dice is None else min(dice.randint(0, scheduled.num_draft_slots), left - 1)
            )
            request.tokens += accepted + 1
            request.block_table.length += accepted
            if request.tokens - request.length >= request.max_tokens:
                request.result.finish_reason = "length"
        plan.cache.release_outside_window(request.block_table)


def leave(plan: Scheduler, *, dice: random.Random | None = None) -> None:
    """Remove ended requests and, with ``dice``, sometimes another one."""
    for request in [each for each in plan.running if each.ended]:
        assert plan.remove(request)
    others = [*plan.running, *plan.waiting]
    if dice is not None and others and dice.random() < 0.05:
        assert plan.remove(dice.choice(others))


def step(plan: Scheduler, dice: random.Random | None = None) -> list[ScheduledRequest]:
    """Schedule a batch, advance its requests as :func:`advance` does, and remove ended requests."""
    batch = plan.schedule()
    check(plan, batch)
    advance(plan, batch, dice)
    leave(plan)
    return batch


def check(plan: Scheduler, batch: Sequence[ScheduledRequest]) -> None:
    assert len(plan.running) <= plan.max_batch
    assert len({id(scheduled.request) for scheduled in batch}) == len(batch)
    pending = [scheduled.request.num_pending for scheduled in batch]
    assert all(
        scheduled.num_tokens == 1
        for scheduled, left in zip(batch, pending, strict=True)
        if left == 1
    )
    prefill = sum(
        scheduled.num_tokens for scheduled, left in zip(batch, pending, strict=True) if left > 1
    )
    assert prefill <= plan.prefill_chunk
    decoding = [request for request in plan.running if request.num_pending == 1]
    live = {id(request) for request in decoding if not request.ended}
    assert live <= {id(scheduled.request) for scheduled in batch}, "a decoding request stalls"
    order = [(-request.priority, request.queueing.start_order) for request in plan.running]
    assert order == sorted(order)  # type: ignore[type-var]
    counts = [0] * plan.cache.allocator.num_blocks
    for request in plan.running:
        for block in request.block_table.blocks:
            counts[block] += 1
    assert counts == plan.cache.allocator.references
    assert plan.cache.allocator.num_free == counts.count(0)


@pytest.mark.parametrize("window", [None, 9])
def test_random_requests(window: int | None) -> None:
    """Random requests start in order of arrival, and all scheduled rows have KV slots."""
    preempted = 0
    for seed in range(60):
        dice = random.Random(seed)
        size = dice.randint(16, 60) if window is None else dice.randint(9, 14)
        plan = scheduler(size, window=window, max_batch=dice.randint(1, 5), tree=dice.randint(1, 6))
        came = list[Fake]()
        started = list[Any]()
        most = 0
        for number in range(300):
            if number < 150 and dice.random() < 0.3:
                request = Fake(dice.randint(1, 40), dice.randint(1, 20))
                try:
                    add(plan, request)
                except CacheFullError:
                    assert window is None
                    assert (
                        BLOCK * plan.cache.allocator.num_blocks
                        < request.length + request.max_tokens
                    )
                    continue
                came.append(request)
            batch = plan.schedule()
            check(plan, batch)
            started += [each for each in plan.running if each not in started]
            most = max(most, len(plan.running))
            advance(plan, batch, dice)
            leave(plan, dice=dice)
        while plan.running or plan.waiting:
            assert step(plan, dice), "requests wait, but none is scheduled"
        assert 0 < most <= plan.max_batch
        order = [came.index(each) for each in started]
        assert order == sorted(order)
        allocator = plan.cache.allocator
        assert allocator.num_free == allocator.num_blocks
        assert not any(allocator.references)
        preempted += sum(request.stats.preemptions for request in came)
    # With a window, all blocks of a request are reserved when it starts.
    assert preempted > 20 if window is None else not preempted


def test_prefill_in_chunks_beside_decoding_requests() -> None:
    plan = scheduler(chunk=16)
    first = Fake(3, 10)
    long = Fake(40, 5)
    later = Fake(20, 5)
    add(plan, first)
    (scheduled,) = plan.schedule()
    assert (scheduled.num_tokens, scheduled.includes_last_token) == (3, True)
    advance(plan, [scheduled])
    add(plan, long, later)
    batches: list[Any] = [
        [(each.request, each.num_tokens) for each in step(plan)] for _ in range(4)
    ]
    assert batches[0] == [(first, 1), (long, 15)]
    assert batches[1] == [(first, 1), (long, 15)]
    assert batches[2] == [(first, 1), (long, 10), (later, 5)]
    assert batches[3] == [(first, 1), (long, 1), (later, 14)]


def test_generated_tokens_are_charged_while_the_request_runs() -> None:
    plan = scheduler(chunk=64)
    request = Fake(4, 20, tenant="a")
    add(plan, request)
    step(plan)
    counted = plan.fair_share.counters["a"]
    for generated in range(1, 6):
        step(plan)
        assert request.num_generated == generated + 1
        assert plan.fair_share.counters["a"] == counted + 2 * generated


def test_no_request_overtakes_one_that_does_not_fit() -> None:
    plan = scheduler(num_blocks=16, max_batch=8, chunk=64)
    large = Fake(30, 10)
    larger = Fake(40, 20)
    small = Fake(2, 2)
    add(plan, large, larger, small)
    assert [scheduled.request for scheduled in plan.schedule()] == [large]
    assert [*plan.waiting] == [larger, small]
    large.result.finish_reason = "stop"
    leave(plan)
    assert plan.schedule()[0].request is larger  # type: ignore[comparison-overlap]


def test_a_request_that_can_never_fit_is_refused() -> None:
    plan = scheduler(num_blocks=10, tree=4)
    add(plan, Fake(30, 10))
    with pytest.raises(
        CacheFullError, match="at most 40 tokens, the size of the KV cache, found 44; raise kv"
    ):
        add(plan, Fake(30, 11))


def test_a_waiting_request_that_no_longer_fits_fails() -> None:
    plan = scheduler(num_blocks=20)
    request = Fake(50, 10)
    small = Fake(3, 3)
    add(plan, request, small)
    # as after a draft model took its share of memory
    plan.cache.allocator = BlockAllocator(10, BLOCK)
    assert [scheduled.request for scheduled in plan.schedule()] == [small]
    assert isinstance(request.result.error, CacheFullError)


def test_draft_slots_shrink_before_a_request_is_preempted() -> None:
    plan = scheduler(num_blocks=8, max_batch=2, tree=8)
    first = Fake(6, 20)
    second = Fake(6, 20)
    add(plan, first, second)
    # The 8th step fills all blocks.
    draft_slots = [[scheduled.num_draft_slots for scheduled in step(plan)] for _ in range(8)]
    assert all(len(pair) == 2 for pair in draft_slots)
    assert draft_slots[1] == [7, 7]
    assert max(draft_slots[-1]) < 7
    assert first.stats.preemptions == second.stats.preemptions == 0


class KeepsAll:
    """A prefix cache that keeps every block until its eviction."""

    def __init__(self) -> None:
        self.gone = list[int]()

    def is_cached(self, block: int) -> bool:
        return block not in self.gone

    def evict(self, block: int) -> None:
        self.gone.append(block)


def with_idle_blocks(num_blocks: int, idle: int, **options: Any) -> tuple[Scheduler, KeepsAll]:
    """Return a scheduler whose last blocks are idle: free, but cached."""
    plan = scheduler(num_blocks, **options)
    memory = KeepsAll()
    allocator = plan.cache.allocator
    block_table = BlockTable()
    kept = BlockTable()
    allocator.allocate(block_table, BLOCK * (num_blocks - idle))
    allocator.allocate(kept, BLOCK * idle)
    allocator.set_prefix_cache(memory)
    allocator.release(kept)
    memory.gone = [*block_table.blocks]
    allocator.release(block_table)
    memory.gone.clear()
    assert len(allocator.evictable) == idle
    return plan, memory


def test_a_request_without_draft_tokens_gets_no_draft_slots() -> None:
    plan, memory = with_idle_blocks(12, 8, tree=16, max_batch=2)
    add(plan, Fake(6, 6, needs_draft_slots=False), Fake(5, 3))
    draft_slots = [[scheduled.num_draft_slots for scheduled in step(plan)] for _ in range(2)]
    assert draft_slots == [[0, 0], [0, 2]], "the first step is prefill"
    assert not memory.gone


def test_draft_slots_evict_at_most_one_idle_block() -> None:
    plan, memory = with_idle_blocks(12, 10, tree=16)
    request: Any = Fake(7, 8)
    add(plan, request)
    draft_slots = []
    while not request.ended:
        held = len(request.block_table.blocks)
        (scheduled,) = step(plan)
        draft_slots.append(scheduled.num_draft_slots)
        assert len(request.block_table.blocks) - held <= (1 if scheduled.num_draft_slots else 2)
    # The free slots of the last block, plus the next block if fewer than a block are free and the
    # text needs it.
    assert draft_slots == [0, 4, 7, 6, 5, 4, 3, 2]
    assert len(memory.gone) == 2, "the text of 15 tokens has four blocks, two of which were empty"


def test_the_last_request_is_preempted_and_restarts_before_waiting_ones() -> None:
    plan = scheduler(num_blocks=8, max_batch=3, tree=1, chunk=64)
    dice = random.Random(0)
    first = Fake(8, 20)
    second = Fake(7, 20)
    third = Fake(4, 4)
    add(plan, first, second, third)
    while not second.stats.preemptions:
        step(plan, dice)
        assert not first.stats.preemptions
    assert second.block_table.blocks == []
    assert plan.waiting[0] is second  # type: ignore[comparison-overlap]
    held = second.tokens
    while not first.ended:
        advance(plan, plan.schedule(), dice)
    assert second.tokens == held
    leave(plan)
    (scheduled, *_) = plan.schedule()
    assert (scheduled.request, scheduled.num_tokens) == (second, held)  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("prompt", "output", "most"),
    [((20, 60), (40, 120), 10), ((100, 200), (20, 60), 4), ((5, 10), (100, 300), 18)],
    ids=["chat", "long prompts", "long outputs"],
)
def test_requests_in_a_small_cache_are_seldom_preempted(
    prompt: tuple[int, int], output: tuple[int, int], most: int
) -> None:
    """16 requests share a cache for 4; a margin of only one block per request gave 50 to 60
    preemptions.
    """
    preempted = 0
    seeds = range(10)
    for seed in seeds:
        dice = random.Random(seed)
        requests = [Fake(dice.randint(*prompt), dice.randint(*output)) for _ in range(16)]
        whole = [-(-(each.length + each.max_tokens) // BLOCK) for each in requests]
        plan = scheduler(max(sum(whole) // 4, *whole), max_batch=16, tree=8, chunk=64)
        add(plan, *requests)
        together = 0
        while plan.running or plan.waiting:
            together = max(together, len(step(plan)))
        assert together >= 4, "blocks for future tokens are not reserved"
        preempted += sum(each.stats.preemptions for each in requests)
    assert 0 < preempted <= most * len(seeds)


def test_higher_priority_starts_first_and_preempts_a_lower_one() -> None:
    plan = scheduler(max_batch=2)
    dice = random.Random(0)
    low = Fake(4, 30)
    middle = Fake(4, 30, priority=1)
    high = Fake(4, 4, priority=2)
    add(plan, low, middle)
    batch = plan.schedule()
    assert [scheduled.request for scheduled in batch] == [middle, low]
    advance(plan, batch, dice)
    add(plan, high)
    batch = plan.schedule()
    assert [scheduled.request for scheduled in batch] == [high, middle]
    assert low.stats.preemptions == 1
    advance(plan, batch, dice)
    add(plan, Fake(4, 4, priority=1))
    assert [scheduled.request for scheduled in plan.schedule()] == [high, middle], (
        "an equal priority waits"
    )


@pytest.mark.parametrize("num_blocks", [64, 16], ids=["plenty", "tight"])
@pytest.mark.parametrize("before", [0, 7])
def test_a_tenant_with_many_requests_delays_another_by_one_request(
    num_blocks: int, before: int
) -> None:
    steps = []
    for tenant in ("other", "flood"):
        plan = scheduler(num_blocks, max_batch=4, chunk=64, tree=1)
        add(plan, *[Fake(8, 12, tenant="flood") for _ in range(50)])
        for _ in range(before):
            step(plan)
        one = Fake(8, 12, tenant=tenant)
        add(plan, one)
        steps.append(0)
        while not one.ended:
            step(plan)
            steps[-1] += 1
    assert steps[0] <= 2 * 13
    assert steps[1] > 10 * 13, "a request of the same tenant waits for all the others"


def test_waiting_tenants_get_equal_shares() -> None:
    plan = scheduler(40, max_batch=4, chunk=64)
    dice = random.Random(3)
    short = [Fake(4, dice.randint(2, 6), tenant="short") for _ in range(300)]
    long = [Fake(40, dice.randint(20, 40), tenant="long") for _ in range(30)]
    add(plan, *long, *short)
    largest = 40 + 2 * 40
    for _ in range(150):
        step(plan)
        served = plan.fair_share.counters
        assert abs(served["short"] - served["long"]) <= 4 * largest
    assert [each for each in plan.waiting if each.tenant == "short"]
    assert [each for each in plan.waiting if each.tenant == "long"]
    ended = [sum(each.ended for each in group) for group in (short, long)]
    assert ended[0] > 3 * ended[1] > 0
    orders = [[each.queueing.start_order for each in group] for group in (short, long)]
    by_tenant = [[order for order in each if order is not None] for each in orders]
    assert all(order == sorted(order) for order in by_tenant), (
        "requests of one tenant start in order of arrival"
    )


def test_priority_goes_before_the_share_of_a_tenant() -> None:
    plan = scheduler(max_batch=1)
    urgent = [Fake(4, 4, tenant="served", priority=1) for _ in range(3)]
    patient = Fake(4, 4, tenant="new")
    add(plan, patient, *urgent)
    for _ in range(12):
        step(plan)
    assert all(each.ended for each in urgent)
    assert not patient.num_generated


def test_no_request_is_preempted_for_one_that_cannot_start() -> None:
    plan = scheduler(num_blocks=16, max_batch=4, chunk=64, tree=1)
    dice = random.Random(0)
    equal = Fake(40, 4, priority=1)
    low = Fake(4, 20)
    urgent = Fake(30, 4, priority=1)
    add(plan, equal, low)
    advance(plan, plan.schedule(), dice)
    add(plan, urgent)
    assert [scheduled.request for scheduled in plan.schedule()] == [equal, low]
    assert low.stats.preemptions == 0


def test_a_refusal_is_forgotten_with_a_new_cache() -> None:
    """A refusal remembers block numbers of the cache, which a smaller new cache may not have."""
    plan = scheduler(num_blocks=16, max_batch=4, chunk=64, tree=1)
    dice = random.Random(0)
    large = Fake(44, 4)
    waits = Fake(30, 4)
    add(plan, large, waits)
    advance(plan, plan.schedule(), dice)
    assert waits.queueing.refusal is not None
    waits.queueing.refusal = waits.queueing.refusal._replace(cached_blocks=[15])  # type: ignore[attr-defined]
    plan.cache.allocator = BlockAllocator(12, BLOCK)
    plan.cache.version = 1
    large.block_table = BlockTable()
    large.result.finish_reason = "abort"
    leave(plan)
    assert [scheduled.request for scheduled in plan.schedule()] == [waits]


def test_a_refusal_knows_the_blocks_of_the_cached_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = scheduler(num_blocks=16, max_batch=4, chunk=64, tree=1)
    dice = random.Random(0)
    large = Fake(44, 4)
    waits = Fake(30, 4)
    add(plan, large)
    advance(plan, plan.schedule(), dice)
    prefix = large.block_table.blocks[:2]
    monkeypatch.setattr(
        plan.cache,
        "match_prefix",
        lambda *_: plan.cache.allocator.fork(large.block_table, 2 * BLOCK),
    )
    add(plan, waits)
    plan.schedule()
    assert waits.queueing.refusal is not None
    assert waits.queueing.refusal.cached_blocks == prefix


def test_deadlines() -> None:
    plan = scheduler(max_batch=1)
    late = Fake(4, 4, deadline=-1.0)
    waits = Fake(4, 4, deadline=-1.0)
    other = Fake(4, 4, deadline=0.0)
    add(plan, late)
    plan.schedule()
    add(plan, waits, other)
    plan.expire()
    leave(plan)
    assert [scheduled.request for scheduled in plan.schedule()] == [other]
    for request in (late, waits):
        assert isinstance(request.result.error, DeadlineError)
        assert isinstance(request.result.error, TimeoutError)


def test_samples_wait_for_prefill_and_share_the_prompt() -> None:
    plan = scheduler(num_blocks=60, chunk=16, max_batch=4)
    dice = random.Random(1)
    first = Fake(22, 6)
    second = Fake(22, 6, parent=first)
    third = Fake(22, 6, parent=first)
    add(plan, first, second, third)
    batch = plan.schedule()
    assert [(scheduled.request, scheduled.num_tokens) for scheduled in batch] == [(first, 16)]
    advance(plan, batch, dice)
    assert [scheduled.request for scheduled in plan.schedule()] == [first]
    advance(plan, plan.schedule(), dice)
    batch = plan.schedule()
    assert [scheduled.request for scheduled in batch] == [first, second, third]
    assert (second.block_table.length, second.num_pending) == (21, 1)
    whole = 21 // BLOCK
    assert (
        second.block_table.blocks[:whole]
        == first.block_table.blocks[:whole]
        == third.block_table.blocks[:whole]
    )
    assert second.block_table.blocks[whole] != first.block_table.blocks[whole], (
        "copied before it is written"
    )
    check(plan, batch)
    first.result.finish_reason = "stop"
    leave(plan)
    assert [scheduled.request for scheduled in plan.schedule()] == [second, third]


@pytest.mark.parametrize("how", ["ended", "failed", "left"])
def test_a_sample_computes_the_prompt_if_the_first_sample_has_left(how: str) -> None:
    plan = scheduler(max_batch=1)
    dice = random.Random(2)
    first = Fake(10, 4)
    second = Fake(10, 4, parent=first)
    add(plan, first, second)
    advance(plan, plan.schedule(), dice)
    if how == "ended":
        first.result.finish_reason = "stop"
    elif how == "failed":
        first.result.error = ArithmeticError()
    assert plan.remove(first)  # type: ignore[arg-type]
    assert not plan.remove(first)  # type: ignore[arg-type]
    (scheduled,) = plan.schedule()
    assert (scheduled.request, scheduled.num_tokens) == (second, 10)  # type: ignore[comparison-overlap]
