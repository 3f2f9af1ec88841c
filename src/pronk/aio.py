"""A model for asyncio: it computes in a thread of its own, and coroutines wait for its tokens.

::

    async with AsyncLLM(LLM("path-or-hub-id")) as llm:
        async for piece in llm.stream("def fibonacci(n):"):
            print(piece.text, end="")

One thread steps the engine; requests come and leave between two steps, so nobody waits for a step to be let in. Other
threads may use the same :class:`~pronk.llm.LLM` meanwhile: they step the same engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Self

from pronk.checks import check_integer, check_number
from pronk.choosing.params import SamplingParams
from pronk.drafters import Drafter
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.errors import ClosedError, DeadlineError, OptionError, OverloadedError
from pronk.llm import LLM, Prompt
from pronk.outputs import Completion, Piece

__all__ = ["AsyncLLM"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    """Requests that come and go together, and who waits for them.

    Attributes:
        requests: the samples of its prompts.
        loop: the event loop of whoever waits.
        news: pieces of each step; an error; ``None`` at the end.
    """

    requests: Sequence[Request]
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[list[Piece] | BaseException | None] = field(default_factory=asyncio.Queue)

    def tell(self, news: list[Piece] | BaseException | None) -> None:
        """From any thread; a loop that is closed has nobody who waits."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.news.put_nowait, news)


class AsyncLLM:
    """An :class:`~pronk.llm.LLM` whose texts are awaited.

    Attributes:
        llm: the model.
        max_requests: most requests at a time, those that wait included.
    """

    def __init__(self, llm: LLM, *, max_requests: int = 1024) -> None:
        self.llm = llm
        self.max_requests = max_requests
        self._lock = threading.Lock()  # loops of several threads may share it
        self._count = 0  # requests that have been let in and have not left
        self._worker = _Worker(llm.engine)
        # Forgotten without being closed, it must not keep a thread and a model.
        weakref.finalize(self, self._worker.stop)

    @property
    def alive(self) -> bool:
        """Whether requests are still served."""
        return self._worker.thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Requests that are here, those whose prompt is still being read included."""
        return self._count

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        tenant: str = "",
    ) -> AsyncGenerator[Piece]:
        """Continue one prompt, token by token; leaving the loop over it, or being cancelled, ends the request.

        Args:
            prompt: a text or token ids.
            params: options.
            drafter: who guesses, if not the one given at loading.
            priority: those of higher priority go first.
            deadline: seconds after which it ends with an error, its time in the queue included; ``None`` is never.
            salt: texts of the same salt alone share what the cache has of them.
            tenant: on whose behalf; among requests of equal priority those of different tenants start by turns.

        Raises:
            OptionError: an option out of its range.
            OverloadedError: there are ``max_requests`` already.
            ClosedError: the model is being closed, or has been.
            DeadlineError: it was not done in time.
            PronkError: see :meth:`~pronk.llm.LLM.generate`.
        """
        steps = self.steps(
            [prompt], params, drafter=drafter, priority=priority, deadline=deadline, salt=salt, tenant=tenant
        )
        async with aclosing(steps):
            async for pieces in steps:
                for piece in pieces:
                    yield piece

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        tenant: str = "",
    ) -> Completion:
        """Continue one prompt; arguments and errors are those of :meth:`stream`."""
        found = dict[int, Completion]()
        steps = self.steps(
            [prompt], params, drafter=drafter, priority=priority, deadline=deadline, salt=salt, tenant=tenant
        )
        async with aclosing(steps):
            async for pieces in steps:
                found.update((piece.index, piece.completion) for piece in pieces if piece.completion is not None)
        first, *others = (found[index] for index in sorted(found))
        return first.beside(others)

    async def steps(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        tenant: str = "",
    ) -> AsyncGenerator[list[Piece]]:
        """Continue prompts side by side, and give out the pieces of each step.

        They come and go together: an error of one ends all of them. Sample ``s`` of prompt ``p`` has the index
        ``p * n + s``. Arguments and errors are those of :meth:`stream`.
        """
        params = params or SamplingParams()
        check_integer("priority", priority, -(2**31), 2**31)
        if deadline is not None:
            check_number("deadline", deadline, 0.0, 1e9)
        if not isinstance(salt, bytes):
            msg = f"salt: expected bytes, found {salt!r}"
            raise OptionError(msg)
        ends_at = None if deadline is None else perf_counter() + deadline
        count = len(prompts) * params.n
        self._enter(count)
        job: _Job | None = None
        try:
            requests = await self._read(prompts, params, drafter, deadline)
            for request in requests:
                request.priority, request.deadline = priority, ends_at
                request.salt, request.tenant = salt, tenant
            job = _Job(requests, asyncio.get_running_loop())
            self._worker.add(job)
            while (news := await job.news.get()) is not None:
                if isinstance(news, BaseException):
                    raise news
                yield news
        finally:
            with self._lock:
                self._count -= count
            if job is not None:
                self._worker.leave(job)

    def stop(self) -> None:
        """End what still runs, with an error, after the step that is being made. Nothing is let in any more."""
        self._worker.stop()

    async def close(self) -> None:
        """The same, and wait for the thread."""
        self.stop()
        await asyncio.to_thread(self._worker.thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read(
        self, prompts: Sequence[Prompt], params: SamplingParams, drafter: str | Drafter | None, deadline: float | None
    ) -> list[Request]:
        """In a thread: a long prompt, or a draft model to be loaded, would keep the loop's other tasks waiting."""
        try:
            async with asyncio.timeout(deadline) as limit:
                if params.guide is not None:
                    await asyncio.wrap_future(self.llm.intake.grammars.submit(params.guide))
                return await asyncio.to_thread(self._requests, prompts, params, drafter)
        except TimeoutError as error:
            if not limit.expired():
                raise
            msg = f"the request was not done by its deadline, after {deadline:.1f} s"
            raise DeadlineError(msg) from error

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams, drafter: str | Drafter | None
    ) -> list[Request]:
        intake, guesser = self.llm.intake, self.llm.meet(drafter)
        return [request for prompt in prompts for request in intake.samples(intake.ids(prompt), params, guesser)]

    def _enter(self, count: int) -> None:
        """Before anything is done for them, so that a crowd costs nothing."""
        if count > self.max_requests:
            msg = f"n: expected at most {self.max_requests} samples at a time, found {count}; ask for fewer"
            raise OptionError(msg)
        with self._lock:
            if self._count + count > self.max_requests:
                msg = f"expected at most {self.max_requests} requests at a time, found {count} more; try again later"
                raise OverloadedError(msg)
            self._count += count


