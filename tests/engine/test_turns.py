"""Turns of tenants, on a clock of the test: whatever one tenant does, another one is in time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from engine.cases import assert_same, drafter, params, text
from engine.test_scheduler import BLOCK, Fake, add, check, leave, scheduler
from engine.test_scheduler import advance as write_rows
from pronk.base.errors import DeadlineError
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.engine.scheduler import MAX_WAIT, ScheduledRequest, Scheduler
from tiny_models import Clock, make_engine, make_request, run_alone, tiny_decoder

NUM_BLOCKS = 120


def flood(shape: str, count: int, dice: random.Random) -> list[Fake]:
    """Return requests of tenant A that take the whole batch, or the cache, or the prompt tokens of
    each pass.
    """
    if shape == "samples":  # several prompts with several samples each
        requests = list[Fake]()
        while len(requests) < count:
            first = Fake(dice.randint(4, 40), 300, tenant="A")
            others = [
                Fake(first.length, 300, parent=first, tenant="A") for _ in range(dice.randint(0, 3))
            ]
            requests += [first, *others][: count - len(requests)]
        return requests
    if shape == "one huge":
        return [Fake(8, NUM_BLOCKS * BLOCK - 8, tenant="A") for _ in range(count)]
    if shape == "long prompts":
        return [Fake(400, 4, tenant="A") for _ in range(count)]
    if shape == "high priority":
        return [Fake(20, 300, priority=100, tenant="A") for _ in range(count)]
    assert shape == "long streams"
    return [Fake(dice.randint(4, 30), 400, tenant="A") for _ in range(count)]


SHAPES = ("long streams", "samples", "one huge", "long prompts", "high priority")


def passes(plan: Scheduler, clock: Clock, dice: random.Random) -> Iterator[list[ScheduledRequest]]:
    """Run passes of random durations up to five seconds; yield the batch of each when it begins."""
    while plan.running or plan.waiting:
        batch = plan.schedule()
        check(plan, batch)
        yield batch
        clock.now += dice.choice((0.01, 0.3, 1.9, 5.0))
        write_rows(plan, batch, dice)
        leave(plan)


def in_batch(batch: list[ScheduledRequest], tenant: str) -> bool:
    return any(scheduled.request.tenant == tenant for scheduled in batch)


@pytest.mark.few(5)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_batch", [1, 4])
def test_a_tenant_is_in_the_first_pass_after_the_bound(shape: str, max_batch: int) -> None:
    """A has 1 to 40 requests and sends more as they end; B is never out of all passes for longer
    than the bound.
    """
    late = 0
    for count in (1, 2, 3, 7, 16, 40):
        dice = random.Random(count)
        clock = Clock()
        plan = scheduler(NUM_BLOCKS, max_batch=max_batch, clock=clock)
        add(plan, *flood(shape, count, dice))
        ones = list[Fake]()
        waits_since = 0.0
        was_in_batch = False
        for number, batch in enumerate(passes(plan, clock, dice)):
            if was_in_batch:
                waits_since = clock.now
            was_in_batch = in_batch(batch, "B")
            if not was_in_batch and any(
                each.tenant == "B" and not each.ended for each in (*plan.waiting, *plan.running)
            ):
                # Only a turn of A that has no token yet may keep B out, if A and B do not fit
                # together.
                is_excused = (max_batch == 1 or shape == "one huge") and any(
                    each.has_new_turn for each in plan.running if each.tenant == "A"
                )
                assert clock.now - waits_since < MAX_WAIT or is_excused, (count, number)
                late += 1
            if len([each for each in plan.waiting if each.tenant == "A"]) < count // 2:
                add(plan, *flood(shape, 1, dice))
            if number % 40 == 5:
                if not any(each.tenant == "B" for each in (*plan.waiting, *plan.running)):
                    waits_since = clock.now
                more = [
                    Fake(dice.randint(1, 60), dice.randint(1, 9), tenant="B")
                    for _ in range(dice.randint(1, 2))
                ]
                add(plan, *more)
                ones += more
            if number == 500:
                break
        assert sum(each.ended for each in ones) > (2 if max_batch == 1 else len(ones) / 2)
    assert late, "B never had to wait"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_deadline_soon_after_the_bound_is_met(shape: str) -> None:
    """One pass of five seconds may have begun before the bound, another one follows it; a turn of A
    that takes the whole cache has one more.
    """
    num_passes = 3 if shape == "one huge" else 2
    for bound in (MAX_WAIT, float("inf")):
        dice = random.Random(5)
        clock = Clock()
        plan = scheduler(NUM_BLOCKS, max_batch=4, clock=clock)
        plan.max_wait = bound
        add(plan, *flood(shape, 40, dice))
        request = Fake(4, 1, tenant="B", deadline=MAX_WAIT + 5.0 * num_passes)
        for number, _ in enumerate(passes(plan, clock, dice)):
            plan.expire()
            if number == 0:
                add(plan, request)
            if request.ended:
                break
        if bound == MAX_WAIT:
            assert request.result.error is None
        elif shape != "long prompts":
            assert isinstance(request.result.error, DeadlineError)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_the_bound_a_tenant_waits_for_others(shape: str) -> None:
    """The inputs above are such that a scheduler without turns fails the test."""
    dice = random.Random(0)
    clock = Clock()
    plan = scheduler(NUM_BLOCKS, max_batch=1, clock=clock)
    plan.max_wait = float("inf")
    add(plan, *flood(shape, 2, dice))
    plan.schedule()
    add(plan, Fake(4, 4, tenant="B"))
    waited = 0.0
    for batch in passes(plan, clock, dice):
        if in_batch(batch, "B"):
            break
        waited = clock.now
    assert waited > 10 * MAX_WAIT


def test_both_tenants_get_on_while_they_take_turns() -> None:
    """One place in the batch: each turn generates tokens, and the tenants are served alike."""
    dice = random.Random(1)
    clock = Clock()
    plan = scheduler(NUM_BLOCKS, max_batch=1, chunk=16, clock=clock)
    a = Fake(100, 200, tenant="A")
    b = Fake(30, 200, tenant="B")
    add(plan, a, b)
    for batch in passes(plan, clock, dice):
        assert len(batch) == 1
        if a.ended or b.ended:
            break
    served = plan.fair_share.counters
    assert min(served.values()) > 0.6 * max(served.values())
    assert a.stats.preemptions > 3


@pytest.mark.parametrize("tenants", [1, 2])
def test_priorities_keep_their_meaning_within_a_tenant(tenants: int) -> None:
    """However long it waits, a request never starts before one of its tenant that has a higher
    priority.
    """
    dice = random.Random(2)
    clock = Clock()
    plan = scheduler(NUM_BLOCKS, max_batch=2, clock=clock)
    requests = [
        Fake(8, 30, priority=number % 3, tenant="AB"[number % tenants]) for number in range(18)
    ]
    add(plan, *requests)
    for batch in passes(plan, clock, dice):
        for scheduled in batch:
            waiting = [each for each in plan.waiting if each.tenant == scheduled.request.tenant]
            assert all(each.priority <= scheduled.request.priority for each in waiting)
    assert all(each.ended for each in requests)


def test_a_request_that_waited_takes_a_place_of_a_tenant_with_more() -> None:
    clock = Clock()
    plan = scheduler(NUM_BLOCKS, max_batch=4, chunk=64, clock=clock)
    add(
        plan,
        *[Fake(4, 90, tenant="A") for _ in range(8)],
        *[Fake(4, 90, tenant="B") for _ in range(8)],
    )
    write_rows(plan, plan.schedule())
    for each in plan.running[1:]:
        each.tenant = "A"
    plan.running[0].tenant = "B"
    shares = list[int]()
    for _ in range(20):
        clock.now += 1.0
        write_rows(plan, plan.schedule())
        shares.append(sum(each.tenant == "B" for each in plan.running))
    assert shares[-1] == 2, "half of the batch"
    assert shares == sorted(shares), "and no place changes back"


def test_a_turn_is_not_ended_by_priorities_or_for_blocks() -> None:
    clock = Clock()
    plan = scheduler(30, max_batch=2, tree=1, clock=clock)
    add(plan, *[Fake(8, 100, priority=5, tenant="A") for _ in range(4)])
    write_rows(plan, plan.schedule())
    one: Any = Fake(8, 60, tenant="B")
    add(plan, one)
    clock.now = MAX_WAIT
    for _ in range(19):
        batch = plan.schedule()
        assert in_batch(batch, "B")
        write_rows(plan, batch)
        clock.now += 0.1
        add(plan, Fake(8, 100, priority=5, tenant="A"))
    clock.now = 2 * MAX_WAIT
    assert not in_batch(plan.schedule(), "B"), "after its turn, the higher priority goes first"


def test_paused_requests_leave_the_batch_and_come_back() -> None:
    plan = scheduler(max_batch=1)
    unread = Fake(4, 20)
    other = Fake(4, 3)
    add(plan, unread, other)
    write_rows(plan, plan.schedule())
    unread.paused = True
    for _ in range(3):
        batch: Any = plan.schedule()
        assert [each.request for each in batch] == [other]
        write_rows(plan, batch)
    leave(plan)
    assert plan.schedule() == []
    unread.paused = False
    (scheduled,) = plan.schedule()
    assert scheduled.request is unread  # type: ignore[comparison-overlap]


class Passes:
    """Forward passes of an engine that take a given time each."""

    def __init__(self, engine: Engine, clock: Clock, seconds: float) -> None:
        self.engine = engine
        self.clock = clock
        self.seconds = seconds

    def step(self) -> set[str]:
        """Run one step; return the tenants in its pass."""
        before = {request: request.block_table.length for request in self.engine.scheduler.running}
        self.engine.step()
        self.clock.now += self.seconds
        return {each.tenant for each, length in before.items() if each.block_table.length != length}


@pytest.mark.parametrize("name", ["suffix", "draft_model"])
def test_turns_change_no_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that give their places away, with a drafter, and come back have the tokens of plain
    decoding.
    """
    want = [
        run_alone(tiny_decoder(), text(seed, 20 + 5 * seed), params("temperature", seed))
        for seed in range(6)
    ]
    clock = Clock()
    engine = make_engine(
        tiny_decoder(), num_blocks=60, max_batch=2, share_prefixes=True, clock=clock
    )
    proposer = drafter(name, want).bind(engine.target)
    got = [make_request(each.prompt, each.params, proposer) for each in want]
    for request, tenant in zip(got, "AAABBC", strict=True):
        request.tenant = tenant
    for request in got[:3]:
        engine.add(request)
    engine.step()
    for request in got[3:]:
        engine.add(request)
    turns = Counter[str]()
    give_turns = engine.scheduler._give_turns

    def note(now: float) -> list[Request]:
        before = {request: request.queueing.turn_end for request in got}
        requests = give_turns(now)
        turns.update(
            request.tenant for request in requests if request.queueing.turn_end != before[request]
        )
        return requests

    monkeypatch.setattr(engine.scheduler, "_give_turns", note)
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
        clock.now += 1.1
    assert_same(got, want)
    assert sum(request.stats.preemptions for request in got) > 3
    assert set(turns) == {"A", "B", "C"}, "each tenant had a turn"
    assert sum(turns.values()) > 5


def test_a_request_waits_since_it_arrived_and_not_since_the_step_that_ran() -> None:
    clock = Clock()
    plan = scheduler(NUM_BLOCKS, max_batch=1, clock=clock)
    add(plan, Fake(4, 400, tenant="A"))
    write_rows(plan, plan.schedule())
    one = Fake(4, 4, tenant="B")
    one.queueing.since = clock.now
    clock.now = MAX_WAIT  # the step took so long
    add(plan, one)
    assert in_batch(plan.schedule(), "B")
