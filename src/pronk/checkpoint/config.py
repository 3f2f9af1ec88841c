"""Configuration of a decoder-only model: its sizes, and the operations of each layer.

A family of models is a set of values of :class:`ModelConfig`, which :mod:`pronk.models.families`
reads from ``config.json`` and from GGUF files. The code that computes a layer depends on these
values only, not on the name of a family.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np

from pronk.checkpoint.rope import RopeConfig

# Limits for damaged files. No model has as many layers; the other limits are those of the kernels
# (``kernels/csrc/common.h``).
MAX_LAYERS = 10_000
MAX_EXPERTS = 1024
MAX_TAPS = 16
MAX_HEAD_DIM = 576  # of attention and of recurrent layers
MAX_ROPES = 2  # maximum number of different rotary embeddings of a model's layers

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
# Function that turns a router's outputs into scores of experts: the softmax over all experts, or
# the sigmoid of each output.
RouterScores = Literal["softmax", "sigmoid"]
# Norms of a branch (attention or MLP) of a layer: of the branch's input, of its output before the
# residual sum, or of both.
NormPlaces = Literal["input", "output", "both"]
# Sublayers of a layer, each with its norm and its residual connection: a mixer of tokens
# (attention, a short convolution or a recurrence), and an MLP (one, or a mixture of experts).
Sublayers = Literal["both", "mixer", "mlp"]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of the attention of one layer.

    Attributes:
        num_kv_heads: number of heads of keys and values.
        head_dim: number of elements of a query, a key and a value of one head.
        reads: layer (from 0) whose keys and values the layer reads; ``None``: the layer computes
            keys and values of its own, and stores them.
        tied_values: whether the values are outputs of the key projection.
    """

    num_kv_heads: int
    head_dim: int
    reads: int | None = None
    tied_values: bool = False


@dataclass(frozen=True)
class MixtureConfig:
    """Mixtures of experts: MLPs of which a router chooses some for each row (Shazeer et al. 2017).

    The router has a score for each expert. The ``per_row`` experts with the largest ranks are
    chosen, and their outputs are added with weights that follow from their scores::

        rank = score + correction
        weight = scale * score / (sum of the chosen experts' scores + epsilon)      if normalized
        weight = scale * score                                                      otherwise

    If ranks are equal, the expert with the smaller number is chosen first. A normalized softmax is
    the softmax over the chosen experts alone.

    With groups (DeepSeek-AI 2024, *DeepSeek-V3*, section 2.1.2), the experts are divided into
    ``groups`` equal groups of adjacent experts, and a row's experts come from its ``row_groups``
    best groups: those with the largest sums of their ``group_best`` largest ranks.

    Attributes:
        experts: number of experts.
        per_row: number of experts that are chosen for a row.
        width: intermediate size of an expert.
        normalized: whether the weights of a row's experts sum to ``scale``.
        layers: for each layer, whether it has a mixture; the other layers have a plain MLP.
        bias: whether the router and the experts have biases.
        scores: function of the router's outputs that gives the scores.
        correction: whether each expert has a learned number that is added to its score for the
            choice, and not for the weight.
        groups: number of groups of experts; 1: a row chooses among all experts.
        row_groups: number of groups that are chosen for a row.
        group_best: number of an expert group's ranks whose sum decides whether it is chosen.
        scale: factor of the weights.
        epsilon: number of at least 0 that is added to the sum of sigmoids by which normalized
            weights are divided; 0 with softmax scores.
        shared_width: intermediate size of the shared expert, a plain MLP whose output every row
            gets besides that of its experts; 0: there is none. Several shared experts are one, as
            wide as all of them.
        shared_gate: whether the shared expert's output is multiplied by the sigmoid of a
            projection of the row to one number.
        separate_norms: whether the router, the experts and the shared expert have a norm each of
            their input, and experts and shared expert one each of their output, before the sum
            (Gemma 4).
        expert_scales: whether each expert has a number by which its weights are multiplied.
    """

    experts: int
    per_row: int
    width: int
    normalized: bool
    layers: tuple[bool, ...]
    bias: bool = False
    scores: RouterScores = "softmax"
    correction: bool = False
    groups: int = 1
    row_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    epsilon: float = 0.0
    shared_width: int = 0
    shared_gate: bool = False
    separate_norms: bool = False
    expert_scales: bool = False

    @property
    def has_valid_groups(self) -> bool:
        """Whether groups have one size, and the chosen ones have enough experts for a row."""
        size, rest = divmod(self.experts, self.groups)
        is_ranked = self.groups == 1 or self.group_best <= size
        has_enough = self.row_groups <= self.groups and self.per_row <= self.row_groups * size
        return not rest and is_ranked and has_enough


