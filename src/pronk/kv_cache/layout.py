"""Memory layout of one layer's keys and values.

Torch reads keys and values as rows. The kernels read values as rows, and keys as panels of 16 slots, so that a vector
register holds the same dimension of 16 keys. Keys and values have the model's dtype, or 8 bits:

=====================  ====================================================================================
rows                   ``[kv_heads, slots, head_dim]``
panels                 ``[kv_heads, slots / 16, head_dim / n, 16, n]``, where ``n`` is 2 for bfloat16 (pairs of
                       adjacent dimensions) and 1 for float32
rows of 8 bits         ``[kv_heads, slots, head_dim + 4]`` bytes: codes, then their float32 scale
panels of 8 bits       ``[kv_heads, slots / 16, head_dim + 4, 16]`` bytes: codes, then the 16 scales
=====================  ====================================================================================

In 8 bits a number is ``scale * code``. Each key or value of a head has its own scale, its largest magnitude divided by
127, so the codes of a token do not depend on other tokens.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig

__all__ = ["HIDDEN_LAYOUT", "PANEL", "PoolLayout", "choose_layouts", "fill_poison", "kv_bytes_per_token"]

# Number of slots per panel of keys; the number of tokens of a block is a multiple of it.
PANEL = 16
_SCALE_BYTES = torch.float32.itemsize
_MAX_CODE = 127.0


class PoolLayout(Protocol):
    """Arrangement of keys, values or layer outputs in a tensor (the pool) with the heads as dimension 0."""

    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of the pool without the first dimension."""

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Store ``rows`` ``[kv_heads, tokens, head_dim]`` in the slots ``slots`` ``[tokens]``."""

    def read(self, pool: Tensor, index: slice | Tensor) -> Tensor:
        """Return the numbers in the slots ``index``, ``[kv_heads, tokens, head_dim]``, as a view if possible."""

    def slot_bytes(self, pool: Tensor) -> int:
        """Return the number of bytes of one slot in the pool."""

    def read_bytes(self, pool: Tensor, slots: Tensor) -> Tensor:
        """Return the stored bytes of the slots ``slots`` ``[tokens]``, as ``[tokens, bytes per slot]``."""

    def write_bytes(self, pool: Tensor, slots: Tensor, data: Tensor) -> None:
        """Store bytes that :meth:`read_bytes` returned for a pool with the same layout."""


class _RowBytesMixin:
    def slot_bytes(self, pool: Tensor) -> int:
        return pool.shape[0] * pool.shape[2] * pool.itemsize

    def read_bytes(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _to_bytes(pool[:, slots].transpose(0, 1))

    def write_bytes(self, pool: Tensor, slots: Tensor, data: Tensor) -> None:
        pool[:, slots] = _from_bytes(data, pool, (pool.shape[0], pool.shape[2])).transpose(0, 1)


class _RowLayout(_RowBytesMixin):
    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        return slots, head_dim

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        pool.index_copy_(1, slots, rows)

    def read(self, pool: Tensor, index: slice | Tensor) -> Tensor:
        return pool[:, index]


class _PanelLayout:
    def __init__(self, num_adjacent: int) -> None:
        self._num_adjacent = num_adjacent  # ``n`` in the table above: number of adjacent dimensions of one key

    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        return slots // PANEL, head_dim // self._num_adjacent, PANEL, self._num_adjacent

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        pool[:, slots // PANEL, :, slots % PANEL] = rows.unflatten(-1, (-1, self._num_adjacent)).transpose(0, 1)

    def read(self, pool: Tensor, index: slice | Tensor) -> Tensor:
        slots = _as_indices(index)
        return pool[:, slots // PANEL, :, slots % PANEL].flatten(2).transpose(0, 1)

    def slot_bytes(self, pool: Tensor) -> int:
        return pool.shape[0] * pool.shape[2] * pool.shape[4] * pool.itemsize

    def read_bytes(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _to_bytes(pool[:, slots // PANEL, :, slots % PANEL])

    def write_bytes(self, pool: Tensor, slots: Tensor, data: Tensor) -> None:
        shape = pool.shape[0], pool.shape[2], pool.shape[4]
        pool[:, slots // PANEL, :, slots % PANEL] = _from_bytes(data, pool, shape)


class _Int8RowLayout(_RowBytesMixin):
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        return slots, head_dim + _SCALE_BYTES

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        codes, scales = _quantize(rows)
        pool.index_copy_(1, slots, torch.cat((codes, _as_bytes(scales)), dim=-1))

    def read(self, pool: Tensor, index: slice | Tensor) -> Tensor:
        stored = pool[:, index]
        scales = _as_scales(stored[..., -_SCALE_BYTES:])
        return (stored[..., :-_SCALE_BYTES] * scales[..., None]).to(self._dtype)


class _Int8PanelLayout:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        return slots // PANEL, head_dim + _SCALE_BYTES, PANEL

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        codes, scales = _quantize(rows)
        panel, offset = slots // PANEL, slots % PANEL
        pool[:, panel, : codes.shape[-1], offset] = codes.transpose(0, 1)
        _scales_of(pool)[:, panel, offset] = scales

    def read(self, pool: Tensor, index: slice | Tensor) -> Tensor:
        slots = _as_indices(index)
        panel, offset = slots // PANEL, slots % PANEL
        codes = pool[:, panel, :-_SCALE_BYTES, offset].transpose(0, 1)
        return (codes * _scales_of(pool)[:, panel, offset][..., None]).to(self._dtype)

    def slot_bytes(self, pool: Tensor) -> int:
        return pool.shape[0] * pool.shape[2]

    def read_bytes(self, pool: Tensor, slots: Tensor) -> Tensor:
        panel, offset = slots // PANEL, slots % PANEL
        scales = _scales_of(pool)[:, panel, offset].transpose(0, 1)
        return torch.cat((_to_bytes(pool[:, panel, :-_SCALE_BYTES, offset]), _to_bytes(scales)), dim=1)

    def write_bytes(self, pool: Tensor, slots: Tensor, data: Tensor) -> None:
        panel, offset, heads = slots // PANEL, slots % PANEL, pool.shape[0]
        codes, scales = data.split([data.shape[1] - heads * _SCALE_BYTES, heads * _SCALE_BYTES], dim=1)
        pool[:, panel, :-_SCALE_BYTES, offset] = _from_bytes(codes, pool, (heads, pool.shape[2] - _SCALE_BYTES))
        _scales_of(pool)[:, panel, offset] = scales.contiguous().view(torch.float32).transpose(0, 1)


# Layout of the outputs of a layer that the cache keeps for drafters: rows with one head of the hidden size.
HIDDEN_LAYOUT: PoolLayout = _RowLayout()


def choose_layouts(dtype: torch.dtype, kv_dtype: torch.dtype, *, packed: bool) -> tuple[PoolLayout, PoolLayout]:
    """Return the layouts of keys and of values stored in ``kv_dtype``; ``packed`` puts keys in panels."""
    if kv_dtype == torch.int8:
        rows = _Int8RowLayout(dtype)
        return (_Int8PanelLayout(dtype) if packed else rows), rows
    return (_PanelLayout(1 if kv_dtype == torch.float32 else 2) if packed else _RowLayout()), _RowLayout()


def kv_bytes_per_token(config: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Return the number of bytes of one token's keys and values, over all layers."""
    head = config.head_dim * kv_dtype.itemsize + (_SCALE_BYTES if kv_dtype == torch.int8 else 0)
    return 2 * config.num_layers * config.num_kv_heads * head


