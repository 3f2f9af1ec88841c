"""Fusion of matrices with the same inputs (such as Q, K and V) that may be quantized differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, gcd

import torch
from torch import Tensor

from pronk.quantization.formats.matrix import QuantizedMatrix

__all__ = ["fusible_runs", "stack_matrices"]


def fusible_runs(weights: Sequence[Tensor | QuantizedMatrix]) -> list[slice]:
    """Return the runs of adjacent matrices with equal bits, group, order and use of minima, or all plain."""
    starts = [i for i, weight in enumerate(weights) if i == 0 or not _is_like(weights[i - 1], weight)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(weights)], strict=True)]


def stack_matrices(parts: Sequence[QuantizedMatrix], codes: Tensor) -> QuantizedMatrix | None:
    """Stack matrices along the outputs without loss; ``None`` if they order their inputs differently.

    Parts that differ in bits, groups or minima are converted to a common form: a 4-bit code becomes an 8-bit code with
    the same scale, a group is split into smaller groups with the same scale, and a zero point becomes a minimum.

    Args:
        parts: matrices whose codes are views of the rows of ``codes``, in order; their codes may be modified.
        codes: uint8 ``[outputs of all parts, inputs]``.
    """
    order = parts[0].order
    if not all(_is_equal(order, part.order) for part in parts[1:]):
        return None
    group, bits = gcd(*(part.group for part in parts)), max(part.bits for part in parts)
    lowest = any(part.minimum is not None for part in parts)
    alike = [_finer(_wider(part, bits), group, lowest=lowest) for part in parts]
    minima = [part.minimum for part in alike if part.minimum is not None]
    scale = torch.cat([part.scale for part in alike])
    return QuantizedMatrix(codes, scale, torch.cat(minima) if minima else None, alike[0].bits, group, order)


def _is_like(one: Tensor | QuantizedMatrix, other: Tensor | QuantizedMatrix) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    forms = [(each.bits, each.group, each.minimum is None) for each in (one, other)]
    return forms[0] == forms[1] and _is_equal(one.order, other.order)


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _wider(part: QuantizedMatrix, bits: int) -> QuantizedMatrix:
    if part.bits == bits:
        return part
    if part.minimum is None:
        part.codes.add_((1 << (bits - 1)) - part.zero)
    return replace(part, bits=8)


def _finer(part: QuantizedMatrix, group: int, *, lowest: bool) -> QuantizedMatrix:
    scale, minimum = part.scale, part.minimum
    if lowest and minimum is None:
        minimum = -scale * part.zero
    if part.group != group:
        groups, times = ceil(part.shape[1] / group), part.group // group
        scale = scale.repeat_interleave(times, 1)[:, :groups]
        minimum = None if minimum is None else minimum.repeat_interleave(times, 1)[:, :groups]
    return replace(part, scale=scale, minimum=minimum, group=group)
