"""State of one run of a program of the torch backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pronk.arrays import Array
from pronk.kv_cache.paged import PagedCache
from pronk.models.program_rows import ProgramRows
from pronk.torch_backend.cache import TorchCache, path_slots
from pronk.torch_backend.convert import to_tensor


class TorchPass:
    """The buffers of one run of a program, by name, and its rows."""

    def __init__(self, rows: ProgramRows, stream: Tensor, collected: Array | None, device: str) -> None:
        self.rows, self.collected, self.device = rows, collected, device
        self._made: dict[object, Any] = {}  # what all layers share
        self.buffers: dict[str, Tensor] = {"stream": stream}
        self._parts: dict[int, Tensor] = {}  # parts of the rows of ``A``, until all are written
        self.pairs_per_expert: list[int] = []
        # Text position of each row; the rows of a segment follow its committed tokens.
        depths = [np.asarray(tree.depths[first:], np.int64) + table.length for table, tree, first in rows.segments]
        self.positions = np.concatenate(depths) if depths else np.arange(rows.count)

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """Return ``make()``, called once in this pass for each ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def store(self, name: str, part: tuple[int, int] | None, x: Tensor) -> None:
        """Replace a buffer, or a part of the rows of ``A``, which is complete when all parts are written."""
        if part is None:
            self.buffers[name] = x
            return
        self._parts[part[0]] = x
        if len(self._parts) == part[1]:
            self.buffers["A"] = torch.cat([self._parts.pop(index) for index in range(part[1])], dim=-1)

    def collected_rows(self, index: int) -> Tensor:
        """Return ``collected[index]``, an input of the program."""
        assert self.collected is not None
        return to_tensor(self.collected[index]).to(self.device)

    def rotate(self, x: Tensor, number: int) -> Tensor:
        """Apply RoPE table ``number`` to ``x`` ``[rows, heads, head_dim]``."""
        table, by_row = self.rows.rope[number]
        places = np.arange(self.rows.count) if by_row else self.positions
        entries = self.once(("rope", number), lambda: to_tensor(table[places]).to(self.device, x.dtype))
        cos, sin = entries.unsqueeze(2).unbind(1)
        half = cos.shape[-1]
        first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    def adapted_rows(self) -> list[tuple[int, Tensor]]:
        """Return the number of each adapter in this pass, and the indices of its rows."""

        def make() -> list[tuple[int, Tensor]]:
            numbers = [table.adapter for table, tree, computed in self.rows.segments for _ in tree.tokens[computed:]]
            by_row = torch.tensor(numbers, device=self.device)
            return [(number, (by_row == number).nonzero()[:, 0]) for number in sorted({*numbers} - {-1})]

        found: list[tuple[int, Tensor]] = self.once("adapters", make)
        return found

    def growth(self, growth: float, period: int) -> Tensor:
        """Return the factor of each row's queries, ``[rows, 1, 1]``: ``ModelConfig.query_growth``."""
        factors = 1.0 + growth * np.log1p(self.positions // period)
        return torch.from_numpy(factors).to(self.device, self.buffers["stream"].dtype)[:, None, None]

    def slots(self, cache: PagedCache) -> Tensor:
        """Return the slot of each row in the cache."""
        assert isinstance(cache, TorchCache)

        def make() -> Tensor:
            slots = [
                cache.slots(table, table.length + computed, table.length + len(tree))
                for table, tree, computed in self.rows.segments
            ]
            return cache.to_index(np.concatenate(slots))

        found: Tensor = self.once("slots", make)
        return found

    def path_slots(self, cache: TorchCache, taps: int) -> tuple[Tensor, Tensor]:
        """Return the slots of the last ``taps`` tokens of each row's path, and which of them exist.

        Both are ``[rows, taps]``, the oldest token first.
        """

        def make() -> tuple[Tensor, Tensor]:
            slots = np.concatenate([path_slots(cache, *segment, taps) for segment in self.rows.segments])
            return cache.to_index(np.maximum(slots, 0)), torch.from_numpy(slots >= 0).to(self.device)

        found: tuple[Tensor, Tensor] = self.once(("path", taps), make)
        return found
