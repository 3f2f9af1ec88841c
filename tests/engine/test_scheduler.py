"""The schedule on requests that are nothing but lengths: order, limits, room for a pass, and every block back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pronk.cache.blocks import BlockAllocator, BlockTable
from pronk.engine.scheduler import Scheduler, Turn
from pronk.engine.stats import Stats
from pronk.errors import CacheFullError, DeadlineError

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
    arrival: int = 0
    began: float = 0.0
    salt: bytes = b""
    reports_prompt: bool = False
    stats: Stats = field(default_factory=Stats)
    table: BlockTable = field(default_factory=BlockTable)
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
        return self.tokens - self.table.length

    @property
    def num_generated(self) -> int:
        return self.tokens - self.length

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class FakeCache:
    """Blocks without anything in them."""

    block_size = BLOCK

    def __init__(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks, BLOCK)

    def prepare(self, table: BlockTable, tokens: int) -> None:
        self.allocator.grow(table, tokens)
        first = table.length // BLOCK - table.released
        for index in range(max(0, first), len(table.blocks)):
            if self.allocator.shared(table.blocks[index]):
                self.allocator.replace(table, index)

    def fork(self, table: BlockTable, tokens: int) -> BlockTable:
        return self.allocator.fork(table, tokens)

    def match(self, tokens: object, salt: bytes) -> None:
        return None

    def release_before(self, table: BlockTable, token: int) -> None:
        self.allocator.release_before(table, token)

    def trim(self, table: BlockTable, tokens: int) -> None:
        self.allocator.trim(table, tokens)

    def release(self, table: BlockTable) -> None:
        self.allocator.release(table)


def scheduler(
    num_blocks: int = 64, *, window: int | None = None, max_batch: int = 4, chunk: int = 16, tree: int = 4
) -> Scheduler:
    return Scheduler(FakeCache(num_blocks), window, max_batch, chunk, tree)  # type: ignore[arg-type]


def add(plan: Scheduler, *requests: Fake) -> None:
    for request in requests:
        plan.add(request)  # type: ignore[arg-type]


def advance(plan: Scheduler, turns: Sequence[Turn], dice: random.Random) -> None:
    """What a step does to its requests: it writes all that they have room for, and some tokens more are certain."""
    free = plan.cache.allocator.num_free
    for turn in turns:
        request: Any = turn.request
        plan.cache.prepare(request.table, request.table.length + turn.count + turn.room)
        assert plan.cache.allocator.num_free == free, "places are found in the schedule"
    for turn in turns:
        request, decodes = turn.request, turn.decodes
        request.table.length += turn.count
        if decodes:
            left = request.max_tokens - (request.tokens - request.length)
            accepted = min(dice.randint(0, turn.room), left - 1)
            request.tokens += accepted + 1
            request.table.length += accepted
            if request.tokens - request.length >= request.max_tokens:
                request.finish_reason = "length"
        if plan.window is not None:
            plan.cache.allocator.release_before(request.table, request.table.length - plan.window + 1)


def leave(plan: Scheduler, *, dice: random.Random | None = None) -> None:
    """Those that have ended leave, and now and then one gives up."""
    for request in [each for each in plan.running if each.ended]:
        assert plan.remove(request)
    everybody = [*plan.running, *plan.waiting]
    if dice is not None and everybody and dice.random() < 0.05:
        assert plan.remove(dice.choice(everybody))


def check(plan: Scheduler, turns: Sequence[Turn]) -> None:
    assert len(plan.running) <= plan.max_batch
    assert len({id(turn.request) for turn in turns}) == len(turns)
    pending = [turn.request.num_pending for turn in turns]
    assert all(turn.count == 1 for turn, left in zip(turns, pending, strict=True) if left == 1)
    prefill = sum(turn.count for turn, left in zip(turns, pending, strict=True) if left > 1)
    assert prefill <= plan.prefill_chunk
    decoding = [request for request in plan.running if request.num_pending == 1]
    live = {id(request) for request in decoding if not request.ended}
    assert live <= {id(turn.request) for turn in turns}, "a decoding request stalls"
    order = [(-request.priority, request.arrival) for request in plan.running]
    assert order == sorted(order)
    counts = [0] * plan.cache.allocator.num_blocks
    for request in plan.running:
        for block in request.table.blocks:
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
            turns = plan.schedule()
            check(plan, turns)
            started += [each for each in plan.running if each not in started]
            most = max(most, len(plan.running))
            advance(plan, turns, dice)
            leave(plan, dice=dice)
        while plan.running or plan.waiting:
            turns = plan.schedule()
            check(plan, turns)
            assert turns, "nobody is asked, and somebody waits"
            advance(plan, turns, dice)
            leave(plan)
        assert 0 < most <= plan.max_batch
        order = [came.index(each) for each in started]
        assert order == sorted(order)
        allocator = plan.cache.allocator
        assert allocator.num_free == allocator.num_blocks
        assert not any(allocator.references)
        preempted += sum(request.stats.preemptions for request in came)
    assert preempted > 20


def test_prompts_are_read_in_chunks_beside_those_that_decode() -> None:
    plan, dice = scheduler(chunk=16), random.Random(0)
    first, long, later = Fake(3, 10), Fake(40, 5), Fake(20, 5)
    add(plan, first)
    (turn,) = plan.schedule()
    assert (turn.count, turn.decodes) == (3, True)
    advance(plan, [turn], dice)
    add(plan, long, later)
    seen = []
    for _ in range(4):
        turns = plan.schedule()
        seen.append([(["first", "long", "later"][[first, long, later].index(t.request)], t.count) for t in turns])  # type: ignore[arg-type]
        for each in turns:
            each.request.table.length += each.count
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
    assert [turn.request for turn in plan.schedule()] == [large]
    assert [*plan.waiting] == [larger, small]
    large.finish_reason = "stop"
    leave(plan)
    assert plan.schedule()[0].request is larger  # type: ignore[comparison-overlap]


def test_what_can_never_fit_is_refused_at_once() -> None:
    plan = scheduler(num_blocks=10, tree=4)
    add(plan, Fake(30, 10))
    with pytest.raises(CacheFullError, match="needs room for 44 tokens in the KV cache, which has 40; raise kv_memory"):
        add(plan, Fake(30, 11))


def test_what_no_longer_fits_ends_with_an_error_when_its_turn_comes() -> None:
    plan = scheduler(num_blocks=20)
    request, small = Fake(50, 10), Fake(3, 3)
    add(plan, request, small)
    plan.cache.allocator = BlockAllocator(10, BLOCK)  # a draft model has taken its share
    assert [turn.request for turn in plan.schedule()] == [small]
    assert isinstance(request.error, CacheFullError)


def test_guesses_give_way_before_requests_do() -> None:
    plan = scheduler(num_blocks=8, max_batch=2, tree=8)
    first, second = Fake(6, 20), Fake(6, 20)
    add(plan, first, second)
    rooms = []
    for _ in range(8):  # the last one fills all blocks
        turns = plan.schedule()
        check(plan, turns)
        rooms.append([turn.room for turn in turns])
        for turn in turns:  # no guess is ever right
            turn.request.table.length += turn.count
            turn.request.tokens += 1  # type: ignore[operator, assignment]
    assert all(len(pair) == 2 for pair in rooms), "both go on"
    assert rooms[1] == [7, 7]
    assert max(rooms[-1]) < 7
    assert first.stats.preemptions == second.stats.preemptions == 0


def test_the_last_one_is_preempted_and_starts_again_in_its_place() -> None:
    plan, dice = scheduler(num_blocks=8, max_batch=3, tree=1, chunk=64), random.Random(0)
    first, second, third = Fake(8, 20), Fake(7, 20), Fake(4, 4)
    add(plan, first, second, third)
    while not second.stats.preemptions:
        turns = plan.schedule()
        check(plan, turns)
        advance(plan, turns, dice)
        leave(plan)
        assert not first.stats.preemptions
    assert second.table.blocks == []
    assert plan.waiting[0] is second  # type: ignore[comparison-overlap]
    held = second.tokens
    while not first.ended:
        advance(plan, plan.schedule(), dice)
    assert second.tokens == held
    leave(plan)
    (turn, *_) = plan.schedule()
    assert (turn.request, turn.count) == (second, held)  # type: ignore[comparison-overlap]


def test_higher_priority_starts_first_and_takes_the_place_of_a_lower_one() -> None:
    plan, dice = scheduler(max_batch=2), random.Random(0)
    low, middle, high = Fake(4, 30), Fake(4, 30, priority=1), Fake(4, 4, priority=2)
    add(plan, low, middle)
    turns = plan.schedule()
    assert [turn.request for turn in turns] == [middle, low]
    advance(plan, turns, dice)
    add(plan, high)
    turns = plan.schedule()
    assert [turn.request for turn in turns] == [high, middle]
    assert low.stats.preemptions == 1
    advance(plan, turns, dice)
    add(plan, Fake(4, 4, priority=1))
    assert [turn.request for turn in plan.schedule()] == [high, middle], "an equal one waits"


def test_nobody_is_preempted_for_what_cannot_start() -> None:
    plan, dice = scheduler(num_blocks=16, max_batch=4, chunk=64, tree=1), random.Random(0)
    equal, low, urgent = Fake(40, 4, priority=1), Fake(4, 20), Fake(30, 4, priority=1)
    add(plan, equal, low)
    advance(plan, plan.schedule(), dice)
    add(plan, urgent)
    assert [turn.request for turn in plan.schedule()] == [equal, low]
    assert low.stats.preemptions == 0


def test_deadlines() -> None:
    plan = scheduler(max_batch=1)
    late, waits, other = Fake(4, 4, deadline=0.0), Fake(4, 4, deadline=0.0), Fake(4, 4, deadline=1e18)
    add(plan, late, waits, other)
    assert [turn.request for turn in plan.schedule()] == [other]
    for request in (late, waits):
        assert isinstance(request.error, DeadlineError)
        assert isinstance(request.error, TimeoutError)


def test_samples_wait_for_the_prompt_and_share_it() -> None:
    plan, dice = scheduler(num_blocks=60, chunk=16, max_batch=4), random.Random(1)
    first = Fake(22, 6)
    second, third = Fake(22, 6, parent=first), Fake(22, 6, parent=first)
    add(plan, first, second, third)
    turns = plan.schedule()
    assert [(turn.request, turn.count) for turn in turns] == [(first, 16)]
    advance(plan, turns, dice)
    assert [turn.request for turn in plan.schedule()] == [first]
    advance(plan, plan.schedule(), dice)
    turns = plan.schedule()
    assert [turn.request for turn in turns] == [first, second, third]
    assert (second.table.length, second.num_pending) == (21, 1)
    whole = 21 // BLOCK
    assert second.table.blocks[:whole] == first.table.blocks[:whole] == third.table.blocks[:whole]
    assert second.table.blocks[whole] != first.table.blocks[whole], "they write behind the prompt"
    check(plan, turns)
    first.finish_reason = "stop"
    leave(plan)
    assert [turn.request for turn in plan.schedule()] == [second, third]


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
    (turn,) = plan.schedule()
    assert (turn.request, turn.count) == (second, 10)  # type: ignore[comparison-overlap]
