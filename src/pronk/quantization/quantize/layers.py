"""Layer-by-layer forward pass over a text: inputs of the matrices, and perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pronk.models.decoder import Decoder, Layer
from pronk.models.linear import PlainLinear
from pronk.train.attention import DenseAttention
from pronk.train.text_loss import text_loss

__all__ = ["LINEARS", "LayerStream", "hessians"]

LINEARS = ("qkv", "out", "up", "down")  # linear modules of a layer

_ROWS = 4096  # tokens per forward pass of a layer, to limit temporary memory


class LayerStream:
    """Hidden states of sequences of equal length between two layers.

    Args:
        frame: model without its layers.
        tokens: token ids ``[sequences, length]``.

    Attributes:
        rows: hidden states, float32 ``[sequences * length, hidden]``.
    """

    def __init__(self, frame: Decoder, tokens: Tensor) -> None:
        self.frame, self.tokens = frame, tokens
        self.length = tokens.shape[1]
        positions = torch.arange(self.length).repeat(len(tokens))
        self.rows = frame.embed(tokens.reshape(-1), positions, torch.float32)

    def through(self, layer: Layer, index: int, *, keep: bool = True) -> None:
        """Compute layer number ``index``; replace the hidden states by its output if ``keep``."""
        step = max(1, _ROWS // self.length) * self.length
        for rows in self.rows.split(step):
            count = len(rows) // self.length
            positions = torch.arange(self.length).repeat(count)
            rope = self.frame.rope(positions, positions + 1, torch.float32)
            out = layer(rows, rope, index, DenseAttention(count, self.length, self.frame.config.windows))
            if keep:
                rows.copy_(out)

    def perplexity(self) -> float:
        """Return the perplexity after the last layer, without first tokens; may be NaN or infinity."""
        rows = self.rows.unflatten(0, (-1, self.length))[:, :-1].flatten(0, 1)
        head = self.frame.head
        assert isinstance(head, PlainLinear)
        loss, _ = text_loss(self.frame.norm(rows), head.weight, self.tokens[:, 1:].reshape(-1), torch.float32)
        value = float(loss)
        return math.exp(min(value, 700.0)) if math.isfinite(value) else value


@contextmanager
def hessians(layer: Layer) -> Iterator[Mapping[str, Tensor]]:
    """Collect ``X Xᵀ`` of the inputs of each linear module from forward passes within the context."""
    found: dict[str, Tensor] = {}

    def register(name: str) -> RemovableHandle:
        def add(_: nn.Module, inputs: tuple[Tensor]) -> None:
            (x,) = inputs
            if name not in found:
                found[name] = x.new_zeros(x.shape[1], x.shape[1])
            found[name].addmm_(x.t(), x)

        return layer.get_submodule(name).register_forward_pre_hook(add)

    handles = [register(name) for name in LINEARS]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
