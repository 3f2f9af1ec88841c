"""Memory layout of one layer's keys and values.

The kernels read values as rows, and keys as panels of 16 slots, so that a vector register holds the
same dimension of 16 keys. Keys and values have the model's dtype, or 8 bits:

=====================  ====================================================================================
rows                   ``[kv_heads, slots, head_dim]``
panels                 ``[kv_heads, slots / 16, head_dim / n, 16, n]``, where ``n`` is 2 for bfloat16 (pairs of
                       adjacent dimensions) and 1 for float32
rows of 8 bits         ``[kv_heads, slots, head_dim + 4]`` bytes: codes, then their float32 scale
panels of 8 bits       ``[kv_heads, slots / 16, head_dim + 4, 16]`` bytes: codes, then the 16 scales
=====================  ====================================================================================

In 8 bits a number is ``scale * code``. Each key or value of a head has its own scale, its largest
magnitude divided by 127, so the codes of a token do not depend on other tokens. The kernels write
keys and values.
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
    """Arrangement of keys, values or layer outputs in an array (the pool) with the heads as dimension 0."""

    def __init__(self, panel: int = 1, num_adjacent: int = 1, *, int8: bool = False) -> None:
        """``panel``: slots per panel, 1 for rows; ``num_adjacent``: ``n`` in the module's table."""
        self.panel = panel
        self._num_adjacent = num_adjacent
        self._int8 = int8

    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of the pool without the first dimension."""
        width = head_dim + (_SCALE_BYTES if self._int8 else 0)
        if self.panel == 1:
            return slots, width
        adjacent = () if self._int8 else (self._num_adjacent,)
        return slots // self.panel, width // self._num_adjacent, self.panel, *adjacent

    def parts(self, pool: Array) -> list[Array]:
        """Return views ``[kv_heads, panels, dimensions, slots of a panel, n]``; 8-bit panels: codes, scales."""
        if self.panel == 1:
            return [pool[..., None, None]]
        if not self._int8:
            return [pool]
        scales = pool.reshape(*pool.shape[:2], -1)[..., -_SCALE_BYTES * PANEL :].view(np.float32)
        return [pool[:, :, :-_SCALE_BYTES, :, None], scales[:, :, None, :, None]]


# Layout of the states of short convolutions, and of the outputs of a layer that the cache keeps for
# drafters: rows with one head of the hidden size.
ROWS = PoolLayout()


def choose_layouts(kv_dtype: DType) -> tuple[PoolLayout, PoolLayout]:
    """Return the kernels' layouts of keys and of values stored in ``kv_dtype``."""
    if kv_dtype == INT8:
        return PoolLayout(PANEL, int8=True), PoolLayout(int8=True)
    return PoolLayout(PANEL, 1 if kv_dtype == FLOAT32 else 2), ROWS


def kv_bytes_per_token(config: ModelConfig, kv_dtype: DType) -> int:
    """Return the number of bytes of one token's keys and values, over all layers."""
    head = config.head_dim * kv_dtype.itemsize + (_SCALE_BYTES if kv_dtype == INT8 else 0)
    num_layers = config.num_layers - (
        0 if config.convolution is None else sum(config.convolution.layers)
    )
    return 2 * num_layers * config.num_kv_heads * head


def state_bytes(config: ModelConfig, dtype: DType) -> int:
    """Return the number of bytes of one token's states, over all layers with a short convolution."""
    num_layers = 0 if config.convolution is None else sum(config.convolution.layers)
    return num_layers * config.hidden_size * dtype.itemsize


def fill_poison(pool: Array, poison: float) -> None:
    """Overwrite a pool with ``poison``.

    In 8 bits, with a byte that makes the scales NaN or huge.
    """
    # Four bytes of -1 are the float32 scale NaN; four bytes of 100 are 1.7e22.
    pool[...] = (-1 if math.isnan(poison) else 100) if pool.dtype == INT8 else poison
