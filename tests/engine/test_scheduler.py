"""The schedule on requests that are nothing but lengths: order, limits, room for a pass, and every block back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pronk.engine.scheduler import ScheduledRequest, Scheduler
from pronk.engine.stats import Stats
from pronk.errors import CacheFullError, DeadlineError
from pronk.kv_cache.blocks import BlockAllocator, BlockTable

BLOCK = 4


@dataclass(eq=False)
class Fake:
    """A request of some length."""

    length: int
    max_tokens: int
    parent: Fake | None = None
    priority: int = 0
    deadline: float | None = None
    tokens: int = 0
    tenant: str = ""
    arrival: int = 0
    start_order: int | None = None
    num_charged: int = 0
    start_time: float = 0.0
    salt: bytes = b""
    computes_prompt_logprobs: bool = False
    needs_draft_slots: bool = True
    stats: Stats = field(default_factory=Stats)
    block_table: BlockTable = field(default_factory=BlockTable)
    digests: list[bytes] = field(default_factory=list)
    admission_refusal: object = None
    finish_reason: str | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.tokens = self.length

    def fail(self, error: Exception) -> None:
        self.error = error

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
        return self.finish_reason is not None or self.error is not None


class FakeCache:
    """Blocks without anything in them."""

    block_size, version = BLOCK, 0

    def __init__(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks, BLOCK)

    def prepare(self, block_table: BlockTable, tokens: int) -> None:
        self.allocator.allocate(block_table, tokens)
        first = block_table.length // BLOCK - block_table.num_released
        for index in range(max(0, first), len(block_table.blocks)):
            if self.allocator.is_shared(block_table.blocks[index]):
                self.allocator.replace_shared(block_table, index)

    def fork(self, block_table: BlockTable, tokens: int) -> BlockTable:
        return self.allocator.fork(block_table, tokens)

    def match_prefix(self, tokens: object, salt: bytes, digests: object) -> None:
        return None

    def has_cached_block(self, digest: bytes) -> bool:
        return False

    def release_before(self, block_table: BlockTable, token: int) -> None:
        self.allocator.release_before(block_table, token)

    def trim(self, block_table: BlockTable, tokens: int) -> None:
        self.allocator.trim(block_table, tokens)

    def release(self, block_table: BlockTable) -> None:
        self.allocator.release(block_table)


def scheduler(
    num_blocks: int = 64, *, window: int | None = None, max_batch: int = 4, chunk: int = 16, tree: int = 4
) -> Scheduler:
    return Scheduler(FakeCache(num_blocks), window, max_batch, chunk, tree)  # type: ignore[arg-type]


def add(plan: Scheduler, *requests: Fake) -> None:
    for request in requests:
        plan.add(request)  # type: ignore[arg-type]


def advance(plan: Scheduler, batch: Sequence[ScheduledRequest], dice: random.Random) -> None:
    """What a step does to its requests: it writes all that they have room for, and some tokens more are certain."""
    free = plan.cache.allocator.num_free
    for scheduled in batch:
        request: Any = scheduled.request
        plan.cache.prepare(
            request.block_table, request.block_table.length + scheduled.num_tokens + scheduled.num_draft_slots
        )
        assert plan.cache.allocator.num_free == free, "places are found in the schedule"
    for scheduled in batch:
        request, decodes = scheduled.request, scheduled.includes_last_token
        request.block_table.length += scheduled.num_tokens
        if decodes:
            left = request.max_tokens - (request.tokens - request.length)
            accepted = min(dice.randint(0, scheduled.num_draft_slots), left - 1)
            request.tokens += accepted + 1
            request.block_table.length += accepted
            if request.tokens - request.length >= request.max_tokens:
                request.finish_reason = "length"
        if plan.window is not None:
            plan.cache.allocator.release_before(request.block_table, request.block_table.length - plan.window + 1)


def leave(plan: Scheduler, *, dice: random.Random | None = None) -> None:
    """Those that have ended leave, and now and then one gives up."""
    for request in [each for each in plan.running if each.ended]:
        assert plan.remove(request)
    everybody = [*plan.running, *plan.waiting]
    if dice is not None and everybody and dice.random() < 0.05:
        assert plan.remove(dice.choice(everybody))


def check(plan: Scheduler, batch: Sequence[ScheduledRequest]) -> None:
    assert len(plan.running) <= plan.max_batch
    assert len({id(scheduled.request) for scheduled in batch}) == len(batch)
    pending = [scheduled.request.num_pending for scheduled in batch]
    assert all(scheduled.num_tokens == 1 for scheduled, left in zip(batch, pending, strict=True) if left == 1)
    prefill = sum(scheduled.num_tokens for scheduled, left in zip(batch, pending, strict=True) if left > 1)
    assert prefill <= plan.prefill_chunk
    decoding = [request for request in plan.running if request.num_pending == 1]
    live = {id(request) for request in decoding if not request.ended}
    assert live <= {id(scheduled.request) for scheduled in batch}, "a decoding request stalls"
    order = [(-request.priority, request.start_order) for request in plan.running]
    assert order == sorted(order)  # type: ignore[type-var]
    counts = [0] * plan.cache.allocator.num_blocks
    for request in plan.running:
        for block in request.block_table.blocks:
            counts[block] += 1
    assert counts == plan.cache.allocator.references
    assert plan.cache.allocator.num_free == counts.count(0)


@pytest.mark.parametrize("window", [None, 9])
def test_any_load(window: int | None) -> None:
    """Requests of any length come and go: they start in the order of their coming, and none lacks room in a step."""
    preempted = 0
    for seed in range(60):
        dice = random.Random(seed)
        size = dice.randint(16, 60) if window is None else dice.randint(9, 14)
        plan = scheduler(size, window=window, max_batch=dice.randint(1, 5), tree=dice.randint(1, 6))
        came, started, most = list[Fake](), list[Any](), 0
        for step in range(300):
            if step < 150 and dice.random() < 0.3:
                request = Fake(dice.randint(1, 40), dice.randint(1, 20))
                try:
                    add(plan, request)
                except CacheFullError:
                    assert window is None
                    assert BLOCK * plan.cache.allocator.num_blocks < request.length + request.max_tokens
                    continue
                came.append(request)
            batch = plan.schedule()
            check(plan, batch)
            started += [each for each in plan.running if each not in started]
            most = max(most, len(plan.running))
            advance(plan, batch, dice)
            leave(plan, dice=dice)
        while plan.running or plan.waiting:
            batch = plan.schedule()
            check(plan, batch)
            assert batch, "nobody is asked, and somebody waits"
            advance(plan, batch, dice)
            leave(plan)
        assert 0 < most <= plan.max_batch
        order = [came.index(each) for each in started]
        assert order == sorted(order)
        allocator = plan.cache.allocator
        assert allocator.num_free == allocator.num_blocks
        assert not any(allocator.references)
        preempted += sum(request.stats.preemptions for request in came)
    # Within a window all that a request will ever hold is known when it starts.
    assert preempted > 20 if window is None else not preempted


def test_prompts_are_read_in_chunks_beside_those_that_decode() -> None:
    plan, dice = scheduler(chunk=16), random.Random(0)
    first, long, later = Fake(3, 10), Fake(40, 5), Fake(20, 5)
    add(plan, first)
    (scheduled,) = plan.schedule()
    assert (scheduled.num_tokens, scheduled.includes_last_token) == (3, True)
    advance(plan, [scheduled], dice)
    add(plan, long, later)
    seen = []
    for _ in range(4):
        batch = plan.schedule()
        seen.append([(["first", "long", "later"][[first, long, later].index(t.request)], t.num_tokens) for t in batch])  # type: ignore[arg-type]
        for each in batch:
            each.request.block_table.length += each.num_tokens
            if each.request.num_pending == 0:
                each.request.tokens += 1  # type: ignore[operator, assignment]
    assert seen[0] == [("first", 1), ("long", 15)]
    assert seen[1] == [("first", 1), ("long", 15)]
    assert seen[2] == [("first", 1), ("long", 10), ("later", 5)]
    assert seen[3] == [("first", 1), ("long", 1), ("later", 14)]


def test_who_does_not_fit_waits_and_nobody_overtakes() -> None:
    plan = scheduler(num_blocks=16, max_batch=8, chunk=64)
    large, larger, small = Fake(30, 10), Fake(40, 20), Fake(2, 2)
    add(plan, large, larger, small)
    assert [scheduled.request for scheduled in plan.schedule()] == [large]
    assert [*plan.waiting] == [larger, small]
    large.finish_reason = "stop"
    leave(plan)
    assert plan.schedule()[0].request is larger  # type: ignore[comparison-overlap]


def test_what_can_never_fit_is_refused_at_once() -> None:
    plan = scheduler(num_blocks=10, tree=4)
    add(plan, Fake(30, 10))
    with pytest.raises(CacheFullError, match="at most 40 tokens, the size of the KV cache, found 44; raise kv"):
        add(plan, Fake(30, 11))


def test_what_no_longer_fits_ends_with_an_error_when_its_turn_comes() -> None:
    plan = scheduler(num_blocks=20)
    request, small = Fake(50, 10), Fake(3, 3)
    add(plan, request, small)
    plan.cache.allocator = BlockAllocator(10, BLOCK)  # a draft model has taken its share
    assert [scheduled.request for scheduled in plan.schedule()] == [small]
    assert isinstance(request.error, CacheFullError)


def test_guesses_give_way_before_requests_do() -> None:
    plan = scheduler(num_blocks=8, max_batch=2, tree=8)
    first, second = Fake(6, 20), Fake(6, 20)
    add(plan, first, second)
    draft_slots = []
    for _ in range(8):  # the last one fills all blocks
        batch = plan.schedule()
        check(plan, batch)
        draft_slots.append([scheduled.num_draft_slots for scheduled in batch])
        for scheduled in batch:  # no guess is ever right
            scheduled.request.block_table.length += scheduled.num_tokens
            scheduled.request.tokens += 1  # type: ignore[operator, assignment]
    assert all(len(pair) == 2 for pair in draft_slots), "both go on"
    assert draft_slots[1] == [7, 7]
    assert max(draft_slots[-1]) < 7
    assert first.stats.preemptions == second.stats.preemptions == 0


class Remembers:
    """Every block is worth keeping."""

    def __init__(self) -> None:
        self.gone = list[int]()

    def is_cached(self, block: int) -> bool:
        return block not in self.gone

    def evict(self, block: int) -> None:
        self.gone.append(block)


def remembering(num_blocks: int, idle: int, **options: Any) -> tuple[Scheduler, Remembers]:
    """A schedule whose pool remembers something in its last blocks."""
    plan, memory = scheduler(num_blocks, **options), Remembers()
    allocator, block_table, kept = plan.cache.allocator, BlockTable(), BlockTable()
    allocator.allocate(block_table, BLOCK * (num_blocks - idle))
    allocator.allocate(kept, BLOCK * idle)
    allocator.set_prefix_cache(memory)
    allocator.release(kept)
    memory.gone = [*block_table.blocks]
    allocator.release(block_table)
    memory.gone.clear()
    assert len(allocator.evictable) == idle
    return plan, memory


def test_who_does_not_guess_gets_no_room() -> None:
    plan, memory = remembering(12, 8, tree=16, max_batch=2)
    add(plan, Fake(6, 6, needs_draft_slots=False), Fake(5, 3))
    draft_slots = [scheduled.num_draft_slots for scheduled in plan.schedule()]
    assert draft_slots == [0, 0], "their prompts are being read"
    for request in plan.running:
        request.block_table.length += request.num_pending
        request.tokens += 1  # type: ignore[operator, assignment]
    draft_slots = [scheduled.num_draft_slots for scheduled in plan.schedule()]
    assert draft_slots == [0, 2]
    assert not memory.gone


def test_guesses_take_what_is_empty_and_at_most_a_block_of_what_is_remembered() -> None:
    plan, memory = remembering(12, 10, tree=16)
    request: Any = Fake(7, 8)
    add(plan, request)
    draft_slots = []
    while not request.finish_reason:
        held = len(request.block_table.blocks)
        (scheduled,) = plan.schedule()
        draft_slots.append(scheduled.num_draft_slots)
        assert len(request.block_table.blocks) - held <= (1 if scheduled.num_draft_slots else 2)
        request.block_table.length += scheduled.num_tokens
        request.tokens += 1
        if request.num_generated == 8:
            request.finish_reason = "length"
    # From position 7 on: the rest of its block, and the next one as soon as that is less than a block.
    assert draft_slots == [0, 4, 7, 6, 5, 4, 3, 2]
    assert len(memory.gone) == 2, "the text has 15 tokens, in four blocks, of which two were empty"


def test_the_last_one_is_preempted_and_starts_again_in_its_place() -> None:
    plan, dice = scheduler(num_blocks=8, max_batch=3, tree=1, chunk=64), random.Random(0)
    first, second, third = Fake(8, 20), Fake(7, 20), Fake(4, 4)
    add(plan, first, second, third)
    while not second.stats.preemptions:
        batch = plan.schedule()
        check(plan, batch)
        advance(plan, batch, dice)
        leave(plan)
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
def test_many_in_a_pool_for_few_are_seldom_preempted(
    prompt: tuple[int, int], output: tuple[int, int], most: int
) -> None:
    """Sixteen requests where four fit to their end: with a block each as margin it was 50 to 60 times."""
    preempted, seeds = 0, range(10)
    for seed in seeds:
        dice = random.Random(seed)
        requests = [Fake(dice.randint(*prompt), dice.randint(*output)) for _ in range(16)]
        whole = [-(-(each.length + each.max_tokens) // BLOCK) for each in requests]
        plan = scheduler(max(sum(whole) // 4, *whole), max_batch=16, tree=8, chunk=64)
        add(plan, *requests)
        together = 0
        while plan.running or plan.waiting:
            batch = plan.schedule()
            check(plan, batch)
            together = max(together, len(batch))
            for scheduled in batch:  # no guess is ever right
                scheduled.request.block_table.length += scheduled.num_tokens
                if scheduled.request.num_pending == 0:
                    scheduled.request.tokens += 1  # type: ignore[operator, assignment]
                if scheduled.request.num_generated == scheduled.request.params.max_tokens:
                    scheduled.request.finish_reason = "length"
            leave(plan)
        assert together >= 4, "what may never be needed is not kept free"
        preempted += sum(each.stats.preemptions for each in requests)
    assert 0 < preempted <= most * len(seeds)


def test_higher_priority_starts_first_and_takes_the_place_of_a_lower_one() -> None:
    plan, dice = scheduler(max_batch=2), random.Random(0)
    low, middle, high = Fake(4, 30), Fake(4, 30, priority=1), Fake(4, 4, priority=2)
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
    assert [scheduled.request for scheduled in plan.schedule()] == [high, middle], "an equal one waits"


def plain_step(plan: Scheduler) -> None:
    """A step in which no guess is right; those that have ended leave."""
    batch = plan.schedule()
    check(plan, batch)
    for scheduled in batch:
        request: Any = scheduled.request
        request.block_table.length += scheduled.num_tokens
        if not request.num_pending:
            request.tokens += 1
        if request.num_generated == request.max_tokens:
            request.finish_reason = "length"
    leave(plan)


@pytest.mark.parametrize("num_blocks", [64, 16], ids=["plenty", "tight"])
@pytest.mark.parametrize("before", [0, 7])
def test_a_tenant_that_floods_delays_another_by_a_request_at_most(num_blocks: int, before: int) -> None:
    steps = []
    for tenant in ("other", "flood"):
        plan = scheduler(num_blocks, max_batch=4, chunk=64, tree=1)
        add(plan, *[Fake(8, 12, tenant="flood") for _ in range(50)])
        for _ in range(before):
            plain_step(plan)
        one = Fake(8, 12, tenant=tenant)
        add(plan, one)
        steps.append(0)
        while not one.ended:
            plain_step(plan)
            steps[-1] += 1
    assert steps[0] <= 2 * 13
    assert steps[1] > 10 * 13, "by itself it would wait for all of them"


def test_tenants_that_both_wait_are_served_alike() -> None:
    plan, dice = scheduler(40, max_batch=4, chunk=64), random.Random(3)
    short = [Fake(4, dice.randint(2, 6), tenant="short") for _ in range(300)]
    long = [Fake(40, dice.randint(20, 40), tenant="long") for _ in range(30)]
    add(plan, *long, *short)
    largest = 40 + 2 * 40
    for _ in range(150):
        plain_step(plan)
        served = plan.fair_share.served
        assert abs(served["short"] - served["long"]) <= 4 * largest
    assert [each for each in plan.waiting if each.tenant == "short"]
    assert [each for each in plan.waiting if each.tenant == "long"]
    ended = [sum(each.ended for each in group) for group in (short, long)]
    assert ended[0] > 3 * ended[1] > 0
    by_tenant = [[each.start_order for each in group if each.start_order is not None] for group in (short, long)]
    assert all(order == sorted(order) for order in by_tenant), "a tenant's own start as they came"


def test_priorities_go_before_tenants() -> None:
    plan = scheduler(max_batch=1)
    urgent = [Fake(4, 4, tenant="served", priority=1) for _ in range(3)]
    patient = Fake(4, 4, tenant="new")
    add(plan, patient, *urgent)
    for _ in range(12):
        plain_step(plan)
    assert all(each.ended for each in urgent)
    assert not patient.num_generated


def test_nobody_is_preempted_for_what_cannot_start() -> None:
    plan, dice = scheduler(num_blocks=16, max_batch=4, chunk=64, tree=1), random.Random(0)
    equal, low, urgent = Fake(40, 4, priority=1), Fake(4, 20), Fake(30, 4, priority=1)
    add(plan, equal, low)
    advance(plan, plan.schedule(), dice)
    add(plan, urgent)
    assert [scheduled.request for scheduled in plan.schedule()] == [equal, low]
    assert low.stats.preemptions == 0


def test_a_refusal_is_of_the_blocks_that_there_were() -> None:
    """The cache may be a smaller one, whose blocks have no such numbers, when the request's turn comes again."""
    plan, dice = scheduler(num_blocks=16, max_batch=4, chunk=64, tree=1), random.Random(0)
    large, waits = Fake(44, 4), Fake(30, 4)
    add(plan, large, waits)
    advance(plan, plan.schedule(), dice)
    assert waits.admission_refusal is not None
    waits.admission_refusal = waits.admission_refusal._replace(cached_blocks=[15])  # type: ignore[attr-defined]
    plan.cache.allocator, plan.cache.version = BlockAllocator(12, BLOCK), 1
    large.block_table = BlockTable()
    large.finish_reason = "abort"
    leave(plan)
    assert [scheduled.request for scheduled in plan.schedule()] == [waits]


