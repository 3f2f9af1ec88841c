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
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import NamedTuple, Self

from pronk.admission import AdmissionQueue
from pronk.checks import check_integer, check_number
from pronk.drafters import Drafter
from pronk.engine.request import Request
from pronk.engine_thread import EngineThread, PendingRequests
from pronk.errors import DeadlineError, OptionError
from pronk.llm import LLM, Prompt
from pronk.outputs import Completion, Piece
from pronk.sampling.params import SamplingParams

__all__ = ["AsyncLLM", "EngineLoad"]


class EngineLoad(NamedTuple):
    """What a model is busy with.

    Attributes:
        running: requests in the passes.
        waiting: requests that wait for room.
        kv_used: of the blocks of the cache, the part that is taken, 0..1.
        kv_idle: blocks that hold what nobody uses at present.
        resumed: times that a request was asked again elsewhere, as its replica had died, so far.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    kv_idle: int = 0
    resumed: int = 0


class AsyncLLM:
    """An :class:`~pronk.llm.LLM` whose texts are awaited.

    Attributes:
        llm: the model.
    """

    def __init__(self, llm: LLM, *, max_requests: int = 1024) -> None:
        """``max_requests`` are served at a time, those that wait included."""
        self.llm = llm
        self._room = AdmissionQueue(max_requests)
        self._thread = EngineThread(llm.engine)
        # Forgotten without being closed, it must not keep a thread and a model.
        weakref.finalize(self, self._thread.stop)

    @property
    def alive(self) -> bool:
        """Whether requests are still served."""
        return self._thread.thread.is_alive() and self.llm.engine.runner.usable

    @property
    def num_requests(self) -> int:
        """Requests that are here, those whose prompt is still being read included."""
        return self._room.taken

    @property
    def load(self) -> EngineLoad:
        """What it is busy with."""
        engine = self.llm.engine
        scheduler, blocks = engine.scheduler, engine.cache.allocator
        used = 1.0 - blocks.num_free / max(1, blocks.num_blocks)
        return EngineLoad(len(scheduler.running), len(scheduler.waiting), used, len(blocks.idle))

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
        given: Mapping[int, Sequence[Piece]] | None = None,
    ) -> AsyncGenerator[list[Piece]]:
        """Continue prompts side by side, and give out the pieces of each step.

        They come and go together: an error of one ends all of them. Sample ``s`` of prompt ``p`` has the index
        ``p * n + s``. Arguments and errors are those of :meth:`stream`.

        Of samples that were ``given`` out before, by their indices, here or by the same model elsewhere, only what
        follows is; with the same seed that is what would have followed there. A sample that has ended stays out.
        """
        params = params or SamplingParams()
        check_integer("priority", priority, -(2**31), 2**31)
        if deadline is not None:
            check_number("deadline", deadline, 0.0, 1e9)
        if not isinstance(salt, bytes):
            msg = f"salt: expected bytes, found {salt!r}"
            raise OptionError(msg)
        if given and params.prompt_logprobs is not None:
            msg = "prompt_logprobs: expected None where some of a text is given, as the prompt is not reported again"
            raise OptionError(msg)
        ends_at = None if deadline is None else perf_counter() + deadline
        with self._room.hold(len(prompts) * params.n):
            requests = await self._read(prompts, params, drafter, deadline, given or {})
            for request in requests.values():
                request.priority, request.deadline = priority, ends_at
                request.salt, request.tenant = salt, tenant
            job = PendingRequests(requests, asyncio.get_running_loop())
            try:
                self._thread.add(job)
                while (news := await job.news.get()) is not None:
                    if isinstance(news, BaseException):
                        raise news
                    yield news
            finally:
                self._thread.leave(job)

    def stop(self) -> None:
        """End what still runs, with an error, after the step that is being made. Nothing is let in any more."""
        self._thread.stop()

    async def close(self) -> None:
        """The same, and wait for the thread."""
        self.stop()
        await asyncio.to_thread(self._thread.thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        drafter: str | Drafter | None,
        deadline: float | None,
        given: Mapping[int, Sequence[Piece]],
    ) -> dict[int, Request]:
        """In a thread: a long prompt, or a draft model to be loaded, would keep the loop's other tasks waiting."""
        try:
            async with asyncio.timeout(deadline) as limit:
                if params.guide is not None:
                    await asyncio.wrap_future(self.llm.request_factory.grammars.submit(params.guide))
                return await asyncio.to_thread(self._requests, prompts, params, drafter, given)
        except TimeoutError as error:
            if not limit.expired():
                raise
            msg = f"the request was not done by its deadline, after {deadline:.1f} s"
            raise DeadlineError(msg) from error

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        drafter: str | Drafter | None,
        given: Mapping[int, Sequence[Piece]],
    ) -> dict[int, Request]:
        """By their indices."""
        request_factory, proposer = self.llm.request_factory, self.llm.get_proposer(drafter)
        samples = (request_factory.samples(request_factory.ids(prompt), params, proposer) for prompt in prompts)
        requests = dict(enumerate(request for group in samples for request in group))
        for index, pieces in given.items():
            if pieces and pieces[-1].completion is not None:
                del requests[index]
            else:
                requests[index].resume((piece.token_id, piece.source, piece.logprobs) for piece in pieces)
        return requests
