"""The pool of the process that requests come to, and what is known of the workers' pools.

All pools have the same blocks, and a token has the same slot in each of them, but a worker's holds what it has computed
or been sent, no more. Here everything is that is certain: what a worker has computed of an accepted path is fetched
when the path is committed, and sent on to the others when they need it, unless it is cheaper to let them compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.speculation.tree import TokenTree

__all__ = ["MirroredCache", "PartitionedTree", "RemoteCopy"]

# Where slots are asked for: seconds are not, as what is fetched is little.
Fetch = Callable[[NDArray[np.int64]], Tensor | None]


@dataclass(eq=False)
class RemoteCopy:
    """What one worker's pool holds.

    Attributes:
        fetch: asks it for what is at some slots; ``None`` if it is gone.
        has: by slot, whether it holds what is there.
        moves: slots that it is to copy, and where to, before anything else.
        told: whether it knows how large the pool is.
    """

    fetch: Fetch
    has: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    moves: list[tuple[int, int]] = field(default_factory=list)
    told: bool = False

    def begin_anew(self, slots: int) -> None:
        """The pool is another one."""
        self.has, self.moves, self.told = np.zeros(slots, np.bool_), [], False


@dataclass(frozen=True)
class PartitionedTree:
    """Who has computed which nodes of one request's tree in the last pass.

    Attributes:
        tree: of the pass.
        here: node to its place behind the table's length, in this pool; ``None``: all, in the order of the tree.
        away: for each worker that has some of them, node to its position in the text's places.
    """

    tree: TokenTree
    here: Mapping[int, int] | None = None
    away: tuple[tuple[RemoteCopy, Mapping[int, int]], ...] = ()


class MirroredCache(PagedCache):
    """A pool of which others hold parts.

    Attributes:
        copies: what the workers' pools hold.
        dealt: of the tables in the last pass, by their ``id``.
        tokens: the committed token at each slot, int64.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """As any pool; nobody holds a part of it yet."""
        self.copies: list[RemoteCopy] = []
        self.dealt: dict[int, PartitionedTree] = {}
        self.tokens = np.zeros(0, np.int64)
        super().__init__(*args, **options)

    def _changed(self) -> None:
        super()._changed()
        if len(self.tokens) != self.num_slots:
            self.tokens = np.zeros(self.num_slots, np.int64)
        self.begin_copies_anew()

    def begin_copies_anew(self) -> None:
        """Nobody holds a part of it any more; what is here stays."""
        for copy in self.copies:
            copy.begin_anew(self.num_slots)

    def join(self, fetch: Fetch) -> RemoteCopy:
        """A worker begins, with nothing."""
        copy = RemoteCopy(fetch)
        copy.begin_anew(self.num_slots)
        self.copies.append(copy)
        return copy

    def prepare(self, block_table: BlockTable, tokens: int) -> None:
        """As any pool; what will be written is nowhere else any more."""
        super().prepare(block_table, tokens)
        if tokens > block_table.length:
            self._forget(self.slots(block_table, block_table.length, tokens))

    def _copy(self, old: int, new: int) -> None:
        super()._copy(old, new)
        size = self.block_size
        self.tokens[new * size : (new + 1) * size] = self.tokens[old * size : (old + 1) * size]
        self._forget(slice(new * size, (new + 1) * size))

    def _forget(self, slots: slice | NDArray[np.int64]) -> None:
        for copy in self.copies:
            copy.has[slots] = False

    def commit(self, block_table: BlockTable, offsets: Sequence[int]) -> None:
        """As any pool; rows that a worker has computed are fetched.

        If that worker is gone, the rows before them are all that is committed: they will be computed again.
        """
        dealt, length = self.dealt.pop(id(block_table), None), block_table.length
        if dealt is None or dealt.here is None:
            super().commit(block_table, offsets)
        else:
            here = dealt.here
            own = [here[offset] for offset in offsets if offset in here]
            super().commit(block_table, own)
            self._fetch(block_table, dealt, offsets[len(own) :])
        if dealt is not None:
            count = block_table.length - length
            self.tokens[self.slots(block_table, length, block_table.length)] = [
                dealt.tree.tokens[node] for node in offsets[:count]
            ]
            for copy, positions in dealt.away:
                self._follow(
                    copy, block_table, [positions[node] for node in offsets[:count] if node in positions], length
                )

    def _fetch(self, block_table: BlockTable, dealt: PartitionedTree, missing: Sequence[int]) -> None:
        """The rest of a path, of the worker that has it."""
        if not missing:
            return
        copy, positions = next(each for each in dealt.away if missing[-1] in each[1])
        kept = copy.fetch(
            np.concatenate([self.slots(block_table, p, p + 1) for p in map(positions.__getitem__, missing)])
        )
        if kept is not None:
            self.put(self.slots(block_table, block_table.length, block_table.length + len(missing)), kept)
            block_table.length += len(missing)

    def _follow(self, copy: RemoteCopy, block_table: BlockTable, positions: Sequence[int], length: int) -> None:
        """A worker keeps what it has of a path, the first rows of it."""
        if not positions:
            return
        stop = max(length + len(positions), max(positions) + 1)
        slots, base = self.slots(block_table, length, stop), length
        for place, position in enumerate(positions):
            if position - base != place:
                copy.moves.append((int(slots[position - base]), int(slots[place])))
        copy.has[slots[: len(positions)]] = True
