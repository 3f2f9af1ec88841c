"""Memory layout of one layer's keys and values.

Both are ``[kv_heads, slots, head_dim]`` numbers, in the model's dtype or in 8 bits, for torch or for the kernels:

=====================  ====================================================================================
for torch              rows: ``[kv_heads, slots, head_dim]``
values, for kernels    rows as well
keys, for kernels      panels of 16 slots, dimension by dimension, so that one vector holds the same
                       dimension of 16 keys: ``[kv_heads, slots / 16, head_dim / n, 16, n]``, where
                       bfloat16 has ``n`` = 2 adjacent dimensions and float32 has 1
rows of 8 bits         ``[kv_heads, slots, head_dim + 4]`` bytes: codes, then their float32 scale
panels of 8 bits       ``[kv_heads, slots / 16, head_dim + 4, 16]`` bytes: codes, then the 16 scales
=====================  ====================================================================================

In 8 bits a number is ``scale * code``, with one scale per key or value of each head: largest magnitude / 127. A token's
codes therefore do not depend on its neighbours.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig

__all__ = ["OUTPUTS", "PANEL", "PoolLayout", "kv_bytes_per_token", "layouts", "spoil"]

# Slots per panel of keys; a block is a whole number of panels.
PANEL = 16
_SCALE_BYTES = torch.float32.itemsize
_MAX_CODE = 127.0


class PoolLayout(Protocol):
    """Position of numbers in a pool. Shapes exclude the first dimension, the heads."""

    def shape(self, slots: int, size: int) -> tuple[int, ...]:
        """Return the shape of a pool for heads of ``size`` numbers."""

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Store ``rows`` ``[kv_heads, tokens, head_dim]`` at ``slots`` ``[tokens]``."""

    def read(self, pool: Tensor, where: slice | Tensor) -> Tensor:
        """Return ``[kv_heads, tokens, head_dim]`` numbers, as a view if possible."""

    def size(self, pool: Tensor) -> int:
        """Return the bytes per slot."""

    def take(self, pool: Tensor, slots: Tensor) -> Tensor:
        """Return the raw bytes at ``slots`` ``[tokens]``: ``[tokens, size]``."""

    def put(self, pool: Tensor, slots: Tensor, kept: Tensor) -> None:
        """Store bytes from :meth:`take` of a pool with the same layout."""


