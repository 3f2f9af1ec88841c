"""Files and folders that are whole or not there, whenever the process dies and however full the disk is.

:func:`replace_file`, :func:`replace_folder` and :func:`new_folder` raise what goes wrong as it is. A command that is
told where to write says it in one line with :func:`writing`, as :func:`write_json` and :func:`write_tokens` do.
"""

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

__all__ = ["new_folder", "replace_file", "replace_folder", "write_json", "write_tokens", "writing"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replace_file(path: Path, *, shared: bool = False) -> Iterator[BinaryIO]:
    """A file to write into, which takes the place of ``path`` when the disk has all of it; else nothing has changed.

    Args:
        path: a file, or a name that is free.
        shared: other processes may replace it at the same time. What a process that dies leaves unfinished stays then;
            else the next one writes over it.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial" if shared else f"{path.name}.partial")
    try:
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
def replace_folder(folder: Path) -> Iterator[Path]:
    """The same for a folder: one to write into, which takes the place of ``folder``, if there is one.

    Two names cannot change at once: a process that dies between the old folder's and the new one's leaves the old one
    as ``NAME.old``, which the next call puts back.
    """
    old = folder.with_name(f"{folder.name}.old")
    _put_back(old, folder)
    try:
        with _unfinished(folder) as partial:
            yield partial
            _sync(partial)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
    except BaseException:
        _put_back(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """The same where there is no folder yet, or an empty one; what else has come into it by then is an error."""
    with _unfinished(folder) as partial:
        yield partial
        _sync(partial)
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """An empty folder beside ``folder``, which is not there any more in the end."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_back(old: Path, folder: Path) -> None:
    if old.exists() and not folder.exists():
        old.rename(folder)


def _sync(folder: Path) -> None:
    """Wait until the disk has the files of ``folder``, and of the folders in it."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


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
        return f"{words}; choose a folder that can be written"
    return f"{words}; make room and give the same command again"


def write_json(path: Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    """Replace ``path`` by a JSON document; ``indent`` spaces a level are for people to read.

    Raises:
        CheckpointError: it cannot be written; see :func:`writing`.
    """
    with writing(path, "JSON"), replace_file(path) as file:
        file.write((json.dumps(value, indent=indent) + "\n").encode())


def write_tokens(path: Path, tokens: np.ndarray[Any, np.dtype[Any]]) -> None:
    """The same for token ids. NumPy's own ``tofile`` does not notice when the disk refuses the last of them."""
    with writing(path, "token ids"), replace_file(path) as file:
        file.write(tokens.data)
