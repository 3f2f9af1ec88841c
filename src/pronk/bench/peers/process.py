"""Start a worker process and exchange JSON lines with it: one line per request, one per answer."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import weakref
from typing import IO, Any

from pronk.errors import PronkError

__all__ = ["PeerError", "WorkerProcess"]

# Number of bytes to read from the end of the worker's standard error, for the reason of its death.
_TAIL_BYTES = 4096


class PeerError(PronkError):
    """Failure of a peer (not installed, not supported, or died); the message is one line."""


class WorkerProcess:
    """A worker process, which dies with :meth:`close` or with the garbage collection of this object.

    Args:
        name: name of the peer for error messages.
        command: program and its arguments.
        threads: number of OpenMP threads.
    """

    def __init__(self, name: str, command: list[str], threads: int) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=_environment(threads),
                # Ctrl-C then reaches the parent only, which closes its workers.
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            msg = f"{name}: cannot start {command[0]}: {error.strerror}"
            raise PeerError(msg) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lines: queue.Queue[bytes] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(self._process.stdout, self._lines), daemon=True)
        reader.start()
        self._finalizer = weakref.finalize(self, _kill, self._process, reader, self._log)

    @property
    def alive(self) -> bool:
        """Whether the worker accepts requests."""
        return self._finalizer.alive

    def ask(self, op: str, arguments: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Args:
            op: name of the operation.
            arguments: arguments of the operation, as JSON values.
            timeout: maximum seconds to wait for the answer.

        Raises:
            PeerError: the worker reports an error, dies, answers something else than JSON, or times out. It stays
                usable if it reports an error itself; in all other cases it is closed.
        """
        if not self._finalizer.alive:
            msg = f"{self.name}: the worker is closed"
            raise PeerError(msg)
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead worker is detected when its answer is read
            stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            stdin.flush()
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self.close()
            msg = f"{self.name}: no answer to {op} within {timeout:g} s"
            raise PeerError(msg) from None
        return self._parse_answer(op, line)

    def close(self) -> None:
        """Kill the worker, wait for its end, and free its log; a second call does nothing."""
        self._finalizer()

    def _parse_answer(self, op: str, line: bytes) -> dict[str, Any]:
        if not line:
            msg = f"{self.name}: the worker died during {op}: {self._describe_death()}"
            self.close()
            raise PeerError(msg)
        answer = None
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
        if isinstance(answer, dict) and isinstance(answer.get("ok"), dict):
            return dict(answer["ok"])
        if not isinstance(answer, dict) or not isinstance(answer.get("error"), str):
            self.close()
            msg = f"{self.name}: expected a JSON answer to {op}, found {line[:60]!r}"
            raise PeerError(msg)
        missing = answer.get("missing")
        reason = f"{missing} is not installed: pip install 'pronk[peers]'" if missing else answer["error"]
        msg = f"{self.name}: {reason}"
        raise PeerError(msg)

    def _describe_death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        cause = f"exit status {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                cause = signal.Signals(-code).name
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{cause}, {lines[-1].strip()[:200]}" if lines else cause


def _environment(threads: int) -> dict[str, str]:
    """Return the worker's environment: offline, and without this process's paths to Python packages."""
    # The model is local, so libraries must not wait for the network.
    overrides = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return inherited | overrides | {"OMP_NUM_THREADS": str(threads), "PYTHONIOENCODING": "utf-8"}


def _read_lines(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Put each line into a queue, then ``b""`` at the end; a queue, unlike a pipe, has a timeout."""
    with contextlib.suppress(ValueError):  # the stream was closed during the loop
        for line in stream:
            lines.put(line)
    lines.put(b"")


def _kill(process: subprocess.Popen[bytes], reader: threading.Thread, log: IO[bytes]) -> None:
    """Kill the worker and its child processes, wait for its end, and close its streams and its log."""
    # Without a return code the process has not been waited for, so its id belongs to no other process yet.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
    process.wait()
    reader.join(timeout=5)
    for stream in (process.stdin, process.stdout, log):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