@dataclass(frozen=True)
class ConvolutionConfig:
    """Gated short convolutions, which some layers have in place of attention (LFM2).

    The layer projects a row to three vectors ``b``, ``c`` and ``x`` of the hidden size. The *state*
    of the row's token is ``b * x``. The output is ``c`` times the weighted sum of the states of the
    last ``taps`` tokens, with a weight for each tap and feature.

    Attributes:
        taps: number of tokens in the sum, the row's token included.
        layers: for each layer, whether it has a convolution; the other layers have attention.
        bias: whether the convolution and its two projections have biases.
    """

    taps: int
    layers: tuple[bool, ...]
    bias: bool = False


# How a recurrent layer updates its state, and which of its outputs a norm spans.
RecurrentRule = Literal["gated_delta", "mamba2"]
RecurrentNorm = Literal["before_gate", "after_gate", "none"]


@dataclass(frozen=True)
class RecurrentConfig:
    """Recurrent layers, which some layers have in place of attention or beside it.

    The layer projects a row to the inputs of a causal convolution over time, with SiLU, whose
    outputs are queries, keys and values. Each value head has a state ``S``, a matrix ``[key_dim,
    value_dim]`` in float32, in place of the keys and values of all tokens. A token first updates
    the state by its key ``k`` and its value ``v``, and then reads the output ``o`` from the state
    by its query ``q``. There are two rules.

    ``"gated_delta"`` is Gated DeltaNet (Yang et al. 2024, *Gated Delta Networks*, equation 10).
    Queries and keys have length 1, and queries are divided by ``sqrt(key_dim)``. For each value
    head, a row has two scalars: ``beta`` is the sigmoid of the first, and the decay ``g <= 0``
    is ``decay_rate * softplus(second + decay_bias)``::

        S = exp(g) S
        S = S + k (beta (v - S^T k))^T
        o = S^T q

    ``"mamba2"`` is Mamba 2 (Dao and Gu 2024, *Transformers are SSMs*, section 7), which calls the
    query ``C``, the key ``B``, the value ``x``, a value head a head and a key head a group. For
    each value head, a row has one scalar: ``dt`` is ``softplus(scalar + decay_bias)``, and the
    decay ``g`` is ``decay_rate * dt``::

        S = exp(g) S + k (dt v)^T
        o = S^T q + skip * v

    ``dt`` has no limits. Limits that some configs state are applied by transformers to prompts and
    not to single tokens, and by llama.cpp nowhere.

    The outputs are multiplied by the SiLU of gates, a projection of the row, and projected to the
    hidden size.

    Attributes:
        layers: for each layer, whether it is recurrent; the other layers have attention.
        key_heads: number of heads of queries and keys.
        value_heads: number of heads of values and states, a multiple of ``key_heads``.
        key_dim: size of a query and of a key.
        value_dim: size of a value.
        taps: number of tokens in a sum of the convolution, the row's token included.
        tiled_heads: whether value head ``i`` uses key head ``i % key_heads``, the order of GGUF
            files of Qwen3.5; otherwise it uses ``i // (value_heads / key_heads)``.
        rule: how a token updates the state.
        norm: RMSNorm of the outputs. ``"before_gate"``: of each value head, with one weight for
            all heads. ``"after_gate"``: of all value heads of a key head together, after the
            gates, with a weight for each output.
        filter_bias: whether the convolution has a bias.
        parallel: whether recurrent layers also have attention, of the same input; the outputs of
            both are added.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled_heads: bool = False
    rule: RecurrentRule = "gated_delta"
    norm: RecurrentNorm = "before_gate"
    filter_bias: bool = False
    parallel: bool = False

    @property
    def num_channels(self) -> int:
        """Number of inputs of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def num_outputs(self) -> int:
        """Number of outputs of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def num_scalars(self) -> int:
        """Number of scalars of a row: for each value head beta and the decay, or ``dt``."""
        return self.value_heads * (2 if self.rule == "gated_delta" else 1)


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-AI 2024, *DeepSeek-V2*, section 2.1), all layers.

    A token has one *latent* ``c``, a normalized projection of its row, and one key ``r`` that RoPE
    rotates. The keys of head ``h`` are ``[K_h c ; r]``, and its values ``V_h c``. A query is
    ``[q ; p]``, of which RoPE rotates ``p``. All layers compute the *absorbed* form: the scores are
    those of the query ``[K_h^T q ; p]`` and the key ``[c ; r]``, which all heads share, and ``V_h``
    is applied to the weighted sum of the latents. The cache therefore has one row ``[c ; r]`` per
    token and layer: ``ModelConfig.head_dim`` is its size, and ``ModelConfig.num_kv_heads`` is 1.

    Attributes:
        rank: size of a latent, a multiple of 16.
        rope_dim: size of ``r`` and ``p``.
        plain_dim: size of ``q``.
        value_dim: size of a head's values, a multiple of 16.
        query_rank: size of the latent of the queries, from which all queries are projected;
            ``None``: they are projected from the row.
        norm_eps: epsilon of the norms of the latents.
    """

    rank: int
    rope_dim: int
    plain_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        """Size of a query before its product with the head's matrix of keys."""
        return self.plain_dim + self.rope_dim


