"""Rendering of chat templates in a child process with limits of time and memory.

Jinja's sandbox keeps a template from files and from Python's internals, but not from running forever:
``'x' * 10**10`` is a single operation, which no thread can interrupt. A process can be killed at any point. One child
process renders all templates of this process, because starting it takes longer (0.1 s) than rendering (1 ms).
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronk.errors import TokenizerError

__all__ = ["Renderer", "default_renderer"]


class Renderer:
    """Compiles and renders chat templates in a child process that is started on demand.

    Threads may share a renderer; their requests are served one after another.

    Args:
        seconds: time limit of one request. A usual prompt takes 1 ms; a prompt of a million tokens takes 1 s.
        memory: maximum size of the child's address space in bytes, enforced on Linux only. Elsewhere, only the time
            limit bounds the memory.
    """

    def __init__(self, seconds: float = 10.0, memory: int = 2**30) -> None:
        self._seconds, self._memory = seconds, memory
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def ask(self, source: str, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Compile a template and, if ``values`` are given, render it.

        Args:
            source: template in Jinja.
            values: variables of the template; nested JSON values.

        Returns:
            Dictionary with ``text`` and ``loops_over_content`` (whether the template handles content parts), or with
            ``error`` (one line), or with ``over_limit`` (limit of time, memory or text length exceeded).

        Raises:
            TokenizerError: the child process does not start.
            TypeError, ValueError, RecursionError: ``values`` is not JSON.
        """
        request = {"source": source} if values is None else {"source": source, "values": values}
        line = json.dumps(request, ensure_ascii=False, default=_to_dict).encode("utf-8", "surrogatepass")
        with self._lock:
            child = self._child
            if child is None or child.poll() is not None:
                child = self._start()
            reply = _exchange(child, line)
            if not reply:
                self._stop()
                return {"over_limit": True}
        result: dict[str, Any] = json.loads(reply.decode("utf-8", "surrogatepass"))
        return result

    def close(self) -> None:
        """End the child process; the next request starts another one."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        self._stop()
        program = Path(__file__).with_name("_child.py")
        self._child = child = subprocess.Popen(  # noqa: S603 - our own file, by our own interpreter
            [sys.executable, "-P", str(program), str(self._seconds), str(self._memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert child.stdout is not None
        if not child.stdout.readline():  # the line "ready", or nothing if the process has ended
            msg = (
                f"chat template: expected the child process {sys.executable} {program.name} to start, found that it "
                f"ended with code {child.wait()}; check that this Python has jinja2"
            )
            raise TokenizerError(msg)
        return child

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _forget(self) -> None:
        """Forget the child process in a fork of this process: two processes cannot share the child's pipes."""
        self._lock, self._child = threading.Lock(), None


def _exchange(child: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Send a request to the child process; return the reply, or ``b""`` if the process has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line + b"\n")
        child.stdin.flush()
        return child.stdout.readline()
    except OSError:
        return b""


def _to_dict(value: object) -> dict[Any, Any]:
    """Convert a mapping to ``dict`` for ``json.dumps``; raise a ``TypeError`` for any other value."""
    if not isinstance(value, Mapping):
        raise TypeError(type(value).__name__)
    return dict(value)


default_renderer = Renderer()
