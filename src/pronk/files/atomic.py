"""Files that are whole or not there, whenever the process dies and however full the disk is."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pronk.errors import CheckpointError, PronkError

__all__ = ["replace_file", "replace_folder", "write_json", "write_tokens", "writing"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path, what: str, *also: type[Exception]) -> Iterator[None]:
    """Say in one line what keeps ``path`` from being written.

    Args:
        path: what is written inside the block.
        what: in words.
        also: errors besides ``OSError`` by which a library says that a file refuses its bytes.

    Raises:
        CheckpointError: in place of those.
    """
    refused: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except PronkError:
        raise
    except refused as error:
        msg = f"{path}: expected to write {what}, found {_reason(error)}"
        raise CheckpointError(msg) from error


def _reason(error: Exception) -> str:
    """What went wrong, and what to do about it."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else (str(error).splitlines() or ["?"])[0]
    if isinstance(error, OSError) and error.errno not in (*_FULL, None):
        return f"{words}; choose an --out folder that can be written"
    return f"{words}; make room and give the same command again"


@contextmanager
def replace_file(path: Path, what: str, *also: type[Exception]) -> Iterator[BinaryIO]:
    """A file to write into, which takes the place of ``path`` when all is written; else nothing has changed.

    Raises:
        CheckpointError: see :func:`writing`.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with writing(path, what, *also):
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


@contextmanager
def replace_folder(folder: Path, what: str, *also: type[Exception]) -> Iterator[Path]:
    """The same for a folder: one to write into, which takes the place of ``folder``, if there is one.

    Two names cannot change at once: a process that dies between the old folder's and the new one's leaves the old one
    as ``NAME.old``, which the next call puts back.
    """
    partial, old = (folder.with_name(f"{folder.name}.{each}") for each in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    _put_back(old, folder)
    try:
        with writing(folder, what, *also):
            partial.mkdir(parents=True)
            yield partial
            _sync(partial)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
    except BaseException:
        _put_back(old, folder)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _put_back(old: Path, folder: Path) -> None:
    if old.exists() and not folder.exists():
        old.rename(folder)


def _sync(folder: Path) -> None:
    """Wait until the disk has the files of ``folder``."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def write_json(path: Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    """Replace ``path``; see :func:`replace_file`."""
    with replace_file(path, "JSON") as file:
        file.write((json.dumps(value, indent=indent) + "\n").encode())


def write_tokens(path: Path, tokens: np.ndarray[Any, np.dtype[Any]]) -> None:
    """The same for token ids. NumPy's own ``tofile`` does not notice when the disk refuses the last of them."""
    with replace_file(path, "token ids") as file:
        file.write(tokens.data)
