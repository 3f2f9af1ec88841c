"""A model for asyncio: it computes in a thread of its own, and coroutines wait for its tokens.

::

    async with AsyncLLM(LLM("path-or-hub-id")) as llm:
        async for piece in llm.stream("def fibonacci(n):"):
            print(piece.text, end="")

One thread steps the engine; requests come to it and leave it between two steps, so nobody waits for a step to be let
in. Other threads may use the same :class:`~pronk.llm.LLM` meanwhile: they step the same engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Self

from pronk.checks import check_integer, check_number
from pronk.choosing.params import SamplingParams
from pronk.drafters import Drafter
from pronk.engine.request import Request
from pronk.errors import OptionError, OverloadedError, PronkError
from pronk.llm import LLM, Prompt
from pronk.outputs import Completion, Piece

__all__ = ["AsyncLLM"]


@dataclass(eq=False)
class _Job:
    """The samples of one prompt, and who waits for them.

    Attributes:
        requests: the samples.
        loop: the event loop of whoever waits.
        news: pieces of each step; an error; ``None`` at the end.
    """

    requests: Sequence[Request]
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[list[Piece] | Exception | None] = field(default_factory=asyncio.Queue)

    def tell(self, news: list[Piece] | Exception | None) -> None:
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
        self._jobs: list[_Job] = []
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._closing = False
        self._count = 0  # requests that have been let in and have not left
        self._thread = threading.Thread(target=self._serve, name="pronk-engine", daemon=True)
        self._thread.start()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
    ) -> AsyncGenerator[Piece]:
        """Continue one prompt, token by token; leaving the loop over it, or being cancelled, ends the request.

        Args:
            prompt: a text or token ids.
            params: options.
            drafter: who guesses, if not the one given at loading.
            priority: those of higher priority go first.
            deadline: seconds after which it ends with an error, its time in the queue included; ``None`` is never.
            salt: texts of the same salt alone share what the cache has of them.

        Raises:
            OptionError: an option out of its range.
            OverloadedError: there are ``max_requests`` already, or the model is being closed.
            DeadlineError: it was not done in time.
            PronkError: see :meth:`~pronk.llm.LLM.generate`.
        """
        async with aclosing(self._run(prompt, params, drafter, priority, deadline, salt)) as steps:
            async for pieces, _ in steps:
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
    ) -> Completion:
        """Continue one prompt; arguments and errors are those of :meth:`stream`."""
        requests: Sequence[Request] = ()
        async with aclosing(self._run(prompt, params, drafter, priority, deadline, salt)) as steps:
            async for _, made in steps:
                requests = made
        return Completion.of(requests[0], tuple(Completion.of(request) for request in requests[1:]))

    async def close(self) -> None:
        """End what still runs, with an error, and wait for the thread. Nothing is let in any more."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        drafter: str | Drafter | None,
        priority: int,
        deadline: float | None,
        salt: bytes,
    ) -> AsyncGenerator[tuple[list[Piece], Sequence[Request]]]:
        check_integer("priority", priority, -(2**31), 2**31)
        if deadline is not None:
            check_number("deadline", deadline, 0.0, 1e9)
        if not isinstance(salt, bytes):
            msg = f"salt: expected bytes, found {salt!r}"
            raise OptionError(msg)
        ends_at = None if deadline is None else perf_counter() + deadline
        # Reading a long prompt, or loading a draft model, would keep the loop's other tasks waiting.
        requests = await asyncio.to_thread(self._requests, prompt, params or SamplingParams(), drafter)
        for request in requests:
            request.priority, request.deadline, request.salt = priority, ends_at, salt
        job = _Job(requests, asyncio.get_running_loop())
        self._enter(job)
        ended = False
        try:
            while (news := await job.news.get()) is not None:
                if isinstance(news, Exception):
                    ended = True
                    raise news
                yield news, requests
            ended = True
        finally:
            if not ended:
                self._post(lambda: self._leave(job))

    def _requests(self, prompt: Prompt, params: SamplingParams, drafter: str | Drafter | None) -> list[Request]:
        return self.llm.intake.samples(self.llm.intake.ids(prompt), params, self.llm.meet(drafter))

    def _enter(self, job: _Job) -> None:
        with self._wake:
            if self._closing:
                msg = "expected a model that is open, found one that is being closed"
                raise OverloadedError(msg)
            if self._count + len(job.requests) > self.max_requests:
                msg = f"expected at most {self.max_requests} requests at a time, found one more; try again later"
                raise OverloadedError(msg)
            self._count += len(job.requests)
            self._inbox.append(lambda: self._add(job))
            self._wake.notify()

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def _serve(self) -> None:
        """What the engine's thread does until it is closed."""
        while True:
            with self._wake:
                while not (self._inbox or self._jobs or self._closing):
                    self._wake.wait()
                actions, self._inbox = self._inbox, []
                closing = self._closing
            for action in actions:
                action()
            if closing:
                for job in [*self._jobs]:
                    self._leave(job, PronkError("the model was closed before the request was done"))
                return
            if self._jobs:
                self._step()

    def _step(self) -> None:
        try:
            self.llm.engine.step()
        except Exception as error:  # noqa: BLE001 - of all requests; the thread goes on for those that come
            for job in [*self._jobs]:
                self._leave(job, error)
            return
        for job in [*self._jobs]:
            self._tell(job)

    def _add(self, job: _Job) -> None:
        self._jobs.append(job)
        try:
            for request in job.requests:
                self.llm.engine.add(request)
        except Exception as error:  # noqa: BLE001 - of this job alone, whatever it is
            self._leave(job, error)

    def _tell(self, job: _Job) -> None:
        """What steps have brought, and the end of it all; another thread may have made some of them."""
        pieces, requests = list[Piece](), job.requests
        with self.llm.engine.lock:
            error = next((request.error for request in requests if request.error is not None), None)
            ended = all(request.ended for request in requests)
            for index, request in enumerate(requests):
                while request.pieces:
                    token = request.pieces.popleft()
                    last = request.finish_reason is not None and not request.pieces
                    done = Completion.of(request) if last else None
                    pieces.append(Piece(token.token_id, token.text, token.guessed, index, done))
        if pieces and error is None:
            job.tell(pieces)
        if ended or error is not None:
            self._leave(job, error)
            if error is None:
                job.tell(None)

    def _leave(self, job: _Job, error: Exception | None = None) -> None:
        """The job is over, one way or another; harmless if it has left."""
        for request in job.requests:
            self.llm.engine.abort(request)
        if job in self._jobs:
            self._jobs.remove(job)
            with self._wake:
                self._count -= len(job.requests)
            if error is not None:
                job.tell(error)
