"""Kinds of files that can be read to an end, and replaced: regular files, and for reading open pipes.

Opening a named pipe may wait for ever, and ``/dev/zero`` has no end.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

# of an input without a known size: standard input, an open pipe, a line of a file
MAX_STREAM_BYTES = 2**28

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(path: Path) -> None:
    """Raise an OSError if ``path`` is a device, pipe or socket.

    Its ``strerror`` says what it is.
    """
    with suppress(FileNotFoundError):
        _check_kind(path, path.stat().st_mode)


def is_file(path: Path) -> bool:
    """Return whether a path leads to a regular file; False for names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Return whether a path leads to a folder; False for names that no folder can have."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def open_input(path: Path) -> BinaryIO:
    """Open a regular file for reading, or a pipe that this process holds, as in ``<(…)`` of a shell.

    Raises an OSError if the file cannot be opened or is of another kind.
    """
    state = path.stat()
    if not (stat.S_ISFIFO(state.st_mode) and _is_held(state)):
        _check_kind(path, state.st_mode)
    return path.open("rb")


def read_input(path: Path, max_bytes: int = -1) -> bytes:
    """Return the content of a file, or its first ``max_bytes`` (-1: no limit).

    The errors are those of :func:`open_input`.
    """
    with open_input(path) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file.read(max_bytes)
        data = read_stream(file)
        return data if max_bytes < 0 else data[:max_bytes]


def read_stream(stream: BinaryIO) -> bytes:
    """Return all bytes of a stream; raise an OSError if they are more than ``MAX_STREAM_BYTES``."""
    data = stream.read(MAX_STREAM_BYTES + 1)
    if len(data) > MAX_STREAM_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_STREAM_BYTES >> 20} MiB")
    return data


def _check_kind(path: Path, mode: int) -> None:
    for is_kind, kind in _KINDS:
        if is_kind(mode):
            raise OSError(errno.EINVAL, f"{kind} instead of a regular file", str(path))


def _is_held(state: os.stat_result) -> bool:
    """Return whether a file descriptor of this process belongs to the file with this state."""
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(OSError):  # that of the listing itself is closed
            if os.path.samestat(os.fstat(int(descriptor.name)), state):
                return True
    return False
