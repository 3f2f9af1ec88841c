"""Checks of the kind of a file: regular files, and for reading also open pipes, are accepted.

Other kinds are refused, because opening a named pipe may wait for ever, and ``/dev/zero`` has no
end.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

# Maximum number of bytes to read from an input of unknown size: standard input, an open pipe, a
# line of a file.
MAX_STREAM_BYTES = 2**28

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(path: Path) -> None:
    """Raise an OSError if ``path`` is a device, pipe or socket; its ``strerror`` names the kind."""
    with suppress(FileNotFoundError):
        _check_kind(path, path.stat().st_mode)


def is_file(path: Path) -> bool:
    """Return whether ``path`` is a regular file; False for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder; False for a name that no folder can have."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def open_input(path: Path) -> BinaryIO:
    """Open a regular file, or a pipe that this process holds, for reading.

    A shell's ``<(…)`` is a pipe of this kind.

    Raises:
        OSError: the file cannot be opened, or is of another kind.
    """
    state = path.stat()
    if not (stat.S_ISFIFO(state.st_mode) and _is_held(state)):
        _check_kind(path, state.st_mode)
    return path.open("rb")


def read_input(path: Path, max_bytes: int = -1) -> bytes:
    """Return the content of a file, or its first ``max_bytes`` bytes (-1: no limit).

    Raises:
        OSError: as in :func:`open_input` and :func:`read_stream`.
    """
    with open_input(path) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file.read(max_bytes)
        data = read_stream(file)
        return data if max_bytes < 0 else data[:max_bytes]


def read_stream(stream: BinaryIO) -> bytes:
    """Return all bytes of a stream; raise OSError if there are more than ``MAX_STREAM_BYTES``."""
    data = stream.read(MAX_STREAM_BYTES + 1)
    if len(data) > MAX_STREAM_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_STREAM_BYTES >> 20} MiB")
    return data


def _check_kind(path: Path, mode: int) -> None:
    for is_kind, kind in _KINDS:
        if is_kind(mode):
            raise OSError(errno.EINVAL, f"{kind} instead of a regular file", str(path))


def _is_held(state: os.stat_result) -> bool:
    """Return whether this process has an open file descriptor of the file with this state."""
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself is closed already
            if os.path.samestat(os.fstat(int(descriptor.name)), state):
                return True
    return False
