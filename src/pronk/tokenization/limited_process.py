"""A child process that answers requests about an untrusted file within limits of time and memory.

Chat templates and tokenizers come with a model. Both are programs in effect: ``'x' * 10**10`` in a template or a
regular expression with nested repetitions in a tokenizer is a single operation, which no thread can interrupt, and
which may exhaust the memory. A process can be killed at any point.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from pronk.errors import TokenizerError, refuse


class LimitedProcess:
    """A child process that is started on demand and answers one request at a time, for any thread.

    Args:
        program: file with a function ``answer`` from the bytes of a request to those of the reply; both are one line.
            It imports nothing of pronk.
        purpose: beginning of the message if the process does not start.
        needs: package that the program imports, for the same message.
        seconds: limit of the time of a request.
        memory: maximum size of the child's address space in bytes, enforced on Linux only; elsewhere, only the time
            bounds the memory.
    """

    def __init__(self, program: Path, *, purpose: str, needs: str, seconds: float, memory: int) -> None:
        self._program = program
        self._purpose = purpose
        self._needs = needs
        self._limits = (str(seconds), str(memory))
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        _processes.add(self)

    def ask(self, request: bytes) -> bytes:
        """Return the reply to a request, both without a line break; empty if the process ended at a limit.

        Raises:
            TokenizerError: the process does not start.
        """
        with self._lock:
            child = self._child
            if child is None or child.poll() is not None:
                child = self._start()
            assert child.stdin is not None
            assert child.stdout is not None
            reply = b""
            with suppress(OSError):  # the process has ended
                child.stdin.write(request + b"\n")
                child.stdin.flush()
                reply = child.stdout.readline()
            if not reply:
                self._stop()
        return reply.removesuffix(b"\n")

    def close(self) -> None:
        """End the process; the next request starts another one."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """Leave the process to another process: in a fork of that one, which cannot share the pipes."""
        self._lock = threading.Lock()
        self._child = None

    def __del__(self) -> None:
        self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        self._stop()
        loop = Path(__file__).with_name("_limited_child.py")
        self._child = child = subprocess.Popen(  # noqa: S603 - our own file, by our own interpreter
            [sys.executable, "-P", str(loop), str(self._program), *self._limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert child.stdout is not None
        if not child.stdout.readline():  # the line "ready", or nothing if the process has ended
            problem = (
                f"expected the child process {sys.executable} {self._program.name} to start, found that it ended "
                f"with code {child.wait()}; check that this Python has {self._needs}"
            )
            refuse(self._purpose, problem, TokenizerError)
        return child

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


_processes = WeakSet[LimitedProcess]()


def _close_all() -> None:
    for process in [*_processes]:
        process.close()


def _forget_all() -> None:
    for process in [*_processes]:
        process.forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
