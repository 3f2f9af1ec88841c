"""Description of a decoder: sizes, and what each layer computes.

A family of models is a set of values of :class:`ModelConfig`. Programs and kernels read these
values and do not know families. :mod:`pronk.models.families` reads them from ``config.json`` and
from GGUF files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from pronk.checkpoint.rope import RopeConfig

# Limits for damaged files: more layers than any model has, and those of ``kernels/csrc/common.h``.
MAX_LAYERS = 10_000
MAX_EXPERTS = 1024
MAX_TAPS = 16
MAX_ROPES = 2  # maximum number of different rotary embeddings of a model's layers

Activation = Literal["silu", "gelu", "gelu_tanh"]
# Norms of a branch (attention or MLP) of a layer: of its input, of its output before the residual
# sum, or of both.
NormPlaces = Literal["input", "output", "both"]


@dataclass(frozen=True)
class MixtureConfig:
    """Mixtures of experts: MLPs of which a router chooses some for each row (Shazeer et al. 2017).

    The router has a score for each expert. The experts with the largest scores are computed, and
    their outputs are added with the softmax of the scores as weights. Of equal scores, that of the
    smaller number counts as larger.
    """

    experts: int
    per_row: int  # number of experts that are chosen for a row
    width: int  # intermediate size of an expert
    # whether the softmax is over the chosen experts only, so that the weights sum to 1
    normalized: bool
    layers: tuple[bool, ...]  # whether each layer is a mixture; the other layers have a plain MLP
    bias: bool = False  # whether the router and the experts have biases


@dataclass(frozen=True)
class ConvolutionConfig:
    """Gated short convolutions, which some layers have in place of attention (LFM2).

    Such a layer projects a row to ``b``, ``c`` and ``x``. The *state* of the row's token is ``b *
    x``. The output is ``c`` times a sum over the last ``taps`` tokens of the text: of their states,
    each times a weight per feature.
    """

    taps: int
    # whether each layer has a convolution; the other layers have attention
    layers: tuple[bool, ...]
    bias: bool = False  # whether the convolution and its two projections have biases


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and features of a decoder-only transformer of any supported family."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int  # maximum number of tokens, prompt and output together, after RoPE scaling
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    norm_places: NormPlaces = "input"
    # number to add to the stored weights of norms: 1 if a checkpoint stores ``weight - 1``
    norm_offset: float = 0.0
    activation: Activation = "silu"
    gated: bool = True  # whether the MLP has a gate, as in SwiGLU
    # Whether the gate is ``g · sigmoid(1.702 g)`` for ``g`` at most 7, and multiplies ``1 + u``,
    # ``u`` in -7 … 7.
    clamped_gate: bool = False
    # mixtures of experts in place of MLPs; ``None``: no layer has one
    mixture: MixtureConfig | None = None
    convolution: ConvolutionConfig | None = None  # ``None``: all layers have attention
    # rotary embedding of all layers; ``None``: learned position embeddings
    rope: RopeConfig | None = None
    # Rotary embedding of each layer, if layers differ; ``None`` in it: the layer does not rotate.
    # At most two differ.
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    # per layer: sliding window in tokens; ``None``: full attention
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # whether queries and keys are normalized before RoPE
    # whether such a norm spans all heads of a row, instead of each head
    whole_qk_norm: bool = False
    # factor of attention scores; ``None``: ``head_dim ** -0.5``
    attention_scale: float | None = None
    # soft cap ``c`` of attention scores: ``c * tanh(score / c)``
    attention_cap: float | None = None
    # whether each head has a score that takes part in the softmax without a value
    attention_sinks: bool = False
    # ``(growth, period)``: queries are multiplied by ``1 + growth * log(1 + position // period)``
    query_growth: tuple[float, int] | None = None
    embedding_scale: float = 1.0  # factor of token embeddings, rounded to the dtype of the model
    residual_scale: float = 1.0  # factor of the output of attention and MLP before the residual sum
    logits_scale: float = 1.0  # factor of the logits
    logits_cap: float | None = None  # soft cap of the logits
    tied: bool = False  # whether the LM head shares the weights of the embedding
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # data type of the weights that are not quantized
    # ``quantization_config`` of config.json; ``None`` if it has none
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    # name that the model's files give it; "" if none
    name: str = field(default="", hash=False, compare=False)
    # Sampling options that are recommended for the model, by their names in SamplingParams
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """Hash of the fields that are compared, 16 hexadecimal digits."""
        values = asdict(self)
        compared = {each.name: values[each.name] for each in fields(self) if each.compare}
        return hashlib.sha256(
            json.dumps(compared, sort_keys=True, default=str).encode()
        ).hexdigest()[:16]

    @property
    def query_scale(self) -> float:
        """Factor of queries, which gives attention scores their scale; rounded to float32."""
        scale = self.attention_scale
        return default_query_scale(self.head_dim) if scale is None else float(np.float32(scale))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Different rotary embeddings of the layers."""
        return tuple(
            dict.fromkeys(rope for rope in (self.layer_ropes or (self.rope,)) if rope is not None)
        )

    @property
    def has_dynamic_rope(self) -> bool:
        """Whether a rotation depends on the length of the text, not only on the position."""
        return any(rope.kind == "dynamic" for rope in self.ropes)

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the rotary embedding of a layer (from 0)."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def for_context(self, context: int | None) -> ModelConfig:
        """Return the configuration of the model, opened for texts of at most ``context`` tokens.

        ``None`` is the longest context. The length selects the rotations of *longrope*, see
        :meth:`RopeConfig.for_context`.
        """
        size = self.context if context is None else context
        full, *layers = (rope and rope.for_context(size) for rope in (self.rope, *self.layer_ropes))
        return replace(self, context=size, rope=full, layer_ropes=tuple(layers))

    def mixture_of(self, layer: int) -> MixtureConfig | None:
        """Return the mixture of experts of a layer (from 0).

        ``None`` if the layer has a plain MLP.
        """
        return self.mixture if self.mixture is not None and self.mixture.layers[layer] else None

    def convolution_of(self, layer: int) -> ConvolutionConfig | None:
        """Return the short convolution of a layer (from 0); ``None`` if the layer has attention."""
        return (
            self.convolution
            if self.convolution is not None and self.convolution.layers[layer]
            else None
        )

    def layers_like(self, layer: int, count: int = 1, **sizes: Any) -> ModelConfig:
        """Return ``count`` layers as layer ``layer`` (from 0).

        ``sizes`` are other fields to replace.
        """
        windows = (self.windows[layer] if self.windows else None,) * count
        sizes = {"windows": windows, "rope": self.rope_of(layer), "layer_ropes": ()} | sizes
        return replace(self, num_layers=count, **sizes)

    def plain_layers(self, layer: int, count: int = 1, **sizes: Any) -> ModelConfig:
        """Return plain layers (:attr:`is_plain`) of the sizes of layer ``layer``, for a drafter."""
        like = self.layers_like(layer, count, **sizes)
        return replace(like, rope=like.rope or self.rope, **_SPECIAL)

    @property
    def is_plain(self) -> bool:
        """Whether all layers are as in Llama, Mistral, Qwen or GPT-2."""
        return not self.layer_ropes and all(
            getattr(self, name) == value for name, value in _SPECIAL.items()
        )

    @property
    def group(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Output sizes of the query, key and value projections: number of heads times ``head_dim``."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv

    def document_sizes(self) -> dict[str, int]:
        """Return the sizes as entries of a Hugging Face ``config.json``."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
        }

    @property
    def window(self) -> int | None:
        """Largest sliding window of all layers in tokens.

        ``None`` if any layer has full attention.
        """
        sizes = [size for size in self.windows if size is not None]
        return max(sizes) if len(sizes) == self.num_layers else None


# Fields that few families set, with their default values.
_SPECIAL_NAMES = (
    "norm_places norm_offset clamped_gate mixture convolution whole_qk_norm attention_scale "
    "attention_cap "
    "attention_sinks query_growth embedding_scale residual_scale logits_scale logits_cap"
).split()
_SPECIAL: dict[str, Any] = {
    each.name: each.default for each in fields(ModelConfig) if each.name in _SPECIAL_NAMES
}


def default_query_scale(head_dim: int) -> float:
    """Return ``head_dim ** -0.5`` as the kernels compute it in float32."""
    return float(np.float32(1.0) / np.sqrt(np.float32(head_dim)))


def llama_config(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocab: int,
    context: int,
    eos_ids: tuple[int, ...] = (),
) -> ModelConfig:
    """Return the configuration of a new Llama to train, with tied embeddings and bfloat16 weights."""
    head_dim = hidden // heads
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        norm_eps=1e-5,
        rope=RopeConfig(head_dim),
        windows=(None,) * layers,
        tied=True,
        bos_id=None,
        eos_ids=eos_ids,
        dtype="bfloat16",
    )
