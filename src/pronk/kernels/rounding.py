"""Rounding of weights to 8 and 4 bits: nearest codes, at the scale with the smallest error.

A group of weights ``w`` shares a scale ``s``, and ``s * code`` stands for a weight. Codes are from
-128 to 127 at 8 bits, and from -8 to 7 at 4 bits. The scale that covers the largest weight,
``max abs(w) / 7`` at 4 bits, rounds all other weights coarsely. Therefore the kernel also tries
scales that clip the largest weights, as the search for a clipping range in AWQ does (Lin et al.
2024, section 3.2). For each range ``r`` of 1, 0.95, …, 0.75 it tries

- ``r * max abs(w) / 7``, and
- ``-r * e / 8``, where ``e`` is the weight of largest magnitude: its code is -8, which has a
  larger magnitude than 7.

The scale with the smallest sum of squared errors is taken. At 8 bits clipping gains nothing, so the
first scale is the only one.
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

# Number of clipping ranges to try, by bits of a code.
_NUM_RANGES = {8: 0, 4: 6}

_SCALE_BYTES = 4
_ROW_MULTIPLE = 32  # the kernels pad rows of weights to a multiple of this number of inputs


def default_group(bits: Bits, inputs: int) -> int:
    """Return the group size, at most the default, with which a row needs the fewest bytes.

    Rows are padded to whole groups, each with a scale of 4 bytes. For example, 320 weights of 8
    bits need 396 bytes in 3 groups of 128, and 340 bytes in 5 groups of 64. Of two sizes that need
    the same number of bytes, the larger one is returned.
    """

    def row_bytes(group: int) -> int:
        num_groups = ceil(inputs / group)
        return num_groups * (group * bits // 8 + _SCALE_BYTES)

    longest = min(DEFAULT_GROUPS[bits], _padded_inputs(inputs))
    groups = [longest, *(group for group in (64, 32) if group < longest)]
    return min(groups, key=row_bytes)


def _padded_inputs(inputs: int) -> int:
    return ceil(inputs / _ROW_MULTIPLE) * _ROW_MULTIPLE


def round_weights(
    kernels: Kernels, weight: Array, bits: Bits, group: int | None = None
) -> QuantizedMatrix:
    """Quantize a matrix with a scale per group, without minima.

    The result has the same bits with all instruction sets.

    Args:
        kernels: the kernels that compute.
        weight: ``[outputs, inputs]``: float32, bfloat16 or float16, finite.
        bits: number of bits per code.
        group: number of inputs that share a scale, a multiple of 8. A group longer than a row is
            cut to the row's padded length. By default :func:`default_group` chooses.

    Raises:
        ValueError: a weight is not finite.
        MemoryError: there is too little memory.
    """
    outputs, inputs = weight.shape
    group = min(group or default_group(bits, inputs), _padded_inputs(inputs))
    if weight.strides[1] != weight.itemsize:
        weight = np.ascontiguousarray(weight)
    row_stride = weight.strides[0] // weight.itemsize
    # The codes are freed after packing. A memory mapping then returns to the operating system at
    # once, unlike memory of the heap.
    codes = mapped_zeros((outputs, inputs), np.dtype(np.uint8))
    scale = np.empty((outputs, ceil(inputs / group)), np.float32)
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
    # A group with a weight that is not finite has the scale NaN, which QuantizedMatrix refuses.
    return QuantizedMatrix(codes, scale, None, bits, group)
