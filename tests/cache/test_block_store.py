"""Blocks on disk: damage, size limit, full disks, several processes, and processes that are
killed.
"""

import hashlib
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pronk.base.errors import OptionError
from pronk.cache import block_database, block_store
from pronk.cache.block_store import BlockStore
from waiting import HUNG

SIZE = 50_000  # bytes of a block


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def content(number: int) -> bytes:
    """Return the bytes of a block, which are different for each number."""
    return random.Random(number).randbytes(SIZE)


def chain(first: int, count: int) -> list[bytes]:
    return [key(first + index) for index in range(count)]


def put(store: BlockStore, first: int, count: int) -> None:
    """Write the blocks of a text, and wait for the disk."""
    store.write(chain(first, count), {index: content(first + index) for index in range(count)})
    store.flush()


@contextmanager
def opened(folder: Path, max_bytes: int = 1 << 30) -> Iterator[BlockStore]:
    store = BlockStore(folder, max_bytes)
    try:
        yield store
    finally:
        store.close()


def database(folder: Path) -> Path:
    return folder / "blocks.sqlite3"


def test_blocks_outlive_the_process(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "folder") as store:
        put(store, 0, 5)
        assert (store.counts.blocks_written, store.counts.bytes_written) == (5, 5 * SIZE)
        # not flushed: closing writes what is queued
        store.write(chain(0, 7), {5: content(5), 6: content(6)})
    with opened(tmp_path / "new" / "folder") as store:
        assert store.count_leading(chain(0, 9)) == 7
        assert store.count_leading(chain(3, 9)) == 4
        assert store.count_leading(chain(8, 2)) == 0
        assert store.read([key(6), key(9), key(0)]) == [content(6), None, content(0)]
        assert (store.counts.blocks_read, store.counts.bytes_read) == (2, 2 * SIZE)
        assert store.is_known(key(6))
        assert not store.is_known(key(5))
    assert database(tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


def test_long_texts_are_looked_up_in_parts(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(chain(0, 1200), dict.fromkeys(range(1150), b"content"))
        store.flush()
        assert store.count_leading(chain(0, 1200)) == 1150
        assert store.count_leading(chain(0, 1150)) == 1150


def test_nothing_is_looked_up_after_a_missing_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        store.write(chain(0, 2), dict.fromkeys(range(2), b"content"))
        store.flush()
        queries = list[int]()
        select = store._select
        monkeypatch.setattr(
            store, "_select", lambda query, keys: queries.append(len(keys)) or select(query, keys)
        )
        assert store.count_leading(chain(0, 1200)) == 2
        assert len(queries) == 1


def test_a_block_is_stored_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store, opened(tmp_path) as other:
        put(store, 0, 3)
        put(other, 0, 4)
        assert (store.counts.blocks_written, other.counts.blocks_written) == (3, 1)


@pytest.mark.parametrize("part", ["content", "checksum", "key", "shorter"])
def test_a_damaged_block_is_missing_and_deleted(part: str, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, 0, 3)
    with closing(sqlite3.connect(database(tmp_path))) as connection:
        changes = {
            "content": ("UPDATE contents SET bytes = ? WHERE id = 2", content(1)[:-1] + b"\0"),
            "shorter": ("UPDATE contents SET bytes = ? WHERE id = 2", content(1)[:-1]),
            "checksum": ("UPDATE blocks SET checksum = ? WHERE id = 2", b"0" * 32),
            "key": ("UPDATE blocks SET key = ? WHERE id = 2", key(7)),
        }
        query, value = changes[part]
        assert connection.execute(query, (value,)).rowcount == 1
        connection.commit()
    damaged = key(7 if part == "key" else 1)
    with opened(tmp_path) as store:
        assert store.read([key(0), damaged, key(2)]) == [content(0), None, content(2)]
        store.flush()
        assert store.counts.blocks_damaged == 1
        assert store.count_leading([damaged]) == 0
        put(store, 0, 3)
        assert store.read(chain(0, 3)) == [content(0), content(1), content(2)]


@pytest.mark.parametrize("seed", range(6))
def test_damaged_bytes_of_the_file_give_no_wrong_block(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Random bytes anywhere in the file: each block is right or missing, and the next process can
    store again.
    """
    dice = random.Random(seed)
    with opened(tmp_path) as store:
        put(store, 0, 40)
    data = bytearray(database(tmp_path).read_bytes())
    for _ in range(4**seed // 4 + 1):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    database(tmp_path).write_bytes(data)
    with opened(tmp_path) as store:
        for number, found in enumerate(store.read(chain(0, 40))):
            assert found in (None, content(number))
        put(store, 0, 40)
    with opened(tmp_path) as store:
        for number, found in enumerate(store.read(chain(0, 40))):
            assert found in (None, content(number))
    assert len(caplog.records) <= 3


@pytest.mark.parametrize("what", ["text", "truncated", "zeros", "name"])
def test_a_file_that_is_no_database_is_replaced(what: str, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, 0, 3)
    data = database(tmp_path).read_bytes()
    bad = {
        "text": b"no database" * 1000,
        "truncated": data[: len(data) // 2],
        "zeros": bytes(len(data)),
        # quoted in SQLite's error, but not UTF-8
        "name": data.replace(b"sqlite_autoindex_", b"sqlite_autoindex\x85"),
    }
    assert data not in bad.values()
    database(tmp_path).write_bytes(bad[what])
    for _ in range(2):
        with opened(tmp_path) as store:
            put(store, 0, 3)
    with opened(tmp_path) as store:
        assert store.read(chain(0, 3)) == [content(0), content(1), content(2)]


def test_a_database_of_another_version_is_emptied(tmp_path: Path) -> None:
    with closing(sqlite3.connect(database(tmp_path))) as connection:
        connection.execute("CREATE TABLE blocks (name TEXT)")
        connection.execute("PRAGMA user_version = 999")
        connection.commit()
    with opened(tmp_path) as store:
        assert store.count_leading([key(0)]) == 0
        put(store, 0, 1)
        assert store.read([key(0)]) == [content(0)]


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_folder_that_cannot_be_written_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" if kind == "file" else tmp_path / "file" / "folder"
    with pytest.raises(
        OptionError, match=r"^prompt_cache: expected a writable .*: not a folder; choose another$"
    ):
        BlockStore(folder, 1 << 20)


class TestSizeLimit:
    def test_the_least_recently_used_text_is_deleted_from_its_end(self, tmp_path: Path) -> None:
        with opened(tmp_path, 30 * SIZE) as store:
            for first in (0, 100, 200):
                put(store, first, 8)
            store.write(chain(0, 8), {})  # the first text is used again
            put(store, 300, 8)
            assert store.counts.blocks_evicted > 0
            counts = {first: store.count_leading(chain(first, 8)) for first in (0, 100, 200, 300)}
            assert counts[0] == counts[200] == counts[300] == 8
            assert 0 < counts[100] < 8
            assert counts[100] + store.counts.blocks_evicted == 8, (
                "blocks at the end of the text were deleted"
            )
            assert not store.is_known(key(107))

    def test_the_start_of_a_long_text_is_not_deleted_for_its_end(self, tmp_path: Path) -> None:
        with opened(tmp_path, 20 * SIZE) as store:
            for index in range(40):
                store.write(chain(0, index + 1), {index: content(index)})
            store.flush()
            found = store.count_leading(chain(0, 40))
            assert 10 < found < 20
            assert not any(store.is_known(each) for each in chain(found, 40 - found))

    def test_the_file_stays_within_the_limit(self, tmp_path: Path) -> None:
        with opened(tmp_path, 2 << 20) as store:
            for first in range(0, 1000, 10):
                store.write(
                    chain(first, 10), {index: content(first + index) for index in range(10)}
                )
            store.flush()
            assert store.counts.blocks_written > 500
        assert database(tmp_path).stat().st_size <= (2 << 20) + 10 * SIZE
        with opened(tmp_path, 1 << 20) as store:  # a lower limit
            put(store, 5000, 1)
        assert database(tmp_path).stat().st_size <= (1 << 20) + 3 * SIZE

    def test_a_block_larger_than_the_limit_is_not_stored(self, tmp_path: Path) -> None:
        with opened(tmp_path, 200_000) as store:
            put(store, 0, 1)
            store.write([key(1)], {0: bytes(10**6)})
            store.flush()
            assert store.read([key(1)]) == [None]

    def test_blocks_deleted_by_another_process_are_written_again(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store, opened(tmp_path, 3 * SIZE) as other:
            put(store, 0, 2)
            put(other, 100, 2)
            assert other.counts.blocks_evicted > 0
            assert store.is_known(key(1)), "it does not know yet"
            assert store.count_leading(chain(0, 2)) < 2
            store.write(chain(0, 3), {2: content(2)})
            store.flush()
            assert not store.is_known(key(1)), "so that the block is offered again"
            put(store, 0, 3)
            assert all(store.read(chain(0, 3)))


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_store, "_MAX_QUEUE_BYTES", 10 * SIZE)
    monkeypatch.setattr(block_database, "_WRITE_TIMEOUT", HUNG)
    with opened(tmp_path) as store, closing(sqlite3.connect(database(tmp_path))) as connection:
        connection.execute("BEGIN IMMEDIATE")  # the writer waits for this lock
        store.write(chain(0, 10), {index: content(index) for index in range(10)})
        assert not store.has_room(1)
        connection.execute("ROLLBACK")
        store.flush()
        assert store.has_room(10 * SIZE)
        assert store.count_leading(chain(0, 10)) == 10


def test_an_error_drops_what_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each queued transaction would wait for the lock of a stuck process again, also at the end of
    the program.
    """
    monkeypatch.setattr(block_database, "_WRITE_TIMEOUT", 0.2)
    monkeypatch.setattr(block_store, "_PAUSE_SECONDS", HUNG)
    all_queued = threading.Event()
    drop = block_store._Writer._drop
    num_failures = 0

    def drop_when_all_are_queued(*given: Any) -> None:
        nonlocal num_failures
        assert all_queued.wait(HUNG)
        num_failures += 1
        drop(*given)

    monkeypatch.setattr(block_store._Writer, "_drop", drop_when_all_are_queued)
    with opened(tmp_path) as store, closing(sqlite3.connect(database(tmp_path))) as connection:
        connection.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(block_store, "_TRANSACTION_BYTES", 1)
        for index in range(100):
            store.write(chain(index, 1), {0: content(index)})
        all_queued.set()
        store.flush()
        assert num_failures == 1
        assert not store.has_room(1)
        assert not any(store.is_known(each) for each in chain(0, 100))
    assert [record.message for record in caplog.records] == [
        f"prompt cache {tmp_path}: database is locked; prompts are computed meanwhile"
    ]


FULL_DISK = """
import logging, random, resource, sys
from pathlib import Path
from pronk.cache.block_store import BlockStore
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (10 ** int(sys.argv[2]), 10 ** int(sys.argv[2])))
store = BlockStore(Path(sys.argv[1]), 1 << 30)
room = []
for first in range(0, 100, 10):
    keys = [(first + index).to_bytes(32, "little") for index in range(10)]
    room.append(store.has_room(1))
    store.write(keys, {index: random.Random(first + index).randbytes(50_000) for index in range(10)})
    store.flush()
for number in range(100):
    found, = store.read([number.to_bytes(32, "little")])
    assert found in (None, random.Random(number).randbytes(50_000))
store.close()
print(store.counts.blocks_written, room[0], room[-1])
"""


@pytest.mark.parametrize("digits", [4, 6])
def test_a_full_disk_is_reported_once(digits: int, tmp_path: Path) -> None:
    """Files cannot grow beyond 10 kB, too few for the tables, or 1 MB; the process continues, with
    one warning.
    """
    arguments = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(digits)]
    # Without coverage, which lacks the room for its own file.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=HUNG, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"prompt cache {tmp_path}: ")
    assert done.stderr.endswith("; prompts are computed meanwhile\n")
    written, before, after = done.stdout.split()
    assert (int(written) > 0, before, after) == (digits == 6, "True", "False")
    with opened(tmp_path) as store:  # the disk has space again
        put(store, 0, 5)
        assert all(store.read(chain(0, 5)))


FULL_AT_START = """
import resource, signal, sys
from pathlib import Path
from pronk.cache import block_store
block_store._PAUSE_SECONDS = 0.0
own, other = (Path(folder) for folder in sys.argv[1:])
_, unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, unlimited))
stores = [block_store.BlockStore(folder, 1 << 30) for folder in (own, other)]
key = bytes(32)
for store in stores:
    assert store.read([key]) == [None]
    store.write([key], {0: b"new"})
    store.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
assert stores[1].read([b"1" * 32]) == [b"stored"]  # by an earlier process
for store in stores:
    assert store.read([key]) == [None]
    store.write([key], {0: b"new"})
    store.flush()
    assert store.read([key]) == [b"new"]
    store.add_note("name", "text")
    assert store.find_note("name") == "text"
    store.close()
    assert store.read([key]) == [None]
"""


def test_a_store_recovers_from_a_disk_that_is_full_at_the_start(tmp_path: Path) -> None:
    """Later calls read and write once there is space, in a new folder and in one with blocks."""
    folders = [tmp_path / "new", tmp_path / "old"]
    with opened(folders[1]) as store:
        store.write([b"1" * 32], {0: b"stored"})
        store.flush()
    arguments = [sys.executable, "-c", FULL_AT_START, *map(str, folders)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=HUNG, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert all((folder / "blocks.sqlite3").stat().st_mode & 0o777 == 0o600 for folder in folders)


WRITING = """
import random, sys
from pathlib import Path
from pronk.cache.block_store import BlockStore
store, first = BlockStore(Path(sys.argv[1]), 4_000_000), int(sys.argv[2])
print("ready", flush=True)
while True:
    keys = [(first + index).to_bytes(32, "little") for index in range(7)]
    store.write(keys, {index: random.Random(first + index).randbytes(20_000) for index in range(7)})
    store.flush()
    print("written", flush=True)
    first += 7 if first % 1000 < 900 else -900
"""


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_processes_leave_no_wrong_block(
    count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes write at a time, with evictions, and are killed at random moments after their
    first writes.
    """
    dice = random.Random(count)
    found = 0
    for _ in range(count):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITING, str(tmp_path), str(first)], stdout=subprocess.PIPE
            )
            for first in (0, 1000)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            for _ in range(dice.randrange(2, 10)):
                assert writer.stdout.readline() == b"written\n"
        time.sleep(dice.uniform(0.0, 0.01))  # the kill does not always follow a write
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            assert writer.wait() == -signal.SIGKILL
            assert writer.stdout is not None
            writer.stdout.close()
        with opened(tmp_path) as store:
            for number in (*range(910), *range(1000, 1910)):
                (block,) = store.read([number.to_bytes(32, "little")])
                assert block in (None, random.Random(number).randbytes(20_000))
                found += block is not None
            assert store.counts.blocks_damaged == 0
    assert found > 20 * count
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
