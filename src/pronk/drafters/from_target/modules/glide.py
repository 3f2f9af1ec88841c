"""GLIDE (Du et al. 2024, section 4.1): a small decoder that also attends to the target's KV cache.

Each layer has cross-attention between self-attention and the MLP: a row attends to the cached keys and values of one of
the target's layers. There is a query for every query head of the target, with the target's rotation at the row's
position. With ``h`` the rows after self-attention, ``K`` and ``V`` the target's of layer ``l``, and head ``j`` of width
``d_k``::

    head_j = softmax((h W_j) K_jᵀ / √d_k) V_j          h ← h + concat(head_1, head_2, …) W_O

Draft layer ``m`` of ``N_D`` attends to layer ``l = N_T - N_D + m`` of ``N_T``, counted from 1. The attention object
decides which tokens a row sees. In a decoding step the target's cache ends before the first draft token, for all draft
tokens of the step. Without cross-attention the module is the *vanilla* twin, GLIDE's baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor, nn

from pronk.architecture.config import ModelConfig, llama_config
from pronk.errors import OptionError
from pronk.kernels.library import Kernels
from pronk.models.decoder import Attend, Decoder, Layer, empty_linear, make_norm
from pronk.models.linear import Linear, WeightLayout, choose_linear
from pronk.models.program import Program

__all__ = ["CrossAttend", "GlideModule", "GlideShape"]


@dataclass(frozen=True)
class GlideShape:
    """Sizes of the module, beside its target's.

    Attributes:
        layers: number of layers.
        hidden: hidden size, divisible by ``2 * heads``.
        heads: heads of self-attention, divisible by ``kv_heads``.
        kv_heads: key/value heads of self-attention.
        mlp: width of the gated MLP.
        block: block length of the mask that imitates in training how far the target's cache lags behind; L in the
            paper.
        cross: whether there is cross-attention.
        cache_layer: the target's layer, from 1, that the first draft layer attends to; the next layer uses the next.
            ``None`` is the paper's choice: the last draft layer attends to the target's last layer.
    """

    layers: int = 1
    hidden: int = 192
    heads: int = 6
    kv_heads: int = 2
    mlp: int = 512
    block: int = 5
    cross: bool = True
    cache_layer: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "mlp", "block", "cache_layer"):
            value = getattr(self, name)
            if value is not None and value < 1:
                msg = f"{name.replace('_', '-')}: expected at least 1, found {value}"
                raise OptionError(msg)
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            msg = (
                "expected heads to divide hidden into even parts, and kv-heads to divide heads; "
                f"found hidden {self.hidden}, heads {self.heads}, kv-heads {self.kv_heads}"
            )
            raise OptionError(msg)

    def cache_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the target's layer, from 1, for each draft layer; none without cross-attention."""
        if not self.cross:
            return ()
        first = target.num_layers - self.layers + 1 if self.cache_layer is None else self.cache_layer
        if not 1 <= first <= target.num_layers - self.layers + 1:
            option = "layers" if self.cache_layer is None else "cache-layer"
            maximum = target.num_layers if self.cache_layer is None else target.num_layers - self.layers + 1
            msg = (
                f"{option}: expected 1 to {maximum} for a target of {target.num_layers} layers, "
                f"found {self.layers if self.cache_layer is None else self.cache_layer}"
            )
            raise OptionError(msg)
        return tuple(range(first, first + self.layers))

    def config(self, target: ModelConfig) -> ModelConfig:
        """Return the draft's decoder: a Llama with the target's vocabulary and positions."""
        return llama_config(
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            mlp=self.mlp,
            vocab=target.vocab_size,
            context=target.context,
            bos_id=target.bos_id,
            eos_ids=target.eos_ids,
        )


class CrossAttend(Attend, Protocol):
    """Attention of a draft that also attends to a target's cache."""

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Attend from ``q`` ``[rows, heads, d]`` of draft layer ``layer`` (from 0) to the target's cache.

        ``q`` has the target's heads, not rotated yet. Returns ``[rows, heads * d]``; a row that sees no token is zero.
        """
        ...


class _GlideLayer(Layer):
    """A layer with cross-attention before the MLP; ``attend`` is a :class:`CrossAttend`."""

    def __init__(self, config: ModelConfig, target: ModelConfig, linear: Callable[[int, int, bool], Linear]) -> None:
        super().__init__(config, linear)
        self.heads, self.head_dim = target.num_heads, target.head_dim
        size = self.heads * self.head_dim
        self.cross_norm = make_norm(config, config.hidden_size)
        self.cross_query = linear(size, config.hidden_size, False)
        self.cross_out = linear(config.hidden_size, size, False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:
        x = self.apply_attention(x, rope, index, attend)
        q = self.cross_query(self.cross_norm(x)).unflatten(-1, (self.heads, self.head_dim))
        return self.apply_mlp(x + self.cross_out(cast("CrossAttend", attend).cross(index, q)))

    def compile(self, program: Program, index: int) -> None:
        program.attention(self, index)
        program.cross(self, index)
        program.mlp(self)

    def layout(self, name: str) -> WeightLayout:
        return WeightLayout(unit=self.head_dim) if name == "cross_query" else super().layout(name)


class GlideModule(Decoder):
    """The module, whose embedding is also its head; the head exists only after :meth:`tie`."""

    def __init__(self, shape: GlideShape, target: ModelConfig) -> None:
        super().__init__(shape.config(target))
        self.cache_layers = shape.cache_layers(target)
        if shape.cross:
            self.layers = nn.ModuleList(_GlideLayer(self.config, target, empty_linear) for _ in range(shape.layers))
        del self.head

    def tie(self, kernels: Kernels | None = None) -> None:
        """Make the head from the present embedding, for ``kernels`` or for torch."""
        self.head = choose_linear(kernels, self.embedding.device)(self.embedding.detach(), None, WeightLayout())
