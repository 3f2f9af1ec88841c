"""Common representation of quantized weights, and the conversion of all file formats to it.

A weight is ``scale * code + minimum``, or without minima ``scale * (code - zero)`` with ``zero =
2**(bits - 1)``. The columns of a row are divided into groups; each group has a scale and, in a
matrix with minima, a minimum. The kernels round activations to 8 bits in the same groups and
compute each group as a sum of integer products (``kernels/README.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd
from typing import Literal, NamedTuple

import numpy as np

from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, UINT8, Array, DType, is_finite
from pronk.base.errors import CheckpointError, refuse

Bits = Literal[8, 4]

# Group sizes are multiples of 8: kernels read 4 bytes of an output at a time, which are eight 4-bit
# codes.
GROUP_MULTIPLE = 8
# maximum: 65,536 products code * activation, each at most 255 * 127, have a sum below 2**31
_MAX_INPUTS = 65_536
# A group may be longer than its row by at most 31 inputs. Reason: a quantized input row (codes
# padded to whole groups, then scale and sum, 8 bytes per group) has to fit the buffer of an
# unquantized row, 16 bits per input, padded to 32.
MAX_GROUP_PADDING = 31


class ScaleFormat(NamedTuple):
    """How the scales and minima of a matrix can be stored without loss."""

    # of the scales, and of minima that are stored as such: float16, bfloat16 or float32
    dtype: DType
    # whether every minimum is ``-scale * zero`` with an integer ``zero`` in 0 .. 255, which is
    # stored
    zeros: bool


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """Quantized matrix ``[outputs, inputs]`` with groups along the inputs.

    Invalid shapes, types or values raise a ValueError of one line.
    """

    # uint8 ``[outputs, inputs]``, each in 0 .. 2**bits - 1; the columns of a group are adjacent
    codes: Array
    scale: Array  # float32 ``[outputs, groups]``, ``groups = ceil(inputs / group)``
    # weight of code 0, float32 ``[outputs, groups]``; ``None``: ``zero`` is subtracted
    minimum: Array | None
    bits: Bits | Literal[5]  # number of bits per code
    # Number of inputs per group: a multiple of 8, at most ``inputs + 31``. The last group of a row
    # may be shorter.
    group: int
    # int64 ``[inputs]``: column ``i`` of ``codes`` is input ``order[i]``. ``None``: column ``i`` is
    # input ``i``.
    order: Array | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        if (
            self.codes.dtype != UINT8
            or self.bits not in (8, 5, 4)
            or (self.bits == 5 and self.group != 32)
        ):
            expected = "codes of 8 or 4 bits, or of 5 bits in groups of 32, as uint8"
            msg = f"expected {expected}, found {self.bits} bits as {self.codes.dtype}"
            raise ValueError(msg)
        if (
            self.group % GROUP_MULTIPLE
            or self.group < GROUP_MULTIPLE
            or not 0 < inputs <= _MAX_INPUTS
        ):
            expected = f"groups of a multiple of {GROUP_MULTIPLE} and 1..{_MAX_INPUTS} inputs"
            msg = f"expected {expected}, found {self.group}, {inputs}"
            raise ValueError(msg)
        if self.group > inputs + MAX_GROUP_PADDING:
            msg = (
                f"expected groups of at most {inputs + MAX_GROUP_PADDING} for {inputs} inputs, "
                f"found {self.group}"
            )
            raise ValueError(msg)
        for name, values in (("scale", self.scale), ("minimum", self.minimum)):
            if values is None:
                continue
            if values.shape != (outputs, ceil(inputs / self.group)) or values.dtype != FLOAT32:
                shape = [outputs, ceil(inputs / self.group)]
                msg = (
                    f"expected {name} {shape} in float32, found {list(values.shape)} in "
                    f"{values.dtype}"
                )
                raise ValueError(msg)
            if not is_finite(values):
                msg = (
                    f"expected finite numbers in {name}, found NaN or infinity; "
                    "the weights are damaged"
                )
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
        """Number to subtract from codes: 0 if the matrix has minima, else the zero point ``2**(bits - 1)``."""
        return 0 if self.minimum is not None else 1 << (self.bits - 1)

    @property
    def scale_format(self) -> ScaleFormat:
        """Smallest format that represents all scales and minima exactly."""
        scale = self.scale
        minimum = self.minimum
        for dtype in (FLOAT16, BFLOAT16):
            if not _can_store(scale, dtype):
                continue
            if minimum is None:
                return ScaleFormat(dtype, zeros=False)
            # With 16-bit scales the products scale * zero are exact.
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
        """Return the outputs ``start .. stop - 1`` as a matrix whose arrays are views of this matrix."""
        return self.take_outputs(slice(start, stop))

    def take_outputs(self, rows: slice | Sequence[int]) -> QuantizedMatrix:
        """Return some outputs; a sequence of indices copies them."""
        minimum = None if self.minimum is None else self.minimum[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], minimum=minimum)


def _can_store(numbers: Array, dtype: DType) -> bool:
    with np.errstate(over="ignore"):  # a number beyond the largest of the type becomes infinite
        return np.array_equal(numbers.astype(dtype).astype(FLOAT32), numbers)


def fusible_runs(weights: Sequence[Array | QuantizedMatrix]) -> list[slice]:
    """Split a list of weights into runs that can be stacked without conversion, each as long as possible.

    Each run is a slice of the list. Its weights are all unquantized; or they are quantized with
    equal bits, group size and input order, and all or none have minima.
    """
    formats = [
        None
        if isinstance(each, np.ndarray)
        else (each.bits, each.group, each.minimum is None, _order_bytes(each))
        for each in weights
    ]
    starts = [i for i, each in enumerate(formats) if i == 0 or formats[i - 1] != each]
    return [
        slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(weights)], strict=True)
    ]


def stack_matrices(matrices: Sequence[QuantizedMatrix], codes: Array) -> QuantizedMatrix | None:
    """Stack matrices along the outputs without loss; return ``None`` if their input orders differ.

    Matrices of different formats are converted: a 4-bit code can be stored as an 8-bit code, a
    group can be split into smaller groups with the same scale, and ``scale * (code - zero)`` equals
    ``scale * code + minimum`` with ``minimum = -scale * zero``. The codes of ``matrices`` are views
    of consecutive rows of ``codes``, uint8 ``[sum of outputs, inputs]``: the codes of the result,
    which may be converted from 4 bits in place.
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
    """Return the matrix with ``bits`` bits per code, ``group`` inputs per group, and ``minima`` or not.

    From 4 to 8 bits, 120 is added to the ``codes`` of a matrix without minima, in place: its zero
    point is then 128 instead of 8.
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


SLICE_OUTPUTS = 512  # number of outputs converted at a time, so that temporary arrays are small


def group_size(size: int, inputs: int) -> int:
    """Return the number of inputs per group in a matrix, for the group size ``size`` of the config.

    This is ``size``, but at most ``inputs`` rounded up to a multiple of 8; a ``size`` of -1 means
    all inputs.
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
        codes[start : start + SLICE_OUTPUTS] = unpack(
            packed[start : start + SLICE_OUTPUTS], bits, codes.shape[1]
        )