class _Plain:
    def size(self, pool: Tensor) -> int:
        return pool.shape[0] * pool.shape[2] * pool.itemsize

    def take(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _bytes(pool[:, slots].transpose(0, 1))

    def put(self, pool: Tensor, slots: Tensor, kept: Tensor) -> None:
        pool[:, slots] = _numbers_of(kept, pool, (pool.shape[0], pool.shape[2])).transpose(0, 1)


class _Rows(_Plain):
    def shape(self, slots: int, size: int) -> tuple[int, ...]:
        return slots, size

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        pool.index_copy_(1, slots, rows)

    def read(self, pool: Tensor, where: slice | Tensor) -> Tensor:
        return pool[:, where]


class _Panels:
    def __init__(self, adjacent: int) -> None:
        self._adjacent = adjacent  # dimensions of one key beside each other

    def shape(self, slots: int, size: int) -> tuple[int, ...]:
        return slots // PANEL, size // self._adjacent, PANEL, self._adjacent

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        pool[:, slots // PANEL, :, slots % PANEL] = rows.unflatten(-1, (-1, self._adjacent)).transpose(0, 1)

    def read(self, pool: Tensor, where: slice | Tensor) -> Tensor:
        slots = _numbers(where)
        return pool[:, slots // PANEL, :, slots % PANEL].flatten(2).transpose(0, 1)

    def size(self, pool: Tensor) -> int:
        return pool.shape[0] * pool.shape[2] * pool.shape[4] * pool.itemsize

    def take(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _bytes(pool[:, slots // PANEL, :, slots % PANEL])

    def put(self, pool: Tensor, slots: Tensor, kept: Tensor) -> None:
        shape = pool.shape[0], pool.shape[2], pool.shape[4]
        pool[:, slots // PANEL, :, slots % PANEL] = _numbers_of(kept, pool, shape)


class _CodedRows(_Plain):
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def shape(self, slots: int, size: int) -> tuple[int, ...]:
        return slots, size + _SCALE_BYTES

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        codes, scales = _round(rows)
        pool.index_copy_(1, slots, torch.cat((codes, _as_bytes(scales)), dim=-1))

    def read(self, pool: Tensor, where: slice | Tensor) -> Tensor:
        found = pool[:, where]
        scales = _as_scales(found[..., -_SCALE_BYTES:])
        return (found[..., :-_SCALE_BYTES] * scales[..., None]).to(self._dtype)


class _CodedPanels:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def shape(self, slots: int, size: int) -> tuple[int, ...]:
        return slots // PANEL, size + _SCALE_BYTES, PANEL

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        codes, scales = _round(rows)
        panel, lane = slots // PANEL, slots % PANEL
        pool[:, panel, : codes.shape[-1], lane] = codes.transpose(0, 1)
        _scales_of(pool)[:, panel, lane] = scales

    def read(self, pool: Tensor, where: slice | Tensor) -> Tensor:
        slots = _numbers(where)
        panel, lane = slots // PANEL, slots % PANEL
        codes = pool[:, panel, :-_SCALE_BYTES, lane].transpose(0, 1)
        return (codes * _scales_of(pool)[:, panel, lane][..., None]).to(self._dtype)

    def size(self, pool: Tensor) -> int:
        return pool.shape[0] * pool.shape[2]

    def take(self, pool: Tensor, slots: Tensor) -> Tensor:
        panel, lane = slots // PANEL, slots % PANEL
        scales = _scales_of(pool)[:, panel, lane].transpose(0, 1)
        return torch.cat((_bytes(pool[:, panel, :-_SCALE_BYTES, lane]), _bytes(scales)), dim=1)

    def put(self, pool: Tensor, slots: Tensor, kept: Tensor) -> None:
        panel, lane, heads = slots // PANEL, slots % PANEL, pool.shape[0]
        codes, scales = kept.split([kept.shape[1] - heads * _SCALE_BYTES, heads * _SCALE_BYTES], dim=1)
        pool[:, panel, :-_SCALE_BYTES, lane] = _numbers_of(codes, pool, (heads, pool.shape[2] - _SCALE_BYTES))
        _scales_of(pool)[:, panel, lane] = scales.contiguous().view(torch.float32).transpose(0, 1)


# Kept outputs of a layer: rows of one head.
OUTPUTS: PoolLayout = _Rows()


def layouts(dtype: torch.dtype, kv_dtype: torch.dtype, *, packed: bool) -> tuple[PoolLayout, PoolLayout]:
    """Return the layouts of keys and of values: computed in ``dtype``, stored in ``kv_dtype``."""
    if kv_dtype == torch.int8:
        rows = _CodedRows(dtype)
        return (_CodedPanels(dtype) if packed else rows), rows
    return (_Panels(1 if kv_dtype == torch.float32 else 2) if packed else _Rows()), _Rows()


def kv_bytes_per_token(config: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values over all layers."""
    head = config.head_dim * kv_dtype.itemsize + (_SCALE_BYTES if kv_dtype == torch.int8 else 0)
    return 2 * config.num_layers * config.num_kv_heads * head


def spoil(pool: Tensor, poison: float) -> None:
    """Overwrite a pool with ``poison``; 8-bit pools get scales of NaN or 1e22 instead."""
    if pool.dtype == torch.int8:
        pool.fill_(-1 if math.isnan(poison) else 100)  # as float32 scales: NaN, or 1e22
    else:
        pool.fill_(poison)


def _round(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``[…, head_dim]`` numbers to codes and scales exactly as the kernels do."""
    rows = rows.float()
    top = rows.abs().amax(-1)
    codes = (rows * (_MAX_CODE / top.clamp_min(1e-30))[..., None]).round().clamp(-_MAX_CODE, _MAX_CODE)
    return codes.to(torch.int8), top / _MAX_CODE


def _bytes(kept: Tensor) -> Tensor:
    """View ``[tokens, …]`` as bytes ``[tokens, n]``."""
    return kept.contiguous().view(len(kept), -1).view(torch.uint8)


def _numbers_of(kept: Tensor, pool: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View bytes from :func:`_bytes` as ``[tokens, *shape]`` numbers of the pool's dtype."""
    return kept.contiguous().view(pool.dtype).view(len(kept), *shape)


def _as_bytes(scales: Tensor) -> Tensor:
    return scales.contiguous()[..., None].view(torch.int8)


def _as_scales(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.float32)[..., 0]


def _scales_of(pool: Tensor) -> Tensor:
    """Return a view of the scales ``[kv_heads, panels, 16]`` of a pool of 8-bit panels."""
    return pool.flatten(2)[..., -_SCALE_BYTES * PANEL :].view(torch.float32)


def _numbers(where: slice | Tensor) -> Tensor:
    return torch.arange(where.start, where.stop) if isinstance(where, slice) else where
