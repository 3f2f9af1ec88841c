"""Matrices packed for the kernels."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from pronk.kernels.library import CODED_TYPES, TYPES, Kernels, Weights
from pronk.kernels.threads import num_threads
from pronk.quantized.form import Quantized

__all__ = ["Packed", "pack", "pages"]

# What a core's caches hold of addresses covers few small pages; weights lie together in large ones.
_HUGE_PAGE = 1 << 21


def pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in memory of their own, in huge pages where Linux has them and they are worth it."""
    size = max(1, prod(shape)) * dtype.itemsize
    if size < _HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, ceil(size / _HUGE_PAGE) * _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: nothing is lost but speed
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix ``[outputs, inputs]`` in the kernels' layout.

    Attributes:
        kernels: who reads it.
        struct: what they are told of it.
        data: the elements, or lines of scales, minima and codes, in blocks of 16 outputs.
        bias: float32 ``[blocks * 16]`` in the order of the blocks, or ``None``.
        order: of quantized weights, int32 ``[inputs]`` or ``None``; see :class:`~pronk.quantized.form.Quantized`.
    """

    kernels: Kernels = field(repr=False)
    struct: Weights
    data: Tensor = field(repr=False)
    bias: Tensor | None = field(repr=False)
    order: Tensor | None = field(repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, both halves of a gated matrix counted."""
        return self.struct.n * (2 if self.struct.gated else 1), self.struct.k

    def unpack(self) -> Tensor:
        """The matrix again, float32 ``[outputs, inputs]``."""
        rows = torch.empty(self.shape)
        for row in range(len(rows)):
            self.kernels.library.pronk_unpack(ctypes.byref(self.struct), row, rows[row].data_ptr())
        return rows


def pack(
    kernels: Kernels,
    weight: Tensor | Quantized,
    bias: Tensor | None = None,
    *,
    unit: int | None = None,
    gated: bool = False,
) -> Packed:
    """Reorder a matrix for the kernels.

    Args:
        kernels: who will read it.
        weight: ``[outputs, inputs]``, float32, bfloat16, float16 or quantized; may be freed afterwards.
        bias: ``[outputs]``.
        unit: outputs that are used together and begin a block of their own: the size of a head.
        gated: the first half of the outputs gates the second.
    """
    rows, k = weight.shape
    n = rows // 2 if gated else rows
    unit = unit or n
    blocks = rows // unit * ceil(unit / 16) if not gated else 2 * ceil(n / 16)
    struct = Weights(gated=int(gated), n=n, k=k, unit=unit, blocks=blocks)
    order = None
    if isinstance(weight, Quantized):
        data, order = _pack_codes(kernels, struct, weight)
    else:
        data = _pack_numbers(kernels, struct, weight)
    placed = None
    if bias is not None:
        placed = _place(bias.detach().float(), unit, blocks, gated=gated)
        struct.bias = placed.data_ptr()
    return Packed(kernels, struct, data, placed, order)


def _pack_numbers(kernels: Kernels, struct: Weights, weight: Tensor) -> Tensor:
    struct.type, struct.kp = TYPES[weight.dtype], ceil(struct.k / 32) * 32
    source = weight.detach().contiguous()
    per_output = struct.kp if weight.dtype == torch.bfloat16 else struct.k
    data = pages((struct.blocks, per_output, 16), weight.dtype)
    struct.data = data.data_ptr()
    kernels.library.pronk_pack(ctypes.byref(struct), source.data_ptr(), struct.k, struct.data, num_threads())
    return data


def _pack_codes(kernels: Kernels, struct: Weights, weight: Quantized) -> tuple[Tensor, Tensor | None]:
    struct.type, struct.group, struct.minima = CODED_TYPES[weight.bits], weight.group, int(weight.minimum is not None)
    struct.kp = ceil(struct.k / weight.group) * weight.group
    # What follows the last input is multiplied with zeros.
    codes = (pad(weight.codes, (0, struct.kp - struct.k)) if struct.kp > struct.k else weight.codes).contiguous()
    scale = weight.scale.contiguous()
    minimum = None if weight.minimum is None else weight.minimum.contiguous()
    data = pages((int(kernels.library.pronk_packed_size(ctypes.byref(struct))),), torch.uint8)
    struct.data = data.data_ptr()
    kernels.library.pronk_pack_codes(
        ctypes.byref(struct),
        codes.data_ptr(),
        scale.data_ptr(),
        None if minimum is None else minimum.data_ptr(),
        struct.data,
        num_threads(),
    )
    order = None if weight.order is None else weight.order.to(torch.int32).contiguous()
    struct.order = None if order is None else order.data_ptr()
    return data, order


def _place(values: Tensor, unit: int, blocks: int, *, gated: bool) -> Tensor:
    """``[outputs]`` in the order of the blocks, zeros between: ``[blocks * 16]``."""
    placed = torch.zeros(blocks * 16)
    if gated:
        for half, part in enumerate(values.chunk(2)):
            padded = torch.zeros(blocks * 8)
            padded[: len(part)] = part
            placed.view(-1, 2, 16)[:, half] = padded.view(-1, 16)
        return placed
    placed.view(len(values) // unit, -1)[:, :unit] = values.view(-1, unit)
    return placed
