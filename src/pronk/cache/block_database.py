"""Database of the blocks on disk: its tables, its transactions, and its errors.

SQLite rather than LMDB: both are limited by the disk when they write (200 to 300 MB/s), SQLite
reads 3 to 7 GB/s, which is faster than the checksum of a block, and it belongs to Python.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from pronk.base.errors import OptionError, describe_reason

_log = logging.getLogger(__name__)

_NAME = "blocks.sqlite3"
# version of the tables, ``user_version`` of the database; a database of another version is emptied
_FORMAT = 1
_SCHEMA = """
CREATE TABLE blocks (id INTEGER PRIMARY KEY, key BLOB UNIQUE NOT NULL, checksum BLOB NOT NULL, used INTEGER NOT NULL);
CREATE INDEX by_use ON blocks (used);
CREATE TABLE contents (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_WRITE_TIMEOUT = 10.0  # seconds to wait for the lock of another process
_PAGE_BYTES = 1 << 14  # page size of the database: large pages read faster, small ones waste less

# The message of an error may quote a name in the database; Python fails to decode it if it is
# damaged.
DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)


class DatabaseErrors:
    """Errors of the database: the first one of each kind is logged, and a damaged database is deleted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._logged = set[str]()
        self.file = 0  # number of the file (inode) that this process has opened

    @contextmanager
    def caught(self, on_error: Callable[[], None] | None = None) -> Iterator[None]:
        """Catch the errors of SQLite, and a lack of memory, in the ``with`` block.

        Then call ``on_error``.
        """
        try:
            yield
        except (*DATABASE_ERRORS, MemoryError) as error:
            if (kind := str(error)) not in self._logged:
                self._logged.add(kind)
                _log.warning(
                    "prompt cache %s: %s; prompts are computed meanwhile",
                    self._path.parent,
                    kind or "no memory",
                )
            # The next process begins with an empty database, unless another one has replaced the
            # damaged file already.
            if _is_damage(error) and file_number(self._path) == self.file:
                _delete(self._path)
            if on_error is not None:
                on_error()


def create_database(folder: Path) -> Path:
    """Create the folder and an empty database if they do not exist.

    Return the path of the database.
    """
    path = folder / _NAME
    try:
        _create_file(path)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return path  # the first use of the database logs the error
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        problem = "not a folder" if is_file else describe_reason(error)
        msg = f"prompt_cache: expected a writable folder, found {folder}: {problem}; choose another"
        raise OptionError(msg) from error
    return path


def file_number(path: Path) -> int:
    """Return the number of a file (inode); 0 without a file."""
    with suppress(OSError):
        return path.stat().st_ino
    return 0


def open_database(
    path: Path, errors: DatabaseErrors, timeout: float | None = None
) -> sqlite3.Connection:
    """Open the database, and create the file and its tables if they are missing.

    See :func:`connect`.

    A database of another version is emptied, and a damaged one is replaced.
    """
    try:
        _create_file(path)
    except OSError as error:
        raise sqlite3.OperationalError(describe_reason(error)) from error
    try:
        _create_tables(path)
    except DATABASE_ERRORS as error:
        if not _is_damage(error):
            raise
        _delete(path)
        _create_tables(create_database(path.parent))
    errors.file = file_number(path)
    return connect(path, timeout)


def _create_file(path: Path) -> None:
    """Create an empty file and its folder, which only this user can read, if they do not exist."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # An existing file is not opened: closing it would end all locks that this process's connections
    # have on it, and another process could then write between their pages
    # (https://www.sqlite.org/howtocorrupt.html, section 2.2).
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        if not path.is_file():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def _create_tables(path: Path) -> None:
    with closing(connect(path)) as connection:
        # This check needs no lock, which another process may hold for seconds.
        if connection.execute("PRAGMA user_version").fetchone() == (_FORMAT,):
            return
        with transaction(connection):
            if connection.execute("PRAGMA user_version").fetchone() == (_FORMAT,):
                return
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table'"
            ).fetchall():
                connection.execute(f'DROP TABLE "{name}"')
            for statement in _SCHEMA.strip().split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_FORMAT}")


def connect(path: Path, timeout: float | None = None) -> sqlite3.Connection:
    """Open the database without the transactions of Python's own.

    Several threads may read, one at a time.

    ``timeout`` is the number of seconds to wait for the lock of another process, by default those
    of a writer.
    """
    connection = sqlite3.connect(
        path, timeout=timeout or _WRITE_TIMEOUT, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        # Changing the mode fails at once if another process changes it at the same time, without
        # waiting.
        for attempt in range(100):
            try:
                connection.execute("PRAGMA journal_mode = WAL").fetchall()
                break
            except sqlite3.OperationalError as error:
                if attempt == 99 or _code(error) not in (
                    sqlite3.SQLITE_BUSY,
                    sqlite3.SQLITE_LOCKED,
                ):
                    raise
                time.sleep(0.02)
        connection.execute("PRAGMA synchronous = NORMAL")
    except DATABASE_ERRORS:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the ``with`` block as a transaction that may write."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(*DATABASE_ERRORS):  # SQLite has rolled back already after some errors
            connection.execute("ROLLBACK")
        raise


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return the size of the database without its free pages."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _is_damage(error: Exception) -> bool:
    is_unreadable = isinstance(error, UnicodeDecodeError)
    return is_unreadable or _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _code(error: Exception) -> int:
    """Return the primary result code of SQLite; 0 for errors of Python's module itself."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _delete(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        with suppress(OSError):
            path.with_name(path.name + suffix).unlink()
