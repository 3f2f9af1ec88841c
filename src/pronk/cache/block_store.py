"""Store of KV blocks on disk: an SQLite database, which a background thread writes.

Any process may end at any moment, by a crash or ``kill -9``: SQLite's write-ahead log then drops
the last transaction. Each block has a checksum, so that a damaged one counts as missing. Several
processes may use one folder at a time.
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

# bytes of blocks that wait for the writer; further blocks are offered again later
_MAX_QUEUE_BYTES = 256 << 20
# bytes of blocks per transaction; bounds what a crash loses, and the write-ahead log
_TRANSACTION_BYTES = 8 << 20
_MAX_KEYS = 500  # keys per query; SQLite allows 999 in every build
# pause after an error, such as a full disk: of writing, and of opening the database to read
_PAUSE_SECONDS = 60.0
# seconds that a read waits for the lock of another process; then the blocks are computed
_READ_TIMEOUT = 0.5


@dataclass
class StoreCounts:
    """Counts of one process since its start."""

    blocks_read: int = 0
    bytes_read: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    blocks_evicted: int = 0
    blocks_damaged: int = 0


@dataclass(frozen=True)
class _Job:
    """One task of the writer."""

    # keys of the blocks of a text, from its start; all of them have just been used
    chain: Sequence[bytes] = ()
    # contents to store, by index in ``chain``
    blocks: Mapping[int, bytes] = field(default_factory=dict)
    damaged: Sequence[bytes] = ()  # keys of blocks to delete

    @property
    def size(self) -> int:
        return sum(map(len, self.blocks.values()))


class BlockStore:
    """Contents of KV blocks by key, in a folder; ``counts`` are those of this process."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open or create the database in ``folder``, readable by this user only.

        ``max_bytes`` is the maximum number of bytes of the stored blocks; beyond, the least
        recently used are deleted. Raises ``OptionError`` if ``folder`` is no folder, or not
        writable.
        """
        path = create_database(folder)
        self.counts = StoreCounts()
        self._errors = DatabaseErrors(path)
        self._reader = _Reader(path, self._errors)
        self._reader.connection()  # an error shows at the start, in the log
        self._writer = _Writer(path, max_bytes, self.counts, self._errors)
        # The thread has no reference to this object. At the end of the program it writes what is
        # queued.
        self._finalizer = weakref.finalize(self, self._writer.stop, self._reader)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading ``keys`` that are stored."""
        for start in range(0, len(keys), _MAX_KEYS):
            part = keys[start : start + _MAX_KEYS]
            found = {key for (key,) in self._select("SELECT key FROM blocks", part)}
            missing = next((index for index, key in enumerate(part) if key not in found), None)
            if missing is not None:  # nothing after it counts; a locked database is waited for once
                return start + missing
        return len(keys)

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the contents of blocks, at most 500.

        ``None`` for one that is missing or damaged.
        """
        found: dict[bytes, bytes] = {}
        damaged = []
        for key, checksum, content in self._select(
            "SELECT key, checksum, bytes FROM blocks JOIN contents USING (id)", keys
        ):
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
        """Return whether this process has read or written a block, and knows of no eviction since."""
        return key in self._writer.known

    def has_room(self, num_bytes: int) -> bool:
        """Return whether :meth:`write` accepts ``num_bytes`` now."""
        return self._writer.has_room(num_bytes)

    def write(self, chain: Sequence[bytes], blocks: Mapping[int, bytes]) -> None:
        """Store blocks in the background, and record the use of all blocks of a text.

        Args:
            chain: keys of the blocks of the text, from its start.
            blocks: contents of new blocks, by index in ``chain``; :meth:`has_room` must have been
                true.
        """
        self._writer.known.update(chain[index] for index in blocks)
        self._writer.add(_Job(chain, blocks))

    def find_note(self, name: str) -> str | None:
        """Return the text that :meth:`add_note` stored under a name."""
        with self._errors.caught():
            connection = self._reader.connection()
            if connection is not None:
                row = connection.execute(
                    "SELECT value FROM notes WHERE name = ?", (name,)
                ).fetchone()
                return str(row[0]) if row else None
        return None

    def add_note(self, name: str, value: str) -> None:
        """Store a short text."""
        with self._errors.caught():
            connection = self._reader.connection()
            if connection is not None:
                connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    def flush(self) -> None:
        """Wait until everything that is queued has been written."""
        self._writer.wait()

    def close(self) -> None:
        """Write what is queued, and end the thread.

        Later writes are ignored, and later reads find nothing.
        """
        self._finalizer()

    def _select(self, query: str, keys: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
        """Yield the rows of ``keys``; none after an error."""
        with self._errors.caught():
            connection = self._reader.connection()
            if connection is not None:
                places = ",".join("?" * len(keys))
                yield from connection.execute(f"{query} WHERE key IN ({places})", keys)


class _Reader:
    """The connection that reads.

    After a failure to open it, as on a full disk, it is tried again.
    """

    def __init__(self, path: Path, errors: DatabaseErrors) -> None:
        self._path = path
        self._errors = errors
        self._connection: sqlite3.Connection | None = None
        self._paused_until = 0.0
        self._closed = False

    def connection(self) -> sqlite3.Connection | None:
        """Return the connection.

        ``None`` after :meth:`close`, and while the database cannot be opened.
        """
        is_due = time.monotonic() >= self._paused_until
        if self._connection is None and is_due and not self._closed:
            with self._errors.caught(self._pause):
                self._connection = open_database(self._path, self._errors, _READ_TIMEOUT)
        return self._connection

    def close(self) -> None:
        """Close the connection for good."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + _PAUSE_SECONDS


