"""Unpacking of codes from 32-bit words, and conversion to :class:`QuantizedMatrix`."""

from __future__ import annotations

from math import ceil

import numpy as np

from pronk.arrays import FLOAT32, UINT8, Array
from pronk.errors import CheckpointError
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix

__all__ = ["SLICE_OUTPUTS", "group_size", "input_order", "to_quantized_matrix", "unpack", "unpack_into"]

SLICE_OUTPUTS = 512  # number of outputs converted at a time, so that temporary arrays are small


def group_size(size: int, inputs: int) -> int:
    """Return the number of inputs per group in a matrix, for the group size ``size`` of the config.

    This is ``size``, but at most ``inputs`` rounded up to a multiple of 8; a ``size`` of -1 means all inputs.
    """
    whole = ceil(inputs / 8) * 8
    return whole if size == -1 else min(size, whole)


def unpack(packed: Array, bits: Bits, count: int) -> Array:
    """Unpack int32 ``[rows, ceil(count * bits / 32)]``, lowest bits first, to uint8 ``[rows, count]``."""
    codes = np.ascontiguousarray(packed).view(UINT8)
    if bits == 4:
        pairs = np.empty((*codes.shape, 2), UINT8)
        np.bitwise_and(codes, 15, out=pairs[..., 0])
        np.right_shift(codes, 4, out=pairs[..., 1])
        codes = pairs.reshape(len(codes), -1)
    return codes[:, :count]


def unpack_into(codes: Array, packed: Array, bits: Bits) -> None:
    """Unpack 32-bit words into ``codes``, uint8 ``[outputs, inputs]``; see :func:`unpack`."""
    for start in range(0, len(codes), SLICE_OUTPUTS):
        codes[start : start + SLICE_OUTPUTS] = unpack(packed[start : start + SLICE_OUTPUTS], bits, codes.shape[1])


def to_quantized_matrix(
    codes: Array, zeros: Array | None, scale: Array, bits: Bits, group: int, order: Array | None = None
) -> QuantizedMatrix:
    """Convert weights ``scale * (code - zero)`` to a :class:`QuantizedMatrix`.

    Unless all zero points are ``2**(bits - 1)``, they become minima ``-scale * zero``. For 16-bit scales, this product,
    ``scale * code`` and their sum are exact in float32: the mantissa of a scale has at most 11 bits, codes and zero
    points have at most 8. For float32 scales, which are rare, the results are rounded.

    Args:
        codes: uint8 ``[outputs, inputs]``, in the order of the inputs; the columns are permuted by ``order`` in place.
        zeros: integers ``[outputs, groups]`` in 0 .. 2**bits - 1; ``None`` means ``2**(bits - 1)`` everywhere.
        scale: scales ``[outputs, groups]`` of any float type; must be finite.
        bits: number of bits per code.
        group: number of inputs per group, a multiple of 8.
        order: int64 ``[inputs]``, the input of each column of the result; ``None`` keeps the order of the inputs.
    """
    scale = np.ascontiguousarray(scale, FLOAT32)
    minimum = None
    if zeros is not None and bool((zeros != 1 << (bits - 1)).any()):
        with np.errstate(over="ignore", invalid="ignore"):  # QuantizedMatrix refuses the results
            minimum = -scale * zeros.astype(FLOAT32)
    for start in range(0, len(codes) if order is not None else 0, SLICE_OUTPUTS):
        codes[start : start + SLICE_OUTPUTS] = codes[start : start + SLICE_OUTPUTS, order]
    try:
        return QuantizedMatrix(codes, scale, minimum, bits, group, order)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def input_order(name: str, index: Array, group: int, *, required: bool = False) -> Array | None:
    """Return the permutation of inputs (int64) that makes groups contiguous; ``None`` if none is needed.

    Args:
        name: name of the tensor ``index``, for error messages.
        index: integers ``[inputs]``, the group of each input (``g_idx``).
        group: number of inputs per group.
        required: whether to refuse an ``index`` that is not set, because the inputs may be permuted (``desc_act``).

    Raises:
        CheckpointError: a group has another size than ``group``, or ``index`` is required and not set.
    """
    inputs = len(index)
    contiguous = np.arange(inputs) // group  # the index without a permutation: 0, …, 0, 1, …, 1, …
    # Some programs do not set the index if the groups are contiguous: it keeps its initial value, all 0 or all -1.
    unset = not bool((index != 0).any()) or not bool((index != -1).any())
    if np.array_equal(index, contiguous) or (unset and not (required and inputs > group)):
        return None
    last_group = int(contiguous[-1])
    if unset:
        found = f"{int(index[0])} for all as desc_act is true"
        msg = f"{name}: expected the group of each input, 0..{last_group}, found {found}; use another checkpoint"
        raise CheckpointError(msg)
    order = np.argsort(index, kind="stable")
    if not np.array_equal(index[order], contiguous):
        low, high = int(index.min()), int(index.max())
        msg = (
            f"{name}: expected {group} inputs in each of the groups 0..{last_group}, found groups {low}..{high} of "
            "other sizes; check that the files are complete and belong together"
        )
        raise CheckpointError(msg)
    return order
