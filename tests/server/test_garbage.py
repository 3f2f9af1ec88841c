"""Full collections wait until no large body is in memory, and bodies are freed in slices."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pronk import PronkError
from pronk.base import SMALL_JOB, FairExecutor
from pronk.server import garbage
from pronk.server.errors import ApiError
from pronk.server.garbage import Bodies, calm_collections
from pronk.server.protocol.request import RequestBody
from waiting import eventually

LARGE = SMALL_JOB + 1
SMALL = SMALL_JOB


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the full collections so far, which are recorded in place of being made."""
    found: list[str] = []
    monkeypatch.setattr(garbage, "_DUE", 0)  # a full collection is always due
    monkeypatch.setattr(garbage, "gc", gc)  # another server of this process may have replaced it
    monkeypatch.setattr(gc, "collect", lambda: found.append("full"))
    return found


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        pytest.param(LARGE, SMALL, 1, id="a small body ends beside a large one"),
        pytest.param(LARGE, LARGE, 1, id="one of two large bodies ends"),
        pytest.param(SMALL, LARGE, 2, id="the only large body ends"),
    ],
)
def test_collections_wait_for_large_bodies(
    outer: int, inner: int, expected: int, collected: list[str]
) -> None:
    async def hold_both() -> None:
        bodies = Bodies()
        async with bodies.hold(outer), bodies.hold(inner):
            pass

    asyncio.run(hold_both())
    assert len(collected) == expected


def test_a_failed_request_holds_its_body_no_longer(collected: list[str]) -> None:
    async def fail() -> None:
        async with Bodies().hold(LARGE):
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        asyncio.run(fail())
    assert len(collected) == 1


def test_garbage_that_is_not_due_stays(
    monkeypatch: pytest.MonkeyPatch, collected: list[str]
) -> None:
    monkeypatch.setattr(garbage, "_DUE", 10**9)

    async def hold() -> None:
        async with Bodies().hold(LARGE):
            pass

    asyncio.run(hold())
    assert collected == []


def test_python_collects_by_its_own_rule_afterwards(
    monkeypatch: pytest.MonkeyPatch, collected: list[str]
) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: collected.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: collected.append("unfreeze"))
    before = gc.get_threshold()
    with calm_collections():
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 1000
        assert collected == ["full", "freeze"]
    assert gc.get_threshold() == before
    assert collected == ["full", "freeze", "unfreeze"]


SLICE = 16
NUM_MESSAGES = 200
TURN = {"role": "user", "content": "x"}
# Content of a message with as many parts as the other requests have messages.
PARTS = [{"type": "text", "text": "x"}] * NUM_MESSAGES
TURNS = {"messages": [TURN] * NUM_MESSAGES, "max_tokens": 1}


def run_at_once(
    executor: FairExecutor, tenant: str, function: Callable[[], Any], *, size: int = 0
) -> Future[Any]:
    """Run a job of an executor in the caller's thread.

    A thread of the executor would keep the result for a moment.
    """
    future = Future[Any]()
    settle(future, function)
    return future


def settle(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except (PronkError, ApiError) as error:
        future.set_exception(error)
    del future  # the error's traceback has this frame, and would be in a cycle with the future


@dataclass
class Freed:
    """Numbers of freed objects of bodies.

    Attributes:
        total: number until now.
        after_slices: numbers after each slice.
    """

    total: int = 0
    after_slices: list[int] = field(default_factory=lambda: [0])


@pytest.fixture
def freed(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Freed:
    """Return the numbers of freed objects, which change with each request."""
    numbers = Freed()

    def count(_: RequestBody) -> None:
        numbers.total += 1

    async def note(_: float) -> None:
        numbers.after_slices.append(numbers.total)
        await asyncio.sleep(0)

    monkeypatch.setattr(RequestBody, "__del__", count, raising=False)
    monkeypatch.setattr(FairExecutor, "submit", run_at_once)
    monkeypatch.setattr(garbage, "_FREED_AT_ONCE", SLICE)
    monkeypatch.setattr(garbage, "asyncio", SimpleNamespace(sleep=note))
    return numbers


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        pytest.param("/v1/chat/completions", TURNS, 200, id="chat"),
        pytest.param("/v1/chat/completions", {**TURNS, "stream": True}, 200, id="stream"),
        pytest.param(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 1},
            200,
            id="parts",
        ),
        pytest.param("/v1/messages", TURNS, 200, id="messages"),
        pytest.param(
            "/v1/responses",
            {"input": TURNS["messages"], "max_output_tokens": 16},
            200,
            id="responses",
        ),
        pytest.param("/v1/chat/completions", {**TURNS, "model": "none"}, 404, id="unknown model"),
        pytest.param(
            "/v1/chat/completions",
            {"messages": [*[TURN] * NUM_MESSAGES, {"role": 1}]},
            400,
            id="the last message is wrong",
        ),
        pytest.param(
            "/v1/chat/completions",
            {"messages": [TURN] * 2000, "max_tokens": 1},
            400,
            id="too long",
        ),
    ],
)
def test_bodies_are_freed_in_slices(
    client: httpx.Client, freed: Freed, route: str, body: dict[str, Any], status: int
) -> None:
    """Each object is alive until its slice, and nothing else keeps it alive afterwards."""
    answer = client.post(route, json=body)
    assert answer.status_code == status, answer.text
    assert eventually(lambda: freed.total >= NUM_MESSAGES)
    steps = [after - before for before, after in pairwise([*freed.after_slices])]
    assert len(steps) >= NUM_MESSAGES // SLICE
    assert SLICE <= steps[0] < 2 * SLICE  # what the answer has needed besides is freed before
    assert max(steps[1:]) == SLICE


def test_objects_are_freed_when_the_server_ends_within_a_slice() -> None:
    num_freed = 0

    class Counted:
        def __del__(self) -> None:
            nonlocal num_freed
            num_freed += 1

    async def hold() -> None:
        async with Bodies().hold(LARGE) as objects:
            objects += [Counted() for _ in range(3 * garbage._FREED_AT_ONCE)]

    async def cancel() -> None:
        task = asyncio.create_task(hold())
        await asyncio.sleep(0)
        assert num_freed == garbage._FREED_AT_ONCE
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancel())
    assert num_freed == 3 * garbage._FREED_AT_ONCE