def fill_poison(pool: Tensor, poison: float) -> None:
    """Overwrite a pool with ``poison``; in 8 bits, with a byte that makes the scales NaN or huge."""
    if pool.dtype == torch.int8:
        # Four bytes of -1 are the float32 scale NaN; four bytes of 100 are 1.7e22.
        pool.fill_(-1 if math.isnan(poison) else 100)
    else:
        pool.fill_(poison)


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes ``[…, head_dim]`` and scales ``[…]`` of ``rows``, bit for bit as the kernels do."""
    rows = rows.float()
    max_abs = rows.abs().amax(-1)
    codes = (rows * (_MAX_CODE / max_abs.clamp_min(1e-30))[..., None]).round().clamp(-_MAX_CODE, _MAX_CODE)
    return codes.to(torch.int8), max_abs / _MAX_CODE


def _to_bytes(values: Tensor) -> Tensor:
    """Return the bytes of the numbers ``values`` ``[tokens, …]``, as ``[tokens, bytes per token]``."""
    return values.contiguous().view(len(values), -1).view(torch.uint8)


def _from_bytes(data: Tensor, pool: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the numbers ``[tokens, *shape]`` with the bytes ``data``, in the dtype of the pool."""
    return data.contiguous().view(pool.dtype).view(len(data), *shape)


def _as_bytes(scales: Tensor) -> Tensor:
    return scales.contiguous()[..., None].view(torch.int8)


def _as_scales(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.float32)[..., 0]


def _scales_of(pool: Tensor) -> Tensor:
    """Return the scales of a pool of 8-bit panels as a view, ``[kv_heads, panels, 16]``."""
    return pool.flatten(2)[..., -_SCALE_BYTES * PANEL :].view(torch.float32)


def _as_indices(index: slice | Tensor) -> Tensor:
    return torch.arange(index.start, index.stop) if isinstance(index, slice) else index
