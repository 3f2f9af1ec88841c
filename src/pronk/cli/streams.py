"""Standard streams of the process that are closed, full, or without a reader.

The result of a command goes to standard output, so an error of this stream ends the command.
Progress and notes go to standard error, so an error of that stream changes nothing.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast


class WatchedOutput:
    """Standard output that keeps its first error.

    The error is thus not mistaken for an error of another file.
    """

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
        """Flush the stream and return its first error, or ``None``.

        After an error, the rest of the output is discarded.
        """
        with suppress(OSError):
            self.flush()
        if self.error is not None:
            _discard(self._stream)
        return self.error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Notes:
    """Standard error that discards all output after its first error."""

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
    """Redirect a stream, its buffered output included, to the null device.

    Otherwise the interpreter would try to write the buffer when it ends, and print a traceback or
    fail.
    """
    with suppress(OSError):  # raised for a stream without a file descriptor, as in tests
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def watch_streams() -> Iterator[WatchedOutput]:
    """Replace standard output by a :class:`WatchedOutput`, and standard error by :class:`Notes`.

    Both are restored after the block. The null device replaces a stream that was closed when the
    process began (``>&-``): output is discarded, and standard input is empty.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - open until exit
            setattr(sys, name, null)
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