@dataclass(frozen=True)
class EmbeddingDefaults:
    """How a model was trained to make the embedding of a text.

    Attributes:
        pooling: ``"mean"``, ``"last"``, or the name of a pooling that pronk does not compute.
        normalize: whether embeddings have the length 1.
        modules: further modules of sentence-transformers that change an embedding, and that pronk
            does not compute, such as ``Dense``.
    """

    pooling: str = "mean"
    normalize: bool = True
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and features of a decoder-only transformer of any supported family.

    Attributes:
        family: name of the family, a ``model_type`` of config.json.
        vocab_size: number of rows of the embedding and of the LM head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP, unless ``intermediate_sizes`` says others.
        num_layers: number of layers.
        num_heads: number of heads of queries.
        num_kv_heads: number of heads of keys and values, unless ``attention_shapes`` says others.
        head_dim: size of a head, unless ``attention_shapes`` says others.
        context: maximum number of tokens, prompt and output together, after RoPE scaling.
        norm_eps: epsilon of the norms.
        norm: ``"rms"`` for RMSNorm, ``"layer"`` for LayerNorm.
        norm_places: which norms a sublayer has: of its input, of its output, or both.
        norm_offset: number to add to the stored weights of norms: 1 if a checkpoint stores
            ``weight - 1``.
        attention_shapes: sizes of the attention of each layer, if layers differ.
        intermediate_sizes: width of the MLP of each layer, if layers differ.
        layer_input_size: width of the embedding that each layer has besides the model's: a layer
            adds a gated projection of its embedding of the row's token to the stream; 0: none.
        layer_scalars: whether the output of each layer is multiplied by a number of the checkpoint.
        sublayers: what each layer consists of, if not all of them have a mixer and an MLP.
        activation: activation function of the MLP.
        gated: whether the MLP has a gate, as in SwiGLU.
        clamped_gate: whether the MLP computes ``g * sigmoid(1.702 * g) * (1 + u)``, with the gate
            ``g`` at most 7 and ``u`` in -7..7 (gpt-oss).
        mixture: mixtures of experts in place of MLPs; ``None``: no layer has one.
        convolution: short convolutions in place of attention; ``None``: no layer has one.
        recurrent: recurrent layers in place of attention or beside it; ``None``: no layer has one.
        latent: multi-head latent attention; ``None``: each head has keys and values.
        gated_attention: whether the outputs of attention are multiplied by the sigmoid of a
            projection of the row, one gate per output.
        head_gates: whether the outputs of each head of attention are multiplied by the sigmoid of
            a projection of the row to one number.
        rope: rotary embedding of all layers; ``None``: learned position embeddings.
        layer_ropes: rotary embedding of each layer, if layers differ; ``None`` for a layer without
            rotation. At most two different ones.
        windows: for each layer, its sliding window in tokens; ``None``: full attention.
        qkv_bias: whether the projections to queries, keys and values have biases.
        out_bias: whether the output projection of attention has a bias.
        mlp_bias: whether the projections of the MLP have biases.
        qk_norm: whether queries and keys are normalized before RoPE.
        value_norm: whether values are normalized, by a norm without weights.
        whole_qk_norm: whether the norms of queries and keys are over all heads of a row together;
            otherwise they are over each head.
        attention_scale: factor of attention scores; ``None``: ``head_dim ** -0.5``.
        attention_cap: soft cap ``c`` of attention scores: ``c * tanh(score / c)``.
        attention_sinks: whether each head has a learned score that takes part in the softmax
            without a value.
        query_growth: ``(growth, period)``: queries are multiplied by
            ``1 + growth * log(1 + position // period)``.
        embedding_scale: factor of token embeddings, rounded to the model's dtype.
        residual_scale: factor of the output of attention and MLP before the residual sum.
        logits_scale: factor of the logits.
        logits_cap: soft cap of the logits.
        tied: whether the LM head shares the weights of the embedding.
        weight_factors: for modules of a layer that stack weights, such as ``qkv``, the factor of
            each stacked weight. The weights are multiplied when they are loaded.
        hides_factors: whether the stored weights are already multiplied by factors that the file
            does not state, so that adapters, which are trained without them, do not fit.
        bos_id: id of the token at the beginning of a text; ``None`` if the files have none.
        eos_ids: ids of the tokens that end a text.
        dtype: data type of weights that are not quantized.
        quantization: ``quantization_config`` of config.json; ``None`` if it has none.
        name: the model's name in its files; "" if they have none.
        sampling: sampling options that the files recommend, by their names in SamplingParams.
        embedding: how the files say that embeddings are made.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    norm_places: NormPlaces = "input"
    norm_offset: float = 0.0
    attention_shapes: tuple[AttentionShape, ...] = ()
    intermediate_sizes: tuple[int, ...] = ()
    layer_input_size: int = 0
    layer_scalars: bool = False
    sublayers: tuple[Sublayers, ...] = ()
    activation: Activation = "silu"
    gated: bool = True
    clamped_gate: bool = False
    mixture: MixtureConfig | None = None
    convolution: ConvolutionConfig | None = None
    recurrent: RecurrentConfig | None = None
    latent: LatentConfig | None = None
    gated_attention: bool = False
    head_gates: bool = False
    rope: RopeConfig | None = None
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    value_norm: bool = False
    whole_qk_norm: bool = False
    attention_scale: float | None = None
    attention_cap: float | None = None
    attention_sinks: bool = False
    query_growth: tuple[float, int] | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    tied: bool = False
    weight_factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    hides_factors: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    name: str = field(default="", hash=False, compare=False)
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False, compare=False)
    embedding: EmbeddingDefaults = field(default=EmbeddingDefaults(), hash=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """Hash of all fields that change what the model computes: 16 hexadecimal digits.

        ``name``, ``sampling`` and ``embedding`` change nothing.
        """
        values = asdict(self)
        compared = {each.name: values[each.name] for each in fields(self) if each.compare}
        text = json.dumps(compared, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def query_scale(self) -> float:
        """The factor of queries that scales attention scores, rounded to float32."""
        if self.attention_scale is None:
            return default_query_scale(self.head_dim)
        return float(np.float32(self.attention_scale))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of the layers, each once."""
        ropes = self.layer_ropes or (self.rope,)
        distinct = dict.fromkeys(ropes)
        return tuple(rope for rope in distinct if rope is not None)

    @property
    def has_dynamic_rope(self) -> bool:
        """Whether the rotation of a token depends on the text's length besides its position."""
        return any(rope.kind == "dynamic" for rope in self.ropes)

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the rotary embedding of a layer (from 0)."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer (from 0) in tokens; ``None``: full attention."""
        return self.windows[layer] if self.windows else None

    def shape_of(self, layer: int) -> AttentionShape:
        """Return the sizes of the attention of a layer (from 0)."""
        if self.attention_shapes:
            return self.attention_shapes[layer]
        return AttentionShape(self.num_kv_heads, self.head_dim)

    @property
    def head_dims(self) -> frozenset[int]:
        """The sizes of heads of all layers."""
        return frozenset(self.shape_of(layer).head_dim for layer in range(self.num_layers))

    def of_layer(self, layer: int) -> ModelConfig:
        """Return this configuration with the sizes of a layer (from 0) as those of the model.

        These are ``num_kv_heads``, ``head_dim`` and ``intermediate_size``.
        """
        shape = self.shape_of(layer)
        sizes = self.intermediate_sizes
        return replace(
            self,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=sizes[layer] if sizes else self.intermediate_size,
        )

    def for_context(self, context: int | None) -> ModelConfig:
        """Return the configuration of the model for texts of at most ``context`` tokens.

        ``None`` is the longest context. The length selects the rotations of *longrope*, see
        :meth:`RopeConfig.for_context`.
        """
        size = self.context if context is None else context

        def limited(rope: RopeConfig | None) -> RopeConfig | None:
            return None if rope is None else rope.for_context(size)

        layer_ropes = tuple(map(limited, self.layer_ropes))
        return replace(self, context=size, rope=limited(self.rope), layer_ropes=layer_ropes)

    def sublayers_of(self, layer: int) -> Sublayers:
        """Return what a layer (from 0) consists of."""
        return self.sublayers[layer] if self.sublayers else "both"

    def mixture_of(self, layer: int) -> MixtureConfig | None:
        """Return the mixture of experts of a layer (from 0); ``None`` if it has a plain MLP."""
        if self.mixture is not None and self.mixture.layers[layer]:
            return self.mixture
        return None

    def convolution_of(self, layer: int) -> ConvolutionConfig | None:
        """Return the short convolution of a layer (from 0); ``None`` if the layer has attention."""
        if self.convolution is not None and self.convolution.layers[layer]:
            return self.convolution
        return None

    def recurrent_of(self, layer: int) -> RecurrentConfig | None:
        """Return the recurrence of a layer (from 0); ``None`` if the layer has none."""
        if self.recurrent is not None and self.recurrent.layers[layer]:
            return self.recurrent
        return None

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer (from 0) has attention."""
        return self.describe_mixer(layer) == "attention"

    def describe_mixer(self, layer: int) -> str:
        """Return what mixes the tokens in a layer (from 0), in words."""
        recurrent = self.recurrent_of(layer)
        if self.sublayers_of(layer) == "mlp":
            return "an MLP alone"
        if self.convolution_of(layer) is not None:
            return "a short convolution"
        if recurrent is not None and not recurrent.parallel:
            return "a recurrence"
        return "attention"

    def stores_keys(self, layer: int) -> bool:
        """Return whether a layer (from 0) has keys and values of its own in the cache."""
        return self.has_attention(layer) and self.shape_of(layer).reads is None

    @cached_property
    def num_storing_layers(self) -> int:
        """Number of layers up to the last one that stores anything in the cache or in states."""
        shared = [self.shape_of(layer).reads is not None for layer in range(self.num_layers)]
        return max(layer + 1 for layer, reads in enumerate(shared) if not reads)

    def layers_like(self, layer: int, count: int = 1, **sizes: Any) -> ModelConfig:
        """Return the configuration of a model of ``count`` layers like layer ``layer`` (from 0).

        ``sizes`` are values of other fields.
        """
        changes: dict[str, Any] = {
            "windows": (self.window_of(layer),) * count,
            "rope": self.rope_of(layer),
            "layer_ropes": (),
            "attention_shapes": (),
            "intermediate_sizes": (),
            "sublayers": self.sublayers[layer : layer + 1] * count,
            "mixture": _like_layer(self.mixture, layer, count),
            "convolution": _like_layer(self.convolution, layer, count),
            "recurrent": _like_layer(self.recurrent, layer, count),
        }
        return replace(self.of_layer(layer), num_layers=count, **(changes | sizes))

    def plain_layers(self, layer: int, count: int = 1, **sizes: Any) -> ModelConfig:
        """Return the configuration of a drafter with the sizes of layer ``layer`` of this model.

        Its ``count`` layers are plain (:attr:`is_plain`). ``sizes`` are values of other fields.
        """
        like = self.layers_like(layer, count, **sizes)
        return replace(like, rope=like.rope or self.rope, weight_factors={}, **_PLAIN_VALUES)

    @property
    def is_plain(self) -> bool:
        """Whether all layers compute the same as those of Llama, Mistral, Qwen or GPT-2."""
        has_plain_values = all(
            getattr(self, name) == value for name, value in _PLAIN_VALUES.items()
        )
        return has_plain_values and not self.layer_ropes

    @property
    def has_values_in_keys(self) -> bool:
        """Whether the cache stores no values, because the first elements of a key are the value."""
        return self.latent is not None

    @property
    def value_dim(self) -> int:
        """Size of a value in the cache: ``head_dim``, or that of a latent."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def group(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Output sizes of the projections to queries, keys and values: heads times ``head_dim``."""
        kv_size = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_size, kv_size

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

    @cached_property
    def window(self) -> int | None:
        """Largest sliding window of the layers, in tokens; ``None`` if a layer has none."""
        sizes = [size for size in self.windows if size is not None]
        return max(sizes) if len(sizes) == self.num_layers else None


_LayerKind = TypeVar("_LayerKind", MixtureConfig, ConvolutionConfig, RecurrentConfig)


def _like_layer(kind: _LayerKind | None, layer: int, count: int) -> _LayerKind | None:
    """Return a kind of layers, such as a mixture, of ``count`` layers like layer ``layer``.

    ``None`` if this layer is of another kind.
    """
    if kind is None or not kind.layers[layer]:
        return None
    return replace(kind, layers=(True,) * count)


# Fields whose default values mean layers as in Llama, Mistral, Qwen and GPT-2.
_PLAIN_FIELDS = frozenset(
    {
        "norm_places",
        "norm_offset",
        "attention_shapes",
        "intermediate_sizes",
        "layer_input_size",
        "layer_scalars",
        "sublayers",
        "clamped_gate",
        "mixture",
        "convolution",
        "recurrent",
        "latent",
        "gated_attention",
        "head_gates",
        "value_norm",
        "whole_qk_norm",
        "attention_scale",
        "attention_cap",
        "attention_sinks",
        "query_growth",
        "embedding_scale",
        "residual_scale",
        "logits_scale",
        "logits_cap",
    }
)
_PLAIN_VALUES: dict[str, Any] = {
    each.name: each.default for each in fields(ModelConfig) if each.name in _PLAIN_FIELDS
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
    """Return the configuration of a new Llama model to train.

    The LM head shares the weights of the embedding; weights are stored in bfloat16.

    Args:
        hidden: hidden size, a multiple of ``heads``.
        layers: number of layers.
        heads: number of heads of queries.
        kv_heads: number of heads of keys and values.
        mlp: width of the MLP.
        vocab: number of tokens of the vocabulary.
        context: maximum number of tokens of a text.
        eos_ids: ids of the tokens that end a text.
    """
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
