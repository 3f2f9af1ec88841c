"""Threads that run the jobs of several tenants in turns: many jobs of one do not delay another."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pronk.errors import ClosedError

T = TypeVar("T")


class _Job(NamedTuple):
    tenant: str
    future: Future[Any]
    function: Callable[[], Any]


class FairExecutor:
    """Executor with a queue per tenant, whose tenants take turns."""

    def __init__(self, threads: int, name: str, *, shared: bool = False) -> None:
        """Create an executor.

        Args:
            threads: maximum number of jobs that run at the same time.
            name: beginning of the threads' names.
            shared: whether no tenant may have all threads, so that one is left for others; with several threads.
        """
        self._executor = ThreadPoolExecutor(threads, name)
        self._per_tenant = max(1, threads - 1) if shared else threads
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job]] = {}  # tenants with jobs, the next one first
        self._running = Counter[str]()
        self._is_closed = False

    def submit(self, tenant: str, function: Callable[[], T]) -> Future[T]:
        """Run a function of a tenant in a thread; return the future of its result.

        Raises ``ClosedError`` after :meth:`shutdown`.
        """
        future = Future[T]()
        with self._lock:
            if self._is_closed:
                raise _closed_error()
            self._executor.submit(self._run_jobs)  # waits for the lock
            self._waiting.setdefault(tenant, deque()).append(_Job(tenant, future, function))
        return future

    async def run(self, tenant: str, function: Callable[..., T], *arguments: Any) -> T:
        """Await ``function(*arguments)`` of a tenant in a thread; errors are those of :meth:`submit`."""
        return await asyncio.wrap_future(self.submit(tenant, partial(function, *arguments)))

    def shutdown(self) -> None:
        """Fail the jobs that have not begun with a ``ClosedError``; end each thread after its job."""
        with self._lock:
            self._is_closed = True
            jobs = [job for queue in self._waiting.values() for job in queue]
            self._waiting.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_closed_error())

    def _run_jobs(self) -> None:
        """Run jobs until none may begin.

        There is one call for each submitted job, and a call goes on while jobs may begin, so that no job is forgotten.
        """
        while (job := self._next_job()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(job.function())
                except BaseException as error:  # noqa: BLE001 - the caller's
                    job.future.set_exception(error)
            with self._lock:
                self._running[job.tenant] -= 1
                self._running += Counter()  # forget tenants without jobs

    def _next_job(self) -> _Job | None:
        with self._lock:
            free = (tenant for tenant in self._waiting if self._running[tenant] < self._per_tenant)
            tenant = next(free, None)
            if tenant is None:
                return None
            queue = self._waiting.pop(tenant)
            job = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the other tenants
            self._running[tenant] += 1
            return job


def _closed_error() -> ClosedError:
    return ClosedError("expected an open model, found one that is closing; load the model again")
