"""Quantize weights to 8 and 4 bits: nearest codes, at the scale with the smallest squared error.

A scale that covers the largest weight of a group rounds all other weights coarsely. At 4 bits the
kernel therefore also tries scales that clip the largest weights, and selects the scale with the
smallest sum of squared errors (like the search for a clipping range in AWQ; Lin et al. 2024,
section 3.2). Codes are from -8 to 7. If ``w`` is the weight of largest magnitude, a clipping range
of 90 % stands for the scales ``0.9 * abs(w) / 7`` and ``-0.9 * w / 8``; with the second one, the
code of ``w`` is -8.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from pronk.base.arrays import Array, mapped_zeros
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix
from pronk.kernels.library import TYPES, Kernels
from pronk.kernels.threads import num_threads

# Default number of weights per scale, by bits of a code. Smaller groups need more memory and gain
# little accuracy.
DEFAULT_GROUPS: dict[int, int] = {8: 128, 4: 32}

# Number of clipping ranges (100 %, 95 %, … 75 %) to try, by bits of a code. At 8 bits, clipping
# gains nothing.
_NUM_RANGES = {8: 0, 4: 6}


def default_group(bits: Bits, inputs: int) -> int:
    """Return the group size, at most the default, with which a row needs the fewest bytes.

    Rows are padded to whole groups, each with a scale of 4 bytes. For example, 320 weights of 8
    bits need 396 bytes in 3 groups of 128, and 340 bytes in 5 groups of 64. Of two sizes that need
    the same number of bytes, the larger one is returned.
    """

    def nbytes(group: int) -> int:
        num_groups = ceil(inputs / group)
        return num_groups * (group * bits // 8 + 4)

    whole_row = ceil(inputs / 32) * 32
    groups = [min(group, whole_row) for group in (128, 64, 32) if group <= DEFAULT_GROUPS[bits]]
    return min(groups, key=nbytes)


def round_weights(
    kernels: Kernels, weight: Array, bits: Bits, group: int | None = None
) -> QuantizedMatrix:
    """Quantize a matrix with a scale per group, without minima.

    The result has the same bits with all instruction sets.

    Args:
        kernels: the kernels that compute.
        weight: ``[outputs, inputs]``: float32, bfloat16 or float16, finite.
        bits: number of bits per code.
        group: number of inputs that share a scale, a multiple of 8; by default from
            :func:`default_group`.

    Raises:
        ValueError: a weight is not finite.
        MemoryError: there is too little memory.
    """
    outputs, inputs = weight.shape
    group = min(group or default_group(bits, inputs), ceil(inputs / 32) * 32)
    if weight.strides[1] != weight.itemsize:
        weight = np.ascontiguousarray(weight)
    # The codes are freed after packing. A memory mapping then returns to the operating system at
    # once, unlike memory of the heap.
    codes = mapped_zeros((outputs, inputs), np.dtype(np.uint8))
    scale = np.empty((outputs, ceil(inputs / group)), np.float32)
    row_stride = weight.strides[0] // weight.itemsize
    status = kernels.library.pronk_round(
        weight.ctypes.data,
        TYPES[weight.dtype],
        outputs,
        inputs,
        row_stride,
        bits,
        group,
        _NUM_RANGES[bits],
        codes.ctypes.data,
        scale.ctypes.data,
        num_threads(),
        kernels.isa,
    )
    if status:
        msg = f"kernels: rounding a matrix of {outputs} by {inputs} failed (memory)"
        raise MemoryError(msg)
    return QuantizedMatrix(codes, scale, None, bits, group)
