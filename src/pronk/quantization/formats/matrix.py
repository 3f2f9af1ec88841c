"""Common representation of quantized weights, to which all file formats are converted.

A weight is ``scale * code + minimum``, or without minima ``scale * (code - zero)`` with ``zero = 2**(bits - 1)``. The
columns of a row are divided into groups; each group has a scale and, in a matrix with minima, a minimum. The kernels
round activations to 8 bits in the same groups and compute each group as a sum of integer products
(``kernels/README.md``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple

import numpy as np

from pronk.arrays import BFLOAT16, FLOAT16, FLOAT32, UINT8, Array, DType, is_finite

__all__ = ["Bits", "QuantizedMatrix", "ScaleFormat"]

Bits = Literal[8, 4]

# Group sizes are multiples of 8: kernels read 4 bytes of an output at a time, which are eight 4-bit codes.
_GROUP_MULTIPLE = 8
_MAX_INPUTS = 65_536  # maximum: 65,536 products code * activation, each at most 255 * 127, have a sum below 2**31
# A group may be longer than its row by at most 31 inputs. Reason: a quantized input row (codes padded to whole groups,
# then scale and sum, 8 bytes per group) has to fit the buffer of an unquantized row, 16 bits per input, padded to 32.
_MAX_GROUP_PADDING = 31


class ScaleFormat(NamedTuple):
    """How the scales and minima of a matrix can be stored without loss."""

    dtype: DType  # of the scales, and of minima that are stored as such: float16, bfloat16 or float32
    zeros: bool  # whether every minimum is ``-scale * zero`` with an integer ``zero`` in 0 .. 255, which is stored


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """Quantized matrix ``[outputs, inputs]`` with groups along the inputs.

    Raises:
        ValueError: the shapes, types or values are invalid; the message is one line.
    """

    codes: Array  # uint8 ``[outputs, inputs]``, each in 0 .. 2**bits - 1; the columns of a group are adjacent
    scale: Array  # float32 ``[outputs, groups]``, ``groups = ceil(inputs / group)``
    minimum: Array | None  # weight of code 0, float32 ``[outputs, groups]``; ``None``: ``zero`` is subtracted
    bits: Bits | Literal[5]  # number of bits per code
    # Number of inputs per group: a multiple of 8, at most ``inputs + 31``. The last group of a row may be shorter.
    group: int
    # int64 ``[inputs]``: column ``i`` of ``codes`` is input ``order[i]``. ``None``: column ``i`` is input ``i``.
    order: Array | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        if self.codes.dtype != UINT8 or self.bits not in (8, 5, 4) or (self.bits == 5 and self.group != 32):
            expected = "codes of 8 or 4 bits, or of 5 bits in groups of 32, as uint8"
            msg = f"expected {expected}, found {self.bits} bits as {self.codes.dtype}"
            raise ValueError(msg)
        if self.group % _GROUP_MULTIPLE or self.group < _GROUP_MULTIPLE or not 0 < inputs <= _MAX_INPUTS:
            expected = f"groups of a multiple of {_GROUP_MULTIPLE} and 1..{_MAX_INPUTS} inputs"
            msg = f"expected {expected}, found {self.group}, {inputs}"
            raise ValueError(msg)
        if self.group > inputs + _MAX_GROUP_PADDING:
            msg = f"expected groups of at most {inputs + _MAX_GROUP_PADDING} for {inputs} inputs, found {self.group}"
            raise ValueError(msg)
        for name, values in (("scale", self.scale), ("minimum", self.minimum)):
            if values is None:
                continue
            if values.shape != (outputs, ceil(inputs / self.group)) or values.dtype != FLOAT32:
                shape = [outputs, ceil(inputs / self.group)]
                msg = f"expected {name} {shape} in float32, found {list(values.shape)} in {values.dtype}"
                raise ValueError(msg)
            if not is_finite(values):
                msg = f"expected finite numbers in {name}, found NaN or infinity; the weights are damaged"
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
        scale, minimum = self.scale, self.minimum
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
        minimum = None if self.minimum is None else self.minimum[start:stop]
        return replace(self, codes=self.codes[start:stop], scale=self.scale[start:stop], minimum=minimum)


def _can_store(numbers: Array, dtype: DType) -> bool:
    """Return whether a float type represents all numbers exactly."""
    with np.errstate(over="ignore"):  # a number beyond the largest of the type becomes infinite
        return np.array_equal(numbers.astype(dtype).astype(FLOAT32), numbers)
