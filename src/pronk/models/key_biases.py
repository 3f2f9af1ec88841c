"""Biases that keys of an int4 KV cache are stored without.

The biases of the key projection of some models, such as Qwen2.5, have elements of 100 and more,
whereas the rest of a key is about 1. A code of 4 bits of their sum would hardly show the rest. A
key ``k`` at position ``p`` is ``R(p) (W x + b)``, where ``R(p)`` is RoPE's rotation. The cache
stores ``R(p) (W x + b - c)``, where ``c`` has the large pairs of elements of ``b``, and attention
adds ``q · R(p) c`` to the scores. Both terms depend on one token alone, so that blocks of the cache
can be shared.
"""

from __future__ import annotations

import math

import numpy as np

from pronk.base.arrays import FLOAT32, Array
from pronk.cache.paged import KeyBias
from pronk.models.decoder import Decoder, Layer
from pronk.models.linear import Linear

# Shorter pairs stay in the keys: leaving them out costs more time than it improves perplexity.
# Qwen2.5-Coder-0.5B, 4,000 tokens of code: perplexity 3.985 with 3, 3.993 with 6 (int8 cache:
# 3.974); the average layer has 4.9 and 2.7 such pairs of 32.
SHORTEST_PAIR = 6.0


def find_key_biases(decoder: Decoder) -> dict[int, KeyBias]:
    """Return the large biases of the keys of each layer, by the number of the layer, from 0.

    Only biases that RoPE rotates by a token's position have an entry: not those before a norm of
    the keys, and not those of latent attention.
    """
    if decoder.config.has_dynamic_rope:
        return {}
    config = decoder.config
    found = dict[int, KeyBias]()
    for number, layer in enumerate(decoder.layers):
        rope = config.rope_of(number)
        if rope is None or not config.stores_keys(number) or config.has_values_in_keys:
            continue
        bias = None if layer.k_norm is not None else _find(layer, rope.dim)
        if bias is not None:
            found[number] = bias
    return found


def _find(layer: Layer, rope_dim: int) -> KeyBias | None:
    """Return the large biases of a layer's keys; ``None`` if there are none."""
    config = layer.config
    rows = np.concatenate([_head_biases(part, config.head_dim) for part in layer.qkv.parts])
    keys = rows[config.num_heads : config.num_heads + config.num_kv_heads]
    half = rope_dim // 2
    first = keys[:, :half].astype(np.float64)
    second = keys[:, half:rope_dim].astype(np.float64)
    squares = first * first + second * second
    pairs = np.flatnonzero((squares >= SHORTEST_PAIR * SHORTEST_PAIR).any(0))
    if not len(pairs):
        return None
    values = np.zeros_like(keys)
    for elements in (pairs, pairs + half):
        values[:, elements] = keys[:, elements]
    return KeyBias(values, pairs.astype(np.int32))


def _head_biases(part: Linear, head_dim: int) -> Array:
    """Return the biases of a matrix with heads as outputs, float32 ``[heads, head_dim]``."""
    num_heads = part.out_features // head_dim
    if part.packed.bias is None:
        return np.zeros((num_heads, head_dim), FLOAT32)
    padded = math.ceil(head_dim / 16) * 16  # each head begins a block of 16 outputs
    heads: Array = part.packed.bias.reshape(-1, padded)
    return heads[:num_heads, :head_dim]
