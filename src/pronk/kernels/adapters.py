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
    """A low-rank adapter of adjacent outputs of a matrix, to which it adds ``(x downᵀ) upᵀ``.

    Attributes:
        start: number of the first of these outputs.
        down: float32 ``[rank, inputs]``.
        up: float32 ``[outputs, rank]``.
    """

    start: int
    down: Array
    up: Array


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter of a matrix in the kernels' layout (``pronk_adapter``).

    The adapter may have several parts, each for other outputs of the matrix.

    Attributes:
        down: the matrices ``down`` of all parts below each other, padded to the largest rank.
        up: the matrices ``up`` of all parts, each in the rows of its outputs.
        first: for each block of 16 outputs, the first row in ``down`` of its part; -1 without a
            part. int32 ``[blocks]``.
    """

    down: PackedMatrix
    up: PackedMatrix
    first: Array = field(repr=False)

    @property
    def struct(self) -> CAdapter:
        """The structure for the kernels; its addresses are valid as long as this object exists."""
        down = ctypes.pointer(self.down.struct)
        up = ctypes.pointer(self.up.struct)
        return CAdapter(down, up, self.first.ctypes.data)


def pack_adapter(matrix: PackedMatrix, parts: Sequence[LowRank]) -> PackedAdapter:
    """Pack the adapter of a matrix.

    Args:
        matrix: the adapted matrix.
        parts: adapters of disjoint outputs of the matrix.
    """
    outputs = _outputs_of_blocks(matrix)
    first = _first_inputs(outputs, parts)
    if first is None:
        # A block of packed rows has outputs of several parts, such as queries and keys: they are
        # merged into one adapter of all outputs.
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
    packed_down = pack(matrix.kernels, down.reshape(-1, inputs))
    gated = bool(matrix.struct.gated)
    packed_up = pack(matrix.kernels, up, unit=matrix.struct.unit, gated=gated)
    return PackedAdapter(packed_down, packed_up, first)


def _outputs_of_blocks(matrix: PackedMatrix) -> list[range]:
    """Return the outputs in each block of a packed matrix, up to 16.

    In a gated matrix, blocks of the gate and of the up projection alternate.
    """
    struct = matrix.struct
    units = []  # for each unit, the outputs of its blocks
    for start in range(0, matrix.shape[0], struct.unit):
        outputs = range(start, start + struct.unit)
        units.append([outputs[first : first + 16] for first in range(0, len(outputs), 16)])
    if struct.gated:
        gate, up = units
        return [block for pair in zip(gate, up, strict=True) for block in pair]
    return [block for unit in units for block in unit]


def _first_inputs(outputs: Sequence[range], parts: Sequence[LowRank]) -> Array | None:
    """Return ``PackedAdapter.first``; ``None`` if a block of rows has outputs of several parts."""
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
    """Return one adapter that is equal to several parts together; the ranks add up."""
    start = min(part.start for part in parts)
    stop = max(part.start + len(part.up) for part in parts)
    down = np.concatenate([part.down for part in parts])
    up = np.zeros((stop - start, len(down)), FLOAT32)
    column = 0
    for part in parts:
        row = part.start - start
        rank = len(part.down)
        up[row : row + len(part.up), column : column + rank] = part.up
        column += rank
    return LowRank(start, down, up)