def to_quantized_matrix(
    codes: Array,
    zeros: Array | None,
    scale: Array,
    bits: Bits,
    group: int,
    order: Array | None = None,
) -> QuantizedMatrix:
    """Convert weights ``scale * (code - zero)`` to a :class:`QuantizedMatrix`.

    Unless all zero points are ``2**(bits - 1)``, they become minima ``-scale * zero``. For 16-bit
    scales, this product, ``scale * code`` and their sum are exact in float32: the mantissa of a
    scale has at most 11 bits, codes and zero points have at most 8. For float32 scales, which are
    rare, the results are rounded.

    Args:
        codes: uint8 ``[outputs, inputs]``, in the order of the inputs; the columns are permuted by
            ``order`` in place.
        zeros: integers ``[outputs, groups]`` in 0 .. 2**bits - 1; ``None`` means ``2**(bits - 1)``
            everywhere.
        scale: scales ``[outputs, groups]`` of any float type; must be finite.
        bits: number of bits per code.
        group: number of inputs per group, a multiple of 8.
        order: int64 ``[inputs]``, the input of each column of the result; ``None`` keeps the order
            of the inputs.
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
    """Return the permutation of inputs (int64) that makes groups contiguous.

    ``None`` if none is needed.

    ``index`` ``[inputs]`` is the group of each input (``g_idx``), from the tensor ``name``.
    ``required``: whether to refuse an ``index`` that is not set, because the inputs may be permuted
    (``desc_act``).

    Raises:
        CheckpointError: a group has another size than ``group``, or ``index`` is required and not
            set.
    """
    inputs = len(index)
    contiguous = np.arange(inputs) // group  # the index without a permutation: 0, …, 0, 1, …, 1, …
    # Some programs do not set the index if the groups are contiguous: it keeps its initial value,
    # all 0 or all -1.
    unset = not bool((index != 0).any()) or not bool((index != -1).any())
    if np.array_equal(index, contiguous) or (unset and not (required and inputs > group)):
        return None
    last_group = int(contiguous[-1])
    if unset:
        found = f"{int(index[0])} for all as desc_act is true"
        refuse(
            name,
            f"expected the group of each input, 0..{last_group}, found {found}; "
            "use another checkpoint",
        )
    order = np.argsort(index, kind="stable")
    if not np.array_equal(index[order], contiguous):
        found = f"groups {int(index.min())}..{int(index.max())} of other sizes"
        remedy = "check that the files are complete and belong together"
        refuse(
            name,
            f"expected {group} inputs in each of the groups 0..{last_group}, found {found}; "
            f"{remedy}",
        )
    return order
