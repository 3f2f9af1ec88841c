"""Rounding of weights with the scales that are stored in the file.

Scales are rounded to the model's dtype first, and codes are chosen for the rounded scales. So the perplexity is
measured with exactly the weights that are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import gcd

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.errors import OptionError
from pronk.kernels.library import Kernels
from pronk.kernels.rounding import DEFAULT_GROUPS, round_weights
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix

__all__ = ["WHOLE_ROW", "RoundingRule", "choose_group", "inputs_of"]

WHOLE_ROW = 0  # group size that stands for all inputs of a matrix
_ALL_INPUTS = 1 << 20  # more inputs than any matrix has


@dataclass(frozen=True)
class RoundingRule:
    """Symmetric rounding of all matrices of a model.

    Attributes:
        kernels: kernels that search for scales.
        bits: bits of a code.
        group: number of inputs per scale, a multiple of 8 and a divisor of all matrices' inputs; or :data:`WHOLE_ROW`.
        dtype: dtype of the scales in the file.
    """

    kernels: Kernels
    bits: Bits
    group: int
    dtype: torch.dtype

    @property
    def zero(self) -> int:
        """Zero point of the codes."""
        return 1 << (self.bits - 1)

    def scales(self, weight: Tensor) -> Tensor:
        """Return the stored scales ``[outputs, groups]`` that minimize the squared error of ``weight``."""
        scale = round_weights(self.kernels, weight, self.bits, self.group or _ALL_INPUTS).scale
        most = torch.finfo(self.dtype).max
        return scale.clamp(-most, most).to(self.dtype).float()

    def nearest(self, weight: Tensor) -> QuantizedMatrix:
        """Quantize ``weight`` ``[outputs, inputs]`` to the nearest codes."""
        return self.coded(weight, self.scales(weight))

    def coded(self, weight: Tensor, scale: Tensor) -> QuantizedMatrix:
        """Quantize ``weight`` to the nearest codes for given scales, float32 ``[outputs, groups]``."""
        group = self.group or weight.shape[1]
        codes = self.codes(weight, scale.repeat_interleave(group, dim=1))
        return QuantizedMatrix(codes.add_(self.zero).to(torch.uint8), scale, None, self.bits, group)

    def codes(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return the nearest signed codes as floats, with one scale per weight; a scale of 0 gives code 0."""
        times = torch.where(scale == 0, 0.0, 1 / scale)
        return (weight * times).round_().clamp_(-self.zero, self.zero - 1)


def choose_group(config: ModelConfig, bits: int, group: int | None) -> tuple[Bits, int]:
    """Return the checked bits and group size.

    Args:
        config: configuration of the model.
        bits: 8 or 4.
        group: group size, or 0 for a whole row; ``None`` for the largest power of two from 8 to the default for
            ``bits`` that divides the inputs of all matrices.

    Raises:
        OptionError: the bits are neither 8 nor 4, or the group does not divide the inputs of every matrix.
    """
    if bits not in DEFAULT_GROUPS:
        msg = f"bits: expected 4 or 8, found {bits}"
        raise OptionError(msg)
    known: Bits = 4 if bits == 4 else 8
    inputs = inputs_of(config)
    fits = reduce(gcd, inputs)
    if group is None:
        group = next((size for size in (128, 64, 32, 16, 8) if size <= DEFAULT_GROUPS[bits] and fits % size == 0), None)
    if group == WHOLE_ROW and all(each % 8 == 0 for each in inputs):
        return known, group
    if group is None or group < 8 or group % 8 or fits % group:
        sizes = [str(size) for size in (128, 64, 32, 16, 8) if fits % size == 0]
        found = "inputs of no common multiple of 8" if group is None else str(group)
        msg = (
            f"group: expected a multiple of 8 that divides the matrices' {' and '.join(map(str, inputs))} inputs, "
            f"found {found}; use {', '.join([*sizes, 'or 0 for a whole row'])}"
        )
        raise OptionError(msg)
    return known, group


def inputs_of(config: ModelConfig) -> list[int]:
    """Return the distinct numbers of inputs of the matrices of a layer."""
    return sorted({config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size})
