"""Matrices packed for the kernels."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, prod

import torch
from torch import Tensor

from pronk.kernels.library import TYPES, Kernels, Weights
from pronk.kernels.threads import num_threads

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
        data: the elements, in blocks of 16 outputs.
        scale: of 8-bit elements, float32 ``[blocks * 16]``.
        bias: float32 ``[blocks * 16]`` in the order of the blocks, or ``None``.
    """

    kernels: Kernels = field(repr=False)
    struct: Weights
    data: Tensor = field(repr=False)
    scale: Tensor | None = field(repr=False)
    bias: Tensor | None = field(repr=False)

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
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    unit: int | None = None,
    gated: bool = False,
    bits: int | None = None,
) -> Packed:
    """Reorder a matrix for the kernels.

    Args:
        kernels: who will read it.
        weight: ``[outputs, inputs]``, float32, bfloat16 or float16; may be freed afterwards.
        bias: ``[outputs]``.
        unit: outputs that are used together and begin a block of their own: the size of a head.
        gated: the first half of the outputs gates the second.
        bits: 8 rounds to 8 bits with a scale for each output.
    """
    rows, k = weight.shape
    kind = torch.int8 if bits == 8 else weight.dtype
    n = rows // 2 if gated else rows
    unit = unit or n
    blocks = rows // unit * ceil(unit / 16) if not gated else 2 * ceil(n / 16)
    kp = ceil(k / 32) * 32
    weight = weight.detach()
    source = (weight.float() if bits else weight).contiguous()
    data = pages((blocks, kp if kind == torch.bfloat16 else k, 16), kind)
    scale = torch.zeros(blocks * 16) if bits else None
    struct = Weights(TYPES[kind], int(gated), n, k, kp, unit, blocks, data.data_ptr())
    if scale is not None:
        struct.scale = scale.data_ptr()
    kernels.library.pronk_pack(ctypes.byref(struct), source.data_ptr(), k, data.data_ptr(), struct.scale, num_threads())
    placed = None
    if bias is not None:
        placed = _place(bias.detach().float(), unit, blocks, gated=gated)
        struct.bias = placed.data_ptr()
    return Packed(kernels, struct, data, scale, placed)


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