class _Writer:
    """The thread that writes; it keeps no reference to the :class:`BlockStore`."""

    def __init__(
        self, path: Path, max_bytes: int, counts: StoreCounts, errors: DatabaseErrors
    ) -> None:
        # keys that are stored or queued, as far as this process knows
        self.known: set[bytes] = set()
        self._path = path
        self._max_bytes = max_bytes
        self._counts = counts
        self._errors = errors
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._num_bytes = 0  # bytes of the queued jobs and of those being written
        self._busy = self._closing = False
        self._paused_until = 0.0
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
        """Write what is queued, end the thread, and close the store's other connection."""
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
        """Wait for jobs, and return those of the next transaction.

        None when the thread must end.
        """
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
        """Forget the blocks of a failed transaction and all that is queued, and pause."""
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        with self._wake:
            queued = [*self._jobs]
            self._jobs.clear()
            self._num_bytes -= sum(job.size for job in queued)
        for job in (*jobs, *queued):
            self.known.difference_update(job.chain)

    def _write(self, connection: sqlite3.Connection, jobs: Sequence[_Job]) -> None:
        before = (
            self._counts.blocks_written,
            self._counts.bytes_written,
            self._counts.blocks_evicted,
        )
        try:
            with transaction(connection):
                for job in jobs:
                    self._write_job(connection, job)
        except (*DATABASE_ERRORS, MemoryError):
            self._counts.blocks_written, self._counts.bytes_written, self._counts.blocks_evicted = (
                before
            )
            raise

    def _write_job(self, connection: sqlite3.Connection, job: _Job) -> None:
        for key in job.damaged:
            self._delete(connection, key)
        # Earlier blocks of a text get a later time of use and are evicted last: the others are
        # useless without them.
        latest = time.time_ns()
        for index, key in enumerate(job.chain):
            used = latest - index
            if connection.execute("UPDATE blocks SET used = ? WHERE key = ?", (used, key)).rowcount:
                continue
            content = job.blocks.get(index)
            if content is None or not self._make_room(
                connection, len(content), latest - len(job.chain)
            ):
                self.known.discard(key)  # so that the block is offered again
                continue
            values = (key, _checksum(key, content), used)
            row = connection.execute(
                "INSERT INTO blocks (key, checksum, used) VALUES (?, ?, ?)", values
            ).lastrowid
            connection.execute("INSERT INTO contents VALUES (?, ?)", (row, content))
            self._counts.blocks_written += 1
            self._counts.bytes_written += len(content)

    def _make_room(self, connection: sqlite3.Connection, num_bytes: int, before: int) -> bool:
        """Delete the least recently used blocks, if used before ``before`` (ns).

        Return False if too few.
        """
        while used_bytes(connection) + num_bytes > self._max_bytes:
            oldest = connection.execute(
                "SELECT key FROM blocks WHERE used < ? ORDER BY used LIMIT 1", (before,)
            )
            row = oldest.fetchone()
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
        """Delete blocks beyond the limit, which was perhaps higher before, and give their pages back."""
        if used_bytes(connection) > self._max_bytes:
            with transaction(connection):
                self._make_room(connection, 0, time.time_ns())
            # ``execute`` would free only one page
            connection.executescript("PRAGMA incremental_vacuum")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _checksum(key: bytes, content: bytes) -> bytes:
    digest = sha256(key)
    digest.update(content)
    return digest.digest()
