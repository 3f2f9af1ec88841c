"""Start the worker process of a peer (another engine) and exchange JSON lines with it.

Each request and each answer is one line; worker.py describes their contents.
"""

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

# Number of bytes read from the end of an ended worker's log (its standard error), which may hold the reason.
_LOG_TAIL_BYTES = 4096


class PeerError(PronkError):
    """Failure of a peer: not installed, not supported, or ended. The message is one line."""


class WorkerProcess:
    """A worker process. It is killed by :meth:`close`, or when this object is garbage-collected.

    Args:
        name: name of the peer for error messages.
        command: program and its arguments.
        threads: number of OpenMP threads.
    """

    def __init__(self, name: str, command: list[str], threads: int) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - no shell, no words of a request
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=_environment(threads),
                # Ctrl-C then interrupts only this process, which closes its workers.
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
    def is_open(self) -> bool:
        """Whether the worker accepts requests: it was not closed, by :meth:`close` or after a failure."""
        return self._finalizer.alive

    def ask(self, op: str, arguments: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Args:
            op: name of the operation.
            arguments: arguments of the operation, as JSON values.
            timeout: maximum seconds to wait for the answer.

        Raises:
            PeerError: the worker reports an error, ends, times out, or its answer is not valid. A worker that
                reports an error itself stays open; in all other cases it is closed.
        """
        if not self.is_open:
            msg = f"{self.name}: the worker is closed"
            raise PeerError(msg)
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading the answer detects that the worker has ended
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
        """Return the result in an answer to ``op``; an empty line means that the worker has ended."""
        if not line:
            msg = f"{self.name}: the worker died during {op}: {self._describe_end()}"
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

    def _describe_end(self) -> str:
        """Return the exit status or signal of the ended worker, and the last line of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        cause = f"exit status {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                cause = signal.Signals(-code).name
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _LOG_TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{cause}, {lines[-1].strip()[:200]}" if lines else cause


def _environment(threads: int) -> dict[str, str]:
    """Return the worker's environment: offline, and without the Python paths of this interpreter."""
    # The model is local: libraries must not look for it in the network.
    overrides = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return inherited | overrides | {"OMP_NUM_THREADS": str(threads), "PYTHONIOENCODING": "utf-8"}


def _read_lines(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Put each line of ``stream`` into ``lines``, then ``b""`` at its end.

    Runs in its own thread: reading from a pipe has no timeout, reading from a queue has one.
    """
    with contextlib.suppress(ValueError):  # raised if _kill closes the stream during the loop
        for line in stream:
            lines.put(line)
    lines.put(b"")


def _kill(process: subprocess.Popen[bytes], reader: threading.Thread, log: IO[bytes]) -> None:
    """Kill the worker and its child processes, wait for its end, and close its streams and its log."""
    # While ``returncode`` is None nothing has waited for the process, so the system cannot have reused its id.
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
