"""Loops in virtual time, and whole load tests against servers whose answers are known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench.load.fake_server import Fake, running
from bench.load.virtual_time import now, run_virtually
from pronk.bench.load.answers import CUT_OFF, NO_CONNECTION, STREAMED_ERROR, TIMED_OUT
from pronk.bench.load.client import Client, Sending
from pronk.bench.load.levels import Level
from pronk.bench.load.measure import Found, LoadPlan, closed_loop, open_loop, run
from pronk.bench.load.records import Call, Targets
from pronk.bench.load.requests import Ask, Job, Server

JOBS = tuple(Job(f"t/{i}", ({"role": "user", "content": f"Hello {i}"},), i) for i in range(4))


class Log:
    """Requests that take ``seconds`` each, and what happened to them."""

    def __init__(self, seconds: float, slots: int = 100) -> None:
        self.seconds, self.slots = seconds, asyncio.Semaphore(slots)
        self.calls: list[tuple[int, float, float, float]] = []

    async def send(self, number: int, due: float) -> None:
        sent = now()
        async with self.slots:
            await asyncio.sleep(self.seconds)
        self.calls.append((number, due, sent, now()))


def test_a_client_waits_for_its_answer() -> None:
    async def main() -> None:
        log = Log(1.0)
        await closed_loop(2, 5, log.send, now)
        assert log.calls == [(0, 0, 0, 1), (1, 0, 0, 1), (2, 1, 1, 2), (3, 1, 1, 2), (4, 2, 2, 3)]

    run_virtually(main())


def test_a_free_client_takes_the_next_request() -> None:
    async def main() -> None:
        done = []

        async def send(number: int, due: float) -> None:
            await asyncio.sleep(10 if number == 0 else 1)
            done.append((number, due))

        await closed_loop(2, 5, send, now)
        assert done == [(1, 0), (2, 1), (3, 2), (4, 3), (0, 0)]

    run_virtually(main())


def test_arrivals_wait_for_nobody() -> None:
    """One answer at a time, 10 s each: the others come all the same, and their waiting counts."""

    async def main() -> None:
        log = Log(10.0, slots=1)
        await open_loop([0.5, 1.0, 1.25], log.send, now)
        assert log.calls == [(0, 0.5, 0.5, 10.5), (1, 1.0, 1.0, 20.5), (2, 1.25, 1.25, 30.5)]

    run_virtually(main())


def test_a_client_that_stalls_does_not_move_the_schedule() -> None:
    """What a stall delays is due when it was due: no omission that the stall coordinates."""

    async def main() -> None:
        log = Log(1.0)

        async def send(number: int, due: float) -> None:
            if number == 0:
                asyncio.get_running_loop()._virtual.now += 5  # type: ignore[attr-defined]
            await log.send(number, due)

        await open_loop([1.0, 2.0, 3.0, 9.0], send, now)
        assert [call[:3] for call in log.calls] == [(0, 1, 6), (1, 2, 6), (2, 3, 6), (3, 9, 9)]

    run_virtually(main())


def plan_for(*fakes: Fake, **changes: Any) -> LoadPlan:
    made = LoadPlan(
        servers=tuple(Server(chr(ord("a") + i), f"{fake.url}/v1", fake.key) for i, fake in enumerate(fakes)),
        ask=Ask(max_tokens=20),
        jobs=JOBS,
        levels=(Level("closed", 1), Level("closed", 2)),
        rounds=1,
        warmup=1,
        timeout=60,
        targets=Targets(),
        seed=7,
    )
    return replace(made, **changes)


def measured(*fakes: Fake, **changes: Any) -> Found:
    found = Found()
    run(plan_for(*fakes, **changes), found, lambda *_: None)
    return found


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake()
    with running(fake):
        yield fake


def test_servers_take_turns_and_get_the_same() -> None:
    fakes = Fake(), Fake(tokens=30)
    told: list[tuple[str, int, int]] = []
    with running(*fakes):
        found = Found()
        run(plan_for(*fakes, rounds=2), found, lambda *what: told.append(what))
    order = [(window.turn, window.level.value, window.server) for window in found.windows]
    assert order == [
        *((0, 1, "a"), (0, 1, "b"), (0, 2, "b"), (0, 2, "a")),
        *((1, 1, "b"), (1, 1, "a"), (1, 2, "a"), (1, 2, "b")),
    ]
    assert told[0] == ("a, warming up", 0, 0)
    assert told[-1] == ("b, 2 clients, round 2 of 2", 32, 32)
    assert [done for _, done, total in told if total] == sorted(done for _, done, total in told if total)
    for fake in fakes:
        assert len(fake.asked) == 1 + 1 + 2 * 2 * 4  # asked what it can do, warmed up, measured
        assert fake.asked[0]["max_tokens"] == 4
        assert [body["messages"] for body in fake.asked[2:6]] == [list(job.messages) for job in JOBS]
        assert fake.connections <= 2 + 1  # clients keep theirs
    assert {call.tokens for window in found.windows for call in window.calls if window.server == "a"} == {8}
    assert {(call.tokens, call.finish) for w in found.windows for call in w.calls if w.server == "b"} == {
        (20, "length")
    }


def test_a_call_has_what_the_server_told(fake: Fake) -> None:
    fake.tokens, fake.chunk, fake.steps, fake.first, fake.each = 7, 3, True, 0.03, 0.02
    (window,) = measured(fake, levels=(Level("closed", 1),)).windows
    for call in window.calls:
        assert (call.tokens, call.chunks, call.steps, call.drafted, call.accepted) == (7, 3, 3, 7, 3)
        assert (call.prompt_tokens, call.cached_tokens, call.finish, call.error) == (10, 4, "stop", None)
        assert 0.02 < call.ttft < call.last <= call.e2e
        assert len(call.gaps) == 2
        assert sum(call.gaps) == pytest.approx(call.last - call.ttft)
        assert call.last > 0.06  # of 0.07: clocks of event loops are coarse
    assert window.seconds >= sum(call.e2e for call in window.calls)
    assert window.busy > 0


def test_an_open_loop_on_a_server() -> None:
    fake = Fake(first=0.05, slots=1)
    with running(fake):
        (window,) = measured(fake, levels=(Level("open", 1000.0),)).windows
    waits = sorted(call.ttft for call in window.calls)
    assert all(wait > 0.04 * (i + 1) for i, wait in enumerate(waits))  # they stood in a queue
    assert all(0 < call.due < 1 for call in window.calls)


def test_failures_are_counted_and_the_rest_goes_on(fake: Fake) -> None:
    """The first two requests are no part of it: one asks what the server can do, one warms up."""
    fake.fails, fake.breaks, fake.cuts = {2: 503}, 3, 4
    (window,) = measured(fake, levels=(Level("closed", 1),)).windows
    assert [(call.error, call.reason) for call in window.calls[:2]] == [
        ("HTTP 503", "busy"),
        (STREAMED_ERROR, "out of memory"),
    ]
    assert [call.error for call in window.calls[2:]] == [CUT_OFF, None]
    assert all(call.e2e > 0 for call in window.calls)


def send_once(fake: Fake, timeout: float) -> Call:
    async def main() -> Call:
        async with Client("completions", timeout) as client:
            body = b'{"model": "tiny", "max_tokens": 9}'
            return await client.send(Server("a", f"{fake.url}/v1"), Sending("t/1", body, 0.0, 0.0, 9))

    return asyncio.run(main())


def test_an_answer_that_takes_too_long(fake: Fake) -> None:
    fake.first = 60.0
    assert send_once(fake, 0.05).error == TIMED_OUT


def test_a_server_that_is_gone() -> None:
    fake = Fake()
    with running(fake):
        pass
    assert send_once(fake, 60).error == NO_CONNECTION


def test_prompts_that_no_cache_has(fake: Fake) -> None:
    """Two names of one server included."""
    measured(fake, fake, ask=Ask(unique=True), rounds=2)
    said = [text for body in fake.asked if (text := body["messages"][0]["content"]).startswith("[")]
    assert len(set(said)) == len(said) == 2 * (1 + 2 * 2 * 4)
    assert all(text.startswith(("[0, 7, ", "[1, 7, ")) and "]\nHello" in text for text in said)


def test_seeds_of_drawn_answers(fake: Fake) -> None:
    measured(fake, ask=Ask(temperature=0.8), levels=(Level("closed", 1),))
    assert [body["seed"] for body in fake.asked[2:]] == [0, 1, 2, 3]
