"""Packing of low-rank adapters (LoRA) into the layout that the kernels read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pronk.base.arrays import FLOAT32, Array
from pronk.kernels.structures import CAdapter
from pronk.kernels.weights import PackedMatrix, pack


class LowRank(NamedTuple):
    """An adapter of adjacent outputs of a matrix: adds ``(x downᵀ) upᵀ`` to them."""

    start: int  # first of the outputs
    down: Array  # float32 ``[rank, inputs]``
    up: Array  # float32 ``[outputs, rank]``


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter of a matrix in the kernels' layout (``pronk_adapter``)."""

    down: PackedMatrix  # the matrices ``down`` of all parts, padded to the largest rank
    up: PackedMatrix  # the matrices ``up``, in the outputs of the adapted matrix
    first: Array = field(repr=False)  # int32 ``[blocks]``

    @property
    def struct(self) -> CAdapter:
        """The structure, whose addresses are valid as long as this object exists."""
        return CAdapter(
            ctypes.pointer(self.down.struct), ctypes.pointer(self.up.struct), self.first.ctypes.data
        )


def pack_adapter(matrix: PackedMatrix, parts: Sequence[LowRank]) -> PackedAdapter:
    """Pack the adapter of a matrix; ``parts`` have disjoint outputs."""
    outputs = _outputs_of_blocks(matrix)
    parts, first = list(parts), _first_inputs(outputs, parts)
    if first is None:
        parts = [_merge(parts)]
        first = _first_inputs(outputs, parts)
        assert first is not None
    rank = max(len(part.down) for part in parts)
    inputs = matrix.shape[1]
    down = np.zeros((len(parts), rank, inputs), FLOAT32)
    up = np.zeros((matrix.shape[0], rank), FLOAT32)
    for number, part in enumerate(parts):
        down[number, : len(part.down)] = part.down
        up[part.start : part.start + len(part.up), : part.up.shape[1]] = part.up
    unit = matrix.struct.unit
    gated = bool(matrix.struct.gated)
    return PackedAdapter(
        pack(matrix.kernels, down.reshape(-1, inputs)),
        pack(matrix.kernels, up, unit=unit, gated=gated),
        first,
    )


def _outputs_of_blocks(matrix: PackedMatrix) -> list[range]:
    """Return the outputs of each block of 16 of a matrix.

    Gate and up projection alternate in a gated one.
    """
    struct = matrix.struct
    units = [range(start, start + struct.unit) for start in range(0, matrix.shape[0], struct.unit)]
    blocks = [[unit[start : start + 16] for start in range(0, len(unit), 16)] for unit in units]
    if struct.gated:
        return [block for pair in zip(*blocks, strict=True) for block in pair]
    return [block for unit in blocks for block in unit]


def _first_inputs(outputs: Sequence[range], parts: Sequence[LowRank]) -> Array | None:
    """Return ``pronk_adapter.first``, or ``None`` if a block has outputs of several parts."""
    rank = max(len(part.down) for part in parts)
    first = np.full(len(outputs), -1, np.int32)
    for block, covered in enumerate(outputs):
        for number, part in enumerate(parts):
            if part.start < covered.stop and covered.start < part.start + len(part.up):
                if first[block] >= 0:
                    return None
                first[block] = number * rank
    return first


def _merge(parts: Sequence[LowRank]) -> LowRank:
    """Return one part that adds the same to the outputs of all; its rank is the sum of theirs."""
    start = min(part.start for part in parts)
    stop = max(part.start + len(part.up) for part in parts)
    up = np.zeros((stop - start, sum(len(part.down) for part in parts)), FLOAT32)
    rank = 0
    for part in parts:
        rows = slice(part.start - start, part.start - start + len(part.up))
        up[rows, rank : rank + len(part.down)] = part.up
        rank += len(part.down)
    return LowRank(start, np.concatenate([part.down for part in parts]), up)
