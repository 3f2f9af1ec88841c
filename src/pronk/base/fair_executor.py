"""Executor for the jobs of several tenants: many jobs of one tenant do not delay another tenant.

Each tenant has a queue, and the threads take jobs from the queues in turn. Small jobs have threads
of their own, so that small jobs do not wait for large ones.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from pronk.base.errors import ClosedError

T = TypeVar("T")

# Largest sizes of small and tiny jobs, in bytes of a request's body or in characters of a text.
# Python needs some tens of milliseconds for a small job, and a few milliseconds for a tiny one.
SMALL_JOB = 2**16
TINY_JOB = 2**12
_IDLE_SECONDS = 10.0  # seconds after which a thread without a job ends
_EXIT_SECONDS = 1.0  # seconds to wait for running jobs at the end of the process


class _Job(NamedTuple):
    tenant: str
    future: Future[Any]
    function: Callable[[], Any]


class FairExecutor:
    """Executor with one queue per tenant, and with separate threads for small jobs.

    At the end of the process, running jobs have one second to finish.
    """

    def __init__(self, threads: int, name: str, *, shared: bool = False) -> None:
        """Create an executor.

        Args:
            threads: maximum number of large jobs that run at the same time, and of small ones.
            name: beginning of the threads' names.
            shared: whether several tenants use the executor. One tenant then has at most
                ``threads - 1`` running jobs of a kind (at least 1), so that a thread is left for
                the others.
        """
        per_tenant = max(1, threads - 1) if shared else threads
        self._large = _Threads(threads, name, per_tenant)
        self._small = _Threads(threads, name, per_tenant)

    def submit(
        self, tenant: str, function: Callable[[], T], *, size: int = SMALL_JOB + 1
    ) -> Future[T]:
        """Run a function in a thread; return the future of its result.

        Args:
            tenant: name of the tenant, whose jobs begin in the order of the calls.
            function: the job.
            size: size of the job; at most ``SMALL_JOB`` for a small job, which does not wait for
                large ones.

        Raises:
            ClosedError: after :meth:`shutdown`.
        """
        threads = self._small if size <= SMALL_JOB else self._large
        return threads.submit(tenant, function)

    async def run(
        self,
        tenant: str,
        function: Callable[..., T],
        *arguments: Any,
        size: int = SMALL_JOB + 1,
    ) -> T:
        """Return ``function(*arguments)``, run as a job of :meth:`submit`.

        A job of at most ``TINY_JOB`` runs in the event loop at once, without a queue.
        """
        if size <= TINY_JOB:
            return function(*arguments)
        job = self.submit(tenant, partial(function, *arguments), size=size)
        return await asyncio.wrap_future(job)

    def shutdown(self) -> None:
        """End each thread after its running job; jobs in a queue fail with ``ClosedError``."""
        self._large.shutdown()
        self._small.shutdown()


class _Threads:
    """Queues of jobs, and up to ``limit`` threads that run them.

    At most ``per_tenant`` jobs of a tenant run at the same time.
    """

    def __init__(self, limit: int, name: str, per_tenant: int) -> None:
        self._limit = limit
        self._name = name
        self._per_tenant = per_tenant
        self._changed = threading.Condition()  # held while an attribute below is used
        self._waiting: dict[str, deque[_Job]] = {}  # tenants with jobs, the next one first
        self._running = Counter[str]()
        self._threads = set[threading.Thread]()
        self._num_idle = 0
        self._is_closed = False
        _all.add(self)

    def submit(self, tenant: str, function: Callable[[], T]) -> Future[T]:
        future = Future[T]()
        with self._changed:
            if self._is_closed:
                raise _closed_error()
            self._waiting.setdefault(tenant, deque()).append(_Job(tenant, future, function))
            num_waiting = sum(map(len, self._waiting.values()))
            if num_waiting > self._num_idle and len(self._threads) < self._limit:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._run_jobs, name=name, daemon=True)
                self._threads.add(thread)
                thread.start()
            self._changed.notify()
        return future

    def shutdown(self) -> None:
        with self._changed:
            self._is_closed = True
            jobs = [job for queue in self._waiting.values() for job in queue]
            self._waiting.clear()
            self._changed.notify_all()
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_closed_error())

    def join(self, end: float) -> None:
        """Wait until all threads have ended, or until ``end``, a time of :func:`time.monotonic`."""
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, end - monotonic()))

    def _run_jobs(self) -> None:
        """Run jobs until the executor is closed, or has had no job for 10 seconds."""
        while (job := self._wait_for_job()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(job.function())
                except BaseException as error:  # noqa: BLE001 - the future passes it to the caller
                    job.future.set_exception(error)
            with self._changed:
                self._running[job.tenant] -= 1
                self._running += Counter()  # removes the tenants whose number of jobs is 0
                self._changed.notify()  # another job of the tenant may begin now
            del job  # the next wait may be long, and the job's arguments and result large

    def _wait_for_job(self) -> _Job | None:
        """Wait for a job that may begin, and return it; ``None`` ends the thread."""
        with self._changed:
            self._num_idle += 1
            job = self._next_job()
            while job is None and not self._is_closed:
                is_notified = self._changed.wait(_IDLE_SECONDS)
                job = self._next_job()
                if not is_notified:
                    break
            self._num_idle -= 1
            if job is None:
                self._threads.discard(threading.current_thread())
            return job

    def _next_job(self) -> _Job | None:
        """Take a job of the next tenant that may have another thread; ``None`` if there is none."""
        free = (tenant for tenant in self._waiting if self._running[tenant] < self._per_tenant)
        tenant = next(free, None)
        if tenant is None:
            return None
        queue = self._waiting.pop(tenant)
        job = queue.popleft()
        if queue:
            self._waiting[tenant] = queue  # at the end, so that each other tenant comes first
        self._running[tenant] += 1
        return job


_all: weakref.WeakSet[_Threads] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Close all executors when the process ends, and wait at most a second for running jobs.

    The threads are daemons, because Python would wait for other threads without a limit. After this
    second, Python unwinds the stack of a daemon thread that needs the interpreter's lock, and
    libraries in Rust or C++ may abort the process then.
    """
    executors = list(_all)
    for each in executors:
        each.shutdown()
    end = monotonic() + _EXIT_SECONDS
    for each in executors:
        each.join(end)


def _closed_error() -> ClosedError:
    return ClosedError("expected an open model, found one that is closing; load the model again")
