"""Packing of weight matrices into the memory layout that the kernels read."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Protocol

import numpy as np

from pronk.base.arrays import BFLOAT16, FLOAT16, UINT8, Array, MemoryPool, mapped_zeros, split_rows
from pronk.checkpoint.formats.matrix import QuantizedMatrix, ScaleFormat
from pronk.checkpoint.gguf.blocks import BlockMatrix
from pronk.kernels.library import CODED_TYPES, SUPER_BLOCK_TYPES, TYPES, Kernels
from pronk.kernels.structures import CBlocks, CWeights
from pronk.kernels.threads import num_threads
from pronk.kernels.weight_cache import WeightCache

_NO_MINIMA, _MINIMA, _ZEROS = range(3)  # values of ``pronk_weights.minima``

_MEMORY = MemoryPool()

# Number of quantized weights in a slab, the part of a matrix that is packed at a time: 4 MiB of
# unpacked codes.
_SLAB = 1 << 22


class CodedRows(Protocol):
    """A quantized matrix ``[outputs, inputs]`` that can be read slice by slice."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""

    @property
    def scale_format(self) -> ScaleFormat:
        """Smallest format that represents all scales and minima exactly."""

    def slice_outputs(self, start: int, stop: int) -> QuantizedMatrix:
        """Return the weights of outputs ``start .. stop - 1``."""


# GGUF types: number of the type in llama.cpp, ``pronk_type``, number of inputs per scale,
# ``pronk_weights.minima``.
_BLOCK_LAYOUTS = {
    "Q4_0": (2, CODED_TYPES[4], 32, _NO_MINIMA),
    "Q4_1": (3, CODED_TYPES[4], 32, _MINIMA),
    "Q5_0": (6, CODED_TYPES[5], 32, _NO_MINIMA),
    "Q5_1": (7, CODED_TYPES[5], 32, _MINIMA),
    "Q8_0": (8, CODED_TYPES[8], 32, _NO_MINIMA),
    "Q4_K": (12, SUPER_BLOCK_TYPES[4], 32, _MINIMA),
    "Q5_K": (13, SUPER_BLOCK_TYPES[5], 32, _MINIMA),
    "Q6_K": (14, SUPER_BLOCK_TYPES[6], 16, _NO_MINIMA),
}