class _Worker:
    """The thread that steps the engine; it knows nothing of the :class:`AsyncLLM` that it works for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._jobs: list[_Job] = []
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._closing = False
        self.thread = threading.Thread(target=self._serve, name="pronk-engine", daemon=True)
        self.thread.start()

    def add(self, job: _Job) -> None:
        """Let a job in, before the next step.

        Raises:
            ClosedError: the thread is ending, or has ended.
        """
        with self._wake:
            if self._closing:
                msg = "expected a model that is open, found one that is being closed"
                raise ClosedError(msg)
            self._inbox.append(lambda: self._add(job))
            self._wake.notify()

    def leave(self, job: _Job) -> None:
        """Let a job go, before the next step; harmless if it has left."""
        with self._wake:
            self._inbox.append(lambda: self._leave(job))
            self._wake.notify()

    def stop(self) -> None:
        """End with the step that runs."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def _serve(self) -> None:
        """What the thread does until it is stopped."""
        cause: BaseException = ClosedError("expected a model that is open, found one that was closed meanwhile")
        try:
            while self._act():
                if self._jobs:
                    self._step()
        except BaseException as error:  # noqa: BLE001 - whoever waits hears of it; its message may quote a text
            _log.critical("the engine's thread has ended with %s", type(error).__name__)
            cause = error
        finally:
            with self._wake:
                self._closing = True
                actions, self._inbox = self._inbox, []
            for action in actions:  # so that whoever came last hears of it, too
                action()
            for job in [*self._jobs]:
                self._leave(job, cause)

    def _act(self) -> bool:
        """Do what has been asked for since the last step, or wait for it. Returns whether to go on."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._jobs or self._closing)
            actions, self._inbox = self._inbox, []
            closing = self._closing
        for action in actions:
            action()
        return not closing

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:  # noqa: BLE001 - of all requests; the thread goes on for those that come
            for job in [*self._jobs]:
                self._leave(job, error)
            return
        for job in [*self._jobs]:
            try:
                self._tell(job)
            except Exception as error:  # noqa: BLE001 - of this job alone, whatever it is
                self._leave(job, error)

    def _add(self, job: _Job) -> None:
        self._jobs.append(job)
        try:
            for request in job.requests:
                self.engine.add(request)
        except Exception as error:  # noqa: BLE001 - of this job alone, whatever it is
            self._leave(job, error)

    def _tell(self, job: _Job) -> None:
        """What steps have brought, and the end of it all; another thread may have made some of them."""
        pieces, requests = list[Piece](), job.requests
        with self.engine.lock:
            error = next((request.error for request in requests if request.error is not None), None)
            ended = all(request.ended for request in requests)
            for index, request in enumerate(requests):
                while request.pieces:
                    token = request.pieces.popleft()
                    last = request.finish_reason is not None and not request.pieces
                    pieces.append(Piece.of(token, index, request, last=last))
        if pieces and error is None:
            job.tell(pieces)
        if ended or error is not None:
            self._leave(job, error)
            if error is None:
                job.tell(None)

    def _leave(self, job: _Job, error: BaseException | None = None) -> None:
        """The job is over, one way or another; harmless if it has left."""
        for request in job.requests:
            self.engine.abort(request)
        if job in self._jobs:
            self._jobs.remove(job)
            if error is not None:
                job.tell(error)
