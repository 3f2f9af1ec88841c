"""Codes for scales as the file will hold them: what is written is what was measured.

A scale is stored in the model's dtype. It is rounded to that first, and the codes are chosen for the rounded one.
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

# In place of the size of a group: all inputs of a matrix share a scale.
WHOLE_ROW = 0

# More inputs than a matrix has.
_ALL = 1 << 20


@dataclass(frozen=True)
class RoundingRule:
    """How every matrix of a model is quantized, without minima.

    Attributes:
        kernels: who search for scales.
        bits: of a code.
        group: inputs that share a scale, a multiple of 8 that divides those of every matrix; or :data:`WHOLE_ROW`.
        dtype: of the scales in the file.
    """

    kernels: Kernels
    bits: Bits
    group: int
    dtype: torch.dtype

    @property
    def zero(self) -> int:
        """What codes are counted from."""
        return 1 << (self.bits - 1)

    def scales(self, weight: Tensor) -> Tensor:
        """The scale of every group of ``weight`` ``[outputs, inputs]`` whose clipping errs least, as stored."""
        return self._stored(round_weights(self.kernels, weight, self.bits, self.group or _ALL).scale)

    def nearest(self, weight: Tensor) -> QuantizedMatrix:
        """Every weight of ``[outputs, inputs]`` by the code that is nearest to it."""
        return self.coded(weight, self.scales(weight))

    def coded(self, weight: Tensor, scale: Tensor) -> QuantizedMatrix:
        """The same for given scales, float32 ``[outputs, groups]``."""
        group = self.group or weight.shape[1]
        codes = self.codes(weight, scale.repeat_interleave(group, dim=1))
        return QuantizedMatrix(codes.add_(self.zero).to(torch.uint8), scale, None, self.bits, group)

    def codes(self, weight: Tensor, scale: Tensor) -> Tensor:
        """The nearest codes, counted from 0 and as floats; one scale for each weight. A scale of 0 has the code 0."""
        times = torch.where(scale == 0, 0.0, 1 / scale)
        return (weight * times).round_().clamp_(-self.zero, self.zero - 1)

    def _stored(self, scale: Tensor) -> Tensor:
        most = torch.finfo(self.dtype).max
        return scale.clamp(-most, most).to(self.dtype).float()


def choose_group(config: ModelConfig, bits: int, group: int | None) -> tuple[Bits, int]:
    """Bits and group, checked; a group of ``None`` is the usual one, or the largest power of two below it that fits.

    Raises:
        OptionError: other bits than 8 and 4, or a group that does not divide the inputs of every matrix.
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
    """How many inputs the matrices of a layer have, each number once."""
    return sorted({config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size})
