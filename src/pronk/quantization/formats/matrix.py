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

import torch
from torch import Tensor

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

    dtype: torch.dtype  # of the scales, and of minima that are stored as such: float16, bfloat16 or float32
    zeros: bool  # whether every minimum is ``-scale * zero`` with an integer ``zero`` in 0 .. 255, which is stored


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """Quantized matrix ``[outputs, inputs]`` with groups along the inputs.

    Raises:
        ValueError: the shapes, types or values are invalid; the message is one line.
    """

    codes: Tensor  # uint8 ``[outputs, inputs]``, each in 0 .. 2**bits - 1; the columns of a group are adjacent
    scale: Tensor  # float32 ``[outputs, groups]``, ``groups = ceil(inputs / group)``
    minimum: Tensor | None  # weight of code 0, float32 ``[outputs, groups]``; ``None``: ``zero`` is subtracted
    bits: Bits  # number of bits per code
    # Number of inputs per group: a multiple of 8, at most ``inputs + 31``. The last group of a row may be shorter.
    group: int
    # int64 ``[inputs]``: column ``i`` of ``codes`` is input ``order[i]``. ``None``: column ``i`` is input ``i``.
    order: Tensor | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        if self.codes.dtype != torch.uint8 or self.bits not in (8, 4):
            msg = f"expected codes of 8 or 4 bits as uint8, found {self.bits} bits as {self.codes.dtype}"
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
            if values.shape != (outputs, ceil(inputs / self.group)) or values.dtype != torch.float32:
                shape = [outputs, ceil(inputs / self.group)]
                msg = f"expected {name} {shape} in float32, found {list(values.shape)} in {values.dtype}"
                raise ValueError(msg)
            if not bool(values.isfinite().all()):
                msg = f"expected finite numbers in {name}, found NaN or infinity; the weights are damaged"
                raise ValueError(msg)
        if self.order is not None and not torch.equal(self.order.sort().values, torch.arange(inputs)):
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
        for dtype in (torch.float16, torch.bfloat16):
            if not torch.equal(scale.to(dtype).float(), scale):
                continue
            if minimum is None:
                return ScaleFormat(dtype, zeros=False)
            # With 16-bit scales the products scale * zero are exact.
            zeros = torch.where(scale == 0, 0.0, -minimum / scale).round()
            if torch.equal(zeros * scale, -minimum) and bool(((zeros >= 0) & (zeros < 256)).all()):
                return ScaleFormat(dtype, zeros=True)
            if torch.equal(minimum.to(dtype).float(), minimum):
                return ScaleFormat(dtype, zeros=False)
        return ScaleFormat(torch.float32, zeros=False)

    def dequantize(self) -> Tensor:
        """Return the weights, float32 ``[outputs, inputs]``, in the order of the inputs."""
        inputs = self.shape[1]
        scale = self.scale.repeat_interleave(self.group, dim=1)[:, :inputs]
        weight = scale * (self.codes.float() - self.zero)
        if self.minimum is not None:
            weight += self.minimum.repeat_interleave(self.group, dim=1)[:, :inputs]
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def slice_outputs(self, start: int, stop: int) -> QuantizedMatrix:
        """Return the outputs ``start .. stop - 1`` as a matrix whose tensors are views of this matrix."""
        minimum = None if self.minimum is None else self.minimum[start:stop]
        return replace(self, codes=self.codes[start:stop], scale=self.scale[start:stop], minimum=minimum)
