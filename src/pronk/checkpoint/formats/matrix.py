"""Quantized matrix: the form of all quantized weights in memory, and conversions to it.

A weight is ``scale * code + minimum``, or in a matrix without minima ``scale * (code - zero)``,
where ``zero`` is ``2**(bits - 1)``. The columns of a row are divided into groups. Each group has a
scale and, in a matrix with minima, a minimum. The kernels round activations to 8 bits in the same
groups, and compute each group as a sum of integer products (``kernels/README.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, gcd
from typing import Literal, NamedTuple

import numpy as np

from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, UINT8, Array, DType, is_finite
from pronk.base.errors import CheckpointError, refuse

Bits = Literal[8, 4]

# Group sizes must be multiples of 8: kernels read 4 bytes of an output at a time, which are eight
# 4-bit codes.
GROUP_MULTIPLE = 8
# Maximum number of inputs. The sum of 65,536 products of a code (at most 255) and an activation (at
# most 127) is below 2**31.
_MAX_INPUTS = 65_536
# Number of inputs by which a group may be longer than its row. A quantized input row (codes padded
# to whole groups, and 8 bytes per group for scale and sum) must fit into the buffer of an
# unquantized row (16 bits per input, padded to 32 inputs).
MAX_GROUP_PADDING = 31


class ScaleFormat(NamedTuple):
    """Data types in which the scales and minima of a matrix are stored without loss."""

    dtype: DType
    zeros: bool


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """Quantized matrix ``[outputs, inputs]`` with groups along the inputs.

    Attributes:
        codes: uint8 ``[outputs, inputs]``, in 0..2**bits - 1; the columns of a group are adjacent.
        scale: float32 ``[outputs, groups]``, where ``groups`` is ``ceil(inputs / group)``.
        minimum: weight of the code 0, float32 ``[outputs, groups]``; ``None``: the weight of a code
            is ``scale * (code - zero)``.
        bits: number of bits per code: 4, 8, or 5 in groups of 32.
        group: number of inputs per group, a multiple of 8 of at most ``inputs + 31``. The last
            group of a row may be shorter.
        order: int64 ``[inputs]``: column ``i`` of ``codes`` is input ``order[i]``. ``None``: column
            ``i`` is input ``i``.

    Raises:
        ValueError: a shape, type or value is invalid; the message is one line.
    """

    codes: Array
    scale: Array
    minimum: Array | None
    bits: Bits | Literal[5]
    group: int
    order: Array | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        is_allowed = self.bits in (8, 4) or (self.bits == 5 and self.group == 32)
        if self.codes.dtype != UINT8 or not is_allowed:
            expected = "codes of 8 or 4 bits, or of 5 bits in groups of 32, as uint8"
            msg = f"expected {expected}, found {self.bits} bits as {self.codes.dtype}"
            raise ValueError(msg)
        is_multiple = self.group >= GROUP_MULTIPLE and self.group % GROUP_MULTIPLE == 0
        if not is_multiple or not 0 < inputs <= _MAX_INPUTS:
            expected = f"groups of a multiple of {GROUP_MULTIPLE} and 1..{_MAX_INPUTS} inputs"
            msg = f"expected {expected}, found {self.group}, {inputs}"
            raise ValueError(msg)
        longest = inputs + MAX_GROUP_PADDING
        if self.group > longest:
            expected = f"groups of at most {longest} for {inputs} inputs"
            msg = f"expected {expected}, found {self.group}"
            raise ValueError(msg)
        shape = [outputs, ceil(inputs / self.group)]
        for name, values in (("scale", self.scale), ("minimum", self.minimum)):
            if values is None:
                continue
            found_shape = list(values.shape)
            if found_shape != shape or values.dtype != FLOAT32:
                found = f"{found_shape} in {values.dtype}"
                msg = f"expected {name} {shape} in float32, found {found}"
                raise ValueError(msg)
            if not is_finite(values):
                expected = f"finite numbers in {name}"
                msg = f"expected {expected}, found NaN or infinity; the weights are damaged"
                raise ValueError(msg)
        if self.order is not None and not np.array_equal(np.sort(self.order), np.arange(inputs)):
            msg = f"expected an order that is a permutation of the {inputs} inputs, found none"
            raise ValueError(msg)

    @property
    def shape(self) -> tuple[int, int]:
        """``(outputs, inputs)``."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def zero(self) -> int:
        """The number subtracted from codes: ``2**(bits - 1)``, or 0 if the matrix has minima."""
        return 0 if self.minimum is not None else 1 << (self.bits - 1)

    @property
    def scale_format(self) -> ScaleFormat:
        """The smallest data types that represent all scales and minima exactly."""
        scale = self.scale
        minimum = self.minimum
        for dtype in (FLOAT16, BFLOAT16):
            if not _can_store(scale, dtype):
                continue
            if minimum is None:
                return ScaleFormat(dtype, zeros=False)
            # This is exact in float32: a product of a 16-bit scale and an integer up to 255.
            with np.errstate(all="ignore"):
                zeros = np.round(np.where(scale == 0, np.float32(0), -minimum / scale))
                has_zeros = np.array_equal(zeros * scale, -minimum)
            if has_zeros and bool(((zeros >= 0) & (zeros < 256)).all()):
                return ScaleFormat(dtype, zeros=True)
            if _can_store(minimum, dtype):
                return ScaleFormat(dtype, zeros=False)
        return ScaleFormat(FLOAT32, zeros=False)

    def dequantize(self) -> Array:
        """Return the weights, float32 ``[outputs, inputs]``, in the order of the inputs."""
        inputs = self.shape[1]
        weight = self.codes.astype(FLOAT32)
        weight -= self.zero
        weight *= np.repeat(self.scale, self.group, axis=1)[:, :inputs]
        if self.minimum is not None:
            weight += np.repeat(self.minimum, self.group, axis=1)[:, :inputs]
        if self.order is None:
            return weight
        ordered = np.empty_like(weight)
        ordered[:, self.order] = weight
        return ordered

    def slice_outputs(self, start: int, stop: int) -> QuantizedMatrix:
        """Return a matrix of the outputs ``start .. stop - 1``, whose arrays are views."""
        return self.take_outputs(slice(start, stop))

    def take_outputs(self, rows: slice | Sequence[int] | Array) -> QuantizedMatrix:
        """Return a matrix of the outputs ``rows``.

        Its arrays are views for a slice, and copies for a sequence of indices.
        """
        minimum = None if self.minimum is None else self.minimum[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], minimum=minimum)

    def scaled(self, factor: float) -> QuantizedMatrix:
        """Return the matrix times a number, with the same codes."""
        minimum = None if self.minimum is None else self.minimum * FLOAT32.type(factor)
        return replace(self, scale=self.scale * FLOAT32.type(factor), minimum=minimum)


