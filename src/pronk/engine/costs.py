"""What a pass costs by its rows, measured on this machine with this model: what guessing has to pay for."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from pronk.cache.blocks import BlockTable
from pronk.engine.runner import Job, Runner
from pronk.model.attention import ROW_ALIGNMENT, Segment
from pronk.tree import TokenTree

__all__ = ["PassCosts"]

_ROWS = (1, 4, 8, 16, 32, 64, 128)

# A pass of so many times the cost of one row is not worth measuring on: from there on costs grow with the rows.
_ENOUGH = 3.0
_ROUNDS = 2
_TABLE = 1024


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a pass over so many rows, at some of their numbers.

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
        room = pool.allocator.num_free * pool.block_size
        sizes = [rows for rows in _ROWS if rows <= room]
        if len(sizes) < 2:
            return None
        rows, seconds = list[int](), list[float]()
        try:
            pool.prepare(table, sizes[-1])
            for size in sizes:
                job = Job(Segment(table, TokenTree.chain([0] * size)), range(size), 1)
                if size == 1:
                    runner.forward([job])  # the first pass of all pays for more than itself
                rows.append(size)
                seconds.append(min(runner.forward([job]).seconds for _ in range(_ROUNDS)))
                if len(rows) > 1 and seconds[-1] > _ENOUGH * seconds[0]:
                    break
        finally:
            pool.release(table)
        return cls(tuple(rows), tuple(max(seconds[: i + 1]) for i in range(len(seconds))))

    def at(self, rows: int) -> float:
        """Seconds of a pass over ``rows``, at least 1; beyond a unit of rows, whole units are what is computed."""
        if rows > ROW_ALIGNMENT:
            rows += -rows % ROW_ALIGNMENT
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
