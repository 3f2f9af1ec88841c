"""Kernels of single rows: norms, activations of the MLP, and the heads of attention.

Each row is computed by itself, in an order that depends on its width alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.gpu.launch import OPTIONS, ceil_div

# Rows of a program of :func:`normalize`. Wide rows have a program each.
_NORM_ROWS = 8
_WIDE = 1024
_GATE_BLOCK = 1024  # elements of a program of :func:`gate`
_HEADS = 32  # pairs of a row and a head of a program of :func:`rotate`

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class RowNorm(NamedTuple):
    """An RMSNorm on the device: ``x / sqrt(mean(x²) + eps) * weight``."""

    weight: Tensor  # float32 ``[width]``
    eps: float


def normalize(x: Tensor, norm: RowNorm) -> Tensor:
    """Return the RMSNorm of rows ``[rows, width]`` in their dtype."""
    rows, width = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    program_rows = 1 if width > _WIDE else _NORM_ROWS
    _normalize[(ceil_div(rows, program_rows),)](
        x.contiguous(),
        norm.weight,
        y,
        rows,
        width,
        norm.eps,
        ROWS=program_rows,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
        **OPTIONS,
    )
    return y


@triton.jit
def _normalize(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_inside = (row < num_rows)[:, None] & (column < width)[None, :]
    address = row[:, None].to(tl.int64) * width + column[None, :]
    values = tl.load(x + address, mask=is_inside, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, axis=1) / width
    scale = 1.0 / tl.sqrt(mean + eps)
    weights = tl.load(weight + column, mask=column < width, other=0.0)
    result = values * scale[:, None] * weights[None, :]
    tl.store(y + address, result.to(y.dtype.element_ty), mask=is_inside)


def gate(x: Tensor, activation: str) -> Tensor:
    """Return ``activation(g) * u``, ``[rows, width]``, of rows ``[g, u]`` ``[rows, 2 width]``."""
    rows, both = x.shape
    y = torch.empty(rows, both // 2, dtype=x.dtype, device=x.device)
    _gate[(ceil_div(y.numel(), _GATE_BLOCK),)](
        x, y, y.numel(), both // 2, ACTIVATION=activation, BLOCK=_GATE_BLOCK, **OPTIONS
    )
    return y


@triton.jit
def _gate(
    x: tl.tensor,
    y: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < size
    address = index // width * (2 * width) + index % width
    g = tl.load(x + address, mask=is_inside, other=0.0).to(tl.float32)
    u = tl.load(x + address + width, mask=is_inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = g / (1.0 + tl.exp(-g))
    elif ACTIVATION == "gelu":
        activated = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(z)) is 1 / (1 + exp(-2 z))
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        activated = g / (1.0 + tl.exp(-2.0 * z))
    tl.store(y + index, (activated * u).to(y.dtype.element_ty), mask=is_inside)


class Heads(NamedTuple):
    """Sizes of the attention of a layer."""

    queries: int  # number of query heads
    keys: int  # number of key-value heads
    size: int  # numbers of a head


class Rotation(NamedTuple):
    """A rotary embedding on the device: cosines and sines, float32 ``[positions, 2, dim / 2]``."""

    table: Tensor
    dim: int  # number of leading elements of a head that are rotated


def rotate(
    projected: Tensor,
    heads: Heads,
    rotation: Rotation | None,
    norms: tuple[RowNorm, RowNorm] | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Normalize and rotate queries and keys, and store keys and values in the pool.

    Args:
        projected: ``[rows, (queries + 2 keys) * size]``: queries, keys and values of each row.
        heads: sizes.
        rotation: ``None`` for a layer without RoPE.
        norms: norms of each head of queries and of keys, if there are any.
        positions: int32 ``[rows]``.
        slots: int32 ``[rows]``: slot of each row in the pool.
        keys: pool ``[key heads, slots, size]`` that receives the keys.
        values: pool of this shape that receives the values.

    Returns:
        The queries, ``[rows, queries, size]``.
    """
    rows = len(projected)
    queries = torch.empty(
        rows, heads.queries, heads.size, dtype=projected.dtype, device=projected.device
    )
    num_pairs = rows * (heads.queries + 2 * heads.keys)
    query_norm, key_norm = norms or (None, None)
    _rotate[(ceil_div(num_pairs, _HEADS),)](
        projected,
        queries,
        keys,
        values,
        keys.shape[1],
        positions,
        slots,
        None if rotation is None else rotation.table,
        None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight,
        0.0 if query_norm is None else query_norm.eps,
        num_pairs,
        QUERIES=heads.queries,
        KEYS=heads.keys,
        SIZE=heads.size,
        DIM=0 if rotation is None else rotation.dim,
        HAS_NORM=norms is not None,
        PAIRS=_HEADS,
        BLOCK=triton.next_power_of_2(heads.size),
        **OPTIONS,
    )
    return queries


