"""Memory layout of one layer's keys and values.

The kernels read and write values as rows, one per slot. They read and write keys as panels of 16
slots, so that a vector register holds the same dimension of 16 keys. The numbers have the model's
dtype, or are quantized to 8 bits.

================  ========================================================
rows              ``[kv_heads, slots, head_dim]``
panels            ``[kv_heads, slots / 16, head_dim / n, 16, n]``
rows, 8 bits      ``[kv_heads, slots, head_dim + 4]`` bytes: codes, scale
panels, 8 bits    ``[kv_heads, slots / 16, head_dim + 4, 16]`` bytes:
                  codes of 16 slots, then their 16 scales
================  ========================================================

With latent attention, there are only rows: the first elements of a key are the value.

``n`` adjacent dimensions of a key are stored side by side: 2 in bfloat16, 1 in float32. In 8 bits a
number is ``scale * code``, with a float32 scale (4 bytes) for each token and head: the largest
magnitude divided by 127. The codes of a token therefore do not depend on other tokens.
"""

from __future__ import annotations

import math

import numpy as np

from pronk.base.arrays import FLOAT32, INT8, Array, DType
from pronk.checkpoint.config import ModelConfig

# Number of slots per panel of keys; the number of tokens of a block is a multiple of it.
PANEL = 16
_SCALE_BYTES = FLOAT32.itemsize


class PoolLayout:
    """Arrangement of numbers in a pool: one layer's array of keys, values or outputs.

    Dimension 0 of a pool is the key-value head; layer outputs have one head.
    """

    def __init__(self, panel: int = 1, num_adjacent: int = 1, *, int8: bool = False) -> None:
        """Create one of the layouts in the table at the top of this module.

        Args:
            panel: slots per panel; 1 for rows.
            num_adjacent: ``n`` in the table.
            int8: whether numbers are stored as codes of 8 bits with scales.
        """
        self.panel = panel
        self._num_adjacent = num_adjacent
        self._int8 = int8

    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of a pool, without its first dimension, the heads."""
        width = head_dim + (_SCALE_BYTES if self._int8 else 0)
        if self.panel == 1:
            return slots, width
        adjacent = () if self._int8 else (self._num_adjacent,)
        return slots // self.panel, width // self._num_adjacent, self.panel, *adjacent

    def parts(self, pool: Array) -> list[Array]:
        """Return the pool as views ``[kv_heads, panels, dimensions, slots of a panel, n]``.

        There is one view; panels of 8 bits have two, the codes (int8) and the scales (float32).
        """
        if self.panel == 1:
            return [pool[..., None, None]]
        if not self._int8:
            return [pool]
        panels = pool.reshape(*pool.shape[:2], -1)
        scales = panels[..., -_SCALE_BYTES * PANEL :].view(np.float32)
        return [pool[:, :, :-_SCALE_BYTES, :, None], scales[:, :, None, :, None]]


# Rows: the layout of values, of the states of short convolutions, and of the layer outputs that
# the cache saves for drafters.
ROWS = PoolLayout()


def choose_layouts(kv_dtype: DType) -> tuple[PoolLayout, PoolLayout]:
    """Return the kernels' layouts of keys and of values stored in ``kv_dtype``."""
    if kv_dtype == INT8:
        return PoolLayout(PANEL, int8=True), PoolLayout(int8=True)
    return PoolLayout(PANEL, 1 if kv_dtype == FLOAT32 else 2), ROWS


def kv_bytes_per_token(config: ModelConfig, kv_dtype: DType) -> int:
    """Return the number of bytes of one token's keys and values, over all layers."""
    scale_bytes = _SCALE_BYTES if kv_dtype == INT8 else 0
    num_arrays = 1 if config.has_values_in_keys else 2
    num_bytes = 0
    for layer in filter(config.stores_keys, range(config.num_layers)):
        shape = config.shape_of(layer)
        head_bytes = shape.head_dim * kv_dtype.itemsize + scale_bytes
        num_bytes += num_arrays * shape.num_kv_heads * head_bytes
    return num_bytes


def state_bytes(config: ModelConfig, dtype: DType) -> int:
    """Return the number of bytes of one token's states in all layers with a short convolution."""
    return _num_convolutions(config) * config.hidden_size * dtype.itemsize


def _num_convolutions(config: ModelConfig) -> int:
    """Return the number of layers with a short convolution, which have states instead of keys."""
    return 0 if config.convolution is None else sum(config.convolution.layers)


def fill_poison(pool: Array, poison: float) -> None:
    """Overwrite an array with ``poison``, so that tests detect reads of it.

    In an int8 array, every byte gets the same value. If ``poison`` is NaN, the value makes the
    float32 scales NaN; otherwise it makes them huge.
    """
    if pool.dtype != INT8:
        pool[...] = poison
    elif math.isnan(poison):
        pool[...] = -1  # float32 scales of four such bytes are NaN
    else:
        pool[...] = 100  # float32 scales of four such bytes are 1.7e22
