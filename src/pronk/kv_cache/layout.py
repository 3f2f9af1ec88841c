"""Memory layout of one layer's keys and values.

The kernels read values as rows, and keys as panels of 16 slots, so that a vector register holds the same dimension of
16 keys. Keys and values have the model's dtype, or 8 bits:

=====================  ====================================================================================
rows                   ``[kv_heads, slots, head_dim]``
panels                 ``[kv_heads, slots / 16, head_dim / n, 16, n]``, where ``n`` is 2 for bfloat16 (pairs of
                       adjacent dimensions) and 1 for float32
rows of 8 bits         ``[kv_heads, slots, head_dim + 4]`` bytes: codes, then their float32 scale
panels of 8 bits       ``[kv_heads, slots / 16, head_dim + 4, 16]`` bytes: codes, then the 16 scales
=====================  ====================================================================================

In 8 bits a number is ``scale * code``. Each key or value of a head has its own scale, its largest magnitude divided by
127, so the codes of a token do not depend on other tokens. The kernels write keys and values; this module copies the
stored bytes of slots, and reads their numbers for tests.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from pronk.architecture.config import ModelConfig
from pronk.arrays import FLOAT32, INT8, UINT8, Array, DType

__all__ = ["PANEL", "ROWS", "PoolLayout", "choose_layouts", "fill_poison", "kv_bytes_per_token", "state_bytes"]

# Number of slots per panel of keys; the number of tokens of a block is a multiple of it.
PANEL = 16
_SCALE_BYTES = FLOAT32.itemsize


class PoolLayout(Protocol):
    """Arrangement of keys, values or layer outputs in an array (the pool) with the heads as dimension 0."""

    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of the pool without the first dimension."""

    def read(self, pool: Array, slots: Array) -> Array:
        """Return the numbers in the slots ``slots`` ``[tokens]``, ``[kv_heads, tokens, head_dim]``."""

    def slot_bytes(self, pool: Array) -> int:
        """Return the number of bytes of one slot in the pool."""

    def read_bytes(self, pool: Array, slots: Array) -> Array:
        """Return the stored bytes of the slots ``slots`` ``[tokens]``, uint8 ``[tokens, bytes per slot]``."""

    def write_bytes(self, pool: Array, slots: Array, data: Array) -> None:
        """Store bytes that :meth:`read_bytes` returned for a pool with the same layout."""


class _RowLayout:
    """Rows of numbers, or with ``int8`` rows of codes and their scale."""

    def __init__(self, *, int8: bool = False) -> None:
        self._int8 = int8

    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        return slots, head_dim + (_SCALE_BYTES if self._int8 else 0)

    def read(self, pool: Array, slots: Array) -> Array:
        stored = pool[:, slots]
        if not self._int8:
            return stored
        scales = np.ascontiguousarray(stored[..., -_SCALE_BYTES:]).view(np.float32)
        return stored[..., :-_SCALE_BYTES] * scales

    def slot_bytes(self, pool: Array) -> int:
        return pool.shape[0] * pool.shape[2] * pool.itemsize

    def read_bytes(self, pool: Array, slots: Array) -> Array:
        return _to_bytes(pool[:, slots].swapaxes(0, 1))

    def write_bytes(self, pool: Array, slots: Array, data: Array) -> None:
        pool[:, slots] = _from_bytes(data, pool, (pool.shape[0], pool.shape[2])).swapaxes(0, 1)


