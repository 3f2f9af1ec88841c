"""Which blocks of the KV cache are whose.

Blocks are numbered places for ``block_size`` tokens each. A request owns a :class:`BlockTable`; several tables may
share a block, which is counted. The allocator prefers runs of consecutive blocks, because a table whose blocks follow
each other is read as a view and needs no gathering; free ones are kept as runs, so that it need not look for them.
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
    """The blocks of one request, in the order of its tokens.

    Token ``p`` is in ``blocks[p // block_size - released]`` at offset ``p % block_size``. For example, with blocks of
    16, ``released = 2`` and ``blocks = [7, 8]``: tokens 0-31 have left the window, token 37 is in block 7 at offset 5,
    which is slot ``7 * 16 + 5 = 117``.

    Attributes:
        blocks: block numbers.
        released: how many leading blocks have been given back.
        length: committed tokens whose keys and values are in the cache; what lies beyond is a draft.
        in_run: whether the blocks are consecutive.
        digests: of the text up to the end of each full block, as far as they are known
            (:mod:`pronk.kv_cache.prefix`).
        version: of the pool that it was begun in.
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
        """``blocks`` as the kernels read them."""
        if self._numbers is None:
            self._numbers = (ctypes.c_int32 * len(self.blocks))(*self.blocks)
        return self._numbers

    @property
    def first(self) -> int | None:
        """Where block 0 of the request would be, if its blocks lie in one run; else ``None``."""
        return self.blocks[0] - self.released if self.blocks and self.in_run else None

    def changed(self) -> None:
        """The blocks are others than before: look again whether they are consecutive."""
        self.in_run = all(b - a == 1 for a, b in pairwise(self.blocks))
        self._numbers = None


class BlockKeeper(Protocol):
    """Who knows what is in blocks that nobody uses any more."""

    def keeps(self, block: int) -> bool:
        """Whether it is worth keeping."""
        ...

    def evict(self, block: int) -> None:
        """Its place is needed."""
        ...


class BlockAllocator:
    """Hands out blocks and counts who refers to them.

    Attributes:
        num_blocks: in all.
        block_size: tokens of a block.
        references: tables that each block is in.
        num_free: blocks that are in none; some may be *idle*.
        idle: those of them that the keeper keeps, the least recently used first: they are taken when there is no other.
        keeper: who keeps them.
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
        """From now on ``keeper`` says what is kept; of what is idle it keeps nothing."""
        self.keeper = keeper
        for run in consecutive(self.idle):
            self._empty.add(run)
        self.idle.clear()

    def reset(self) -> None:
        """All blocks are free; no table may be in use."""
        for block, references in enumerate(self.references):
            if references and self.keeper is not None and self.keeper.keeps(block):
                self.idle[block] = None
        self.references = [0] * self.num_blocks
        self.num_free = self.num_blocks
        self._empty = FreeRuns(self.num_blocks)
        for run in consecutive(self.idle):
            self._empty.take(run)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    def grow(self, block_table: BlockTable, tokens: int) -> None:
        """Give ``block_table`` places for its first ``tokens`` tokens.

        Raises:
            CacheFullError: not enough free blocks; the table is as before.
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
        """Free blocks that it takes to make the places of tokens ``block_table.length .. tokens - 1`` writable."""
        more = max(0, self.blocks_for(tokens) - block_table.released - len(block_table.blocks))
        written = block_table.blocks[max(0, block_table.length // self.block_size - block_table.released) :]
        return more + sum(self.shared(block) for block in written)

    def fork(self, block_table: BlockTable, tokens: int) -> BlockTable:
        """A second table over the blocks of the first ``tokens`` tokens."""
        count = max(0, self.blocks_for(tokens) - block_table.released)
        made = BlockTable(released=block_table.released, length=tokens, version=block_table.version)
        made.digests = block_table.digests[: tokens // self.block_size]
        self.share(made, block_table.blocks[:count])
        return made

    def share(self, block_table: BlockTable, blocks: Sequence[int]) -> None:
        """Let a table without blocks refer to these, which others may refer to as well."""
        for block in blocks:
            if not self.references[block]:
                self.num_free -= 1
                del self.idle[block]  # nobody knows of an empty one
            self.references[block] += 1
        block_table.blocks = list(blocks)
        block_table.changed()

    def shared(self, block: int) -> bool:
        """Whether more than one table refers to ``block``: it must be copied before it is written."""
        return self.references[block] > 1

    def replace(self, block_table: BlockTable, index: int) -> tuple[int, int]:
        """Swap the shared block at ``index`` of ``block_table`` for one of its own: ``(old, new)``; the caller copies."""
        old = block_table.blocks[index]
        if not self.num_free:
            msg = f"KV cache is full: no free block to copy a shared one into, of {self.num_blocks}; raise kv_memory"
            raise CacheFullError(msg)
        new = block_table.blocks[index] = self._claim(1)[0]
        self.references[old] -= 1
        block_table.changed()
        return old, new

    def release_before(self, block_table: BlockTable, token: int) -> list[int]:
        """Give back the blocks that hold only tokens before ``token``; returns the blocks that are free now."""
        count = max(0, token // self.block_size - block_table.released)
        gone, block_table.blocks = block_table.blocks[:count], block_table.blocks[count:]
        block_table.released += len(gone)
        if gone:
            block_table.changed()
        return self._drop(gone)

    def release(self, block_table: BlockTable) -> list[int]:
        """Give all blocks back; returns the blocks that are free now."""
        gone, block_table.blocks = block_table.blocks, []
        block_table.length = block_table.released = 0
        block_table.digests = []
        block_table.changed()
        return self._drop(gone)

    def trim(self, block_table: BlockTable, tokens: int) -> list[int]:
        """Give back the blocks behind the first ``tokens`` tokens; returns the blocks that are free now."""
        count = max(0, self.blocks_for(tokens) - block_table.released)
        gone, block_table.blocks = block_table.blocks[count:], block_table.blocks[:count]
        if gone:
            block_table.changed()
        return self._drop(gone)

    def _drop(self, blocks: list[int]) -> list[int]:
        freed = []
        for block in reversed(blocks):  # the end of a text is the first to be forgotten
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

    def _claim(self, count: int, place: int = -1) -> list[int]:
        """Take ``count`` free blocks: from number ``place`` on as far as that goes, and else in few runs."""
        taken: list[int] = []
        while len(taken) < count:
            more = self._next_blocks(count - len(taken), place)
            self._take(more)
            taken += more
        return taken

    def _next_blocks(self, count: int, place: int) -> Sequence[int]:
        """The next of ``count`` blocks, at least one.

        Where there are too few empty ones it is all of them, and the idle ones least recently used. That they are taken
        in the order of their numbers costs nothing, and makes the longest runs.
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
