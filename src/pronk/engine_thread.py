"""Thread that steps an engine and sends the generated tokens to coroutines of any event loop."""

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
    """A *job*: the requests of one call, one per sample, which end together."""

    requests: Mapping[int, Request]  # by index of the sample
    loop: asyncio.AbstractEventLoop  # event loop of the caller
    # One list of new :class:`Piece` per step; at the end ``None``, or the exception that ended the job.
    queue: asyncio.Queue[list[Piece] | BaseException | None] = field(default_factory=asyncio.Queue)

    def put(self, item: list[Piece] | BaseException | None) -> None:
        """Add an item to the queue; callable from any thread."""
        with suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class EngineThread:
    """Steps the engine while there are jobs; does not keep the :class:`AsyncLLM` alive that it serves."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._jobs: list[PendingRequests] = []
        self._wake = threading.Condition()
        self._actions: list[Callable[[], None]] = []
        self._closing = False
        self.thread = threading.Thread(target=self._serve, name="pronk-engine", daemon=True)
        self.thread.start()

    def add(self, job: PendingRequests) -> None:
        """Add a job before the next step; raise ``ClosedError`` if the thread is stopping or stopped."""
        with self._wake:
            if self._closing:
                msg = "expected an open model, found one that is closing; load the model again"
                raise ClosedError(msg)
            self._actions.append(lambda: self._add(job))
            self._wake.notify()

    def leave(self, job: PendingRequests) -> None:
        """Remove a job before the next step; without effect on a removed job."""
        with self._wake:
            self._actions.append(lambda: self._remove(job))
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after the current step."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def _serve(self) -> None:
        cause: BaseException = ClosedError("expected an open model, found one that was closed; load the model again")
        try:
            while self._run_actions():
                if self._jobs:
                    self._step()
        except BaseException as error:  # noqa: BLE001 - passed to all callers; its message may quote a text
            _log.critical("the engine's thread has ended with %s", type(error).__name__)
            cause = error
        finally:
            with self._wake:
                self._closing = True
                actions, self._actions = self._actions, []
            for action in actions:  # adds the queued jobs, so that they receive the error, too
                action()
            for job in [*self._jobs]:
                self._remove(job, cause)

    def _run_actions(self) -> bool:
        """Run queued actions; if there is no job, wait for an action. Return False to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._actions or self._jobs or self._closing)
            actions, self._actions = self._actions, []
            closing = self._closing
        for action in actions:
            action()
        return not closing

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:  # noqa: BLE001 - fails all requests; the thread serves later ones
            for job in [*self._jobs]:
                self._remove(job, error)
            return
        for job in [*self._jobs]:
            try:
                self._deliver(job)
            except Exception as error:  # noqa: BLE001 - fails this job only
                self._remove(job, error)

    def _add(self, job: PendingRequests) -> None:
        self._jobs.append(job)
        try:
            for request in job.requests.values():
                self.engine.add(request)
        except Exception as error:  # noqa: BLE001 - fails this job only
            self._remove(job, error)

    def _deliver(self, job: PendingRequests) -> None:
        """Send the undelivered tokens of a job, then its end. Another thread may have run the step."""
        pieces, requests = list[Piece](), job.requests
        with self.engine.lock:
            error = next((request.error for request in requests.values() if request.error is not None), None)
            ended = all(request.ended for request in requests.values())
            for index, request in requests.items():
                while request.undelivered:
                    token = request.undelivered.popleft()
                    last = request.finish_reason is not None and not request.undelivered
                    pieces.append(Piece.of(token, index, request, last=last))
        if pieces and error is None:
            job.put(pieces)
        if ended or error is not None:
            self._remove(job, error)
            if error is None:
                job.put(None)

    def _remove(self, job: PendingRequests, error: BaseException | None = None) -> None:
        """Abort the requests of a job and remove the job; without effect on a removed job."""
        for request in job.requests.values():
            self.engine.abort(request)
        if job in self._jobs:
            self._jobs.remove(job)
            if error is not None:
                job.put(error)
