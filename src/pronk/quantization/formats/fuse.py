"""Stacking of matrices with the same inputs, such as query, key and value projections, into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, gcd

import torch
from torch import Tensor

from pronk.quantization.formats.matrix import QuantizedMatrix

__all__ = ["fusible_runs", "stack_matrices"]


def fusible_runs(weights: Sequence[Tensor | QuantizedMatrix]) -> list[slice]:
    """Return the longest runs of consecutive weights that can be stacked without conversion, as slices.

    The weights of a run are all unquantized, or agree in bits, group size, input order and presence of minima.
    """
    starts = [i for i, weight in enumerate(weights) if i == 0 or not _have_same_format(weights[i - 1], weight)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(weights)], strict=True)]


def stack_matrices(parts: Sequence[QuantizedMatrix], codes: Tensor) -> QuantizedMatrix | None:
    """Stack matrices along the outputs without loss; ``None`` if their input orders differ.

    Matrices of different formats are converted: a 4-bit code can be stored as an 8-bit code, a group can be split into
    smaller groups with the same scale, and ``scale * (code - zero)`` equals ``scale * code + minimum`` with
    ``minimum = -scale * zero``.

    Args:
        parts: matrices to stack.
        codes: uint8 ``[sum of outputs, inputs]``, of which the codes of the parts are views; may be changed in place.
    """
    order = parts[0].order
    if not all(_is_equal(order, part.order) for part in parts[1:]):
        return None
    group, bits = gcd(*(part.group for part in parts)), max(part.bits for part in parts)
    with_minima = any(part.minimum is not None for part in parts)
    converted = [_with_group(_with_bits(part, bits), group, minima=with_minima) for part in parts]
    minima = [part.minimum for part in converted if part.minimum is not None]
    scale = torch.cat([part.scale for part in converted])
    return QuantizedMatrix(codes, scale, torch.cat(minima) if minima else None, converted[0].bits, group, order)


def _have_same_format(one: Tensor | QuantizedMatrix, other: Tensor | QuantizedMatrix) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    forms = [(each.bits, each.group, each.minimum is None) for each in (one, other)]
    return forms[0] == forms[1] and _is_equal(one.order, other.order)


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _with_bits(part: QuantizedMatrix, bits: int) -> QuantizedMatrix:
    """Return the matrix with ``bits`` bits per code, not fewer than before; codes are changed in place."""
    if part.bits == bits:
        return part
    if part.minimum is None:
        part.codes.add_((1 << (bits - 1)) - part.zero)
    return replace(part, bits=8)


def _with_group(part: QuantizedMatrix, group: int, *, minima: bool) -> QuantizedMatrix:
    """Return the matrix with groups of ``group`` inputs; if ``minima``, with minima, not a zero point."""
    scale, minimum = part.scale, part.minimum
    if minima and minimum is None:
        minimum = -scale * part.zero
    if part.group != group:
        groups, times = ceil(part.shape[1] / group), part.group // group
        scale = scale.repeat_interleave(times, 1)[:, :groups]
        minimum = None if minimum is None else minimum.repeat_interleave(times, 1)[:, :groups]
    return replace(part, scale=scale, minimum=minimum, group=group)
