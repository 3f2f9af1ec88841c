"""The thread that steps an engine for whoever waits in event loops."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.errors import ClosedError
from pronk.outputs import Piece

__all__ = ["EngineThread", "PendingRequests"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class PendingRequests:
    """Requests that come and go together, and who waits for them.

    Attributes:
        requests: the samples of its prompts, by their indices.
        loop: the event loop of whoever waits.
        news: pieces of each step; an error; ``None`` at the end.
    """

    requests: Mapping[int, Request]
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[list[Piece] | BaseException | None] = field(default_factory=asyncio.Queue)

    def tell(self, news: list[Piece] | BaseException | None) -> None:
        """From any thread; a loop that is closed has nobody who waits."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.news.put_nowait, news)


class EngineThread:
    """The thread that steps the engine; it knows nothing of the :class:`AsyncLLM` that it works for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._jobs: list[PendingRequests] = []
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._closing = False
        self.thread = threading.Thread(target=self._serve, name="pronk-engine", daemon=True)
        self.thread.start()

    def add(self, job: PendingRequests) -> None:
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

    def leave(self, job: PendingRequests) -> None:
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

    def _add(self, job: PendingRequests) -> None:
        self._jobs.append(job)
        try:
            for request in job.requests.values():
                self.engine.add(request)
        except Exception as error:  # noqa: BLE001 - of this job alone, whatever it is
            self._leave(job, error)

    def _tell(self, job: PendingRequests) -> None:
        """What steps have brought, and the end of it all; another thread may have made some of them."""
        pieces, requests = list[Piece](), job.requests
        with self.engine.lock:
            error = next((request.error for request in requests.values() if request.error is not None), None)
            ended = all(request.ended for request in requests.values())
            for index, request in requests.items():
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

    def _leave(self, job: PendingRequests, error: BaseException | None = None) -> None:
        """The job is over, one way or another; harmless if it has left."""
        for request in job.requests.values():
            self.engine.abort(request)
        if job in self._jobs:
            self._jobs.remove(job)
            if error is not None:
                job.tell(error)
