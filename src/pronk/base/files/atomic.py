"""Atomic writes: after a crash or on a full disk, a file or folder is complete or unchanged.

If a write fails, :func:`replace_file`, :func:`replace_folder` and :func:`new_folder` raise the
system's error. :func:`write_text`, :func:`write_json` and :func:`write_tokens` raise a
CheckpointError, whose message is one line.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pronk.base.errors import CheckpointError, PronkError, describe_reason, refuse
from pronk.base.files.regular import check_regular


@contextmanager
def replace_file(path: Path, *, shared: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file, and rename it to ``path`` after the block.

    If the block raises, the temporary file is removed, and the file at ``path`` is unchanged. The
    new file has the permissions of the old one.

    Args:
        path: the file to replace. If it is a link, the file that it points to is replaced.
        shared: whether several processes or threads may replace the file at the same time. The name
            of the temporary file is random then, so that the temporary file of a killed process
            stays for ever. Otherwise the next call overwrites it.

    Raises:
        OSError: ``path`` is a device or a pipe, or the file cannot be written.
    """
    check_regular(path)
    path = path.resolve()
    if shared:
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    else:
        partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("xb" if shared else "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.is_file():
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder; after the block, replace ``folder`` by it.

    If the block raises, ``folder`` is unchanged. The old folder is first renamed to ``NAME.old``,
    and deleted at the end. If the process dies between the two renames, the next call renames the
    old folder back.
    """
    old = folder.with_name(f"{folder.name}.old")
    _restore(old, folder)
    try:
        with _partial_folder(folder) as partial:
            yield partial
            _fsync_files(partial)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
    except BaseException:
        _restore(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder; after the block, rename it to ``folder``.

    ``folder`` must be missing or empty. If the block raises, it stays so.
    """
    with _partial_folder(folder) as partial:
        yield partial
        _fsync_files(partial)
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)


@contextmanager
def _partial_folder(folder: Path) -> Iterator[Path]:
    """Create the temporary folder ``NAME.partial``; remove it at the end unless it was renamed."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _restore(old: Path, folder: Path) -> None:
    """Rename ``old``, the previous version of a folder, to ``folder`` if ``folder`` is missing."""
    if old.exists() and not folder.exists():
        old.rename(folder)


def _fsync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def convert_write_errors(path: Path, content: str, *error_types: type[Exception]) -> Iterator[None]:
    """Convert write errors of the block to a CheckpointError, whose message begins with ``path``.

    Args:
        path: the file or folder that the block writes.
        content: noun phrase for the message, such as ``the datastore``.
        *error_types: classes of exceptions that count as write errors, besides ``OSError``.
    """
    write_errors: tuple[type[Exception], ...] = (OSError, *error_types)
    try:
        yield
    except PronkError:  # already has a message for the user
        raise
    except write_errors as error:
        problem = f"expected to write {content}, found {_describe(error)}"
        refuse(path, problem, CheckpointError, error)


def _describe(error: Exception) -> str:
    """Return the reason of a write error and a remedy."""
    make_room = "make room and give the same command again"
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, None)
        remedy = make_room if is_full else "choose a writable folder"
        return f"{describe_reason(error)}; {remedy}"
    lines = str(error).splitlines()
    reason = lines[0] if lines else ""
    return f"{reason or describe_reason(error)}; {make_room}"


def write_text(path: Path, text: str, content: str = "a text") -> None:
    """Replace the file ``path`` by a text in UTF-8; raise a CheckpointError on failure.

    ``content`` describes the text in the message, as in :func:`convert_write_errors`.
    """
    with convert_write_errors(path, content), replace_file(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    """Replace the file ``path`` by a JSON document; raise a CheckpointError on failure."""
    with convert_write_errors(path, "JSON"), replace_file(path) as file:
        file.write((json.dumps(value, indent=indent) + "\n").encode())


def write_tokens(path: Path, tokens: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Replace the file ``path`` by the bytes of an array of token ids.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with convert_write_errors(path, "token ids"), replace_file(path) as file:
        file.write(tokens.data)  # NumPy's ``tofile`` does not notice a full disk
