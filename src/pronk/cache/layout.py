"""Memory layout of one layer's keys and values.

The kernels read and write values as rows, one per slot. They read and write keys as panels of 16
slots, so that a vector register holds the same dimension of 16 keys. The numbers have the model's
dtype, or are quantized to 8 or 4 bits.

=================  =======================================================
rows               ``[kv_heads, slots, head_dim]``
panels             ``[kv_heads, slots / 16, head_dim / n, 16, n]``
rows, quantized    ``[kv_heads, slots, codes + scales]`` bytes
panels, quantized  ``[kv_heads, slots / 16, codes + scales, 16]`` bytes:
                   codes of 16 slots, then their scales
=================  =======================================================

With latent attention, there are only rows: the first elements of a key are the value.

``n`` adjacent dimensions of a key are stored side by side: 2 in bfloat16, 1 in float32.

A quantized number is ``scale * code``. In 8 bits, each token and head has one float32 scale: the
largest magnitude divided by 127. In 4 bits, each group of 32 dimensions has a bfloat16 scale, and a
code is the index of one of 16 numbers from -127 to 113 (``INT4_NUMBERS`` in
``kernels/csrc/common.h``); ``head_dim`` is padded to whole groups. Keys and values of 4 bits are
rotated before they are quantized (``rotate_head`` in ``kernels/csrc/ops.inc``), and large biases of
keys are not stored (:mod:`pronk.models.key_biases`). The codes of a token do not depend on other
tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pronk.base.arrays import BFLOAT16, FLOAT32, INT4, INT8, Array, DType
from pronk.checkpoint.config import ModelConfig

# Number of slots per panel of keys; the number of tokens of a block is a multiple of it.
PANEL = 16


class Quantization(NamedTuple):
    """How the numbers of a key or value are stored: codes, then scales."""

    bits: int  # of a code
    group: int | None  # number of dimensions that share a scale; ``None``: all of a head
    scale_dtype: DType

    def head_bytes(self, head_dim: int) -> int:
        """Return the number of bytes of one head's key or value."""
        if self.group is None:
            return head_dim * self.bits // 8 + self.scale_dtype.itemsize
        return math.ceil(head_dim / self.group) * self._group_bytes(self.group)

    def scale_bytes(self, head_bytes: int) -> int:
        """Return how many of the bytes of one head's key or value are scales."""
        num_scales = 1 if self.group is None else head_bytes // self._group_bytes(self.group)
        return num_scales * self.scale_dtype.itemsize

    def _group_bytes(self, group: int) -> int:
        return group * self.bits // 8 + self.scale_dtype.itemsize


_QUANTIZATIONS = {INT8: Quantization(8, None, FLOAT32), INT4: Quantization(4, 32, BFLOAT16)}


class PoolLayout:
    """Arrangement of numbers in a pool: one layer's array of keys, values or outputs.

    Dimension 0 of a pool is the key-value head; layer outputs have one head.
    """

    def __init__(
        self, panel: int = 1, num_adjacent: int = 1, quantization: Quantization | None = None
    ) -> None:
        """Create one of the layouts in the table at the top of this module.

        Args:
            panel: slots per panel; 1 for rows.
            num_adjacent: ``n`` in the table.
            quantization: codes and scales of the numbers; ``None`` if they are not quantized.
        """
        self.panel = panel
        self.quantization = quantization
        self._num_adjacent = num_adjacent

    def shape(self, slots: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of a pool, without its first dimension, the heads."""
        quantized = self.quantization
        width = head_dim if quantized is None else quantized.head_bytes(head_dim)
        if self.panel == 1:
            return slots, width
        adjacent = (self._num_adjacent,) if quantized is None else ()
        return slots // self.panel, width // self._num_adjacent, self.panel, *adjacent

    def parts(self, pool: Array) -> list[Array]:
        """Return the pool as views ``[kv_heads, panels, dimensions, slots of a panel, n]``.

        There is one view; quantized panels have two, the codes (int8) and the scales.
        """
        if self.panel == 1:
            return [pool[..., None, None]]
        if self.quantization is None:
            return [pool]
        scale_bytes = self.quantization.scale_bytes(pool.shape[2])
        panels = pool.reshape(*pool.shape[:2], -1)
        scales = panels[..., -scale_bytes * PANEL :].view(self.quantization.scale_dtype)
        scales = scales.reshape(*pool.shape[:2], -1, PANEL, 1)
        return [pool[:, :, :-scale_bytes, :, None], scales]


# Rows: the layout of values, of the states of short convolutions, and of the layer outputs that
# the cache saves for drafters.
ROWS = PoolLayout()


def choose_layouts(kv_dtype: DType) -> tuple[PoolLayout, PoolLayout]:
    """Return the kernels' layouts of keys and of values stored in ``kv_dtype``."""
    quantization = _QUANTIZATIONS.get(kv_dtype)
    if quantization is None:
        return PoolLayout(PANEL, 1 if kv_dtype == FLOAT32 else 2), ROWS
    return PoolLayout(PANEL, quantization=quantization), PoolLayout(quantization=quantization)


def array_dtype(kv_dtype: DType) -> DType:
    """Return the data type of arrays with keys and values of ``kv_dtype``: bytes if quantized."""
    return INT8 if kv_dtype in _QUANTIZATIONS else kv_dtype


def kv_bytes_per_token(config: ModelConfig, kv_dtype: DType) -> int:
    """Return the number of bytes of one token's keys and values, over all layers."""
    (_, layout) = choose_layouts(kv_dtype)
    num_arrays = 1 if config.has_values_in_keys else 2
    num_bytes = 0
    for layer in filter(config.stores_keys, range(config.num_layers)):
        shape = config.shape_of(layer)
        (_, width) = layout.shape(1, shape.head_dim)
        num_bytes += num_arrays * shape.num_kv_heads * width * array_dtype(kv_dtype).itemsize
    return num_bytes


def state_bytes(config: ModelConfig, dtype: DType) -> int:
    """Return the number of bytes of one token's states in all layers with a short convolution."""
    return _num_convolutions(config) * config.hidden_size * dtype.itemsize


def _num_convolutions(config: ModelConfig) -> int:
    """Return the number of layers with a short convolution, which have states instead of keys."""
    return 0 if config.convolution is None else sum(config.convolution.layers)


def fill_poison(pool: Array, poison: float) -> None:
    """Overwrite an array with ``poison``, so that tests detect reads of it.

    In an array of quantized numbers, every byte gets the same value. If ``poison`` is NaN, the
    value makes the scales NaN; otherwise it makes them huge.
    """
    if pool.dtype != INT8:
        pool[...] = poison
    elif math.isnan(poison):
        pool[...] = -1  # scales of such bytes are NaN
    else:
        pool[...] = 100  # scales of such bytes are 1.7e22