_BITS_OF_TYPE = {
    number: bits for bits, number in [*CODED_TYPES.items(), *SUPER_BLOCK_TYPES.items()]
}


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A matrix ``[outputs, inputs]`` in the kernels' layout."""

    kernels: Kernels = field(repr=False)
    struct: CWeights  # describes ``data`` to the kernels: shape, format, address
    data: Array = field(repr=False)  # packed weights; layout: ``pronk_weights`` in ``csrc/pronk.h``
    # float32 ``[blocks * 16]``, in the order of the outputs in ``data``
    bias: Array | None = field(repr=False)
    # int32 ``[inputs]``: column ``i`` of ``data`` is for input ``order[i]``; ``None``: for input
    # ``i``
    order: Array | None = field(repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs.

        A gated matrix has the outputs of gate and up projection.
        """
        return self.struct.N * (2 if self.struct.gated else 1), self.struct.K

    @property
    def nbytes(self) -> int:
        """Size in memory in bytes, scales, minima and padding included, without a bias."""
        return self.data.nbytes

    @property
    def format(self) -> str:
        """Format of the weights in words, such as ``int4 in groups of 32``."""
        bits = _BITS_OF_TYPE.get(self.struct.type)
        if bits is None:
            return str(self.data.dtype)
        super_blocks = (
            " in super-blocks of 256" if self.struct.type in SUPER_BLOCK_TYPES.values() else ""
        )
        return f"int{bits} in groups of {self.struct.group}{super_blocks}"

    def slice_outputs(self, start: int, stop: int) -> PackedMatrix:
        """Return outputs ``start .. stop - 1`` as a view; ``start`` must be a multiple of 16.

        The outputs must be packed one after the other: neither padded per attention head nor
        interleaved with a gate.
        """
        assert not self.struct.gated, "expected outputs that follow each other, found a gate"
        assert self.struct.unit == self.struct.N, "expected outputs of one unit, found several"
        assert not start % 16, f"expected the beginning of a block, found {start}"
        struct = CWeights.from_buffer_copy(self.struct)
        struct.N = struct.unit = stop - start
        struct.blocks = ceil(struct.N / 16)
        struct.data += start // 16 * (self.data.nbytes // self.struct.blocks)
        if self.bias is not None:
            struct.bias = self.bias.ctypes.data + start * self.bias.itemsize
        return replace(self, struct=struct)

    def unpack(self) -> Array:
        """Unpack to float32 ``[outputs, inputs]``."""
        rows = np.empty(self.shape, np.float32)
        for row in range(len(rows)):
            self.kernels.library.pronk_unpack(ctypes.byref(self.struct), row, rows[row].ctypes.data)
        return rows


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
        kernels: library that packs; the layout is the same for all instruction sets.
        weight: ``[outputs, inputs]``, float32, bfloat16, float16, or quantized. The result does not
            refer to it. The outputs of a gated matrix are those of the gate, then of the up
            projection.
        bias: ``[outputs]``, or ``None`` without a bias.
        unit: every ``unit`` outputs are padded to whole blocks of 16: ``head_dim`` for heads; by
            default all outputs.
        gated: whether the first half of the outputs is the gate and the second half the up
            projection.
        cache: packed blocks of earlier loads, and where to add others; weights in other forms are
            not cached.

    Raises ``ValueError`` if a scale in a block is not finite.
    """
    rows, inputs = weight.shape
    outputs = rows // 2 if gated else rows
    unit = unit or outputs
    struct = CWeights(
        gated=int(gated), N=outputs, K=inputs, unit=unit, blocks=rows // unit * ceil(unit / 16)
    )
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
    struct.type, struct.K_pad = TYPES[weight.dtype], ceil(struct.K / 32) * 32
    source = np.ascontiguousarray(weight)
    per_output = struct.K_pad if weight.dtype == BFLOAT16 else struct.K
    data = _MEMORY.zeros((struct.blocks, per_output, 16), weight.dtype)
    struct.data = data.ctypes.data
    kernels.library.pronk_pack(
        ctypes.byref(struct), source.ctypes.data, struct.K, struct.data, num_threads()
    )
    return data


def _pack_blocks(
    kernels: Kernels, struct: CWeights, weight: BlockMatrix, cache: WeightCache | None
) -> Array:
    block_format, struct.type, struct.group, struct.minima = _BLOCK_LAYOUTS[weight.type]
    struct.scale_type = TYPES[FLOAT16]
    struct.K_pad = struct.K
    size = int(kernels.library.pronk_packed_size(ctypes.byref(struct)))
    tensors = " ".join(rows.name for rows in weight.parts)
    name = f"{tensors} {weight.type} {struct.N} {struct.K} {struct.unit} {struct.gated}"
    if cache is not None and (found := cache.find(name, size)) is not None:
        struct.data = found.ctypes.data
        return found
    data = _MEMORY.zeros((size,), UINT8)
    struct.data = data.ctypes.data
    parts = (CBlocks * len(weight.parts))()
    for part, rows in zip(parts, weight.parts, strict=True):
        part.data = rows.stored.ctypes.data
        part.rows = len(rows.stored)
        part.heads = rows.heads
    call = ctypes.byref(struct), parts, len(parts), block_format, struct.data, num_threads()
    status = kernels.library.pronk_pack_blocks(*call)
    if status not in {0, -1}:
        msg = "expected as many rows as the matrix has, found another number"
        raise AssertionError(msg)
    if status:
        msg = "expected finite scales, found NaN or infinity"
        raise ValueError(msg)
    if cache is not None:
        cache.add(name, data)
    return data


def _pack_codes(
    kernels: Kernels, struct: CWeights, weight: CodedRows
) -> tuple[Array, Array | None]:
    """Pack quantized weights by slabs of output rows, so that few codes are unpacked at a time."""
    # A gated matrix has two halves, gate and up projection. With several units (heads), slabs begin
    # with a unit.
    num_halves = 1 + struct.gated
    blocks_of_unit = ceil(struct.unit / 16)
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
            scales = weight.scale_format
            struct.type = CODED_TYPES[slab.bits]
            struct.group = slab.group
            struct.K_pad = slab.shape[1]
            struct.scale_type = TYPES[scales.dtype]
            struct.minima = (
                _NO_MINIMA if slab.minimum is None else _ZEROS if scales.zeros else _MINIMA
            )
            data = _MEMORY.zeros(
                (int(kernels.library.pronk_packed_size(ctypes.byref(struct))),), UINT8
            )
            struct.data = data.ctypes.data
        slab_struct = CWeights.from_buffer_copy(struct)
        slab_struct.N = stop - start
        slab_struct.unit = stop - start if one_unit else struct.unit
        slab_struct.blocks = (
            num_halves * (slab_struct.N // slab_struct.unit) * ceil(slab_struct.unit / 16)
        )
        num_blocks_before = (
            num_halves * start // 16 if one_unit else start // struct.unit * blocks_of_unit
        )
        kernels.library.pronk_pack_codes(
            ctypes.byref(slab_struct),
            slab.codes.ctypes.data,
            slab.scale.ctypes.data,
            None if slab.minimum is None else slab.minimum.ctypes.data,
            struct.data + num_blocks_before * (len(data) // struct.blocks),
            num_threads(),
        )
    order = None if matrices[0].order is None else np.ascontiguousarray(matrices[0].order, np.int32)
    struct.order = None if order is None else order.ctypes.data
    return data, order


def _stack_padded(matrices: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Stack matrices along the outputs.

    Pad their rows with code 0 to a multiple of the group size.
    """
    first = matrices[0]
    inputs = matrices[0].shape[1]
    missing = -inputs % first.group
    if len(matrices) == 1 and not missing:
        minimum = None if first.minimum is None else np.ascontiguousarray(first.minimum)
        codes = np.ascontiguousarray(first.codes)
        scale = np.ascontiguousarray(first.scale)
        return replace(first, codes=codes, scale=scale, minimum=minimum, order=None)
    rows = [matrix.shape[0] for matrix in matrices]
    # Memory outside the heap: freed codes of many slabs would fragment the heap.
    codes = mapped_zeros((sum(rows), inputs + missing), np.dtype(np.uint8))
    for target, matrix in zip(split_rows(codes, rows), matrices, strict=True):
        target[:, :inputs] = matrix.codes
    scale = np.concatenate([matrix.scale for matrix in matrices])
    minima = [matrix.minimum for matrix in matrices if matrix.minimum is not None]
    return replace(
        first,
        codes=codes,
        scale=scale,
        minimum=np.concatenate(minima) if minima else None,
        order=None,
    )


def _pack_bias(bias: Array, unit: int, *, gated: bool) -> Array:
    """Return a bias ``[outputs]`` in packed order, float32 ``[blocks * 16]``, with zeros as padding."""
    units = np.zeros((len(bias) // unit, ceil(unit / 16) * 16), np.float32)
    units[:, :unit] = bias.reshape(-1, unit)
    # In a gated matrix, the blocks of its two units, gate and up projection, alternate.
    return (units.reshape(2, -1, 16).swapaxes(0, 1) if gated else units).reshape(-1)
