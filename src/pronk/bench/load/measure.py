"""A whole load test: rounds over levels over servers, one server at a time, so that each has the machine to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time

from pronk.bench.load.answers import AnswerError
from pronk.bench.load.client import Client, Sending
from pronk.bench.load.levels import Level, poisson_arrivals
from pronk.bench.load.records import Targets, Window
from pronk.bench.load.requests import Ask, Job, Server
from pronk.bench.load.sessions import Session, open_session, refusal

__all__ = ["Found", "LoadPlan", "Progress", "closed_loop", "open_loop", "run"]

# Told what is going on, the requests that are through, and all requests.
Progress = Callable[[str, int, int], None]
_Send = Callable[[int, float], Coroutine[None, None, None]]  # the number of a request, and when it is due


@dataclass(frozen=True)
class LoadPlan:
    """What to measure.

    Attributes:
        servers: the first is what the others are compared with.
        ask: what they are asked.
        jobs: the requests of one level and round.
        levels: of load.
        rounds: how often all of it is measured.
        warmup: requests to each server that come first and are not counted.
        timeout: seconds for an answer.
        targets: for goodput.
        seed: of the arrivals.
    """

    servers: tuple[Server, ...]
    ask: Ask
    jobs: tuple[Job, ...]
    levels: tuple[Level, ...]
    rounds: int
    warmup: int
    timeout: float
    targets: Targets
    seed: int


@dataclass
class Found:
    """What has been measured so far: servers that are ready, windows that have begun."""

    sessions: list[Session] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)


def run(plan: LoadPlan, found: Found, progress: Progress) -> None:
    """Measure; ``found`` has all that was measured, even if this ends early.

    Raises:
        OptionError: a server that cannot be measured.
    """
    asyncio.run(_run(plan, found, progress))


async def _run(plan: LoadPlan, found: Found, progress: Progress) -> None:
    async with Client(plan.ask.endpoint, plan.timeout) as client:
        for server in plan.servers:
            progress(f"{server.name}, warming up", 0, 0)
            found.sessions.append(await open_session(client, server, plan.ask, plan.jobs[0]))
            await _warm_up(client, found.sessions[-1], plan)
        turns = list(_turns(plan, found.sessions))
        for number, (turn, level, session) in enumerate(turns):
            window = Window(session.server.name, level, turn)
            found.windows.append(window)
            label = f"{window.server}, {level}, round {turn + 1} of {plan.rounds}"
            meter = _Meter(progress, label, number * len(plan.jobs), len(turns) * len(plan.jobs))
            await _measure(client, session, plan, window, meter)


def _turns(plan: LoadPlan, sessions: Sequence[Session]) -> Iterator[tuple[int, Level, Session]]:
    """Servers take turns within each level, and another begins each time: a noisy machine disturbs all alike."""
    for turn in range(plan.rounds):
        for number, level in enumerate(plan.levels):
            first = (turn + number) % len(sessions)
            for session in (*sessions[first:], *sessions[:first]):
                yield turn, level, session


@dataclass
class _Meter:
    """Tells of the requests that are through."""

    progress: Progress
    label: str
    done: int
    total: int

    def count(self, calls: int) -> None:
        self.progress(self.label, self.done + calls, self.total)


async def _warm_up(client: Client, session: Session, plan: LoadPlan) -> None:
    for number in range(plan.warmup):
        body = session.body(plan.ask, plan.jobs[number % len(plan.jobs)], _mark(plan, session.server, -1, None, number))
        try:
            await client.ask(session.server, body)
        except AnswerError as error:
            raise refusal(session.server, error, session.model) from error


def _mark(plan: LoadPlan, server: Server, turn: int, level: Level | None, number: int) -> str:
    """Of a server's own, too: two names may be of one server."""
    return f"[{plan.servers.index(server)}, {plan.seed}, {turn}, {level}, {number}]\n" if plan.ask.unique else ""


async def _measure(client: Client, session: Session, plan: LoadPlan, window: Window, meter: _Meter) -> None:
    bodies = [
        session.body(plan.ask, job, _mark(plan, session.server, window.turn, window.level, number))
        for number, job in enumerate(plan.jobs)
    ]
    most = session.server.extra.get("max_tokens")
    most = most if isinstance(most, int) else plan.ask.max_tokens
    busy, began = process_time(), perf_counter()

    async def send(number: int, due: float) -> None:
        sending = Sending(plan.jobs[number].id, bodies[number], due, began, most)
        window.calls.append(await client.send(session.server, sending))
        window.seconds = perf_counter() - began
        meter.count(len(window.calls))

    meter.count(0)
    try:
        if window.level.loop == "closed":
            await closed_loop(int(window.level.value), len(bodies), send)
        else:
            await open_loop(poisson_arrivals(window.level.value, len(bodies), plan.seed, window.turn), send)
    finally:
        window.busy = process_time() - busy


async def closed_loop(clients: int, count: int, send: _Send, now: Callable[[], float] = perf_counter) -> None:
    """``count`` requests from ``clients`` clients, each of which sends its next when its last is done."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await send(number, now())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, count)):
            group.create_task(work())


async def open_loop(arrivals: Sequence[float], send: _Send, now: Callable[[], float] = perf_counter) -> None:
    """A request at each moment, in seconds from now, whatever became of those before it."""
    began = now()
    async with asyncio.TaskGroup() as group:
        for number, at in enumerate(arrivals):
            if (wait := began + at - now()) > 0:
                await asyncio.sleep(wait)
            group.create_task(send(number, began + at))
