"""Standard output of the process: closed from the beginning, full, or without a reader."""

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
        """Flush the stream; return its first error, after which the rest of the output is discarded.

        Otherwise the interpreter would try to write the rest when it ends, and print a traceback.
        """
        with suppress(OSError):
            self.flush()
        if self.error is not None:
            with suppress(OSError):  # no file descriptor: not the standard output of a process
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
        return self.error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def watch_output() -> Iterator[WatchedOutput]:
    """Replace standard output by a :class:`WatchedOutput` during the block.

    What is written to streams that were closed when the process began (``>&-``) is discarded.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until the end
    stream = sys.stdout
    output = WatchedOutput(stream)
    sys.stdout = cast("TextIO", output)
    try:
        yield output
    finally:
        sys.stdout = stream
