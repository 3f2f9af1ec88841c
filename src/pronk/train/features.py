"""Hidden states, keys and values of the target, from which drafters learn; computed for each batch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pronk.train.attention import DenseAttention, dense_states
from pronk.train.modules.decoder import DecoderModule

__all__ = ["Features", "compute_features"]


@dataclass
class Features:
    """Hidden states, keys and values of ``rows = batch * length`` tokens; layers count from 1."""

    last: Tensor  # output of the last layer before the final norm, ``[rows, hidden]``
    hidden: dict[int, Tensor] = field(default_factory=dict)  # by layer: its output, ``[rows, hidden]``
    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer: its keys, ``[rows, kv_heads, head_dim]``
    values: dict[int, Tensor] = field(default_factory=dict)  # by layer: its values, of the same shape


@torch.no_grad()
def compute_features(
    decoder: DecoderModule,
    tokens: Tensor,
    dtype: torch.dtype,
    hidden: Collection[int] = (),
    cache: Collection[int] = (),
) -> Features:
    """Run the decoder; keep outputs of the layers ``hidden``, and keys and values of the layers ``cache``."""
    batch, length = tokens.shape
    config, features = decoder.config, Features(tokens.new_empty(0))
    dense = DenseAttention(batch, length, config.windows, config.attention_cap)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer + 1 in cache:
            features.keys[layer + 1], features.values[layer + 1] = k, v
        return dense(layer, q, k, v)

    for layer, features.last in dense_states(decoder, tokens, dtype, attend):
        if layer in hidden:
            features.hidden[layer] = features.last
    return features
