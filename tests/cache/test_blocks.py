"""The block allocator: reference counts, and the same choice of blocks as a slow implementation."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from pronk.base.errors import CacheFullError
from pronk.cache.blocks import BlockAllocator, BlockTable


def grown(allocator: BlockAllocator, *tokens: int) -> list[BlockTable]:
    tables = [BlockTable() for _ in tokens]
    for block_table, count in zip(tables, tokens, strict=True):
        allocator.allocate(block_table, count)
    return tables


def check(allocator: BlockAllocator, tables: list[BlockTable]) -> None:
    """Check reference counts, the number of free blocks, and the flags of the block tables."""
    held = Counter(block for block_table in tables for block in block_table.blocks)
    assert [held[block] for block in range(allocator.num_blocks)] == allocator.references
    assert allocator.num_free == allocator.references.count(0)
    for block_table in tables:
        assert len(set(block_table.blocks)) == len(block_table.blocks)
        assert block_table.contiguous == all(b - a == 1 for a, b in pairwise(block_table.blocks))
        if block_table.first_block is not None:
            start = block_table.first_block + block_table.num_released
            assert block_table.blocks == [*range(start, start + len(block_table.blocks))]


def test_the_example_of_the_docstring() -> None:
    block_table = BlockTable(blocks=[7, 8], num_released=2)
    assert block_table.first_block == 5
    assert (block_table.blocks[37 // 16 - block_table.num_released], 37 % 16) == (7, 5)
    assert BlockTable().first_block is None
    assert BlockTable([3, 5], contiguous=False).first_block is None


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10), (161, 11)]
)
def test_num_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockAllocator(4, 16).num_blocks_for(tokens) == blocks


def test_errors_of_a_full_cache() -> None:
    allocator = BlockAllocator(5, 16)
    a, b = grown(allocator, 40, 10)
    with pytest.raises(
        CacheFullError, match=r"2 blocks of 16 tokens needed, 1 of 5 free; raise kv_memory"
    ):
        allocator.allocate(b, 33)
    assert b.blocks == [3]
    check(allocator, [a, b])
    allocator.allocate(b, 32)
    other = allocator.fork(b, 32)
    with pytest.raises(CacheFullError, match=r"no free block.*of 5; raise kv_memory"):
        allocator.replace_shared(other, 1)
    check(allocator, [a, b, other])


def test_a_block_is_released_once() -> None:
    allocator = BlockAllocator(4, 4)
    (block_table,) = grown(allocator, 4)
    stale = BlockTable(list(block_table.blocks))
    allocator.release(block_table)
    assert allocator.release(block_table) == []
    with pytest.raises(AssertionError, match="block 0 was released twice"):
        allocator.release(stale)


def test_reset() -> None:
    allocator = BlockAllocator(5, 4)
    grown(allocator, 9, 3)
    allocator.reset()
    check(allocator, [])


@dataclass
class Prefix:
    """A fake prefix cache with given blocks, which records evictions."""

    kept: set[int] = field(default_factory=set)
    gone: list[int] = field(default_factory=list)

    def is_cached(self, block: int) -> bool:
        return block in self.kept

    def evict(self, block: int) -> None:
        self.kept.remove(block)
        self.gone.append(block)


class Slow:
    """A slow allocator with the same choice of blocks, by a search through all of them."""

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self.idle: list[int] = []

    @property
    def empty(self) -> list[int]:
        return [b for b, count in enumerate(self.references) if not count and b not in self.idle]

    def claim(self, count: int, place: int) -> list[int]:
        taken = list[int]()
        while len(taken) < count:
            empty = self.empty
            missing = count - len(taken)
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

    def drop(self, blocks: Sequence[int], memory: Prefix) -> list[int]:
        """Remove a reference to each block; return the free blocks that are not in the prefix
        cache.
        """
        freed = list[int]()
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                (self.idle if memory.is_cached(block) else freed).append(block)
        return freed[::-1]


def act(
    allocator: BlockAllocator,
    slow: Slow,
    memory: Prefix,
    tables: list[BlockTable],
    dice: random.Random,
) -> None:
    """Apply a random operation to both allocators and compare the results."""
    block_table = dice.choice(tables)
    size = allocator.block_size
    held = list(block_table.blocks)
    shared = [index for index, block in enumerate(held) if allocator.references[block] > 1]
    num_released = block_table.num_released
    slots = (num_released + len(held)) * size
    operation = dice.randrange(8)
    if operation < 3:
        with pytest.raises(CacheFullError):
            allocator.allocate(block_table, slots + (allocator.num_free + 1) * size)
        count = min(dice.choice((1, 1, 3, 8)), allocator.num_free)
        allocator.allocate(block_table, slots + count * size - dice.randrange(size))
        assert block_table.blocks == held + slow.claim(count, held[-1] + 1 if held else -1)
    elif operation == 3:
        keep = dice.randint(0, len(held))
        freed = allocator.trim(block_table, (num_released + keep) * size)
        assert freed == slow.drop(held[keep:], memory)
    elif operation == 4 and len(tables) < 8:
        tokens = dice.randint(0, slots)
        tables.append(allocator.fork(block_table, tokens))
        assert (tables[-1].num_released, tables[-1].length) == (num_released, tokens)
        assert tables[-1].blocks == held[: max(0, allocator.num_blocks_for(tokens) - num_released)]
        for block in tables[-1].blocks:
            slow.references[block] += 1
    elif operation == 5:
        freed = allocator.release(block_table)
        assert freed == slow.drop(held, memory)
        assert (block_table.blocks, block_table.length, block_table.num_released) == ([], 0, 0)
    elif operation == 6 and shared and allocator.num_free:
        index = dice.choice(shared)
        (new,) = slow.claim(1, -1)
        slow.references[held[index]] -= 1
        assert allocator.replace_shared(block_table, index) == (held[index], new)
        assert block_table.blocks == [*held[:index], new, *held[index + 1 :]]
    elif held:
        count = dice.randint(0, len(held))
        place = (num_released + count) * size + (dice.randrange(size) if count < len(held) else 0)
        freed = allocator.release_before(block_table, place)
        assert freed == slow.drop(held[:count], memory)
        assert block_table.num_released == num_released + count


@pytest.mark.parametrize("seed", range(30))
def test_random_operations_equal_those_of_a_slow_allocator(seed: int) -> None:
    dice = random.Random(seed)
    blocks = dice.choice((3, 12, 40))
    allocator = BlockAllocator(blocks, dice.choice((1, 3, 4, 16)))
    slow = Slow(blocks)
    memory = Prefix()
    allocator.set_prefix_cache(memory)
    tables = [BlockTable() for _ in range(4)]
    for _ in range(400):
        act(allocator, slow, memory, tables, dice)
        used = [b for b, count in enumerate(slow.references) if count]
        memory.kept |= {b for b in used if dice.random() < 0.3}
        check(allocator, tables)
        assert allocator.references == slow.references
        assert [*allocator.evictable] == slow.idle
        assert [*allocator._empty] == slow.empty
    assert memory.gone
    assert len(tables) == 8
    for block_table in tables:
        allocator.release(block_table)
    check(allocator, [])


def test_a_new_prefix_cache_keeps_no_block() -> None:
    allocator = BlockAllocator(4, 1)
    allocator.set_prefix_cache(Prefix({*range(4)}))
    (block_table,) = grown(allocator, 4)
    allocator.release(block_table)
    assert len(allocator.evictable) == 4
    fresh = Prefix()
    allocator.set_prefix_cache(fresh)
    assert not allocator.evictable
    assert grown(allocator, 4)[0].blocks == [0, 1, 2, 3]
    assert not fresh.gone


class Counted(list[Any]):
    """A list that counts its reads."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_allocation_does_not_search_all_blocks() -> None:
    allocator = BlockAllocator(4096, 1)
    tables = grown(allocator, *[1] * 4096)
    for block_table in tables[::2]:
        allocator.release(block_table)
    references = allocator.references = Counted(allocator.references)
    for number in range(1, 401, 2):
        allocator.allocate(tables[number], 2)
        allocator.release(tables[number])
    assert 0 < references.reads < 20 * 200
