"""A child process that answers requests about an untrusted file within limits of time and memory.

Chat templates and tokenizers come with a model, and both are programs in effect. ``'x' * 10**10``
in a template, or a regular expression with nested repetitions in a tokenizer, is a single operation
that no thread can interrupt and that may exhaust the memory. A process can be killed at any point.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from pronk.base.errors import ClosedError, TokenizerError, refuse

# Maximum seconds of a request, waiting included. On a busy machine, the processor time of a request
# may take long to come.
_WAIT = 60.0
# Number of child processes that a request tries: another one, if the first was ended from outside.
_TRIES = 2
# Return codes (``Popen.returncode``) with which a child process ends at a limit: ``_WAIT`` or a
# MemoryError (1), memory that native code cannot allocate (SIGABRT), a full stack (SIGSEGV),
# processor time (SIGPROF).
_AT_LIMIT = {1, -6, -11, -27}


class ChildReply(NamedTuple):
    """Reply of a child process to a request.

    Attributes:
        line: the reply, without a line break.
        seconds: processor time that the request took.
    """

    line: bytes
    seconds: float


class LimitedProcess:
    """A child process that is started on demand and answers one request at a time, for any thread.

    A pickled copy has a child process of its own.

    Args:
        program: Python file with a function ``answer``, which takes the bytes of a request and
            returns those of the reply; both are one line. The program imports nothing of pronk.
        purpose: name of the process in error messages.
        needs: package that the program imports, for the message if the process does not start.
        seconds: limit of the processor time of a request.
        memory: maximum size of the child's address space in bytes. Only Linux enforces this limit;
            on other systems, the limit of time bounds the memory.
        setup: first request to each new child process; its reply is dropped. Empty for none.
    """

    _child: subprocess.Popen[bytes] | None = None

    def __init__(
        self,
        program: Path,
        *,
        purpose: str,
        needs: str,
        seconds: float,
        memory: int,
        setup: bytes = b"",
    ) -> None:
        self._program = program
        self._purpose = purpose
        self._needs = needs
        self._seconds = seconds
        self._memory = memory
        self._setup = setup
        self._lock = threading.Lock()
        self._numbers = count()
        self._num_stops = 0  # number of calls of :meth:`stop` so far
        _processes.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        create = partial(
            LimitedProcess,
            purpose=self._purpose,
            needs=self._needs,
            seconds=self._seconds,
            memory=self._memory,
            setup=self._setup,
        )
        return create, (self._program,)

    def ask(self, request: bytes, seconds: float | None = None) -> ChildReply | None:
        """Return the reply to a request, or ``None`` if the process ended at a limit.

        Args:
            request: one line, without a line break.
            seconds: limit of the processor time, in place of that of the constructor.

        Raises:
            ClosedError: :meth:`stop` was called meanwhile.
            TokenizerError: the process does not start, exceeds a limit in its setup, or was ended
                from outside.
        """
        num_stops = self._num_stops
        limit = self._seconds if seconds is None else seconds
        with self._lock:
            try:
                return self._ask(request, limit, num_stops)
            except BaseException:
                # end the process: otherwise the next request would get the reply to this one
                self._end()
                raise

    def stop(self) -> None:
        """End the process at once, from any thread; requests in progress fail with a ClosedError.

        The next request starts another process.
        """
        self._num_stops += 1
        child = self._child
        if child is not None:
            child.kill()
        # If a request is in progress, its thread holds the lock, and ends its request because the
        # process has ended.
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the process after the request in progress; the next request starts another one."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Drop the child process without ending it, for use after a fork.

        There, the child process still belongs to the original process.
        """
        self._lock = threading.Lock()
        self._child = None

    def __del__(self) -> None:
        self._end()

    def _ask(self, request: bytes, seconds: float, num_stops: int) -> ChildReply | None:
        """Return the reply to a request; start a child process if there is none.

        ``num_stops`` is the number of calls of :meth:`stop` before the request. If it has
        increased, the request fails with a ClosedError.
        """
        for _ in range(_TRIES):
            is_set_up = self._child is not None and self._child.poll() is None
            if not is_set_up:
                self._end()
                self._child = self._start()
                self._check_stops(num_stops)
                is_set_up = (
                    not self._setup or self._exchange(self._setup, self._seconds) is not None
                )
            self._check_stops(num_stops)
            reply = self._exchange(request, seconds) if is_set_up else None
            self._check_stops(num_stops)
            if reply is not None:
                return reply
            code = self._end()
            if code in _AT_LIMIT and is_set_up:
                return None
            if code in _AT_LIMIT:
                problem = (
                    "expected one that needs little time and memory, found one that exceeds a limit"
                )
                refuse(self._purpose, f"{problem} as it is loaded", TokenizerError)
        msg = (
            f"{self._purpose}: expected the child process to answer, found that it was ended with "
            f"code {code}; check that no other program ends it"
        )
        raise TokenizerError(msg)

    def _check_stops(self, num_stops: int) -> None:
        if self._num_stops != num_stops:
            msg = f"{self._purpose}: the model is closing"
            raise ClosedError(msg)

    def _exchange(self, request: bytes, seconds: float) -> ChildReply | None:
        """Send a request and return the reply; ``None`` if the child process has ended.

        A line that is no reply to this request counts as the end of the child process, too.
        """
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        number = b"%d" % next(self._numbers)
        line = b""
        with suppress(OSError):  # an OSError means that the process has ended
            child.stdin.write(b"%b %b %b\n" % (number, str(seconds).encode(), request))
            child.stdin.flush()
            line = child.stdout.readline()
        if not line.startswith(number + b" ") or not line.endswith(b"\n"):
            return None
        _, taken, reply = line.split(b" ", 2)
        return ChildReply(reply.removesuffix(b"\n"), float(taken))

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a child process, and return it once it is ready for requests."""
        loop = Path(__file__).with_name("_limited_child.py")
        limits = (str(_WAIT), str(self._memory))
        child = subprocess.Popen(  # noqa: S603 - our own file, by our own interpreter
            [sys.executable, "-P", str(loop), str(self._program), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert child.stdout is not None
            is_ready = child.stdout.readline() == b"ready\n"
        except BaseException:
            _kill(child)
            raise
        if not is_ready:
            code = _kill(child)
            problem = (
                f"expected the child process {sys.executable} {self._program.name} to start, found "
                f"that it ended with code {code}; check that this Python has {self._needs}"
            )
            refuse(self._purpose, problem, TokenizerError)
        return child

    def _end(self) -> int | None:
        """End the child process, and return its exit code; ``None`` if there is no process."""
        child = self._child
        self._child = None
        return None if child is None else _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> int:
    """End a child process, unless it has ended by itself, and return its exit code."""
    child.kill()
    child.communicate()
    return child.returncode


_processes = WeakSet[LimitedProcess]()


def _stop_all() -> None:
    for process in [*_processes]:
        process.stop()


def _forget_all() -> None:
    for process in [*_processes]:
        process.forget()


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
