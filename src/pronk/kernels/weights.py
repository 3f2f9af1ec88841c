"""Packing of weight matrices into the memory layout of the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Protocol

import numpy as np

from pronk.base.arrays import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    UINT8,
    Array,
    MemoryPool,
    mapped_zeros,
    split_rows,
)
from pronk.checkpoint.formats.matrix import QuantizedMatrix, ScaleFormat
from pronk.checkpoint.gguf.blocks import STORED_BLOCKS, TENSOR_TYPES, BlockMatrix
from pronk.checkpoint.gguf.codebooks import codebook
from pronk.kernels.library import CODED_TYPES, SUPER_BLOCK_TYPES, TYPES, Kernels
from pronk.kernels.structures import CBlocks, CWeights
from pronk.kernels.threads import num_threads
from pronk.kernels.weight_cache import WeightCache

# Values of ``pronk_weights.minima``: the matrix has no minima, has minima, or has zero points.
_NO_MINIMA, _MINIMA, _ZEROS = range(3)

_MEMORY = MemoryPool()

# Number of quantized weights in a slab, the part of a matrix that is packed at a time: 4 MiB of
# unpacked codes.
_SLAB = 1 << 22
# Bytes of packed GGUF blocks after which the pages of the file that were read are freed. Packing
# 16 MiB takes several ms, and freeing the pages about 0.1 ms.
_SLAB_BYTES = 1 << 24

_SUPER_BLOCK = 256  # number of inputs of a super-block, as in GGUF files
_STORED_GROUP = 16  # number of inputs per scale in decoded blocks (``WIDE_GROUP`` of csrc/common.h)


class CodedRows(Protocol):
    """A quantized matrix ``[outputs, inputs]`` that can be read in slices of outputs."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""

    @property
    def scale_format(self) -> ScaleFormat:
        """The smallest format that represents all scales and minima exactly."""

    def slice_outputs(self, start: int, stop: int) -> QuantizedMatrix:
        """Return the weights of outputs ``start .. stop - 1``."""


# For each GGUF type: its number in llama.cpp, ``pronk_type``, number of inputs per scale, and
# ``pronk_weights.minima``.
_BLOCK_LAYOUTS = {
    "Q4_0": (2, CODED_TYPES[4], 32, _NO_MINIMA),
    "Q4_1": (3, CODED_TYPES[4], 32, _MINIMA),
    "Q5_0": (6, CODED_TYPES[5], 32, _NO_MINIMA),
    "Q5_1": (7, CODED_TYPES[5], 32, _MINIMA),
    "Q8_0": (8, CODED_TYPES[8], 32, _NO_MINIMA),
    "Q2_K": (10, SUPER_BLOCK_TYPES["Q2_K"], 16, _MINIMA),
    "Q3_K": (11, SUPER_BLOCK_TYPES["Q3_K"], 16, _NO_MINIMA),
    "Q4_K": (12, SUPER_BLOCK_TYPES["Q4_K"], 32, _MINIMA),
    "Q5_K": (13, SUPER_BLOCK_TYPES["Q5_K"], 32, _MINIMA),
    "Q6_K": (14, SUPER_BLOCK_TYPES["Q6_K"], 16, _NO_MINIMA),
    "IQ4_XS": (23, SUPER_BLOCK_TYPES["IQ4_XS"], 32, _NO_MINIMA),
}

# Numbers in llama.cpp of the types whose blocks stay as they are in the file.
_STORED_NUMBERS = {
    type_.name: number for number, type_ in TENSOR_TYPES.items() if type_.name in STORED_BLOCKS
}

