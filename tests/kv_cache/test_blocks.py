"""The allocator: whatever is asked of it, every block is counted as often as a table refers to it."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from pronk.errors import CacheFullError
from pronk.kv_cache.blocks import BlockAllocator, BlockTable


def grown(allocator: BlockAllocator, *tokens: int) -> list[BlockTable]:
    tables = [BlockTable() for _ in tokens]
    for block_table, count in zip(tables, tokens, strict=True):
        allocator.allocate(block_table, count)
    return tables


def check(allocator: BlockAllocator, tables: list[BlockTable]) -> None:
    """The invariants."""
    held = Counter(block for block_table in tables for block in block_table.blocks)
    assert [held[block] for block in range(allocator.num_blocks)] == allocator.references
    assert allocator.num_free == allocator.references.count(0)
    for block_table in tables:
        assert len(set(block_table.blocks)) == len(block_table.blocks)
        runs = all(b - a == 1 for a, b in pairwise(block_table.blocks))
        assert not block_table.contiguous or runs  # it may be forgotten that they are in a run, for a while
        if block_table.first_block is not None:
            assert [
                block_table.first_block + block_table.num_released + i for i in range(len(block_table.blocks))
            ] == block_table.blocks


def test_the_example_of_the_docstring() -> None:
    block_table = BlockTable(blocks=[7, 8], num_released=2)
    assert block_table.first_block == 5
    assert (block_table.blocks[37 // 16 - block_table.num_released], 37 % 16) == (7, 5)
    assert BlockTable().first_block is None
    assert BlockTable([3, 5], contiguous=False).first_block is None


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10), (161, 11)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockAllocator(4, 16).blocks_for(tokens) == blocks


def test_growing() -> None:
    allocator = BlockAllocator(10, 4)
    (block_table,) = grown(allocator, 5)
    assert (block_table.blocks, allocator.num_free) == ([0, 1], 8)
    allocator.allocate(block_table, 8)
    allocator.allocate(block_table, 3)
    assert block_table.blocks == [0, 1]
    allocator.allocate(block_table, 9)
    assert block_table.blocks == [0, 1, 2]
    assert block_table.length == 0  # a place is not a token
    check(allocator, [block_table])


def test_a_full_pool_says_so_and_changes_nothing() -> None:
    allocator = BlockAllocator(5, 16)
    a, b = grown(allocator, 40, 10)
    with pytest.raises(CacheFullError, match=r"2 blocks of 16 tokens needed, 1 of 5 free; raise kv_memory"):
        allocator.allocate(b, 33)
    assert b.blocks == [3]
    check(allocator, [a, b])
    allocator.allocate(b, 32)
    other = allocator.fork(b, 32)
    with pytest.raises(CacheFullError, match=r"no free block.*of 5; raise kv_memory"):
        allocator.replace_shared(other, 1)
    check(allocator, [a, b, other])


def test_forking_and_replacing() -> None:
    allocator = BlockAllocator(10, 4)
    (block_table,) = grown(allocator, 12)
    block_table.length = 11
    other = allocator.fork(block_table, 6)
    assert (other.blocks, other.length, other.contiguous) == ([0, 1], 6, True)
    assert [allocator.is_shared(block) for block in block_table.blocks] == [True, True, False]
    assert allocator.replace_shared(other, 1) == (1, 3)
    assert (other.blocks, other.contiguous, block_table.blocks) == ([0, 3], False, [0, 1, 2])
    assert [allocator.is_shared(block) for block in block_table.blocks] == [True, False, False]
    check(allocator, [block_table, other])
    assert allocator.release(block_table) == [1, 2]
    assert allocator.release(other) == [0, 3]
    assert allocator.num_free == 10
    assert (block_table.blocks, block_table.length, block_table.num_released, block_table.contiguous) == (
        [],
        0,
        0,
        True,
    )
    nothing = allocator.fork(other, 0)
    assert nothing.blocks == []


def test_a_block_that_one_holds_is_released_once() -> None:
    allocator = BlockAllocator(4, 4)
    (block_table,) = grown(allocator, 4)
    stale = BlockTable(list(block_table.blocks))
    allocator.release(block_table)
    assert allocator.release(block_table) == []  # an empty table has nothing to release
    with pytest.raises(AssertionError, match="block 0 was released twice"):
        allocator.release(stale)


def test_releasing_what_left_the_window() -> None:
    allocator = BlockAllocator(10, 4)
    (block_table,) = grown(allocator, 18)
    assert allocator.release_before(block_table, 3) == []
    assert allocator.release_before(block_table, 4) == [0]
    assert allocator.release_before(block_table, 11) == [1]
    assert allocator.release_before(block_table, 11) == []
    assert (block_table.blocks, block_table.num_released, block_table.first_block) == ([2, 3, 4], 2, 0)
    allocator.allocate(block_table, 21)
    assert block_table.blocks == [2, 3, 4, 5]
    other = allocator.fork(block_table, 14)
    assert (other.blocks, other.num_released) == ([2, 3], 2)
    assert allocator.release_before(block_table, 20) == [4]  # 2 and 3 are still referred to
    check(allocator, [block_table, other])
    assert allocator.release(other) == [2, 3]


def test_a_run_is_found_again_when_what_broke_it_has_left() -> None:
    allocator = BlockAllocator(6, 1)
    a, b = grown(allocator, 1, 1)
    allocator.allocate(a, 3)
    assert (a.blocks, a.contiguous) == ([0, 2, 3], False)
    allocator.release_before(a, 1)
    assert (a.contiguous, a.first_block) == (True, 1)
    check(allocator, [a, b])


@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed: int) -> None:
    dice = random.Random(seed)
    allocator, tables = BlockAllocator(dice.choice((5, 17, 25)), dice.choice((1, 3, 16))), list[BlockTable]()
    refused = 0
    for _ in range(300):
        operation, size = dice.randrange(6), allocator.block_size
        block_table = dice.choice(tables) if tables else None
        if operation == 0 or block_table is None:
            tables.append(BlockTable())
        elif operation == 1:
            before = (list(block_table.blocks), allocator.num_free)
            try:
                allocator.allocate(
                    block_table, (block_table.num_released + len(block_table.blocks)) * size + dice.randint(0, 4 * size)
                )
            except CacheFullError:
                refused += 1
                assert (block_table.blocks, allocator.num_free) == before
        elif operation == 2:
            tables.append(
                allocator.fork(
                    block_table, dice.randint(0, (block_table.num_released + len(block_table.blocks)) * size)
                )
            )
        elif operation == 3 and any(map(allocator.is_shared, block_table.blocks)) and allocator.num_free:
            index = dice.choice([i for i, block in enumerate(block_table.blocks) if allocator.is_shared(block)])
            old, new = allocator.replace_shared(block_table, index)
            assert (block_table.blocks[index], allocator.references[new]) == (new, 1)
            assert allocator.references[old] >= 1
        elif operation == 4:
            count = dice.randint(0, len(block_table.blocks))
            gone = block_table.blocks[:count]
            last = [block for block in gone if not allocator.is_shared(block)]
            place = (block_table.num_released + count) * size + (
                dice.randrange(size) if count < len(block_table.blocks) else 0
            )
            assert allocator.release_before(block_table, place) == last
        elif operation == 5:
            tables = [other for other in tables if other is not block_table]
            last = [block for block in block_table.blocks if not allocator.is_shared(block)]
            assert allocator.release(block_table) == last
        check(allocator, tables)
    for block_table in tables:
        allocator.release(block_table)
    check(allocator, [])
    assert allocator.num_free == allocator.num_blocks
    assert refused > 0 or allocator.num_blocks > 5


def test_reset() -> None:
    allocator = BlockAllocator(5, 4)
    grown(allocator, 9, 3)
    allocator.reset()
    check(allocator, [])


@dataclass
class Memory:
    """Keeps some blocks, and notes which have gone."""

    kept: set[int] = field(default_factory=set)
    gone: list[int] = field(default_factory=list)

    def is_cached(self, block: int) -> bool:
        return block in self.kept

    def evict(self, block: int) -> None:
        self.kept.remove(block)
        self.gone.append(block)


class Slow:
    """The allocator's rules by looking at every block."""

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self.idle: list[int] = []

    @property
    def empty(self) -> list[int]:
        return [b for b, count in enumerate(self.references) if not count and b not in self.idle]

    def claim(self, count: int, place: int) -> list[int]:
        taken = list[int]()
        while len(taken) < count:
            empty, missing = self.empty, count - len(taken)
            if missing > len(empty):
                every = sorted([*empty, *self.idle[: missing - len(empty)]])
                more = [b for b in every if b >= place] + [b for b in every if b < place]
            else:
                more = self.run(empty, place) or self.fitting(empty, missing)
            taken += more[:missing]
            for block in more[:missing]:
                self.references[block] = 1
                self.idle = [b for b in self.idle if b != block]
        return taken

    def run(self, empty: Sequence[int], start: int) -> list[int]:
        found = list[int]()
        while start + len(found) in empty:
            found.append(start + len(found))
        return found

    def fitting(self, empty: Sequence[int], missing: int) -> list[int]:
        runs = [self.run(empty, block) for block in empty if block - 1 not in empty]
        enough = [run for run in runs if len(run) >= missing]
        return min(enough, key=len) if enough else max(runs, key=len)

    def drop(self, blocks: Sequence[int], memory: Memory) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block] and memory.is_cached(block):
                self.idle.append(block)


