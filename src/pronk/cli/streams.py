"""Standard streams of the process: closed from the beginning, full, or without a reader.

Standard output has the result of a command, so an error of it ends the command. Standard error has
progress and notes besides the result, so an error of it changes nothing.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast


class WatchedOutput:
    """Standard output that remembers its first error, so that it is not mistaken for one of another file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write a text."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """Write the texts that are still in the buffer."""
        try:
            self._stream.flush()
        except OSError as error:
            self.error = self.error or error
            raise

    def finish(self) -> OSError | None:
        """Flush the stream.

        Return its first error, after which the rest of the output is discarded.
        """
        with suppress(OSError):
            self.flush()
        if self.error is not None:
            _discard(self._stream)
        return self.error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Notes:
    """Standard error, of which the rest is discarded after its first error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text."""
        try:
            return self._stream.write(text)
        except OSError:
            _discard(self._stream)
            return len(text)

    def flush(self) -> None:
        """Write the texts that are still in the buffer."""
        try:
            self._stream.flush()
        except OSError:
            _discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _discard(stream: TextIO) -> None:
    """Let the file descriptor of a stream write to nowhere, with what is in its buffer.

    Otherwise the interpreter would try to write the buffer when it ends, and print a traceback or
    fail.
    """
    with suppress(OSError):  # no file descriptor: not the stream of a process
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def watch_streams() -> Iterator[WatchedOutput]:
    """Replace standard output by a :class:`WatchedOutput`, and standard error by :class:`Notes`.

    They are restored after the block. A stream that was closed when the process began (``>&-``) is
    replaced by the null device: what is written is discarded, and standard input is empty.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open until the end
    stdout = sys.stdout
    stderr = sys.stderr
    output = WatchedOutput(stdout)
    sys.stdout = cast("TextIO", output)
    sys.stderr = cast("TextIO", Notes(stderr))
    try:
        yield output
    finally:
        sys.stderr.flush()
        sys.stdout = stdout
        sys.stderr = stderr
