"""Rounding weights to 8 and 4 bits: to the nearest code, by the clipping that errs least.

A group's scale is a compromise: the largest weight decides how coarse all others become. So several scales are tried,
from that of the largest weight down, and the one with the smallest sum of squared errors is taken (as the search for a
clipping range in OmniQuant and AWQ does; Lin et al. 2024, section 3.2).
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad

from pronk.quantized.form import Bits, Quantized

__all__ = ["DEFAULT_GROUPS", "round_weights"]

# By bits: what costs the least memory at the accuracy that the bits have.
DEFAULT_GROUPS: dict[int, int] = {8: 128, 4: 32}

# Parts of the largest weight that are tried as the end of the range.
_RANGES = {8: (), 4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)}
# Outputs that are rounded at a time.
_ROWS = 4096


def round_weights(weight: Tensor, bits: Bits, group: int | None = None) -> Quantized:
    """Round a matrix to the nearest codes, without minima.

    Args:
        weight: ``[outputs, inputs]``, any float dtype; finite.
        bits: 8 or 4.
        group: inputs that share a scale, a multiple of 8; 128 for 8 bits and 32 for 4 by default.

    Raises:
        ValueError: a weight is not finite.
    """
    outputs, inputs = weight.shape
    group = min(group or DEFAULT_GROUPS[bits], ceil(inputs / 32) * 32)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scale = torch.empty(outputs, ceil(inputs / group))
    for start in range(0, outputs, _ROWS):
        part = weight[start : start + _ROWS].float()
        grouped = pad(part, (0, -inputs % group)).unflatten(1, (-1, group))
        found, own = _round(grouped, bits)
        codes[start : start + _ROWS] = found.flatten(1)[:, :inputs]
        scale[start : start + _ROWS] = own
    return Quantized(codes, scale, None, bits, group)


def _round(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups ``[outputs, groups, group]``."""
    zero, most = 1 << (bits - 1), (1 << (bits - 1)) - 1
    low, high = weight.amin(-1), weight.amax(-1)
    peak = torch.maximum(-low, high)
    # One code more on one side: the weight that is farthest out goes there, and the scale has the other's sign.
    farthest = torch.where(high >= -low, -high, -low)
    best = _try(weight, peak / most, -most, most)
    for part in _RANGES[bits]:
        for scale in (peak * (part / most), farthest * (part / zero)):
            found = _try(weight, scale, -zero, most)
            better = found[0] < best[0]
            best = (
                torch.where(better, found[0], best[0]),
                torch.where(better[..., None], found[1], best[1]),
                torch.where(better, scale, best[2]),
            )
    return best[1].add_(zero).to(torch.uint8), best[2]


def _try(weight: Tensor, scale: Tensor, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a scale costs in squares, the codes that are nearest with it, and the scale."""
    times = torch.where(scale == 0, 0.0, 1 / scale)
    codes = (weight * times[..., None]).round_().clamp_(low, high)
    wrong = (codes * scale[..., None]).sub_(weight).square_().sum(-1)
    return wrong, codes, scale