class _PanelLayout:
    def __init__(self, num_adjacent: int) -> None:
        self._num_adjacent = num_adjacent  # ``n`` in the table above: number of adjacent dimensions of one key

    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        return slots // PANEL, head_dim // self._num_adjacent, PANEL, self._num_adjacent

    def read(self, pool: Array, slots: Array) -> Array:
        rows = pool[:, slots // PANEL, :, slots % PANEL]  # ``[tokens, kv_heads, head_dim / n, n]``
        return rows.reshape(len(slots), pool.shape[0], -1).swapaxes(0, 1)

    def slot_bytes(self, pool: Array) -> int:
        return pool.shape[0] * pool.shape[2] * pool.shape[4] * pool.itemsize

    def read_bytes(self, pool: Array, slots: Array) -> Array:
        return _to_bytes(pool[:, slots // PANEL, :, slots % PANEL])

    def write_bytes(self, pool: Array, slots: Array, data: Array) -> None:
        shape = pool.shape[0], pool.shape[2], pool.shape[4]
        pool[:, slots // PANEL, :, slots % PANEL] = _from_bytes(data, pool, shape)


class _Int8PanelLayout:
    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        return slots // PANEL, head_dim + _SCALE_BYTES, PANEL

    def read(self, pool: Array, slots: Array) -> Array:
        panel, offset = slots // PANEL, slots % PANEL
        codes = pool[:, panel, :-_SCALE_BYTES, offset].swapaxes(0, 1)
        return codes * _scales_of(pool)[:, panel, offset][..., None]

    def slot_bytes(self, pool: Array) -> int:
        return pool.shape[0] * pool.shape[2]

    def read_bytes(self, pool: Array, slots: Array) -> Array:
        panel, offset = slots // PANEL, slots % PANEL
        scales = _scales_of(pool)[:, panel, offset].swapaxes(0, 1)
        return np.concatenate((_to_bytes(pool[:, panel, :-_SCALE_BYTES, offset]), _to_bytes(scales)), axis=1)

    def write_bytes(self, pool: Array, slots: Array, data: Array) -> None:
        panel, offset, heads = slots // PANEL, slots % PANEL, pool.shape[0]
        codes, scales = np.split(data, [data.shape[1] - heads * _SCALE_BYTES], axis=1)
        pool[:, panel, :-_SCALE_BYTES, offset] = _from_bytes(codes, pool, (heads, pool.shape[2] - _SCALE_BYTES))
        _scales_of(pool)[:, panel, offset] = np.ascontiguousarray(scales).view(np.float32).swapaxes(0, 1)


# Layout of the states of short convolutions, and of the outputs of a layer that the cache keeps for drafters: rows with
# one head of the hidden size.
ROWS: PoolLayout = _RowLayout()


def choose_layouts(kv_dtype: DType) -> tuple[PoolLayout, PoolLayout]:
    """Return the kernels' layouts of keys and of values stored in ``kv_dtype``."""
    if kv_dtype == INT8:
        return _Int8PanelLayout(), _RowLayout(int8=True)
    return _PanelLayout(1 if kv_dtype == FLOAT32 else 2), ROWS


def kv_bytes_per_token(config: ModelConfig, kv_dtype: DType) -> int:
    """Return the number of bytes of one token's keys and values, over all layers."""
    head = config.head_dim * kv_dtype.itemsize + (_SCALE_BYTES if kv_dtype == INT8 else 0)
    num_layers = config.num_layers - (0 if config.convolution is None else sum(config.convolution.layers))
    return 2 * num_layers * config.num_kv_heads * head


def state_bytes(config: ModelConfig, dtype: DType) -> int:
    """Return the number of bytes of one token's states, over all layers with a short convolution."""
    num_layers = 0 if config.convolution is None else sum(config.convolution.layers)
    return num_layers * config.hidden_size * dtype.itemsize


def fill_poison(pool: Array, poison: float) -> None:
    """Overwrite a pool with ``poison``; in 8 bits, with a byte that makes the scales NaN or huge."""
    # Four bytes of -1 are the float32 scale NaN; four bytes of 100 are 1.7e22.
    pool[...] = (-1 if math.isnan(poison) else 100) if pool.dtype == INT8 else poison


def _to_bytes(values: Array) -> Array:
    """Return the bytes of the numbers ``values`` ``[tokens, …]``, uint8 ``[tokens, bytes per token]``."""
    return np.ascontiguousarray(values).reshape(len(values), -1).view(UINT8)


def _from_bytes(data: Array, pool: Array, shape: tuple[int, ...]) -> Array:
    """Return the numbers ``[tokens, *shape]`` with the bytes ``data``, in the dtype of the pool."""
    return np.ascontiguousarray(data).view(pool.dtype).reshape(len(data), *shape)


def _scales_of(pool: Array) -> Array:
    """Return the scales of a pool of 8-bit panels as a view, ``[kv_heads, panels, 16]``."""
    return pool.reshape(*pool.shape[:2], -1)[..., -_SCALE_BYTES * PANEL :].view(np.float32)