def test_deadlines() -> None:
    plan = scheduler(max_batch=1)
    late, waits, other = Fake(4, 4, deadline=0.0), Fake(4, 4, deadline=0.0), Fake(4, 4, deadline=1e18)
    add(plan, late)
    plan.schedule()
    add(plan, waits, other)
    plan.expire()
    leave(plan)
    assert [scheduled.request for scheduled in plan.schedule()] == [other]
    for request in (late, waits):
        assert isinstance(request.error, DeadlineError)
        assert isinstance(request.error, TimeoutError)


def test_samples_wait_for_the_prompt_and_share_it() -> None:
    plan, dice = scheduler(num_blocks=60, chunk=16, max_batch=4), random.Random(1)
    first = Fake(22, 6)
    second, third = Fake(22, 6, parent=first), Fake(22, 6, parent=first)
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
    assert second.block_table.blocks[:whole] == first.block_table.blocks[:whole] == third.block_table.blocks[:whole]
    assert second.block_table.blocks[whole] != first.block_table.blocks[whole], "they write behind the prompt"
    check(plan, batch)
    first.finish_reason = "stop"
    leave(plan)
    assert [scheduled.request for scheduled in plan.schedule()] == [second, third]


@pytest.mark.parametrize("how", ["ended", "failed", "left"])
def test_samples_of_a_prompt_that_has_gone_read_it_themselves(how: str) -> None:
    plan, dice = scheduler(max_batch=1), random.Random(2)
    first = Fake(10, 4)
    second = Fake(10, 4, parent=first)
    add(plan, first, second)
    advance(plan, plan.schedule(), dice)
    if how == "ended":
        first.finish_reason = "stop"
    elif how == "failed":
        first.error = ArithmeticError()
    assert plan.remove(first)  # type: ignore[arg-type]
    assert not plan.remove(first)  # type: ignore[arg-type]
    (scheduled,) = plan.schedule()
    assert (scheduled.request, scheduled.num_tokens) == (second, 10)  # type: ignore[comparison-overlap]
