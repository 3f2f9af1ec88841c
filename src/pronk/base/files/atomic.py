"""Atomic writes: after a crash or on a full disk, a file or folder is complete or unchanged.

If a write fails, :func:`replace_file`, :func:`replace_folder` and :func:`new_folder` let the error
propagate; :func:`write_json` and :func:`write_tokens` turn the error into a CheckpointError with a
message of one line.
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
    """Open a temporary file, and rename it to ``path`` after the block unless the block raises.

    If ``path`` is a link, the file that it points to is replaced; a device or a pipe raises an
    OSError. A file keeps its permissions. If ``shared``, several processes or threads may replace
    the file at the same time: the name of the temporary file is random, and the file of a killed
    process is never removed. Otherwise the next call overwrites that file.
    """
    check_regular(path)
    path = path.resolve()
    partial = path.with_name(
        f"{path.name}.{secrets.token_hex(8)}.partial" if shared else f"{path.name}.partial"
    )
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
    """Create a temporary folder, and rename it to ``folder`` after the block.

    The old folder is deleted.

    If the block raises, ``folder`` is unchanged. The old folder is first renamed to ``NAME.old``;
    if the process dies before the second rename, the next call renames the old folder back.
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
    """Create a temporary folder.

    After the block rename it to ``folder``, which must be absent or empty.
    """
    with _partial_folder(folder) as partial:
        yield partial
        _fsync_files(partial)
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)


@contextmanager
def _partial_folder(folder: Path) -> Iterator[Path]:
    """Create the temporary folder ``NAME.partial``.

    Remove it at the end unless the caller renamed it.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _restore(old: Path, folder: Path) -> None:
    """If ``folder`` is missing, rename ``old``, its previous version, to ``folder``."""
    if old.exists() and not folder.exists():
        old.rename(folder)


def _fsync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def convert_write_errors(path: Path, content: str, *error_types: type[Exception]) -> Iterator[None]:
    """Turn write errors of the block into a CheckpointError of one line, which begins with ``path``.

    ``content`` is a noun phrase for the message, such as ``the datastore``. ``error_types`` are
    classes of exceptions that count as write errors, besides ``OSError``.
    """
    write_errors: tuple[type[Exception], ...] = (OSError, *error_types)
    try:
        yield
    except PronkError:  # already has a message for the user
        raise
    except write_errors as error:
        refuse(
            path, f"expected to write {content}, found {_describe(error)}", CheckpointError, error
        )


def _describe(error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    problem = (
        describe_reason(error)
        if isinstance(error, OSError)
        else first_line or describe_reason(error)
    )
    if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT, None):
        return f"{problem}; choose a writable folder"
    return f"{problem}; make room and give the same command again"


def write_text(path: Path, text: str, content: str = "a text") -> None:
    """Replace the file ``path`` by a text in UTF-8; raise a CheckpointError if this fails.

    ``content`` describes the text in the message, as in :func:`convert_write_errors`.
    """
    with convert_write_errors(path, content), replace_file(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    """Replace the file ``path`` by a JSON document; raise a CheckpointError if this fails."""
    with convert_write_errors(path, "JSON"), replace_file(path) as file:
        file.write((json.dumps(value, indent=indent) + "\n").encode())


def write_tokens(path: Path, tokens: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Replace the file ``path`` by the bytes of an array of token ids."""
    with convert_write_errors(path, "token ids"), replace_file(path) as file:
        file.write(tokens.data)  # not ``tofile`` of NumPy, which does not notice a full disk