def _can_store(numbers: Array, dtype: DType) -> bool:
    """Return whether ``dtype`` represents all numbers of a float32 array exactly."""
    with np.errstate(over="ignore"):  # a number that is too large for the type becomes infinite
        return np.array_equal(numbers.astype(dtype).astype(FLOAT32), numbers)


def fusible_runs(weights: Sequence[Array | QuantizedMatrix]) -> list[slice]:
    """Group adjacent weights that can be stacked along the outputs without a conversion.

    The weights of a run are all unquantized; or they are quantized with equal bits, group size and
    input order, and all or none have minima. Runs are as long as possible.

    Returns:
        Slices of the list ``weights``, one for each run, in order.
    """
    formats = [_stack_format(each) for each in weights]
    starts = [i for i, each in enumerate(formats) if i == 0 or formats[i - 1] != each]
    bounds = [*starts, len(weights)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _stack_format(weight: Array | QuantizedMatrix) -> object:
    """Return a value that is equal for two weights if they can be stacked as they are."""
    if isinstance(weight, np.ndarray):
        return None
    return weight.bits, weight.group, weight.minimum is None, _order_bytes(weight)


def stack_matrices(matrices: Sequence[QuantizedMatrix], codes: Array) -> QuantizedMatrix | None:
    """Stack matrices along the outputs without loss; return ``None`` if their input orders differ.

    Matrices of different formats are converted. A 4-bit code can be stored as an 8-bit code. A
    group can be split into smaller groups with the same scale. ``scale * (code - zero)`` equals
    ``scale * code + minimum`` with ``minimum = -scale * zero``.

    Args:
        matrices: matrices whose codes are views of consecutive rows of ``codes``.
        codes: uint8 ``[sum of outputs, inputs]``, the codes of the result; 4-bit codes may be
            converted in place.
    """
    if len(set(map(_order_bytes, matrices))) > 1:
        return None
    group = gcd(*(matrix.group for matrix in matrices))
    bits = max(matrix.bits for matrix in matrices)
    has_minima = any(matrix.minimum is not None for matrix in matrices)
    converted = [_convert(matrix, bits, group, minima=has_minima) for matrix in matrices]
    minima = [matrix.minimum for matrix in converted if matrix.minimum is not None]
    scale = np.concatenate([matrix.scale for matrix in converted])
    minimum = np.concatenate(minima) if minima else None
    return QuantizedMatrix(codes, scale, minimum, bits, group, matrices[0].order)


def _order_bytes(matrix: QuantizedMatrix) -> bytes | None:
    return None if matrix.order is None else matrix.order.tobytes()


def _convert(
    matrix: QuantizedMatrix, bits: Bits | Literal[5], group: int, *, minima: bool
) -> QuantizedMatrix:
    """Convert a matrix to ``bits`` bits per code and ``group`` inputs per group.

    If ``minima`` is set, a matrix without minima gets them. A conversion from 4 to 8 bits adds 120
    to the ``codes`` of a matrix without minima, in place, because its zero point is then 128
    instead of 8.
    """
    if matrix.bits != bits:
        if matrix.minimum is None:
            np.add(matrix.codes, (1 << (bits - 1)) - matrix.zero, out=matrix.codes)
        matrix = replace(matrix, bits=bits)
    scale = matrix.scale
    minimum = matrix.minimum
    if minima and minimum is None:
        minimum = -scale * matrix.zero
    if matrix.group != group:
        num_groups = ceil(matrix.shape[1] / group)
        factor = matrix.group // group
        scale = np.repeat(scale, factor, axis=1)[:, :num_groups]
        minimum = None if minimum is None else np.repeat(minimum, factor, axis=1)[:, :num_groups]
    return replace(matrix, scale=scale, minimum=minimum, group=group)


# number of outputs that are converted at a time, so that temporary arrays are small
SLICE_OUTPUTS = 512


def group_size(size: int, inputs: int) -> int:
    """Return the number of inputs per group in a matrix with ``inputs`` inputs.

    ``size`` is the group size in the config; -1 means all inputs. The result is at most ``inputs``
    rounded up to a multiple of 8.
    """
    whole = ceil(inputs / 8) * 8
    return whole if size == -1 else min(size, whole)


def unpack(packed: Array, bits: Bits, count: int) -> Array:
    """Unpack codes of 4 or 8 bits from 32-bit words, from the lowest bits up.

    Args:
        packed: int32 ``[rows, ceil(count * bits / 32)]``.
        bits: number of bits per code.
        count: number of codes per row.

    Returns:
        The codes, uint8 ``[rows, count]``.
    """
    codes = np.ascontiguousarray(packed).view(UINT8)
    if bits == 4:
        pairs = np.empty((*codes.shape, 2), UINT8)
        np.bitwise_and(codes, 15, out=pairs[..., 0])
        np.right_shift(codes, 4, out=pairs[..., 1])
        codes = pairs.reshape(len(codes), -1)
    return codes[:, :count]


def unpack_into(codes: Array, packed: Array, bits: Bits) -> None:
    """Unpack codes of 4 or 8 bits from int32 words into ``codes``, uint8 ``[outputs, inputs]``.

    ``packed`` is ``[outputs, ceil(inputs * bits / 32)]``; the first code is in the lowest bits.
    """
    inputs = codes.shape[1]
    for start in range(0, len(codes), SLICE_OUTPUTS):
        stop = start + SLICE_OUTPUTS
        codes[start:stop] = unpack(packed[start:stop], bits, inputs)


def to_quantized_matrix(
    codes: Array,
    zeros: Array | None,
    scale: Array,
    bits: Bits,
    group: int,
    order: Array | None = None,
) -> QuantizedMatrix:
    """Convert weights ``scale * (code - zero)`` to a :class:`QuantizedMatrix`.

    Zero points other than ``2**(bits - 1)`` become minima ``-scale * zero``. For 16-bit scales,
    this product, ``scale * code`` and their sum are exact in float32, because the mantissa of a
    scale has at most 11 bits, and codes and zero points have at most 8. For float32 scales, which
    are rare, the results are rounded.

    Args:
        codes: uint8 ``[outputs, inputs]``, in the order of the inputs; the columns are permuted by
            ``order`` in place.
        zeros: integers ``[outputs, groups]`` in 0..2**bits - 1; ``None`` means ``2**(bits - 1)``
            everywhere.
        scale: scales ``[outputs, groups]`` of any float type; must be finite.
        bits: number of bits per code.
        group: number of inputs per group, a multiple of 8.
        order: int64 ``[inputs]``, the input of each column of the result; ``None`` keeps the order
            of the inputs.

    Raises:
        CheckpointError: a shape, type or value is invalid.
    """
    scale = np.ascontiguousarray(scale, FLOAT32)
    minimum = None
    if zeros is not None and bool((zeros != 1 << (bits - 1)).any()):
        # QuantizedMatrix refuses infinities and NaN
        with np.errstate(over="ignore", invalid="ignore"):
            minimum = -scale * zeros.astype(FLOAT32)
    if order is not None:
        for start in range(0, len(codes), SLICE_OUTPUTS):
            stop = start + SLICE_OUTPUTS
            codes[start:stop] = codes[start:stop, order]
    try:
        return QuantizedMatrix(codes, scale, minimum, bits, group, order)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def input_order(name: str, index: Array, group: int, *, required: bool = False) -> Array | None:
    """Return the permutation of inputs that makes groups contiguous, int64 ``[inputs]``.

    Some programs do not set ``index`` if the groups are contiguous: it keeps its initial value, all
    0 or all -1.

    Args:
        name: name of the tensor ``index``, for error messages.
        index: group of each input, ``[inputs]`` (``g_idx``).
        group: number of inputs per group.
        required: whether to refuse an ``index`` that is not set, because the inputs may be permuted
            (``desc_act``).

    Returns:
        The permutation; ``None`` if the groups are contiguous already.

    Raises:
        CheckpointError: a group has another size than ``group``, or ``index`` is required and not
            set.
    """
    inputs = len(index)
    # index of inputs that are not permuted: 0, …, 0, 1, …, 1, …
    contiguous = np.arange(inputs) // group
    if np.array_equal(index, contiguous):
        return None
    last_group = int(contiguous[-1])
    is_unset = not bool((index != 0).any()) or not bool((index != -1).any())
    if is_unset:
        if not required or inputs <= group:
            return None
        expected = f"the group of each input, 0..{last_group}"
        found = f"{int(index[0])} for all as desc_act is true"
        refuse(name, f"expected {expected}, found {found}; use another checkpoint")
    order = np.argsort(index, kind="stable")
    if not np.array_equal(index[order], contiguous):
        expected = f"{group} inputs in each of the groups 0..{last_group}"
        found = f"groups {int(index.min())}..{int(index.max())} of other sizes"
        remedy = "check that the files are complete and belong together"
        refuse(name, f"expected {expected}, found {found}; {remedy}")
    return order
