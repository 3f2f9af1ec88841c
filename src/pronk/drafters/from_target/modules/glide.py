"""GLIDE (Du et al. 2024, section 4.1): a small decoder that also attends to the target's KV cache.

Each layer has cross-attention between self-attention and the MLP: a row attends to the cached keys and values of one of
the target's layers, with as many query heads as the target and with the target's RoPE. Let ``h`` be the rows after
self-attention, ``K`` and ``V`` the keys and values of the target's layer ``l``, and ``d_k`` a head's size::

    head_j = softmax((h W_j) K_jᵀ / √d_k) V_j          h ← h + concat(head_1, head_2, …) W_O

Layer ``m`` of ``N_D`` attends to the target's layer ``l = N_T - N_D + m`` of ``N_T``, counted from 1. In decoding, all
draft tokens of a step see the target's cache up to the text's last token but one. Without cross-attention the module is
the *vanilla* drafter, the paper's baseline.
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
    """Sizes of the module that do not follow from the target."""

    layers: int = 1  # number of decoder layers
    hidden: int = 192  # width of the hidden states, divisible by ``2 * heads``
    heads: int = 6  # query heads of self-attention, divisible by ``kv_heads``
    kv_heads: int = 2  # key/value heads of self-attention
    mlp: int = 512  # width of the gated MLP
    # Number of tokens of a block (L in the paper), for training only. The text is split into blocks; all tokens of a
    # block see the same part of the target's cache, as all draft tokens of a step do.
    block: int = 5
    cross: bool = True  # whether the layers have cross-attention
    # Number (from 1) of the target's layer that the first draft layer attends to; draft layer i attends to layer
    # ``cache_layer + i - 1``. ``None`` is the paper's choice: the last draft layer attends to the target's last layer.
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
        """Return, for each draft layer, the number (from 1) of the target's layer that it attends to.

        Return an empty tuple without cross-attention. Raise OptionError if the target has too few layers.
        """
        if not self.cross:
            return ()
        last_start = target.num_layers - self.layers + 1
        first = last_start if self.cache_layer is None else self.cache_layer
        if not 1 <= first <= last_start:
            if self.cache_layer is None:
                option, maximum, found = "layers", target.num_layers, self.layers
            else:
                option, maximum, found = "cache-layer", last_start, self.cache_layer
            msg = f"{option}: expected 1 to {maximum} for a target of {target.num_layers} layers, found {found}"
            raise OptionError(msg)
        return tuple(range(first, first + self.layers))

    def config(self, target: ModelConfig) -> ModelConfig:
        """Return the module's configuration: a Llama with the target's vocabulary and context length."""
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
    """The self-attention of :class:`Attend`, and cross-attention to a target's KV cache."""

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Attend from the queries of draft layer ``layer`` (from 0) to the target's cache.

        ``q`` is ``[rows, heads, d]`` with the target's number and size of heads, before RoPE. Returns
        ``[rows, heads * d]``; a row without a token to attend to is zero.
        """


class _GlideLayer(Layer):
    """A layer with cross-attention before the MLP; ``attend`` is a :class:`CrossAttend`."""

    def __init__(self, config: ModelConfig, target: ModelConfig, linear: Callable[[int, int, bool], Linear]) -> None:
        super().__init__(config, linear)
        self.heads, self.head_dim = target.num_heads, target.head_dim
        size = self.heads * self.head_dim
        self.cross_norm = make_norm(config, config.hidden_size)
        self.cross_query = linear(size, config.hidden_size, False)  # False: no bias
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
    """GLIDE's decoder; it has no head until :meth:`tie` makes one with the embedding's weights."""

    def __init__(self, shape: GlideShape, target: ModelConfig) -> None:
        super().__init__(shape.config(target))
        self.cache_layers = shape.cache_layers(target)
        if shape.cross:
            self.layers = nn.ModuleList(_GlideLayer(self.config, target, empty_linear) for _ in range(shape.layers))
        del self.head

    def tie(self, kernels: Kernels | None = None) -> None:
        """Make the head from the embedding's weights, in the layout of ``kernels`` (torch's if ``None``)."""
        self.head = choose_linear(kernels, self.embedding.device)(self.embedding.detach(), None, WeightLayout())
