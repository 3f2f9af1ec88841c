"""What a pass costs by its rows, measured on this machine with this model: what guessing has to pay for."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from pronk.cache.blocks import BlockTable
from pronk.interrupts import uninterrupted
from pronk.passes.attention import Segment
from pronk.passes.runner import Job, Runner
from pronk.tree import TokenTree

__all__ = ["PassCosts"]

_ROWS = (1, 4, 8, 16, 32, 64, 128)

# A pass of so many times the cost of one row ends a round: from there on costs grow with the rows.
_ENOUGH = 1.8
_ROUNDS = 2
# A size is looked at twice before it ends a round: it may have been disturbed.
_LOOKS = 2
_TABLE = 1024


@dataclass(frozen=True)
class PassCosts:
    """Measured seconds of a pass by its number of rows, with a short context on a quiet machine.

    Only their ratios decide how much is guessed, and those change little with the context: its keys and values are read
    once per pass, whatever the rows.

    Attributes:
        rows: numbers of rows, rising; the first is 1.
        seconds: of a pass over them, never falling; at least two.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def measure(cls, runner: Runner) -> PassCosts | None:
        """Run some passes over a scratch table; ``None`` while the cache has no room for one."""
        table, pool = BlockTable(), runner.cache
        room = min(pool.allocator.num_free * pool.block_size, runner.decoder.config.context)
        sizes = [rows for rows in _ROWS if rows <= room]
        if len(sizes) < 2:
            return None
        best: dict[int, float] = {}
        try:
            with uninterrupted():
                pool.prepare(table, sizes[-1])
            # Round by round, so that whoever disturbs the machine for a while does not disturb one size alone.
            for _ in range(_ROUNDS):
                for size in sizes:
                    job = Job(Segment(table, TokenTree.chain([0] * size)), range(size), 1)
                    for _ in range(_LOOKS):
                        best[size] = min(runner.forward([job]).seconds, best.get(size, math.inf))
                        if best[size] <= _ENOUGH * best[1]:
                            break
                    else:
                        break
        finally:
            with uninterrupted():
                pool.release(table)
        rows = tuple(sorted(best))
        # More rows never take less time, and whoever disturbs a measurement makes it longer.
        return cls(rows, tuple(min(best[more] for more in rows[i:]) for i in range(len(rows))))

    def at(self, rows: int) -> float:
        """Seconds of a pass over ``rows``, at least 1."""
        return self._table[rows] if rows < _TABLE else self._interpolate(rows)

    @cached_property
    def _table(self) -> list[float]:
        return [self._interpolate(max(1, rows)) for rows in range(_TABLE)]

    def _interpolate(self, rows: int) -> float:
        """Between two points, or on beyond the last two."""
        upper = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        low, high = self.rows[upper - 1], self.rows[upper]
        before, after = self.seconds[upper - 1], self.seconds[upper]
        return before + (after - before) * (rows - low) / (high - low)
