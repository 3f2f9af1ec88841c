"""Layer-by-layer forward pass over a text, which gives Hessians of the linear modules, and perplexity."""

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
from pronk.train.losses import text_loss

__all__ = ["LINEARS", "LayerStream", "collect_hessians"]

LINEARS = ("qkv", "out", "up", "down")  # names of the linear modules in a layer

_MAX_ROWS = 4096  # maximum tokens of sequences that a layer computes together; a longer one is alone


class LayerStream:
    """Hidden states of a text, computed one layer after the other.

    Args:
        outer: model without its layers: embedding, final norm and LM head.
        tokens: token ids ``[sequences, length]``.

    Attributes:
        rows: input of the next layer, float32 ``[sequences * length, hidden]``.
    """

    def __init__(self, outer: Decoder, tokens: Tensor) -> None:
        self.outer, self.tokens = outer, tokens
        self.length = tokens.shape[1]
        positions = torch.arange(self.length).repeat(len(tokens))
        self.rows = outer.embed(tokens.reshape(-1), positions, torch.float32)

    def run_layer(self, layer: Layer, index: int, *, keep: bool = True) -> None:
        """Compute layer ``index`` (from 0); if ``keep``, replace :attr:`rows` by its output."""
        step = max(1, _MAX_ROWS // self.length) * self.length
        for rows in self.rows.split(step):
            count = len(rows) // self.length
            positions = torch.arange(self.length).repeat(count)
            rope = self.outer.rope(positions, positions + 1, torch.float32)
            output = layer(rows, rope, index, DenseAttention(count, self.length, self.outer.config.windows))
            if keep:
                rows.copy_(output)

    def perplexity(self) -> float:
        """Return the perplexity, without the first token of each sequence; NaN or inf after an overflow.

        All layers must have been run before.
        """
        rows = self.rows.unflatten(0, (-1, self.length))[:, :-1].flatten(0, 1)
        head = self.outer.head
        assert isinstance(head, PlainLinear)
        loss, _ = text_loss(self.outer.norm(rows), head.weight, self.tokens[:, 1:].reshape(-1), torch.float32)
        mean_loss = float(loss)
        return math.exp(min(mean_loss, 700.0)) if math.isfinite(mean_loss) else mean_loss  # math.exp(710) overflows


@contextmanager
def collect_hessians(layer: Layer) -> Iterator[Mapping[str, Tensor]]:
    """Yield ``{module name: X Xᵀ}``; ``X`` is all inputs of the linear module in the ``with`` block."""
    products: dict[str, Tensor] = {}

    def register(name: str) -> RemovableHandle:
        def add_product(_: nn.Module, inputs: tuple[Tensor]) -> None:
            (rows,) = inputs  # ``[tokens, inputs]``: a part of the transpose of X
            if name not in products:
                products[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
            products[name].addmm_(rows.t(), rows)

        return layer.get_submodule(name).register_forward_pre_hook(add_product)

    handles = [register(name) for name in LINEARS]
    try:
        yield products
    finally:
        for handle in handles:
            handle.remove()
