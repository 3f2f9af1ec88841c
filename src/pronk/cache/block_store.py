"""Store of KV blocks on disk: an SQLite database, which a background thread writes.

A process may end at any moment, by a crash or ``kill -9``: SQLite then drops an incomplete
transaction. Each block has a checksum; a damaged block counts as missing. Several processes may use
one folder at the same time.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from pronk.cache.block_database import (
    DATABASE_ERRORS,
    DatabaseErrors,
    create_database,
    open_database,
    transaction,
    used_bytes,
)

# Bytes of blocks that wait for the writer thread. While the queue is full, no blocks are accepted;
# the prompt cache offers the same blocks again later.
_MAX_QUEUE_BYTES = 256 << 20
# Bytes of blocks per transaction: a crash loses one transaction, and the write-ahead log grows with
# its size.
_TRANSACTION_BYTES = 8 << 20
_MAX_KEYS = 500  # keys per query; SQLite allows 999 in every build
# Seconds without writes, or without attempts to open the database for reading, after an error such
# as a full disk.
_PAUSE_SECONDS = 60.0
# Seconds that a read waits for the lock of another process. Then the blocks count as missing, and
# the model computes them.
_READ_TIMEOUT = 0.5


@dataclass
class StoreCounts:
    """Numbers of blocks and bytes that this process has read and written since its start."""

    blocks_read: int = 0
    bytes_read: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    blocks_evicted: int = 0  # deleted from disk because the store was full
    blocks_damaged: int = 0  # read with a wrong checksum, and deleted


@dataclass(frozen=True)
class _Job:
    """One task of the writer thread.

    ``chain`` has the keys of a text's blocks, from the start of the text. All of them are recorded
    as used now, so that they are evicted late. ``blocks`` has the contents to store, by index in
    ``chain``.
    """

    chain: Sequence[bytes] = ()
    blocks: Mapping[int, bytes] = field(default_factory=dict)
    damaged: Sequence[bytes] = ()  # keys of blocks to delete

    @property
    def size(self) -> int:
        return sum(map(len, self.blocks.values()))


class BlockStore:
    """Contents of KV blocks by key, in a database in a folder.

    An error of the database is logged, not raised: reads then find nothing, and writes are dropped.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open or create the database in ``folder``, readable by this user only.

        Args:
            folder: created if it is missing.
            max_bytes: maximum size of the database in bytes; beyond, the least recently used blocks
                are deleted.

        Raises:
            OptionError: ``folder`` is a file, or cannot be written.
        """
        path = create_database(folder)
        self.counts = StoreCounts()
        self._errors = DatabaseErrors(path)
        self._reader = _Reader(path, self._errors)
        self._reader.connection()  # so that an error is logged at the start
        self._writer = _Writer(path, max_bytes, self.counts, self._errors)
        # The thread has no reference to this object, so the finalizer runs when the object is
        # deleted, and at the latest at the end of the program.
        self._finalizer = weakref.finalize(self, self._writer.stop, self._reader)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys whose blocks are all stored."""
        for start in range(0, len(keys), _MAX_KEYS):
            part = keys[start : start + _MAX_KEYS]
            found = {key for (key,) in self._select("SELECT key FROM blocks", part)}
            for index, key in enumerate(part):
                if key not in found:
                    return start + index
        return len(keys)

    def find_last(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys up to the last one that is stored; 0 if none is."""
        for start in reversed(range(0, len(keys), _MAX_KEYS)):
            part = keys[start : start + _MAX_KEYS]
            found = {key for (key,) in self._select("SELECT key FROM blocks", part)}
            for index in reversed(range(len(part))):
                if part[index] in found:
                    return start + index + 1
        return 0

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the contents of at most 500 blocks; ``None`` for a missing or damaged block."""
        found: dict[bytes, bytes] = {}
        damaged = []
        query = "SELECT key, checksum, bytes FROM blocks JOIN contents USING (id)"
        for key, checksum, content in self._select(query, keys):
            if checksum == _checksum(key, content):
                found[key] = content
            else:
                damaged.append(key)
        if damaged:
            self.counts.blocks_damaged += len(damaged)
            self._writer.add(_Job(damaged=damaged))
        self._writer.known.update(found)
        self.counts.blocks_read += len(found)
        self.counts.bytes_read += sum(map(len, found.values()))
        return [found.get(key) for key in keys]

    def is_known(self, key: bytes) -> bool:
        """Return whether a block is on disk or queued, as far as this process knows.

        This process knows the blocks that it has read or written, minus those that it has deleted.
        """
        return key in self._writer.known

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the write queue can take blocks of ``num_bytes`` bytes more."""
        return self._writer.has_room(num_bytes)

    def write(self, chain: Sequence[bytes], blocks: Mapping[int, bytes]) -> None:
        """Store blocks in the background, and record the use of all blocks of a text.

        Call :meth:`has_room` first.

        Args:
            chain: keys of the blocks of the text, from its start.
            blocks: contents of new blocks, by index in ``chain``.
        """
        self._writer.known.update(chain[index] for index in blocks)
        self._writer.add(_Job(chain, blocks))

    def find_note(self, name: str) -> str | None:
        """Return the text that :meth:`add_note` stored under a name; ``None`` if there is none."""
        with self._errors.caught():
            connection = self._reader.connection()
            if connection is not None:
                query = "SELECT value FROM notes WHERE name = ?"
                row = connection.execute(query, (name,)).fetchone()
                return str(row[0]) if row else None
        return None

    def add_note(self, name: str, value: str) -> None:
        """Store a short text under a name, for other processes and later starts."""
        with self._errors.caught():
            connection = self._reader.connection()
            if connection is not None:
                connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    def flush(self) -> None:
        """Wait until all queued blocks have been written."""
        self._writer.wait()

    def close(self) -> None:
        """Write all queued blocks, and end the writer thread.

        Later writes are ignored, and later reads find nothing.
        """
        self._finalizer()

    def _select(self, query: str, keys: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
        """Yield the rows of a query with the given keys; none after an error."""
        with self._errors.caught():
            connection = self._reader.connection()
            if connection is not None:
                places = ",".join("?" * len(keys))
                yield from connection.execute(f"{query} WHERE key IN ({places})", keys)


class _Reader:
    """Owner of the connection for reading, which is opened again a minute after a failure."""

    def __init__(self, path: Path, errors: DatabaseErrors) -> None:
        self._path = path
        self._errors = errors
        self._connection: sqlite3.Connection | None = None
        self._paused_until = 0.0
        self._closed = False

    def connection(self) -> sqlite3.Connection | None:
        """Return the connection; ``None`` after :meth:`close` or if the database cannot be opened.

        A failed attempt to open the database is repeated after 60 seconds at the earliest.
        """
        is_due = time.monotonic() >= self._paused_until
        if self._connection is None and is_due and not self._closed:
            with self._errors.caught(self._pause):
                self._connection = open_database(self._path, self._errors, _READ_TIMEOUT)
        return self._connection

    def close(self) -> None:
        """Close the connection; it is not opened again."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + _PAUSE_SECONDS


class _Writer:
    """Queue of blocks to write, and the thread that writes them.

    Neither has a reference to the :class:`BlockStore`, so that an unused store can be deleted.
    """

    def __init__(
        self, path: Path, max_bytes: int, counts: StoreCounts, errors: DatabaseErrors
    ) -> None:
        # Keys of the blocks that are on disk or queued, as far as this process knows.
        self.known: set[bytes] = set()
        self._path = path
        self._max_bytes = max_bytes
        self._counts = counts
        self._errors = errors
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._num_bytes = 0  # bytes of the queued jobs and of those being written
        self._busy = False
        self._closing = False
        self._paused_until = 0.0  # no block is accepted before this time of ``time.monotonic``
        self._thread = threading.Thread(target=self._run, name="pronk-prompt-cache", daemon=True)
        self._thread.start()

    def add(self, job: _Job) -> None:
        with self._wake:
            if not self._closing:
                self._num_bytes += job.size
                self._jobs.append(job)
                self._wake.notify_all()

    def has_room(self, num_bytes: int) -> bool:
        paused = self._closing or time.monotonic() < self._paused_until
        return not paused and self._num_bytes + num_bytes <= _MAX_QUEUE_BYTES

    def wait(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: not (self._jobs or self._busy))

    def stop(self, reader: _Reader) -> None:
        """Write all queued blocks, end the thread, and close the connection for reading."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        reader.close()

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        while jobs := self._take():
            with self._errors.caught(lambda jobs=jobs: self._drop(jobs)):  # type: ignore[misc]
                if connection is None:
                    connection = open_database(self._path, self._errors)
                    self._shrink(connection)
                self._write(connection, jobs)
            with self._wake:
                self._busy = False
                self._num_bytes -= sum(job.size for job in jobs)
                self._wake.notify_all()
        if connection is not None:
            with self._errors.caught():
                connection.close()

    def _take(self) -> list[_Job]:
        """Wait for jobs, and return the jobs of one transaction; an empty list ends the thread."""
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self._closing)
            jobs = list[_Job]()
            size = 0
            while self._jobs and (not jobs or size + self._jobs[0].size <= _TRANSACTION_BYTES):
                jobs.append(self._jobs.popleft())
                size += jobs[-1].size
            self._busy = bool(jobs)
            return jobs

    def _drop(self, jobs: Sequence[_Job]) -> None:
        """Drop the jobs of a failed transaction and all queued jobs; accept none for a minute."""
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        with self._wake:
            queued = list(self._jobs)
            self._jobs.clear()
            self._num_bytes -= sum(job.size for job in queued)
        for job in (*jobs, *queued):
            self.known.difference_update(job.chain)

    def _write(self, connection: sqlite3.Connection, jobs: Sequence[_Job]) -> None:
        """Write the blocks of jobs in one transaction; a failure leaves the counts as before."""
        counts = self._counts
        blocks_written = counts.blocks_written
        bytes_written = counts.bytes_written
        blocks_evicted = counts.blocks_evicted
        try:
            with transaction(connection):
                for job in jobs:
                    self._write_job(connection, job)
        except (*DATABASE_ERRORS, MemoryError):
            counts.blocks_written = blocks_written
            counts.bytes_written = bytes_written
            counts.blocks_evicted = blocks_evicted
            raise

    def _write_job(self, connection: sqlite3.Connection, job: _Job) -> None:
        for key in job.damaged:
            self._delete(connection, key)
        # A block is useless without the blocks before it in its text. Earlier blocks therefore get
        # a later time of use, and are evicted last.
        latest = time.time_ns()
        earliest = latest - len(job.chain)
        for index, key in enumerate(job.chain):
            used = latest - index
            is_stored = self._set_time_of_use(connection, key, used)
            if is_stored:
                continue
            content = job.blocks.get(index)
            if content is None or not self._make_room(connection, len(content), earliest):
                self.known.discard(key)  # not stored, so the prompt cache may offer the block again
                continue
            self._insert(connection, key, content, used)

    def _set_time_of_use(self, connection: sqlite3.Connection, key: bytes, used: int) -> bool:
        """Record the time of use of a block, in nanoseconds; return whether the block is stored."""
        query = "UPDATE blocks SET used = ? WHERE key = ?"
        return connection.execute(query, (used, key)).rowcount > 0

    def _insert(
        self, connection: sqlite3.Connection, key: bytes, content: bytes, used: int
    ) -> None:
        query = "INSERT INTO blocks (key, checksum, used) VALUES (?, ?, ?)"
        row = connection.execute(query, (key, _checksum(key, content), used)).lastrowid
        connection.execute("INSERT INTO contents VALUES (?, ?)", (row, content))
        self._counts.blocks_written += 1
        self._counts.bytes_written += len(content)

    def _make_room(self, connection: sqlite3.Connection, num_bytes: int, before: int) -> bool:
        """Delete the least recently used blocks until ``num_bytes`` fit into the size limit.

        Only blocks whose last use is before ``before`` (nanoseconds since 1970) are deleted. Return
        False if these are too few.
        """
        query = "SELECT key FROM blocks WHERE used < ? ORDER BY used LIMIT 1"
        while used_bytes(connection) + num_bytes > self._max_bytes:
            row = connection.execute(query, (before,)).fetchone()
            if row is None:
                return False
            self._delete(connection, row[0])
            self._counts.blocks_evicted += 1
        return True

    def _delete(self, connection: sqlite3.Connection, key: bytes) -> None:
        connection.execute(
            "DELETE FROM contents WHERE id = (SELECT id FROM blocks WHERE key = ?)", (key,)
        )
        connection.execute("DELETE FROM blocks WHERE key = ?", (key,))
        self.known.discard(key)

    def _shrink(self, connection: sqlite3.Connection) -> None:
        """Shrink a database that an earlier start with a higher size limit has left.

        Blocks beyond the limit are deleted, and their pages return to the file system.
        """
        if used_bytes(connection) > self._max_bytes:
            with transaction(connection):
                self._make_room(connection, 0, time.time_ns())
            # ``execute`` instead of ``executescript`` would free only one page.
            connection.executescript("PRAGMA incremental_vacuum")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _checksum(key: bytes, content: bytes) -> bytes:
    """Return the SHA-256 of a key and a content, so that a content under a wrong key is damaged."""
    digest = sha256(key)
    digest.update(content)
    return digest.digest()
