"""Rounding weights to 8 and 4 bits: to the nearest code, by the range that errs least.

A group's scale is a compromise: the largest weight decides how coarse all others become. So several scales are tried,
from that of the largest weight down, with the one code that a side has more on either side, and the one with the
smallest sum of squared errors is taken (as the search for a clipping range in AWQ; Lin et al. 2024, section 3.2).
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from pronk.kernels.library import TYPES, Kernels
from pronk.kernels.threads import num_threads
from pronk.kernels.weights import pages
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix

__all__ = ["DEFAULT_GROUPS", "default_group", "round_weights"]

# By bits: what costs the least memory at the accuracy that the bits have, where rows are whole groups.
DEFAULT_GROUPS: dict[int, int] = {8: 128, 4: 32}

# Ranges that are tried, each 5 % narrower than the one before; at 8 bits clipping gains nothing.
_TRIES = {8: 0, 4: 6}


def default_group(bits: Bits, inputs: int) -> int:
    """The group in which rows of so many inputs take the fewest bytes, down from the default; the larger of equals.

    A row is filled up to whole groups: 320 weights of 8 bits are 3 groups of 128 (396 bytes with their scales), 5 of 64
    (340) or 10 of 32 (360).
    """

    def nbytes(group: int) -> int:
        return ceil(inputs / group) * (group * bits // 8 + 4)

    most = DEFAULT_GROUPS[bits]
    return min((min(group, ceil(inputs / 32) * 32) for group in (128, 64, 32) if group <= most), key=nbytes)


def round_weights(kernels: Kernels, weight: Tensor, bits: Bits, group: int | None = None) -> QuantizedMatrix:
    """Round a matrix to the nearest codes, without minima; the same on every instruction set.

    Args:
        kernels: who does it.
        weight: ``[outputs, inputs]`` on the CPU: float32, bfloat16 or float16, finite.
        bits: 8 or 4.
        group: inputs that share a scale, a multiple of 8; :func:`default_group` by default. More than the row has is
            the row.

    Raises:
        ValueError: a weight is not finite.
        MemoryError: there is none for a row of every thread.
    """
    outputs, inputs = weight.shape
    group = min(group or default_group(bits, inputs), ceil(inputs / 32) * 32)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    codes = pages((outputs, inputs), torch.uint8)  # of their own, and given back when they are packed
    scale = torch.empty(outputs, ceil(inputs / group))
    status = kernels.library.pronk_round(
        *(weight.data_ptr(), TYPES[weight.dtype], outputs, inputs, weight.stride(0), bits, group),
        *(_TRIES[bits], codes.data_ptr(), scale.data_ptr(), num_threads(), kernels.isa),
    )
    if status:
        msg = f"kernels: rounding a matrix of {outputs} by {inputs} failed (memory)"
        raise MemoryError(msg)
    return QuantizedMatrix(codes, scale, None, bits, group)