def act(allocator: BlockAllocator, slow: Slow, memory: Memory, tables: list[BlockTable], dice: random.Random) -> None:
    """One operation on both, the blocks of which are compared."""
    block_table, size = dice.choice(tables), allocator.block_size
    held = list(block_table.blocks)
    operation = dice.randrange(7)
    if operation < 3:
        count = min(dice.choice((1, 1, 3, 8)), allocator.num_free)
        allocator.allocate(block_table, (block_table.num_released + len(held) + count) * size)
        assert block_table.blocks == held + slow.claim(count, held[-1] + 1 if held else -1)
    elif operation == 3:
        keep = dice.randint(0, len(held))
        allocator.trim(block_table, (block_table.num_released + keep) * size)
        slow.drop(held[keep:], memory)
    elif operation == 4 and len(tables) < 8:
        tables.append(allocator.fork(block_table, dice.randint(0, block_table.num_released + len(held)) * size))
        for block in tables[-1].blocks:
            slow.references[block] += 1
    elif operation == 5:
        allocator.release(block_table)
        slow.drop(held, memory)
    elif held:
        count = dice.randint(0, len(held))
        allocator.release_before(block_table, (block_table.num_released + count) * size)
        slow.drop(held[:count], memory)


@pytest.mark.parametrize("seed", range(30))
def test_against_a_slow_allocator(seed: int) -> None:
    """The same blocks in the same order, and the same ones forgotten, whatever is asked for."""
    dice = random.Random(seed)
    blocks = dice.choice((3, 12, 40))
    allocator, slow, memory = BlockAllocator(blocks, 4), Slow(blocks), Memory()
    allocator.set_prefix_cache(memory)
    tables = [BlockTable() for _ in range(4)]
    for _ in range(400):
        act(allocator, slow, memory, tables, dice)
        used = [b for b, count in enumerate(slow.references) if count]
        memory.kept |= {b for b in used if dice.random() < 0.3}  # something is known of it from now on
        check(allocator, tables)
        assert allocator.references == slow.references
        assert [*allocator.evictable] == slow.idle
        assert [*allocator._empty] == slow.empty
    assert memory.gone
    assert len(tables) == 8


