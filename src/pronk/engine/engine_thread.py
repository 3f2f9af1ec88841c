"""Thread that steps an engine and sends the generated tokens to coroutines of any event loop."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from pronk.base.errors import ClosedError
from pronk.engine.engine import Engine
from pronk.engine.outputs import Piece
from pronk.engine.request import Request

_log = logging.getLogger(__name__)

MAX_UNREAD = 256  # a sample is paused while its caller has more unread tokens than this

_running: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Stop all engine threads and wait for their current steps, when the program ends.

    Python ends daemon threads by unwinding their stacks; inside C++ code, this would abort the
    process.
    """
    threads = [*_running]
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.thread.join()


@dataclass(eq=False)
class PendingRequests:
    """Requests of one call of :class:`AsyncLLM`, one per sample. An error of one request ends all.

    The requests are paused while too many generated tokens are waiting to be read. The engine's
    thread alone writes ``num_put``, and the caller alone writes ``num_read``, so that neither needs
    a lock.
    """

    requests: Mapping[int, Request]  # by index of the sample
    loop: asyncio.AbstractEventLoop  # event loop of the caller
    # Output for the caller: one list of new pieces per step; at the end ``None``, or the exception
    # that ended the call.
    queue: asyncio.Queue[list[Piece] | BaseException | None] = field(default_factory=asyncio.Queue)
    num_put: int = 0  # number of tokens put into the queue so far
    num_read: int = 0  # number of tokens that the caller has taken and processed
    is_paused: bool = False  # whether the requests wait until the caller has read more

    @property
    def num_unread(self) -> int:
        """Number of tokens that the caller has not read."""
        return self.num_put - self.num_read

    @property
    def max_unread(self) -> int:
        """Number of unread tokens above which the requests are paused; at half of it they go on."""
        return MAX_UNREAD * len(self.requests)

    def put(self, item: list[Piece] | BaseException | None) -> None:
        """Add an item to the queue; callable from any thread."""
        with suppress(RuntimeError):  # raised if the event loop is closed
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class EngineThread:
    """Thread that steps the engine while requests of callers are unfinished.

    It has no reference to its :class:`AsyncLLM`, which is freed when its user drops it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._calls: list[PendingRequests] = []
        self._wake = threading.Condition()
        self._actions: list[Callable[[], None]] = []
        self._closing = False
        self.thread = threading.Thread(target=self._serve, name="pronk-engine", daemon=True)
        self.thread.start()
        _running.add(self)

    def add(self, call: PendingRequests) -> None:
        """Add a call's requests before the next step.

        Their time of waiting begins now, also while a step runs. Raises ``ClosedError`` if the
        thread is ending.
        """
        now = self.engine.runner.clock()
        for request in call.requests.values():
            request.queueing.since = now
        with self._wake:
            if self._closing:
                msg = "expected an open model, found one that is closing; load the model again"
                raise ClosedError(msg)
            self._actions.append(lambda: self._add(call))
            self._wake.notify()

    def leave(self, call: PendingRequests) -> None:
        """Abort a call's requests before the next step; without effect on a removed call."""
        with self._wake:
            self._actions.append(lambda: self._remove(call))
            self._wake.notify()

    def resume(self, call: PendingRequests) -> None:
        """Let the paused requests of a call run again, from the next step on."""
        with self._wake:
            self._actions.append(lambda: self._set_paused(call, paused=False))
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after the current step."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def _serve(self) -> None:
        cause: BaseException = ClosedError(
            "expected an open model, found one that was closed; load the model again"
        )
        try:
            while self._run_actions():
                if self._has_work():
                    self._step()
        except BaseException as error:  # noqa: BLE001 - passed to all callers; its message may quote a text
            _log.critical("the engine's thread has ended with %s", type(error).__name__)
            cause = error
        finally:
            with self._wake:
                self._closing = True
                actions = self._actions
                self._actions = []
            for action in actions:  # calls added here receive the error below, too
                action()
            for call in [*self._calls]:
                self._remove(call, cause)

    def _run_actions(self) -> bool:
        """Run queued actions; wait for one if no step is due.

        Return False if the thread must end.
        """
        with self._wake:
            self._wake.wait_for(
                lambda: self._actions or self._has_work() or self._closing,
                self._seconds_to_deadline(),
            )
            actions = self._actions
            self._actions = []
            closing = self._closing
        for action in actions:
            action()
        return not closing

    def _has_work(self) -> bool:
        """Return whether a step is due: a call is not paused, or a deadline has passed."""
        return not all(call.is_paused for call in self._calls) or self._seconds_to_deadline() == 0.0

    def _seconds_to_deadline(self) -> float | None:
        """Return the seconds, at least 0, until the next deadline of a paused call.

        ``None`` without one.
        """
        requests = [
            request for call in self._calls if call.is_paused for request in call.requests.values()
        ]
        deadlines = [
            each.deadline for each in requests if each.deadline is not None and not each.ended
        ]
        return max(0.0, min(deadlines) - self.engine.runner.clock()) if deadlines else None

    def _set_paused(self, call: PendingRequests, *, paused: bool) -> None:
        call.is_paused = paused
        for request in call.requests.values():
            request.paused = paused

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:  # noqa: BLE001 - fails all requests; the thread serves later ones
            for call in [*self._calls]:
                self._remove(call, error)
            return
        for call in [*self._calls]:
            try:
                self._deliver(call)
            except Exception as error:  # noqa: BLE001 - fails this call only
                self._remove(call, error)

    def _add(self, call: PendingRequests) -> None:
        self._calls.append(call)
        try:
            for request in call.requests.values():
                self.engine.add(request)
        except Exception as error:  # noqa: BLE001 - fails this call only
            self._remove(call, error)

    def _deliver(self, call: PendingRequests) -> None:
        """Put a call's new tokens into its queue.

        If the call has ended or failed, also put ``None`` or the error, and remove the call.
        """
        pieces = list[Piece]()
        requests = call.requests
        with self.engine.lock:
            results = [request.result for request in requests.values()]
            error = next((result.error for result in results if result.error is not None), None)
            ended = all(request.ended for request in requests.values())
            for index, request in requests.items():
                while request.result.undelivered:
                    token = request.result.undelivered.popleft()
                    last = (
                        request.result.finish_reason is not None and not request.result.undelivered
                    )
                    pieces.append(Piece.of(token, index, request, last=last))
        if pieces and error is None:
            call.num_put += len(pieces)
            call.put(pieces)
        if not ended and call.num_unread > call.max_unread:
            self._set_paused(call, paused=True)
            # The caller may have read the tokens meanwhile without seeing the pause, so it would
            # not resume.
            if call.num_unread <= call.max_unread // 2:
                self._set_paused(call, paused=False)
        if ended or error is not None:
            self._remove(call, error)
            if error is None:
                call.put(None)

    def _remove(self, call: PendingRequests, error: BaseException | None = None) -> None:
        """Abort the requests of a call and remove the call; without effect on a removed call."""
        for request in call.requests.values():
            self.engine.abort(request)
        if call in self._calls:
            self._calls.remove(call)
            if error is not None:
                call.put(error)
