"""Block tables and the block allocator of the KV cache.

A block holds ``block_size`` tokens. Each request owns a :class:`BlockTable`; several tables may share a block by
reference counting. The allocator prefers runs of consecutive blocks, because a table of consecutive blocks is read as a
view, without a gather. Free blocks are stored as runs, so that none has to be searched for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Protocol

from pronk.errors import CacheFullError
from pronk.kv_cache.runs import FreeRuns, consecutive

__all__ = ["BlockAllocator", "BlockKeeper", "BlockTable"]


@dataclass
class BlockTable:
    """Blocks of one request, in token order.

    Token ``p`` is in ``blocks[p // block_size - released]`` at offset ``p % block_size``. For example, with blocks of
    16, ``released = 2`` and ``blocks = [7, 8]``: tokens 0-31 have left the window, token 37 is in block 7 at offset 5,
    which is slot ``7 * 16 + 5 = 117``.

    Attributes:
        blocks: block numbers.
        released: number of leading blocks that have been freed.
        length: number of committed tokens in the cache; later slots hold draft tokens.
        in_run: whether the block numbers are consecutive.
        digests: digest of the text up to the end of each full block, as far as computed (:mod:`pronk.kv_cache.prefix`).
        version: version of the pool (:class:`~pronk.kv_cache.paged.PagedCache`) at the table's first allocation.
    """

    blocks: list[int] = field(default_factory=list)
    released: int = 0
    length: int = 0
    in_run: bool = True
    digests: list[bytes] = field(default_factory=list)
    version: int = -1
    _numbers: ctypes.Array[ctypes.c_int32] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def numbers(self) -> ctypes.Array[ctypes.c_int32]:
        """``blocks`` as a C array for the kernels."""
        if self._numbers is None:
            self._numbers = (ctypes.c_int32 * len(self.blocks))(*self.blocks)
        return self._numbers

    @property
    def first(self) -> int | None:
        """Number that the request's block 0 has or would have if the blocks form one run; else ``None``."""
        return self.blocks[0] - self.released if self.blocks and self.in_run else None

    def changed(self) -> None:
        """Update the derived values after a change of ``blocks``."""
        self.in_run = all(b - a == 1 for a, b in pairwise(self.blocks))
        self._numbers = None


class BlockKeeper(Protocol):
    """Prefix cache as the allocator sees it: it decides which unreferenced blocks keep their content."""

    def keeps(self, block: int) -> bool:
        """Return whether the block's content is worth keeping."""
        ...

    def evict(self, block: int) -> None:
        """Drop the entry of a block that is about to be reused."""
        ...


class BlockAllocator:
    """Allocate blocks and count references to them.

    Attributes:
        num_blocks: total number of blocks.
        block_size: tokens per block.
        references: number of tables that hold each block.
        num_free: number of blocks without references; includes idle blocks.
        idle: unreferenced blocks whose content the keeper keeps, least recently used first; reused when no empty block
            is left.
        keeper: prefix cache, or ``None``.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.num_free = num_blocks
        self.idle: dict[int, None] = {}
        self.keeper: BlockKeeper | None = None
        self._empty = FreeRuns(num_blocks)  # free, and not idle

    def entrust(self, keeper: BlockKeeper) -> None:
        """Set the keeper, which knows none of the blocks: idle blocks become empty."""
        self.keeper = keeper
        for run in consecutive(self.idle):
            self._empty.add(run)
        self.idle.clear()

    def reset(self) -> None:
        """Free all blocks; no table may be in use."""
        for block, references in enumerate(self.references):
            if references and self.keeper is not None and self.keeper.keeps(block):
                self.idle[block] = None
        self.references = [0] * self.num_blocks
        self.num_free = self.num_blocks
        self._empty = FreeRuns(self.num_blocks)
        for run in consecutive(self.idle):
            self._empty.take(run)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    def grow(self, block_table: BlockTable, tokens: int) -> None:
        """Allocate slots for the first ``tokens`` tokens of ``block_table``.

        Raises:
            CacheFullError: too few blocks are free; the table is unchanged.
        """
        wanted = self.blocks_for(tokens) - block_table.released - len(block_table.blocks)
        if wanted <= 0:
            return
        if wanted > self.num_free:
            msg = (
                f"KV cache is full: {wanted} blocks of {self.block_size} tokens needed, {self.num_free} of "
                f"{self.num_blocks} free; raise kv_memory, or lower max_tokens or the number of requests"
            )
            raise CacheFullError(msg)
        block_table.blocks += self._claim(wanted, block_table.blocks[-1] + 1 if block_table.blocks else -1)
        block_table.changed()

    def missing(self, block_table: BlockTable, tokens: int) -> int:
        """Return the number of free blocks, with copies, needed to write tokens up to ``tokens``."""
        more = max(0, self.blocks_for(tokens) - block_table.released - len(block_table.blocks))
        written = block_table.blocks[max(0, block_table.length // self.block_size - block_table.released) :]
        return more + sum(self.shared(block) for block in written)

    def fork(self, block_table: BlockTable, tokens: int) -> BlockTable:
        """Return a second table over the blocks of the first ``tokens`` tokens."""
        count = max(0, self.blocks_for(tokens) - block_table.released)
        made = BlockTable(released=block_table.released, length=tokens, version=block_table.version)
        made.digests = block_table.digests[: tokens // self.block_size]
        self.share(made, block_table.blocks[:count])
        return made

    def share(self, block_table: BlockTable, blocks: Sequence[int]) -> None:
        """Set the blocks of an empty table to existing blocks, which other tables may hold as well."""
        for block in blocks:
            if not self.references[block]:
                self.num_free -= 1
                del self.idle[block]  # a block without references is idle here: empty blocks cannot be shared
            self.references[block] += 1
        block_table.blocks = list(blocks)
        block_table.changed()

    def shared(self, block: int) -> bool:
        """Return whether several tables hold ``block``; it must be copied before a write."""
        return self.references[block] > 1

    def replace(self, block_table: BlockTable, index: int) -> tuple[int, int]:
        """Replace the shared block at ``index`` by a new one; return ``(old, new)``, which the caller copies."""
        old = block_table.blocks[index]
        if not self.num_free:
            msg = f"KV cache is full: no free block to copy a shared one, out of {self.num_blocks}; raise kv_memory"
            raise CacheFullError(msg)
        new = block_table.blocks[index] = self._claim(1)[0]
        self.references[old] -= 1
        block_table.changed()
        return old, new

    def release_before(self, block_table: BlockTable, token: int) -> list[int]:
        """Release blocks with only tokens before ``token``; return the blocks that became empty."""
        count = max(0, token // self.block_size - block_table.released)
        gone, block_table.blocks = block_table.blocks[:count], block_table.blocks[count:]
        block_table.released += len(gone)
        if gone:
            block_table.changed()
        return self._drop(gone)

    def release(self, block_table: BlockTable) -> list[int]:
        """Release all blocks; return those that became empty."""
        gone, block_table.blocks = block_table.blocks, []
        block_table.length = block_table.released = 0
        block_table.digests = []
        block_table.changed()
        return self._drop(gone)

    def trim(self, block_table: BlockTable, tokens: int) -> list[int]:
        """Release the blocks behind the first ``tokens`` tokens; return those that became empty."""
        count = max(0, self.blocks_for(tokens) - block_table.released)
        gone, block_table.blocks = block_table.blocks[count:], block_table.blocks[:count]
        if gone:
            block_table.changed()
        return self._drop(gone)

    def _drop(self, blocks: list[int]) -> list[int]:
        freed = []
        for block in reversed(blocks):  # the end of a text is evicted first
            if self.references[block] <= 0:
                msg = f"block {block} was released twice"
                raise AssertionError(msg)
            self.references[block] -= 1
            if self.references[block]:
                continue
            self.num_free += 1
            if self.keeper is not None and self.keeper.keeps(block):
                self.idle[block] = None
            else:
                freed.append(block)
        for run in consecutive(freed):
            self._empty.add(run)
        return freed[::-1]

    def _claim(self, count: int, after: int = -1) -> list[int]:
        """Allocate ``count`` free blocks: from number ``after`` on while possible, else in few runs."""
        taken: list[int] = []
        while len(taken) < count:
            run = self._next_blocks(count - len(taken), after)
            self._take(run)
            taken += run
        return taken

    def _next_blocks(self, count: int, place: int) -> Sequence[int]:
        """Return the next of ``count`` blocks to allocate, at least one.

        If too few blocks are empty, these are all empty blocks and the least recently used idle ones, sorted by number
        for long runs.
        """
        idle = count - (self.num_free - len(self.idle))
        if idle > 0:
            return sorted([*self._empty, *islice(self.idle, idle)], key=lambda block: (block < place, block))
        return (self._empty.after(place) or self._empty.fit(count))[:count]

    def _take(self, blocks: Sequence[int]) -> None:
        for run in consecutive(block for block in blocks if block not in self.idle):
            self._empty.take(run)
        for block in blocks:
            if block in self.idle:
                assert self.keeper is not None
                self.keeper.evict(block)
                del self.idle[block]
            self.references[block] = 1
        self.num_free -= len(blocks)
