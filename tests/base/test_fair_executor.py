"""Jobs of several tenants run in turns; cancelled and failing jobs take no thread away."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from pronk.base import fair_executor
from pronk.base.errors import ClosedError
from pronk.base.fair_executor import SMALL_JOB, TINY_JOB, FairExecutor
from waiting import HUNG, eventually

WAIT = 60  # seconds until a test fails


class Gate:
    """A job that blocks its thread until it is opened."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.open.wait(WAIT)


def test_tenants_take_turns() -> None:
    made = FairExecutor(1, "test")
    gate = Gate()
    order = list[str]()
    first = made.submit("a", gate)
    assert gate.begun.wait(WAIT)
    jobs = [made.submit(tenant, lambda tenant=tenant: order.append(tenant)) for tenant in "aaaabbc"]  # type: ignore[misc]
    gate.open.set()
    for job in [first, *jobs]:
        job.result(WAIT)
    assert "".join(order) == "abcabaa"
    made.shutdown()


def test_a_tenant_leaves_a_thread_to_others() -> None:
    made = FairExecutor(2, "test", shared=True)
    gates = [Gate() for _ in range(3)]
    jobs = [made.submit("a", gate) for gate in gates]
    assert gates[0].begun.wait(WAIT)
    assert made.submit("b", lambda: "done").result(WAIT) == "done"
    assert not gates[1].begun.is_set()
    for gate in gates:
        gate.open.set()
    for job in jobs:
        job.result(WAIT)
    made.shutdown()


def test_failed_and_cancelled_jobs() -> None:
    made = FairExecutor(1, "test")
    gate = Gate()
    first = made.submit("a", gate)
    assert gate.begun.wait(WAIT)
    failing: Future[float] = made.submit("a", lambda: 1 / 0)
    cancelled = made.submit("a", lambda: 1)
    last = made.submit("a", lambda: 2)
    assert cancelled.cancel()
    gate.open.set()
    assert last.result(WAIT) == 2
    with pytest.raises(ZeroDivisionError):
        failing.result(WAIT)
    first.result(WAIT)
    made.shutdown()


def test_shutdown_fails_waiting_jobs_and_ends_the_threads() -> None:
    made = FairExecutor(1, "test-shutdown")
    gate = Gate()
    first = made.submit("a", gate)
    assert gate.begun.wait(WAIT)
    waiting = [made.submit(tenant, lambda: None) for tenant in "ab"]
    made.shutdown()
    for job in waiting:
        with pytest.raises(ClosedError, match="expected an open model, found one that is closing"):
            job.result(WAIT)
    gate.open.set()
    first.result(WAIT)
    with pytest.raises(ClosedError):
        made.submit("a", lambda: None)
    assert eventually(
        lambda: not any(each.name.startswith("test-shutdown") for each in threading.enumerate())
    )


def test_a_coroutine_awaits_a_job() -> None:
    made = FairExecutor(1, "test")

    async def main() -> None:
        assert await made.run("a", divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await made.run("a", divmod, 7, 0)
        made.shutdown()
        with pytest.raises(ClosedError):
            await made.run("a", divmod, 7, 2)

    asyncio.run(main())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tenant", ["a", "b"])
def test_a_small_job_waits_for_no_large_one(tenant: str, threads: int, *, shared: bool) -> None:
    """Neither for those that run nor for those in the queue, whose tenant may be its own."""
    made = FairExecutor(threads, "test", shared=shared)
    gates = [Gate() for _ in range(5)]
    large = [made.submit("a", gate, size=SMALL_JOB + 1) for gate in gates]
    assert gates[0].begun.wait(WAIT)
    assert made.submit(tenant, lambda: "small", size=SMALL_JOB).result(WAIT) == "small"
    assert not any(job.done() for job in large)
    for gate in gates:
        gate.open.set()
    for job in large:
        job.result(WAIT)
    made.shutdown()


def test_large_jobs_wait_for_no_small_ones() -> None:
    made = FairExecutor(1, "test")
    gates = [Gate() for _ in range(5)]
    small = [made.submit("a", gate, size=1) for gate in gates]
    assert made.submit("a", lambda: "large").result(WAIT) == "large"
    for gate in gates:
        gate.open.set()
    for job in small:
        job.result(WAIT)
    made.shutdown()


def test_a_tiny_job_runs_in_the_event_loop() -> None:
    made = FairExecutor(1, "test")

    async def main() -> None:
        name = threading.current_thread().name
        ran_in = [
            await made.run("a", lambda: threading.current_thread().name, size=size)
            for size in (TINY_JOB, TINY_JOB + 1)
        ]
        assert [each == name for each in ran_in] == [True, False]

    asyncio.run(main())
    made.shutdown()


def test_threads_without_jobs_end_and_later_jobs_start_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fair_executor, "_IDLE_SECONDS", 0.01)
    made = FairExecutor(2, "test-idle")
    for _ in range(3):
        assert made.submit("a", lambda: 1).result(WAIT) == 1
        assert eventually(
            lambda: not any(each.name.startswith("test-idle") for each in threading.enumerate())
        )
    made.shutdown()


EXIT = """
import threading
from pronk.base.fair_executor import FairExecutor
begun = threading.Event()
def wait():
    begun.set()
    threading.Event().wait()
FairExecutor(1, "test").submit("a", wait)
begun.wait()
print("end")
"""


def test_the_process_ends_beside_a_job_that_does_not() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXIT], timeout=HUNG, check=True, capture_output=True, text=True
    )
    assert ended.stdout == "end\n"