_BITS_OF_TYPE = {number: bits for bits, number in CODED_TYPES.items()}
_SUPER_BLOCK_BITS = {"Q2_K": 2, "Q3_K": 3, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6, "IQ4_XS": 4}
_BITS_OF_TYPE |= {SUPER_BLOCK_TYPES[name]: bits for name, bits in _SUPER_BLOCK_BITS.items()}
# Number of the arrays ``[16, 2]`` of bytes in a super-block of 16 outputs that hold scales and
# minima.
_SUPER_BLOCK_SCALES = {"Q2_K": 8, "Q3_K": 6, "Q4_K": 8, "Q5_K": 8, "Q6_K": 8, "IQ4_XS": 4}
_SCALES_OF_TYPE = {SUPER_BLOCK_TYPES[name]: count for name, count in _SUPER_BLOCK_SCALES.items()}


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A matrix ``[outputs, inputs]`` in the kernels' layout.

    Attributes:
        kernels: the kernels that packed the matrix.
        struct: description of ``data`` for the kernels: shape, format and address.
        data: packed weights; ``pronk_weights`` in ``csrc/pronk.h`` describes the layout.
        bias: float32 ``[blocks * 16]``, in the order of the outputs in ``data``.
        order: int32 ``[inputs]``: column ``i`` of ``data`` is input ``order[i]``; ``None``: column
            ``i`` is input ``i``.
    """

    kernels: Kernels = field(repr=False)
    struct: CWeights
    data: Array = field(repr=False)
    bias: Array | None = field(repr=False)
    order: Array | None = field(repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs; outputs of gate and up projection both count."""
        outputs = 2 * self.struct.N if self.struct.gated else self.struct.N
        return outputs, self.struct.K

    @property
    def nbytes(self) -> int:
        """Size in memory in bytes, with scales, minima and padding, without a bias."""
        return self.data.nbytes

    @property
    def format(self) -> str:
        """Format of the weights in words, such as ``int4 in groups of 32``."""
        if self.struct.stored:
            return f"GGUF blocks of type {TENSOR_TYPES[self.struct.stored].name}"
        bits = _BITS_OF_TYPE.get(self.struct.type)
        if bits is None:
            return str(self.data.dtype)
        text = f"int{bits} in groups of {self.struct.group}"
        if self.struct.type in SUPER_BLOCK_TYPES.values():
            text += " in super-blocks of 256"
        return text

    def slice_outputs(self, start: int, stop: int) -> PackedMatrix:
        """Return a matrix of the outputs ``start .. stop - 1``, as a view.

        ``start`` must be a multiple of 16. The matrix must have no gate, and no padding between
        attention heads.
        """
        assert not self.struct.gated, "expected outputs that follow each other, found a gate"
        assert self.struct.unit == self.struct.N, "expected outputs of one unit, found several"
        assert not start % 16, f"expected the beginning of a block, found {start}"
        struct = CWeights.from_buffer_copy(self.struct)
        struct.N = stop - start
        struct.unit = struct.N
        struct.blocks = ceil(struct.N / 16)
        block_bytes = self.data.nbytes // self.struct.blocks
        struct.data += start // 16 * block_bytes
        if self.bias is not None:
            struct.bias = self.bias.ctypes.data + start * self.bias.itemsize
        return replace(self, struct=struct)

    def take_outputs(self, rows: Array) -> PackedMatrix:
        """Return a matrix of the outputs ``rows``, as copies of their packed weights.

        ``rows`` are int ``[outputs]``. The matrix must have no gate, and no padding between
        attention heads.
        """
        assert not self.struct.gated, "expected outputs that follow each other, found a gate"
        assert self.struct.unit == self.struct.N, "expected outputs of one unit, found several"
        struct = CWeights.from_buffer_copy(self.struct)
        struct.N = len(rows)
        struct.unit = struct.N
        struct.blocks = ceil(struct.N / 16)
        sections = _lane_sections(struct)
        unit_bytes = sum(16 * count * size for count, size in sections)
        source = self.data.view(UINT8).reshape(self.struct.blocks, -1, unit_bytes)
        per_block = self.data.size // self.struct.blocks
        data = _MEMORY.zeros((struct.blocks * per_block,), self.data.dtype)
        struct.data = data.ctypes.data
        target = data.view(UINT8).reshape(struct.blocks, -1, unit_bytes)
        for block in range(struct.blocks):
            _copy_lanes(source, rows[16 * block : 16 * block + 16], target[block], sections)
        bias = None
        if self.bias is not None:
            bias = np.zeros(16 * struct.blocks, np.float32)
            bias[: len(rows)] = self.bias[rows]
            struct.bias = bias.ctypes.data
        return replace(self, struct=struct, data=data, bias=bias)

    def unpack(self) -> Array:
        """Return the weights, float32 ``[outputs, inputs]``."""
        rows = np.empty(self.shape, np.float32)
        for row in range(len(rows)):
            self.kernels.library.pronk_unpack(ctypes.byref(self.struct), row, rows[row].ctypes.data)
        return rows


