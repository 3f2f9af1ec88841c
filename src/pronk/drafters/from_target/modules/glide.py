"""GLIDE (Du et al. 2024, section 4.1): a small decoder whose layers also look into the target's cache.

In each layer, between self-attention and the MLP, a row asks the keys and values that a layer of the target has cached.
It has a query for every query head of the target, rotated as the target would rotate it at the row's position; with
``h`` the rows after self-attention, ``K`` and ``V`` the target's of layer ``l``, and head ``j`` of width ``d_k``::

    head_j = softmax((h W_j) K_jᵀ / √d_k) V_j          h ← h + concat(head_1, head_2, …) W_O

Draft layer ``m`` of ``N_D`` asks layer ``l = N_T - N_D + m`` of ``N_T``, counted from 1. Which tokens a row sees there
is up to the attention: in a decoding step the target's cache ends before the first guess, and stays there however many
tokens are drafted. Without the cross-attention the same module is the *vanilla* twin that GLIDE is compared with.
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
    """What the module is made by, beside its target.

    Attributes:
        layers: of the draft.
        hidden: its size.
        heads: of its self-attention.
        kv_heads: key/value heads of it.
        mlp: width of its gated MLP.
        block: tokens in a block of the mask that imitates in training how the target's cache lags behind; L in the
            paper.
        cross: whether there is cross-attention.
        cache_layer: the target's layer that the first draft layer asks, from 1; the next asks the next. ``None`` is
            the paper's choice, by which the last draft layer asks the target's last one.

    Raises:
        OptionError: sizes that are not positive or do not divide each other.
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
        """The target's layer, from 1, that each draft layer asks; none without cross-attention.

        Raises:
            OptionError: the target has no such layers.
        """
        if not self.cross:
            return ()
        first = target.num_layers - self.layers + 1 if self.cache_layer is None else self.cache_layer
        if not 1 <= first <= target.num_layers - self.layers + 1:
            option = "layers" if self.cache_layer is None else "cache-layer"
            most = target.num_layers if self.cache_layer is None else target.num_layers - self.layers + 1
            msg = (
                f"{option}: expected 1 to {most} for a target of {target.num_layers} layers, "
                f"found {self.layers if self.cache_layer is None else self.cache_layer}"
            )
            raise OptionError(msg)
        return tuple(range(first, first + self.layers))

    def config(self, target: ModelConfig) -> ModelConfig:
        """The draft's decoder: a Llama with the target's tokens and positions."""
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
    """Attention of a draft that sees a target's cache as well."""

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Attend from ``q`` ``[rows, heads, d]`` of draft layer ``layer`` (from 0) to the target's cache.

        ``q`` has the target's heads and is not rotated yet. Returns ``[rows, heads * d]`` in the dtype of ``q``; zeros
        for a row that sees no token.
        """
        ...


class _GlideLayer(Layer):
    """A layer with cross-attention between its halves."""

    def __init__(self, config: ModelConfig, target: ModelConfig, linear: Callable[[int, int, bool], Linear]) -> None:
        super().__init__(config, linear)
        self.heads, self.head_dim = target.num_heads, target.head_dim
        size = self.heads * self.head_dim
        self.cross_norm = make_norm(config, config.hidden_size)
        self.cross_query = linear(size, config.hidden_size, False)
        self.cross_out = linear(config.hidden_size, size, False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:
        """See :class:`~pronk.models.decoder.Layer`; ``attend`` is a :class:`CrossAttend`."""
        x = self.attend(x, rope, index, attend)
        q = self.cross_query(self.cross_norm(x)).unflatten(-1, (self.heads, self.head_dim))
        return self.feed(x + self.cross_out(cast("CrossAttend", attend).cross(index, q)))

    def compile(self, program: Program, index: int) -> None:
        """See :class:`~pronk.models.decoder.Layer`."""
        program.attention(self, index)
        program.cross(self, index)
        program.mlp(self)

    def layout(self, name: str) -> WeightLayout:
        """See :class:`~pronk.models.decoder.Layer`."""
        return WeightLayout(unit=self.head_dim) if name == "cross_query" else super().layout(name)


class GlideModule(Decoder):
    """The module, with an embedding of its own, which is its head too.

    Its files have that matrix once, so there is a head only after :meth:`tie`.

    Args:
        shape: its sizes.
        target: the model that it guesses for.

    Raises:
        OptionError: the target has too few layers.
    """

    def __init__(self, shape: GlideShape, target: ModelConfig) -> None:
        super().__init__(shape.config(target))
        self.cache_layers = shape.cache_layers(target)
        if shape.cross:
            self.layers = nn.ModuleList(_GlideLayer(self.config, target, empty_linear) for _ in range(shape.layers))
        del self.head

    def tie(self, kernels: Kernels | None = None) -> None:
        """Make the head of the embedding, as it is now, for ``kernels`` or for torch."""
        self.head = choose_linear(kernels, self.embedding.device)(self.embedding.detach(), None, WeightLayout())
