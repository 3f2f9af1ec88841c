"""GLIDE (Du et al. 2024, section 4.1): a small decoder that also attends to the target's KV cache.

Each layer has cross-attention between self-attention and the MLP: a row attends to the cached keys
and values of one of the target's layers, with as many query heads as the target and with the
target's RoPE. Let ``h`` be the rows after self-attention, ``K`` and ``V`` the keys and values of
the target's layer ``l``, and ``d_k`` a head's size::

    head_j = softmax((h W_j) K_jᵀ / √d_k) V_j          h ← h + concat(head_1, head_2, …) W_O

Layer ``m`` of ``N_D`` attends to the target's layer ``l = N_T - N_D + m`` of ``N_T``, counted from
1. In decoding, all draft tokens of a step see the target's cache up to the text's last token but
one. Without cross-attention the module is the *vanilla* drafter, the paper's baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pronk import OptionError
from pronk.backends import Attention, Decoder, KVSource, Layer, Linear, Program, WeightLayout
from pronk.base.checks import check_integer
from pronk.checkpoint import MAX_LAYERS, ModelConfig, llama_config
from pronk.lab.drafters.modules.files import DrafterWeights


@dataclass(frozen=True)
class GlideShape:
    """Sizes of the module that do not follow from the target.

    Attributes:
        layers: number of decoder layers.
        hidden: width of the hidden states, divisible by ``2 * heads``.
        heads: query heads of self-attention, divisible by ``kv_heads``.
        kv_heads: key/value heads of self-attention.
        mlp: width of the gated MLP.
        block: number of tokens of a block (L in the paper), for training only. The text is split
            into blocks; all tokens of a block see the same part of the target's cache, as all draft
            tokens of a step do.
        cross: whether the layers have cross-attention.
        cache_layer: number (from 1) of the target's layer that the first draft layer attends to;
            draft layer i attends to layer ``cache_layer + i - 1``. ``None`` is the paper's choice:
            the last draft layer attends to the target's last layer.
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
            maximum = MAX_LAYERS if name == "layers" else None
            if value is not None:
                check_integer(name.replace("_", "-"), value, 1, maximum)
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            found = f"found hidden {self.hidden}, heads {self.heads}, kv-heads {self.kv_heads}"
            msg = (
                "expected heads to divide hidden into even parts, and kv-heads to divide heads; "
                f"{found}"
            )
            raise OptionError(msg)

    @classmethod
    def of_target(
        cls,
        target: ModelConfig,
        layers: int = 1,
        hidden: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        mlp: int | None = None,
        **more: Any,
    ) -> GlideShape:
        """Return the shape for a target; a size that is ``None`` follows from the others.

        The hidden size is a third of the target's, at least 192. The paper's drafter has the hidden
        size of the target; but with the large vocabularies of small models, an LM head of this size
        alone would take a fifth of the time of SmolLM2-135M.
        """
        if hidden is None:  # a multiple of 96: three heads of 32 dimensions per key/value head
            hidden = max(192, target.hidden_size // 3 // 96 * 96)
        if heads is None:
            heads = max(1, hidden // 32)
        if kv_heads is None:
            kv_heads = heads if heads % 3 else heads // 3
        if mlp is None:
            mlp = hidden * 8 // 3
        return cls(layers, hidden, heads, kv_heads, mlp, **more)

    def cache_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the number (from 1) of the target's layer that each draft layer attends to.

        The tuple is empty without cross-attention. Raises OptionError if the target has too few
        layers, or if one of these layers has no keys.
        """
        if not self.cross:
            return ()
        last_start = target.num_layers - self.layers + 1
        first = last_start if self.cache_layer is None else self.cache_layer
        if not 1 <= first <= last_start:
            option = "cache-layer"
            maximum = last_start
            found = first
            if self.cache_layer is None:
                option = "layers"
                maximum = target.num_layers
                found = self.layers
            msg = (
                f"{option}: expected 1 to {maximum} for a target of {target.num_layers} layers, "
                f"found {found}"
            )
            raise OptionError(msg)
        numbers = tuple(range(first, first + self.layers))
        for number in numbers:
            if not target.stores_keys(number - 1):
                kind = _kind_without_keys(target, number - 1)
                msg = (
                    f"cache-layer: expected target layers with attention, found {kind} in layer "
                    f"{number}"
                )
                raise OptionError(msg)
        return numbers

    def config(self, target: ModelConfig) -> ModelConfig:
        """Return the module's configuration: a Llama with the target's vocabulary and context."""
        config = llama_config(
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            mlp=self.mlp,
            vocab=target.vocab_size,
            context=target.context,
            eos_ids=target.eos_ids,
        )
        return replace(config, bos_id=target.bos_id)


def _kind_without_keys(target: ModelConfig, layer: int) -> str:
    """Return what a layer (from 0) of the target has in place of keys of its own, in words."""
    if target.recurrent_of(layer):
        return "a recurrence"
    if target.convolution_of(layer):
        return "a short convolution"
    return "the keys of another layer"


class _CrossAttention(Attention):
    """Attention to the keys and values of layer ``layer`` (from 0) of the target."""

    def __init__(
        self,
        config: ModelConfig,
        target: ModelConfig,
        layer: int,
        weights: DrafterWeights,
        name: str,
    ) -> None:
        head_dim = target.shape_of(layer).head_dim
        queries = replace(config, num_heads=target.num_heads, head_dim=head_dim)
        super().__init__(queries, reads=KVSource(layer, cache=1))
        size = target.num_heads * head_dim
        self.attention_norm = weights.norm(f"{name}.cross_norm", config, config.hidden_size)
        self.qkv = weights.linear(
            f"{name}.cross_query", size, config.hidden_size, self.layout("qkv")
        )
        self.out = weights.linear(f"{name}.cross_out", config.hidden_size, size)


class _GlideLayer(Layer):
    """A layer with cross-attention before the MLP."""

    def __init__(self, config: ModelConfig, cross_attention: _CrossAttention) -> None:
        super().__init__(config)
        self.cross_attention = cross_attention

    def compile(self, program: Program, index: int) -> None:
        program.attention(self, index)
        self.cross_attention.compile(program, index)
        program.mlp(self)


class GlideDecoder(Decoder):
    """GLIDE's decoder, whose embedding is also its output head.

    ``cache_layers`` are the layers of the target that it attends to, see :class:`GlideShape`.
    """

    def __init__(self, shape: GlideShape, target: ModelConfig, weights: DrafterWeights) -> None:
        super().__init__(shape.config(target), weights.kernels)
        config = self.config
        self.cache_layers = shape.cache_layers(target)
        self.embedding = weights.array("embedding", config.vocab_size, config.hidden_size)
        if shape.cross:
            self.layers = []
            for index, number in enumerate(self.cache_layers):
                cross = _CrossAttention(config, target, number - 1, weights, f"layers.{index}")
                self.layers.append(_GlideLayer(config, cross))
        for index, layer in enumerate(self.layers):
            weights.layer(layer, f"layers.{index}")
        self.norm = weights.norm("norm", config, config.hidden_size)
        self.head = Linear(weights.kernels, self.embedding, None, WeightLayout(), None)
