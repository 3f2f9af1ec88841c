"""Block tables and the block allocator of the KV cache.

A block holds the keys and values of ``block_size`` tokens. Each request owns a
:class:`BlockTable`; several tables may share a block, which is reference-counted. The allocator
prefers runs of consecutive block numbers, because the keys of consecutive blocks are read as a
view, without a gather. The free blocks are therefore stored as runs.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

from pronk.base.errors import CacheFullError

if TYPE_CHECKING:
    from pronk.cache.prefix import PrefixCache
    from pronk.cache.states import StateTable


def max_held_tokens(length: int, window: int | None, prefill_chunk: int) -> int:
    """Return how many of ``length`` new tokens of a request have KV slots at one time, at most.

    Without a sliding window these are all of them. With one, these are the tokens of the window,
    those of the next chunk of the prompt, and the token that the forward pass generates.

    Args:
        length: number of tokens.
        window: largest sliding window of a layer in tokens; ``None`` if a layer has full attention.
        prefill_chunk: maximum number of prompt tokens per forward pass.
    """
    if window is None:
        return length
    return min(length, window + prefill_chunk + 1)


def max_held_blocks(length: int, window: int | None, prefill_chunk: int, block_size: int) -> int:
    """Return the maximum number of blocks held at one time by a text that grows to ``length``.

    The arguments are those of :func:`max_held_tokens`, and the number of tokens of a block.
    """
    num_blocks = -(-max_held_tokens(length, window, prefill_chunk) // block_size)
    # One more block, because a window can start in the middle of a block.
    return num_blocks + (window is not None)


@dataclass
class BlockTable:
    """Blocks of one request, in token order.

    Token ``p`` is in ``blocks[p // block_size - num_released]`` at offset ``p % block_size``. For
    example, with blocks of 16 tokens, ``num_released = 2`` and ``blocks = [7, 8]``: tokens 0-31
    have left the sliding window, and their blocks are released. Token 37 is in block 7 at offset 5,
    which is slot ``7 * 16 + 5 = 117``.

    Attributes:
        blocks: block numbers.
        num_released: number of leading blocks that this table has released.
        length: number of committed tokens in the cache; draft tokens have the slots after these.
        contiguous: whether the block numbers are consecutive.
        digests: digests of the text up to the end of the first, second, … full block; see
            :mod:`pronk.cache.prefix`.
        num_stored: number of leading blocks whose contents are on disk or queued to be written
            there.
        version: ``PagedCache.version`` at the first allocation. After a change of the cache's
            version, the prefix cache takes no blocks of this table.
        adapter: number of the adapter that computes these tokens in every forward pass; -1: none.
        states: states of recurrent layers after these tokens; ``None`` before the first pass, and
            for a model without recurrent layers.
    """

    blocks: list[int] = field(default_factory=list)
    num_released: int = 0
    length: int = 0
    contiguous: bool = True
    digests: list[bytes] = field(default_factory=list)
    num_stored: int = 0
    version: int = -1
    adapter: int = -1
    states: StateTable | None = field(default=None, repr=False, compare=False)
    _c_blocks: ctypes.Array[ctypes.c_int32] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @property
    def c_blocks(self) -> ctypes.Array[ctypes.c_int32]:
        """The block numbers as a C array of int32, for the kernels."""
        if self._c_blocks is None:
            array_type = ctypes.c_int32 * len(self.blocks)
            self._c_blocks = array_type(*self.blocks)
        return self._c_blocks

    @property
    def first_block(self) -> int | None:
        """Number that the block of token 0 has, or had before its release, in a contiguous table.

        ``None`` for a table without blocks, or with gaps between the block numbers.
        """
        if self.blocks and self.contiguous:
            return self.blocks[0] - self.num_released
        return None

    def update_derived(self) -> None:
        """Recompute the fields that depend on ``blocks``, after a change of ``blocks``."""
        self.contiguous = all(after - before == 1 for before, after in pairwise(self.blocks))
        self._c_blocks = None


class BlockAllocator:
    """Allocates blocks of ``block_size`` tokens and counts the tables that hold each block.

    A block that no table holds is free: evictable if the prefix cache holds it, else empty. Empty
    blocks are allocated first.

    Attributes:
        references: for each block, the number of tables that hold it.
        num_free: number of empty and evictable blocks.
        evictable: the evictable blocks, least recently used first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.num_free = num_blocks
        self.evictable: dict[int, None] = {}
        self.prefix_cache: PrefixCache | None = None
        self._empty = FreeRuns(num_blocks)

    def set_prefix_cache(self, prefix_cache: PrefixCache) -> None:
        """Connect a prefix cache that has no blocks; all evictable blocks become empty."""
        self.prefix_cache = prefix_cache
        for run in to_runs(self.evictable):
            self._empty.add(run)
        self.evictable.clear()

    def reset(self) -> None:
        """Free all blocks; existing tables must not be used any more."""
        if self.prefix_cache is not None:
            for block, references in enumerate(self.references):
                if references and self.prefix_cache.is_cached(block):
                    self.evictable[block] = None
        self.references = [0] * self.num_blocks
        self.num_free = self.num_blocks
        self._empty = FreeRuns(self.num_blocks)
        for run in to_runs(self.evictable):
            self._empty.take(run)

    def num_blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, block_table: BlockTable, tokens: int) -> None:
        """Extend a table to hold ``tokens`` tokens.

        Raises:
            CacheFullError: too few blocks are free.
        """
        num_blocks = block_table.num_released + len(block_table.blocks)
        needed = self.num_blocks_for(tokens) - num_blocks
        if needed <= 0:
            return
        if needed > self.num_free:
            msg = (
                f"KV cache is full: {needed} blocks of {self.block_size} tokens needed, "
                f"{self.num_free} of {self.num_blocks} free; raise kv_memory, or lower max_tokens "
                "or the number of requests"
            )
            raise CacheFullError(msg)
        next_block = block_table.blocks[-1] + 1 if block_table.blocks else -1
        block_table.blocks += self._allocate_blocks(needed, next_block)
        block_table.update_derived()

    def num_missing(self, block_table: BlockTable, tokens: int) -> int:
        """Return the number of free blocks that a table takes until it holds ``tokens`` tokens.

        A shared block that is written counts, because it is copied first; see
        :meth:`PagedCache.prepare`.
        """
        needed = self.num_blocks_for(tokens) - block_table.num_released
        first = max(0, block_table.length // self.block_size - block_table.num_released)
        num_missing = max(0, needed - len(block_table.blocks))
        for block in block_table.blocks[first:needed]:
            num_missing += self.references[block] > 1
        return num_missing

    def fork(self, block_table: BlockTable, tokens: int) -> BlockTable:
        """Return a new table that shares the blocks of the first ``tokens`` tokens.

        A later write to a shared block copies the block first; see :meth:`PagedCache.prepare`.
        """
        count = max(0, self.num_blocks_for(tokens) - block_table.num_released)
        forked = BlockTable(num_released=block_table.num_released, length=tokens)
        forked.version = block_table.version
        forked.adapter = block_table.adapter
        forked.digests = block_table.digests[: tokens // self.block_size]
        self.assign_cached(forked, block_table.blocks[:count])
        return forked

    def assign_cached(self, block_table: BlockTable, blocks: Sequence[int]) -> None:
        """Let an empty table share ``blocks``, each held by another table or the prefix cache."""
        for block in blocks:
            if not self.references[block]:
                self.num_free -= 1
                # since no table holds the block, it is in the prefix cache only
                del self.evictable[block]
            self.references[block] += 1
        block_table.blocks = list(blocks)
        block_table.update_derived()

    def replace_shared(self, block_table: BlockTable, index: int) -> tuple[int, int]:
        """Replace the shared block ``blocks[index]`` of a table by a new one.

        Returns:
            The old and the new block number. The caller copies the content.

        Raises:
            CacheFullError: no block is free.
        """
        old = block_table.blocks[index]
        if not self.num_free:
            msg = (
                f"KV cache is full: no free block to copy a shared one, out of {self.num_blocks}; "
                "raise kv_memory"
            )
            raise CacheFullError(msg)
        new = self._allocate_blocks(1)[0]
        block_table.blocks[index] = new
        self.references[old] -= 1
        block_table.update_derived()
        return old, new

    def release_before(self, block_table: BlockTable, token: int) -> list[int]:
        """Release the blocks of a table that hold only tokens before position ``token``.

        Called when a sliding window has moved on: no later token attends to the released ones.

        Returns:
            The blocks that became empty.
        """
        num_left = max(0, token // self.block_size - block_table.num_released)
        count = min(num_left, len(block_table.blocks))
        block_table.num_released += count
        return self._release_blocks(block_table, 0, count)

    def release(self, block_table: BlockTable) -> list[int]:
        """Release all blocks of a table; return the blocks that became empty."""
        block_table.length = 0
        block_table.num_released = 0
        block_table.num_stored = 0
        block_table.digests = []
        return self._release_blocks(block_table, 0)

    def trim(self, block_table: BlockTable, tokens: int) -> list[int]:
        """Release the blocks of a table that its first ``tokens`` tokens do not need.

        Returns:
            The blocks that became empty.
        """
        count = max(0, self.num_blocks_for(tokens) - block_table.num_released)
        return self._release_blocks(block_table, count)

    def _release_blocks(
        self, block_table: BlockTable, start: int, stop: int | None = None
    ) -> list[int]:
        """Release ``blocks[start:stop]`` of a table; return the blocks that became empty."""
        removed = block_table.blocks[start:stop]
        freed = list[int]()
        if removed:
            del block_table.blocks[start:stop]
            block_table.update_derived()
        # In reverse order, so that the last blocks of a text are evicted first: they are useless
        # without the blocks before them.
        for block in reversed(removed):
            if self.references[block] <= 0:
                msg = f"block {block} was released twice"
                raise AssertionError(msg)
            self.references[block] -= 1
            if self.references[block]:
                continue
            self.num_free += 1
            if self.prefix_cache is not None and self.prefix_cache.is_cached(block):
                self.evictable[block] = None
            else:
                freed.append(block)
        for run in to_runs(freed):
            self._empty.add(run)
        return freed[::-1]

    def _allocate_blocks(self, count: int, start: int = -1) -> list[int]:
        """Allocate ``count`` blocks, preferably consecutive ones that begin with ``start``."""
        allocated: list[int] = []
        while len(allocated) < count:
            blocks = self._next_blocks(count - len(allocated), start)
            empty = [block for block in blocks if block not in self.evictable]
            for run in to_runs(empty):
                self._empty.take(run)
            for block in blocks:
                if block in self.evictable:
                    assert self.prefix_cache is not None
                    self.prefix_cache.evict(block)
                    del self.evictable[block]
                self.references[block] = 1
            self.num_free -= len(blocks)
            allocated += blocks
        return allocated

    def _next_blocks(self, count: int, start: int) -> Sequence[int]:
        """Return 1 to ``count`` blocks to allocate, preferably a run that begins with ``start``.

        If fewer than ``count`` blocks are empty, return all empty blocks and the least recently
        used evictable blocks, sorted by number so that they form long runs: from ``start`` upwards,
        then the numbers below ``start``.
        """
        num_empty = self.num_free - len(self.evictable)
        num_evicted = count - num_empty
        if num_evicted > 0:
            blocks = [*self._empty, *islice(self.evictable, num_evicted)]
            return sorted(blocks, key=lambda block: (block < start, block))
        run = self._empty.run_from(start) or self._empty.best_fit(count)
        return run[:count]


class FreeRuns:
    """A set of numbers, stored as runs of consecutive numbers; initially ``0 .. stop - 1``."""

    def __init__(self, stop: int) -> None:
        self._runs = [range(stop)] if stop else []  # ascending, with gaps between them

    def __iter__(self) -> Iterator[int]:
        return (number for run in self._runs for number in run)

    def best_fit(self, length: int) -> range:
        """Return the shortest run of at least ``length`` numbers, or else the longest run."""
        long_enough = [run for run in self._runs if len(run) >= length]
        if long_enough:
            return min(long_enough, key=len)
        return max(self._runs, key=len)

    def run_from(self, number: int) -> range:
        """Return ``number`` and the numbers after it in its run; an empty range if it is absent."""
        index = self._index_after(number)
        stop = self._runs[index - 1].stop if index else number
        return range(number, max(number, stop))

    def add(self, run: range) -> None:
        """Add a run of numbers, none of which is in the set, and merge it with adjacent runs."""
        first = self._index_after(run.start)  # the runs ``first:last`` are merged with ``run``
        last = first
        start = run.start
        stop = run.stop
        if first and self._runs[first - 1].stop == start:
            first -= 1
            start = self._runs[first].start
        if last < len(self._runs) and self._runs[last].start == stop:
            stop = self._runs[last].stop
            last += 1
        self._runs[first:last] = [range(start, stop)]

    def take(self, run: range) -> None:
        """Remove a run of numbers, all of which are in the set."""
        index = self._index_after(run.start) - 1
        whole = self._runs[index]
        assert index >= 0
        assert run.stop <= whole.stop
        rest = (range(whole.start, run.start), range(run.stop, whole.stop))
        self._runs[index : index + 1] = [part for part in rest if part]

    def _index_after(self, number: int) -> int:
        """Return the index of the first run that begins after ``number``."""
        return bisect_right(self._runs, number, key=attrgetter("start"))


def to_runs(numbers: Iterable[int]) -> list[range]:
    """Group distinct numbers, in any order, into runs of consecutive numbers in ascending order."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