def _lane_sections(struct: CWeights) -> list[tuple[int, int]]:
    """Return the arrays ``[count, 16, size]`` of bytes, one after the other, of a unit of a block.

    The 16 lanes of an array belong to the 16 outputs of the block. A *unit* is a group, a
    super-block, or all inputs of weights that are not quantized. The result has pairs of ``count``
    and ``size``; ``pronk_weights`` in ``csrc/pronk.h`` describes the layout.
    """
    if struct.type == TYPES[BFLOAT16]:
        return [(struct.K_pad // 2, 4)]  # pairs of inputs
    if struct.stored:
        return [(TENSOR_TYPES[struct.stored].size, 1)]  # the bytes of a block of the file
    bits = _BITS_OF_TYPE.get(struct.type)
    if bits is None:
        return [(struct.K, 2 if struct.type == TYPES[FLOAT16] else 4)]
    if struct.type in _SCALES_OF_TYPE:
        # factors of scales and of minima; scales and minima; codes, in words of 32 bits
        return [(2, 2), (_SCALES_OF_TYPE[struct.type], 2), (_SUPER_BLOCK * bits // 32, 4)]
    # the low 4 bits of eight inputs, or four codes of 8 bits; then all high bits of a group
    words = struct.group // (4 if bits == 8 else 8) + (bits == 5)
    number = 4 if struct.scale_type == TYPES[FLOAT32] else 2
    # minima have the type of the scales, and zero points are bytes
    size_of_minimum = {_NO_MINIMA: 0, _MINIMA: number, _ZEROS: 1}[struct.minima]
    header = [(1, number), (1, size_of_minimum)] if size_of_minimum else [(1, number)]
    return [*header, (words, 4)]


def _copy_lanes(
    source: Array, rows: Array, target: Array, sections: Sequence[tuple[int, int]]
) -> None:
    """Copy at most 16 outputs ``rows`` of the blocks ``source`` to the first lanes of a block.

    ``source`` is uint8 ``[blocks, units, bytes]``, and ``target`` ``[units, bytes]``.
    """
    blocks = source[rows // 16]
    numbers = np.arange(len(rows))
    start = 0
    for count, size in sections:
        section = slice(start, start + 16 * count * size)
        start = section.stop
        lanes = blocks[:, :, section].reshape(len(rows), -1, count, 16, size)
        taken = lanes[numbers, :, :, rows % 16]
        target[:, section].reshape(-1, count, 16, size)[:, :, : len(rows)] = taken.transpose(
            1, 2, 0, 3
        )


def pack(
    kernels: Kernels,
    weight: Array | CodedRows | BlockMatrix,
    bias: Array | None = None,
    *,
    unit: int | None = None,
    gated: bool = False,
    cache: WeightCache | None = None,
) -> PackedMatrix:
    """Copy a matrix into the kernels' layout.

    Args:
        kernels: the kernels that pack; the layout is the same for all instruction sets.
        weight: ``[outputs, inputs]``, float32, bfloat16, float16, or quantized. The result has no
            reference to this matrix.
        bias: ``[outputs]``, or ``None`` without a bias.
        unit: number of outputs that are padded to whole blocks of 16: ``head_dim`` for attention
            heads; by default all outputs.
        gated: whether the first half of the outputs is the gate, and the second half the up
            projection.
        cache: packed blocks of earlier starts. A matrix of GGUF blocks is looked up here, and added
            if it is missing; other matrices are not.

    Raises:
        ValueError: a scale in a GGUF block is not finite.
    """
    rows, inputs = weight.shape
    outputs = rows // 2 if gated else rows
    unit = unit or outputs
    blocks = rows // unit * ceil(unit / 16)
    struct = CWeights(gated=int(gated), N=outputs, K=inputs, unit=unit, blocks=blocks)
    order = None
    if isinstance(weight, np.ndarray):
        data = _pack_numbers(kernels, struct, weight)
    elif isinstance(weight, BlockMatrix):
        data = _pack_blocks(kernels, struct, weight, cache)
    else:
        data, order = _pack_codes(kernels, struct, weight)
    packed_bias = None
    if bias is not None:
        packed_bias = _pack_bias(bias, unit, gated=gated)
        struct.bias = packed_bias.ctypes.data
    return PackedMatrix(kernels, struct, data, packed_bias, order)


def _pack_numbers(kernels: Kernels, struct: CWeights, weight: Array) -> Array:
    """Pack an unquantized matrix, and set its format in ``struct``."""
    struct.type = TYPES[weight.dtype]
    struct.K_pad = ceil(struct.K / 32) * 32
    rows = np.ascontiguousarray(weight)
    per_output = struct.K_pad if weight.dtype == BFLOAT16 else struct.K
    data = _MEMORY.zeros((struct.blocks, per_output, 16), weight.dtype)
    struct.data = data.ctypes.data
    call = (ctypes.byref(struct), rows.ctypes.data, struct.K, struct.data, num_threads())
    kernels.library.pronk_pack(*call)
    return data


def _pack_blocks(
    kernels: Kernels, struct: CWeights, weight: BlockMatrix, cache: WeightCache | None
) -> Array:
    """Pack GGUF blocks, or find them packed in ``cache``; set their format in ``struct``."""
    block_format = _set_block_format(struct, weight.type)
    size = int(kernels.library.pronk_packed_size(ctypes.byref(struct)))
    tensors = " ".join(rows.name for rows in weight.parts)
    name = f"{tensors} {weight.type} {struct.N} {struct.K} {struct.unit} {struct.gated}"
    if cache is not None:
        found = cache.find(name, size)
        if found is not None:
            struct.data = found.ctypes.data
            return found
    data = _MEMORY.zeros((size,), UINT8)
    struct.data = data.ctypes.data
    parts = (CBlocks * len(weight.parts))()
    for part, rows in zip(parts, weight.parts, strict=True):
        part.data = rows.stored.ctypes.data
        part.rows = len(rows.stored)
        part.heads = rows.heads
    source = (ctypes.byref(struct), parts, len(parts), block_format)
    slab = max(1, _SLAB_BYTES * struct.blocks // max(1, size))
    for first in range(0, struct.blocks, slab):
        if first:
            weight.release()
        count = min(slab, struct.blocks - first)
        status = kernels.library.pronk_pack_blocks(
            *source, first, count, struct.data, num_threads()
        )
        if status == -1:
            msg = "expected finite scales, found NaN or infinity"
            raise ValueError(msg)
        if status:
            msg = "expected as many rows as the matrix has, found another number"
            raise AssertionError(msg)
    if cache is not None:
        cache.add(name, data)
    return data


def describe_blocks(table: BlockMatrix) -> tuple[int, CWeights]:
    """Return the number of a table's GGUF type in llama.cpp, and a description without data."""
    rows, width = table.shape
    struct = CWeights(N=rows, K=width, unit=rows)
    return _set_block_format(struct, table.type), struct


def _set_block_format(struct: CWeights, type_: str) -> int:
    """Set the format of packed GGUF blocks in ``struct``; return the type's number in llama.cpp."""
    struct.K_pad = struct.K
    if type_ in STORED_BLOCKS:
        return _set_stored_format(struct, type_)
    number, struct.type, struct.group, struct.minima = _BLOCK_LAYOUTS[type_]
    struct.scale_type = TYPES[FLOAT16]
    return number


def _set_stored_format(struct: CWeights, type_: str) -> int:
    """Set the format of blocks that stay as they are in ``struct``; return the type's number."""
    struct.stored = _STORED_NUMBERS[type_]
    # Blocks of 256 inputs decode to super-blocks, others to groups with float32 scales.
    is_super_block = TENSOR_TYPES[struct.stored].values == _SUPER_BLOCK
    struct.type = SUPER_BLOCK_TYPES["decoded"] if is_super_block else CODED_TYPES[8]
    struct.group = _STORED_GROUP
    struct.minima = _NO_MINIMA
    struct.scale_type = TYPES[FLOAT32]
    entries = codebook(type_)
    if entries is not None:
        struct.codebook = entries.ctypes.data
    return int(struct.stored)


def _pack_codes(
    kernels: Kernels, struct: CWeights, weight: CodedRows
) -> tuple[Array, Array | None]:
    """Pack quantized weights by slabs of outputs, so that few codes are unpacked at a time.

    The format of the weights is set in ``struct``.

    Returns:
        The packed weights, uint8, and the order of the inputs as in :class:`PackedMatrix`.
    """
    # A gated matrix has two halves, gate and up projection; a slab has outputs of both. If the
    # matrix has several units (attention heads), a slab has whole units.
    num_halves = 1 + struct.gated
    one_unit = struct.gated or struct.unit == struct.N
    step = 16 if one_unit else struct.unit
    step *= max(1, _SLAB // (step * struct.K * num_halves))
    for start in range(0, struct.N, step):
        stop = min(start + step, struct.N)
        matrices = [
            weight.slice_outputs(half * struct.N + start, half * struct.N + stop)
            for half in range(num_halves)
        ]
        slab = _stack_padded(matrices)
        if not start:
            _set_coded_format(struct, slab, weight.scale_format)
            size = int(kernels.library.pronk_packed_size(ctypes.byref(struct)))
            data = _MEMORY.zeros((size,), UINT8)
            struct.data = data.ctypes.data
        slab_struct = CWeights.from_buffer_copy(struct)
        slab_struct.N = stop - start
        slab_struct.unit = slab_struct.N if one_unit else struct.unit
        num_units = num_halves * (slab_struct.N // slab_struct.unit)
        slab_struct.blocks = num_units * ceil(slab_struct.unit / 16)
        if one_unit:
            num_blocks_before = num_halves * start // 16
        else:
            num_blocks_before = start // struct.unit * ceil(struct.unit / 16)
        block_bytes = len(data) // struct.blocks
        kernels.library.pronk_pack_codes(
            ctypes.byref(slab_struct),
            slab.codes.ctypes.data,
            slab.scale.ctypes.data,
            None if slab.minimum is None else slab.minimum.ctypes.data,
            struct.data + num_blocks_before * block_bytes,
            num_threads(),
        )
    if matrices[0].order is None:
        return data, None
    order = np.ascontiguousarray(matrices[0].order, np.int32)
    struct.order = order.ctypes.data
    return data, order


def _set_coded_format(struct: CWeights, slab: QuantizedMatrix, scales: ScaleFormat) -> None:
    """Set the format of quantized weights in ``struct``, given the first slab."""
    struct.type = CODED_TYPES[slab.bits]
    struct.group = slab.group
    struct.K_pad = slab.shape[1]
    struct.scale_type = TYPES[scales.dtype]
    if slab.minimum is None:
        struct.minima = _NO_MINIMA
    else:
        struct.minima = _ZEROS if scales.zeros else _MINIMA


def _stack_padded(matrices: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Stack matrices along the outputs, with rows padded with code 0 to whole groups."""
    first = matrices[0]
    inputs = matrices[0].shape[1]
    missing = -inputs % first.group
    if len(matrices) == 1 and not missing:
        minimum = None if first.minimum is None else np.ascontiguousarray(first.minimum)
        codes = np.ascontiguousarray(first.codes)
        scale = np.ascontiguousarray(first.scale)
        return replace(first, codes=codes, scale=scale, minimum=minimum, order=None)
    rows = [matrix.shape[0] for matrix in matrices]
    # The memory is a mapping, because freed codes of many slabs would fragment the heap.
    codes = mapped_zeros((sum(rows), inputs + missing), np.dtype(np.uint8))
    for target, matrix in zip(split_rows(codes, rows), matrices, strict=True):
        target[:, :inputs] = matrix.codes
    scale = np.concatenate([matrix.scale for matrix in matrices])
    minima = [matrix.minimum for matrix in matrices if matrix.minimum is not None]
    minimum = np.concatenate(minima) if minima else None
    return replace(first, codes=codes, scale=scale, minimum=minimum, order=None)


def _pack_bias(bias: Array, unit: int, *, gated: bool) -> Array:
    """Return a bias ``[outputs]`` in packed order, float32 ``[blocks * 16]``, padded with zeros."""
    units: Array = np.zeros((len(bias) // unit, ceil(unit / 16) * 16), np.float32)
    units[:, :unit] = bias.reshape(-1, unit)
    if gated:  # the blocks of the two units, gate and up projection, alternate
        units = units.reshape(2, -1, 16).swapaxes(0, 1)
    return units.reshape(-1)
