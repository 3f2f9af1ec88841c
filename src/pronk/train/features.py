"""What a drafter learns from of a target: computed with each batch, never stored."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pronk.models.decoder import Decoder
from pronk.train.attention import DenseAttention, dense_states

__all__ = ["Features", "compute_features"]


@dataclass
class Features:
    """Of ``rows`` tokens, ``[batch * length]`` of them.

    Attributes:
        last: ``[rows, hidden]``, the last layer's output before the final norm.
        hidden: the same of the layers asked for, by number: 1 is the first layer's output.
        keys: ``[rows, kv_heads, head_dim]`` of the layers asked for, by number, as the cache has them.
        values: likewise.
    """

    last: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


@torch.no_grad()
def compute_features(
    decoder: Decoder,
    tokens: Tensor,
    dtype: torch.dtype,
    hidden: Collection[int] = (),
    cache: Collection[int] = (),
) -> Features:
    """One pass over ``tokens`` ``[batch, length]``, whose ``hidden`` outputs and ``cache`` keys and values are kept."""
    batch, length = tokens.shape
    found = Features(tokens.new_empty(0))
    attend = _Remember(DenseAttention(batch, length, decoder.config.windows), frozenset(cache), found)
    for layer, found.last in dense_states(decoder, tokens, dtype, attend):
        if layer in hidden:
            found.hidden[layer] = found.last
    return found


@dataclass(frozen=True)
class _Remember:
    """Dense attention that keeps the keys and values of some layers."""

    attend: DenseAttention
    layers: frozenset[int]
    into: Features

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer + 1 in self.layers:
            self.into.keys[layer + 1], self.into.values[layer + 1] = k, v
        return self.attend(layer, q, k, v)
