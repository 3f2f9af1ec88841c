"""Quantize weights to 8 and 4 bits: nearest codes, at the scale with the smallest squared error.

If the scale covers the largest weight of a group, the codes of all other weights are coarse. So the kernel tries
several scales, from the full range down, and takes the one with the smallest sum of squared errors (like the search for
a clipping range in AWQ; Lin et al. 2024, section 3.2). Two's complement has one negative code more than positive codes;
the kernel also tries scales whose sign assigns this code to the largest weight.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from pronk.kernels.library import TYPES, Kernels
from pronk.kernels.threads import num_threads
from pronk.kernels.weights import mapped_zeros
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix

__all__ = ["DEFAULT_GROUPS", "default_group", "round_weights"]

# Default number of weights per scale, by bits of a code: a smaller group needs more memory and is little more accurate.
DEFAULT_GROUPS: dict[int, int] = {8: 128, 4: 32}

# Number of ranges to try (100 %, 95 %, … 75 % of the full one) by bits of a code; at 8 bits clipping gains nothing.
_TRIES = {8: 0, 4: 6}


def default_group(bits: Bits, inputs: int) -> int:
    """Return the group size of the fewest bytes per row, at most the default; the larger one of equals.

    Rows are padded to whole groups: 320 weights of 8 bits are 3 groups of 128 (396 bytes with their scales), 5 of 64
    (340) or 10 of 32 (360).
    """

    def nbytes(group: int) -> int:
        return ceil(inputs / group) * (group * bits // 8 + 4)

    default = DEFAULT_GROUPS[bits]
    return min((min(group, ceil(inputs / 32) * 32) for group in (128, 64, 32) if group <= default), key=nbytes)


def round_weights(kernels: Kernels, weight: Tensor, bits: Bits, group: int | None = None) -> QuantizedMatrix:
    """Quantize a matrix to the nearest codes, without minima; equal on every instruction set.

    Args:
        kernels: kernels to compute with.
        weight: ``[outputs, inputs]`` on the CPU: float32, bfloat16 or float16, finite.
        bits: 8 or 4.
        group: inputs that share a scale, a multiple of 8; :func:`default_group` by default, at most the whole row.

    Raises:
        ValueError: a weight is not finite.
        MemoryError: a row per thread cannot be allocated.
    """
    outputs, inputs = weight.shape
    group = min(group or default_group(bits, inputs), ceil(inputs / 32) * 32)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    # A memory mapping goes back to the operating system when the codes are freed after packing.
    codes = mapped_zeros((outputs, inputs), torch.uint8)
    scale = torch.empty(outputs, ceil(inputs / group))
    status = kernels.library.pronk_round(
        *(weight.data_ptr(), TYPES[weight.dtype], outputs, inputs, weight.stride(0), bits, group),
        *(_TRIES[bits], codes.data_ptr(), scale.data_ptr(), num_threads(), kernels.isa),
    )
    if status:
        msg = f"kernels: rounding a matrix of {outputs} by {inputs} failed (memory)"
        raise MemoryError(msg)
    return QuantizedMatrix(codes, scale, None, bits, group)
