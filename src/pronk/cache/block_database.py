"""SQLite database of the KV blocks on disk: tables, transactions and errors.

SQLite belongs to Python's standard library. A faster database would not help: writes are limited by
the disk (200 to 300 MB/s), and reads of 3 to 7 GB/s are faster than the computation of a block's
checksum.
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
# Version of the tables, ``user_version`` of the database. A database of another version is emptied.
_FORMAT = 1
_SCHEMA = """
CREATE TABLE blocks (
    id INTEGER PRIMARY KEY,
    key BLOB UNIQUE NOT NULL,
    checksum BLOB NOT NULL,
    used INTEGER NOT NULL
);
CREATE INDEX by_use ON blocks (used);
CREATE TABLE contents (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_WRITE_TIMEOUT = 10.0  # seconds to wait for the lock of another process
# number of attempts to set the journal mode, which fail while another process sets it
_MODE_ATTEMPTS = 100
_MODE_PAUSE = 0.02  # seconds between attempts to set the journal mode
_PAGE_BYTES = 1 << 14  # page size of the database: large pages read faster, small ones waste less

# SQLite's messages may quote a name in the database. If the name is damaged, Python cannot decode
# the message, and raises UnicodeDecodeError.
DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)


class DatabaseErrors:
    """Handler of database errors, which must not stop the engine.

    It logs each message once, and deletes a damaged database, so that the next process begins with
    an empty one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._logged = set[str]()
        self.file = 0  # inode number of the database that this process has opened

    @contextmanager
    def caught(self, on_error: Callable[[], None] | None = None) -> Iterator[None]:
        """Catch SQLite's errors and MemoryError in the ``with`` block, then call ``on_error``."""
        try:
            yield
        except (*DATABASE_ERRORS, MemoryError) as error:
            kind = str(error)
            if kind not in self._logged:
                self._logged.add(kind)
                _log.warning(
                    "prompt cache %s: %s; prompts are computed meanwhile",
                    self._path.parent,
                    kind or "no memory",
                )
            # Another process may have replaced the damaged file already; the new file stays.
            if _is_damage(error) and file_number(self._path) == self.file:
                _delete(self._path)
            if on_error is not None:
                on_error()


def create_database(folder: Path) -> Path:
    """Return the path of the database in ``folder``; create folder and file if they are missing.

    A full disk is no error here: the first use of the database logs it.

    Raises:
        OptionError: ``folder`` is a file, or cannot be written.
    """
    path = folder / _NAME
    try:
        _create_file(path)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return path
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        problem = "not a folder" if is_file else describe_reason(error)
        msg = f"prompt_cache: expected a writable folder, found {folder}: {problem}; choose another"
        raise OptionError(msg) from error
    return path


def file_number(path: Path) -> int:
    """Return the inode number of a file; 0 if the file is missing."""
    with suppress(OSError):
        return path.stat().st_ino
    return 0


def open_database(
    path: Path, errors: DatabaseErrors, timeout: float | None = None
) -> sqlite3.Connection:
    """Open the database, and create the file and its tables if they are missing.

    A database of another version is emptied, and a damaged one is replaced. ``timeout`` is that of
    :func:`connect`.
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
    """Create the file, empty, and its folder if they are missing; only this user can read both."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # An existing file is not opened here: closing the file would release the locks that connections
    # of this process have on it, and another process could write during their transactions
    # (https://www.sqlite.org/howtocorrupt.html, section 2.2).
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        if not path.is_file():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def _create_tables(path: Path) -> None:
    """Create the tables, after dropping those of another version of the format."""
    with closing(connect(path)) as connection:
        # The first check needs no lock, which another process may hold for seconds.
        if _has_tables(connection):
            return
        with transaction(connection):
            if _has_tables(connection):
                return
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            old_tables = connection.execute(query).fetchall()
            for (name,) in old_tables:
                connection.execute(f'DROP TABLE "{name}"')
            for statement in _SCHEMA.strip().split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_FORMAT}")


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("PRAGMA user_version").fetchone() == (_FORMAT,)


def connect(path: Path, timeout: float | None = None) -> sqlite3.Connection:
    """Open a connection that begins no transactions of its own; see :func:`transaction`.

    Several threads may use the connection, one at a time.

    Args:
        path: the database.
        timeout: seconds to wait for the lock of another process; by default 10, enough to write.
    """
    connection = sqlite3.connect(
        path, timeout=timeout or _WRITE_TIMEOUT, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        _use_write_ahead_log(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
    except DATABASE_ERRORS:
        connection.close()
        raise
    return connection


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch the database to a write-ahead log, so that reads do not wait for writes.

    While another process sets the mode, SQLite fails at once in spite of the connection's timeout;
    the attempt is then repeated.
    """
    for attempt in range(_MODE_ATTEMPTS):
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            is_locked = _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not is_locked or attempt == _MODE_ATTEMPTS - 1:
                raise
            time.sleep(_MODE_PAUSE)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the ``with`` block as a write transaction; an exception rolls it back."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(*DATABASE_ERRORS):  # SQLite has rolled back already after some errors
            connection.execute("ROLLBACK")
        raise


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes of the database's pages, without the free pages."""

    def read(name: str) -> int:
        return int(connection.execute(f"PRAGMA {name}").fetchone()[0])

    num_used_pages = read("page_count") - read("freelist_count")
    return num_used_pages * read("page_size")


def _is_damage(error: Exception) -> bool:
    is_unreadable = isinstance(error, UnicodeDecodeError)
    return is_unreadable or _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _code(error: Exception) -> int:
    """Return SQLite's primary result code of an error; 0 for an error of Python's own module."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _delete(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        with suppress(OSError):
            path.with_name(path.name + suffix).unlink()