@triton.jit
def _rotate(
    projected: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    num_slots: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    table: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    eps: tl.tensor,
    num_pairs: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    heads: tl.constexpr = QUERIES + 2 * KEYS
    half: tl.constexpr = DIM // 2
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    row = (pair // heads).to(tl.int64)
    head = pair % heads
    column = tl.arange(0, BLOCK)
    has_pair = pair < num_pairs
    is_inside = has_pair[:, None] & (column < SIZE)[None, :]
    is_query = head < QUERIES
    is_key = (head >= QUERIES) & (head < QUERIES + KEYS)
    address = (row * heads + head)[:, None] * SIZE
    x = tl.load(projected + address + column[None, :], mask=is_inside, other=0.0).to(tl.float32)
    # The other number of the pair (i, i + dim / 2) that a rotation turns.
    is_first = column < half
    is_turned = is_inside & (is_query | is_key)[:, None] & (column < DIM)[None, :]
    other_column = tl.where(is_first, column + half, column - half)
    other = tl.load(projected + address + other_column[None, :], mask=is_turned, other=0.0)
    other = other.to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / SIZE + eps)
        of_query = is_query[:, None] & is_inside
        of_key = is_key[:, None] & is_inside
        own = tl.load(query_norm + column[None, :], mask=of_query, other=1.0)
        own *= tl.load(key_norm + column[None, :], mask=of_key, other=1.0)
        scale = tl.where(is_query | is_key, scale, 1.0)
        x = x * scale[:, None] * own
        turned_query = is_query[:, None] & is_turned
        turned_key = is_key[:, None] & is_turned
        weights = tl.load(query_norm + other_column[None, :], mask=turned_query, other=1.0)
        weights *= tl.load(key_norm + other_column[None, :], mask=turned_key, other=1.0)
        other = other * scale[:, None] * weights
    if DIM:
        position = tl.load(positions + row, mask=has_pair, other=0).to(tl.int64)
        angle = tl.where(is_first, column, column - half)
        entry = position[:, None] * DIM + angle[None, :]
        cosine = tl.load(table + entry, mask=is_turned, other=1.0)
        sine = tl.load(table + entry + half, mask=is_turned, other=0.0)
        x = x * cosine + other * tl.where(is_first, -1.0, 1.0)[None, :] * sine
    result = x.to(queries.dtype.element_ty)
    address = (row * QUERIES + head)[:, None] * SIZE + column[None, :]
    tl.store(queries + address, result, mask=is_inside & is_query[:, None])
    slot = tl.load(slots + row, mask=has_pair, other=0).to(tl.int64)
    key_head = tl.where(is_key, head - QUERIES, head - QUERIES - KEYS).to(tl.int64)
    address = (key_head * num_slots + slot)[:, None] * SIZE + column[None, :]
    tl.store(keys + address, result, mask=is_inside & is_key[:, None])
    is_value = head >= QUERIES + KEYS
    tl.store(values + address, result, mask=is_inside & is_value[:, None])
