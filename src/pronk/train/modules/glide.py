"""GLIDE's decoder as a module of torch; see :mod:`pronk.drafters.from_target.modules.glide`."""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.drafters.from_target.modules.glide import GlideShape
from pronk.train.modules.decoder import Attend, DecoderModule, ModuleLayer, empty_linear, make_norm

__all__ = ["CrossAttend", "GlideDecoderModule"]


class CrossAttend(Attend, Protocol):
    """The self-attention of :class:`Attend`, and cross-attention to a target's keys and values."""

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Attend from the queries of draft layer ``layer`` (from 0) to the target's cache.

        ``q`` is ``[rows, heads, d]`` with the target's number and size of heads, before RoPE. Returns
        ``[rows, heads * d]``; a row without a token to attend to is zero.
        """


class _GlideLayer(ModuleLayer):
    """A layer with cross-attention before the MLP; ``attend`` is a :class:`CrossAttend`."""

    def __init__(self, config: ModelConfig, target: ModelConfig) -> None:
        super().__init__(config)
        self.heads, self.head_dim = target.num_heads, target.head_dim
        size = self.heads * self.head_dim
        self.cross_norm = make_norm(config, config.hidden_size)
        self.cross_query = empty_linear(size, config.hidden_size, bias=False)
        self.cross_out = empty_linear(config.hidden_size, size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:
        x = self.apply_attention(x, rope, index, attend)
        q = self.cross_query(self.cross_norm(x)).unflatten(-1, (self.heads, self.head_dim))
        return self.apply_mlp(x + self.cross_out(cast("CrossAttend", attend).cross(index, q)))


class GlideDecoderModule(DecoderModule):
    """GLIDE's decoder; its head is the transposed ``embedding``, without a module of its own."""

    def __init__(self, shape: GlideShape, target: ModelConfig) -> None:
        super().__init__(shape.config(target))
        self.cache_layers = shape.cache_layers(target)
        if shape.cross:
            self.layers = nn.ModuleList(_GlideLayer(self.config, target) for _ in range(shape.layers))
        del self.head
