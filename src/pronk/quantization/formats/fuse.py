"""Stacking of matrices with the same inputs, such as query, key and value projections, into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, gcd

import numpy as np

from pronk.arrays import Array
from pronk.quantization.formats.matrix import QuantizedMatrix

__all__ = ["fusible_runs", "stack_matrices"]


def fusible_runs(weights: Sequence[Array | QuantizedMatrix]) -> list[slice]:
    """Split a list of weights into runs that can be stacked without conversion, each as long as possible.

    Each run is a slice of the list. Its weights are all unquantized; or they are quantized with equal bits, group size
    and input order, and all or none have minima.
    """
    starts = [i for i, weight in enumerate(weights) if i == 0 or not _have_same_format(weights[i - 1], weight)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(weights)], strict=True)]


def stack_matrices(matrices: Sequence[QuantizedMatrix], codes: Array) -> QuantizedMatrix | None:
    """Stack matrices along the outputs without loss; return ``None`` if their input orders differ.

    Matrices of different formats are converted: a 4-bit code can be stored as an 8-bit code, a group can be split into
    smaller groups with the same scale, and ``scale * (code - zero)`` equals ``scale * code + minimum`` with
    ``minimum = -scale * zero``.

    Args:
        matrices: matrices to stack; their codes are views of consecutive rows of ``codes``.
        codes: uint8 ``[sum of outputs, inputs]``, the codes of the result; 4-bit codes may be converted in place.
    """
    order = matrices[0].order
    if not all(_is_equal(order, matrix.order) for matrix in matrices[1:]):
        return None
    group, bits = gcd(*(matrix.group for matrix in matrices)), max(matrix.bits for matrix in matrices)
    has_minima = any(matrix.minimum is not None for matrix in matrices)
    converted = [_with_group(_with_bits(matrix, bits), group, minima=has_minima) for matrix in matrices]
    minima = [matrix.minimum for matrix in converted if matrix.minimum is not None]
    scale = np.concatenate([matrix.scale for matrix in converted])
    return QuantizedMatrix(codes, scale, np.concatenate(minima) if minima else None, converted[0].bits, group, order)


def _have_same_format(one: Array | QuantizedMatrix, other: Array | QuantizedMatrix) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    formats = [(matrix.bits, matrix.group, matrix.minimum is None) for matrix in (one, other)]
    return formats[0] == formats[1] and _is_equal(one.order, other.order)


def _is_equal(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _with_bits(matrix: QuantizedMatrix, bits: int) -> QuantizedMatrix:
    """Return the matrix with ``bits`` bits per code, 4 or 8.

    From 4 to 8 bits, 120 is added to the ``codes`` of a matrix without minima, in place: its zero point is then 128
    instead of 8.
    """
    if matrix.bits == bits:
        return matrix
    if matrix.minimum is None:
        np.add(matrix.codes, (1 << (bits - 1)) - matrix.zero, out=matrix.codes)
    return replace(matrix, bits=8)


def _with_group(matrix: QuantizedMatrix, group: int, *, minima: bool) -> QuantizedMatrix:
    """Return the matrix with groups split into groups of ``group`` inputs; if ``minima``, with minima."""
    scale, minimum = matrix.scale, matrix.minimum
    if minima and minimum is None:
        minimum = -scale * matrix.zero
    if matrix.group != group:
        num_groups, factor = ceil(matrix.shape[1] / group), matrix.group // group
        scale = np.repeat(scale, factor, axis=1)[:, :num_groups]
        minimum = None if minimum is None else np.repeat(minimum, factor, axis=1)[:, :num_groups]
    return replace(matrix, scale=scale, minimum=minimum, group=group)