def test_a_keeper_that_begins_anew_keeps_nothing() -> None:
    allocator = BlockAllocator(4, 1)
    allocator.set_prefix_cache(Memory({*range(4)}))
    (block_table,) = grown(allocator, 4)
    allocator.release(block_table)
    assert len(allocator.evictable) == 4
    fresh = Memory()
    allocator.set_prefix_cache(fresh)
    assert not allocator.evictable
    assert grown(allocator, 4)[0].blocks == [0, 1, 2, 3]
    assert not fresh.gone


class Counted(list[Any]):
    """A list that counts how often it is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


def test_a_block_of_a_large_pool_costs_no_look_at_all_of_it() -> None:
    allocator = BlockAllocator(4096, 1)
    tables = grown(allocator, *[1] * 4096)
    for block_table in tables[::2]:
        allocator.release(block_table)
    references = allocator.references = Counted(allocator.references)
    lists = allocator._empty._starts, allocator._empty._lengths
    allocator._empty._starts, allocator._empty._lengths = counted = (Counted(lists[0]), Counted(lists[1]))
    for number in range(1, 401, 2):
        allocator.allocate(tables[number], 2)
        allocator.release(tables[number])
    assert 0 < references.looks < 20 * 200
    assert all(0 < each.looks < 200 * 200 for each in counted), "it searches for runs, and does not go through them"
