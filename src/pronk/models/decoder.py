"""Decoder-only transformer, whose layers :class:`~pronk.checkpoint.config.ModelConfig` describes.

The input is *packed rows* ``[rows, hidden]``: tokens of any requests and positions, without a batch
dimension. Only attention, through the KV cache, lets rows interact. ``compile`` appends the
operations of a layer to a :class:`~pronk.models.program.Program`. The first layers can run alone,
for drafters that exit early.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import BFLOAT16, FLOAT32, Array
from pronk.checkpoint.config import MixtureConfig, ModelConfig, RecurrentConfig, Sublayers
from pronk.checkpoint.gguf.blocks import BlockMatrix
from pronk.kernels.library import Kernels
from pronk.models.linear import Experts, Linear, Norm, StackedLinear, WeightLayout
from pronk.models.operations import KVSource
from pronk.models.program import Program
from pronk.models.tensor_plan import plan_tensors


class Attention:
    """Attention with its residual connection, ``x + out(attention(norm(x)))``.

    The weights are set when they are loaded. ``config`` has the sizes of the queries, and of the
    keys and values that the attention stores.
    """

    # The keys and values to attend to; ``qkv`` then has only queries. ``None``: the attention's
    # own, which it stores.
    reads: KVSource | None = None
    attention_norm: Norm | None = None
    qkv: Linear | StackedLinear
    # norm of each query head, or with ``whole_qk_norm`` of all query heads together
    q_norm: Norm | None = None
    # norm of each key head, or with ``whole_qk_norm`` of all key heads together
    k_norm: Norm | None = None
    v_norm: Norm | None = None  # norm of each value head, whose weights are all 1
    # ``[heads]``: score of each head's attention sink, a key without value
    sinks: Array | None = None
    # Projection to the gates of gated attention: one output for each element of ``out``'s input, or
    # for each head.
    attention_gate: Linear | None = None
    # Latent attention, in place of ``qkv`` (:class:`~pronk.checkpoint.config.LatentConfig`): the
    # projection to the latent of the queries and its norm, if there is one, and the projection to
    # the queries; the projection to the token's latent and key, and the latent's norm; the
    # matrices of keys, transposed, and of values of all heads.
    q_a: Linear | None = None
    q_a_norm: Norm
    q_b: Linear
    kv_a: Linear
    kv_a_norm: Norm
    k_b: Linear
    v_b: Linear
    out: Linear
    attention_output_norm: Norm | None = None

    def __init__(self, config: ModelConfig, reads: KVSource | None = None) -> None:
        self.config = config
        self.reads = reads
        if config.value_norm:
            self.v_norm = Norm.of(config, np.ones(config.head_dim, FLOAT32))

    def compile(self, program: Program, index: int) -> None:
        """Append the operations to a program.

        ``index`` is the layer (from 0) that stores keys and values.
        """
        if self.config.latent is not None:
            program.latent_attention(self, index)
        else:
            program.attention(self, index)

    def layout(self, name: str) -> WeightLayout:
        """Return how to pack a linear layer of the attention."""
        latent = self.config.latent
        if latent is not None and name in {"k_b", "v_b"}:
            return WeightLayout(unit=latent.rank if name == "k_b" else latent.value_dim)
        has_heads = name == "qkv" and not self.config.whole_qk_norm
        return WeightLayout(unit=self.config.head_dim if has_heads else None, several=has_heads)

    def linears(self) -> Iterator[Linear]:
        """Yield the linear layers; one that stacks several matrices yields each of them."""
        for value in vars(self).values():
            if isinstance(value, Linear | StackedLinear | Experts):
                yield from value.parts
            elif isinstance(value, Attention):
                yield from value.linears()


class Layer(Attention):
    """Transformer layer: attention, then MLP; the attributes are set when the weights are loaded.

    ``sublayers`` says whether the layer has both, or one of them alone. With ``mixture``, the MLP
    is a mixture of experts, which the router chooses. With ``gates``, the layer has a short
    convolution (:class:`~pronk.checkpoint.config.ConvolutionConfig`) in place of attention. With
    ``recurrent``, it has a recurrence in place of attention, or both
    (:class:`~pronk.checkpoint.config.RecurrentConfig`).
    """

    gates: Linear | None = None  # projection of a convolution: outputs ``b``, ``c``, ``x``
    # weights of a convolution, ``[hidden or num_channels, …, taps]``, the oldest token first
    filter: Array
    filter_bias: Array | None = None  # ``[hidden or num_channels]``
    # Projections of a recurrence: the inputs of the convolution, then the gates of the outputs; the
    # scalars of a row, ``[num_scalars]``; and from the outputs to the hidden size.
    mixer_in: Linear | StackedLinear
    mixer_gates: Linear
    mixer_out: Linear
    decay_rate: Array  # ``[value_heads]``, negative: factor of the softplus of the decay
    decay_bias: Array  # ``[value_heads]``: added to the decay before the softplus
    skip: Array | None = None  # ``[value_heads]``: factor of values that are added to the outputs
    # Norm of the outputs, ``[value_dim]`` before the gates or ``[num_outputs]`` after them.
    mixer_norm: Norm | None = None
    mlp_norm: Norm | None = None
    router: Linear | None = None
    correction: Array | None = None  # ``[experts]``: added to the router's scores for the choice
    up: Linear | Experts  # gate and up projection, if the MLP is gated
    down: Linear | Experts
    # Shared expert of a mixture, which every row uses, and the projection to the gate of its
    # output.
    shared_up: Linear | None = None
    shared_down: Linear
    shared_gate: Linear | None = None
    mlp_output_norm: Norm | None = None
    # Norms of experts and of a shared expert whose norms are separate: of the router's input, of
    # the experts' input, and of the outputs of both.
    router_norm: Norm | None = None
    expert_norm: Norm
    expert_output_norm: Norm
    shared_output_norm: Norm
    expert_scale: Array | None = None  # ``[experts]``: factors of the experts' shares
    # Projections from the stream to a gate of the layer's input, and from there to the stream; and
    # the norm of their output.
    input_gate: Linear | None = None
    input_projection: Linear
    input_norm: Norm
    scalar: Array | None = None  # ``[1]``: factor of the layer's output

    def __init__(
        self,
        config: ModelConfig,
        mixture: MixtureConfig | None = None,
        recurrent: RecurrentConfig | None = None,
        reads: KVSource | None = None,
        sublayers: Sublayers = "both",
    ) -> None:
        super().__init__(config, reads)
        self.recurrent = recurrent
        self.sublayers = sublayers
        if mixture is not None:
            self.up = Experts(mixture, WeightLayout(gated=config.gated), gathers=False)
            self.down = Experts(mixture, WeightLayout(), gathers=True)

    def compile(self, program: Program, index: int) -> None:
        """Append the layer's operations to a program.

        ``index`` is its layer number (from 0) in the KV cache.
        """
        if self.sublayers != "mlp":
            self._compile_mixer(program, index)
        if self.sublayers != "mixer":
            program.mlp(self)
        if self.input_gate is not None:
            program.layer_input(self, index)
        if self.scalar is not None:
            program.norm(None, scale=float(self.scalar[0]))

    def _compile_mixer(self, program: Program, index: int) -> None:
        if self.recurrent is not None and self.recurrent.parallel:
            program.parallel(self, index)
        elif self.recurrent is not None:
            program.recurrence(self, index)
        elif self.gates is not None:
            program.convolution(self, index)
        else:
            super().compile(program, index)

    def layout(self, name: str) -> WeightLayout:
        """Return how to pack the linear layer ``name``, an attribute of this layer."""
        if name in {"qkv", "attention_gate", "k_b", "v_b", "out"}:
            return super().layout(name)
        return WeightLayout(
            gated=self.config.gated and name in {"up", "shared_up"},
            exact=name in {"router", "mixer_gates", "shared_gate"},
            several=name == "mixer_in",
        )


class LayerInputs:
    """Embeddings of single layers (Gemma 4): for each token and layer, some numbers.

    The attributes are set when the weights are loaded.

    Attributes:
        table: the embeddings, ``[vocab, layers · size]``, as numbers or in GGUF blocks: a view of
            the mapped file, from which a pass reads one row per token.
        projection: projection of the model's embedding to ``layers · size`` numbers.
        norm: norm of the ``size`` numbers of each layer.
    """

    table: Array | BlockMatrix
    projection: Linear
    norm: Norm

    def rows(self, tokens: NDArray[np.int32]) -> Array:
        """Return the rows ``[len(tokens), layers · size]`` of the table for token ids."""
        if isinstance(self.table, BlockMatrix):
            return self.table.dequantize_rows(tokens)
        return self.table[tokens]

    def layout(self, name: str) -> WeightLayout:
        """Return how to pack the linear layer ``name``: ``projection``."""
        del name  # there is one
        return WeightLayout()


class Decoder:
    """Language model on packed rows; the attributes are set when the weights are loaded.

    Attributes:
        config: architecture and sizes.
        kernels: the kernels that compute the model.
        embedding: ``[vocab, hidden]``; ``[0, hidden]`` if the embedding is quantized (``table``).
        table: the quantized embedding, which with tied weights is also the ``head``; ``None`` if it
            is not quantized.
        layer_inputs: embeddings of single layers; ``None``: the model has none.
        positions: learned position embeddings ``[context, hidden]``; ``None`` with RoPE.
        stored_bytes: size in the checkpoint's files of all tensors except lookup tables; ``None``
            without files.
    """

    embedding: Array
    norm: Norm
    head: Linear

    def __init__(
        self, config: ModelConfig, kernels: Kernels, layer_config: ModelConfig | None = None
    ) -> None:
        """Create the layers.

        ``layer_config`` has the sizes of this process's layers in tensor parallelism.
        """
        self.config = config
        self.kernels = kernels
        self.table: Linear | None = None
        self.layer_inputs = LayerInputs() if config.layer_input_size else None
        self.positions: Array | None = None
        self.stored_bytes: int | None = None
        self.layers = [
            self._make_layer((layer_config or config).of_layer(index), index)
            for index in range(config.num_layers)
        ]

    def _make_layer(self, sizes: ModelConfig, index: int) -> Layer:
        """Return layer ``index`` (from 0), without weights; ``sizes`` has those of its own."""
        source = self.config.shape_of(index).reads
        return Layer(
            sizes,
            self.config.mixture_of(index),
            self.config.recurrent_of(index),
            None if source is None else KVSource(source),
            self.config.sublayers_of(index),
        )

    def get(self, path: str) -> Any:
        """Return the object at an attribute path such as ``layers.0``.

        The empty path is the decoder.
        """
        found: Any = self
        for name in path.split(".") if path else ():
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        return found

    @cached_property
    def has_uniform_activations(self) -> bool:
        """Whether the layers that store keys, and the rest, round activations as all do together.

        A program has activations in bfloat16 if all its weights are, and else in float32. Routers
        do not count.
        """
        last = self.config.num_storing_layers
        common = set[str]()
        if self.layer_inputs is not None:
            common.add(self.layer_inputs.projection.packed.format)
        first = common.union(*map(_formats, self.layers[:last]))
        rest = common.union([self.head.packed.format], *map(_formats, self.layers[last:]))
        rounded = {str(BFLOAT16)}
        return (first == rounded) == (rest == rounded) == (first | rest == rounded)

    def linears(self) -> Iterator[Linear]:
        """Yield all linear layers, the LM head first; stacked matrices come one by one.

        A tied head counts once.
        """
        yield self.head
        if self.layer_inputs is not None:
            yield self.layer_inputs.projection
        for layer in self.layers:
            yield from layer.linears()


def _formats(layer: Layer) -> set[str]:
    """Return the formats of a layer's weights, without its router."""
    linears = [linear for linear in layer.linears() if linear is not layer.router]
    return {linear.packed.format for linear in linears}


@dataclass(frozen=True)
class ForwardWeights:
    """Weight matrices of a forward pass; an embedding counts if it is also the LM head."""

    # formats in memory, most bytes first, such as ``int4 in groups of 32, int8 in groups of 128``
    formats: str
    nbytes: int  # size in memory in bytes, scales, minima and padding included
    # Bytes that a forward pass of one row has to read at least: the weights' size in the
    # checkpoint, or in memory if that is less, without experts that the row does not choose.
    floor_bytes: int
    count: int  # number of parameters

    @property
    def bits(self) -> float:
        """Average number of bits per parameter."""
        return 8 * self.nbytes / self.count


def forward_weights(decoder: Decoder) -> ForwardWeights:
    """Return the size and formats of the weight matrices that a forward pass reads."""
    sizes = Counter[str]()
    count = 0
    for linear in decoder.linears():
        sizes[linear.packed.format] += linear.packed.nbytes
        count += linear.in_features * linear.out_features
    total = sizes.total()
    in_file = 1.0 if decoder.stored_bytes is None else min(1.0, decoder.stored_bytes / total)
    floor_bytes = round(in_file * (total - _unread_bytes(decoder)))
    return ForwardWeights(
        ", ".join(kind for kind, _ in sizes.most_common()), total, floor_bytes, count
    )


def _unread_bytes(decoder: Decoder) -> float:
    """Return the size in memory of the experts that a row does not choose."""
    mixture = decoder.config.mixture
    if mixture is None:
        return 0.0
    return expert_bytes(decoder) * (1.0 - mixture.per_row / mixture.experts)


def expert_bytes(decoder: Decoder) -> int:
    """Return the size in memory of all experts of all layers."""
    modules = [
        module
        for layer in decoder.layers
        for module in vars(layer).values()
        if isinstance(module, Experts)
    ]
    return sum(linear.packed.nbytes for module in modules for linear in module.parts)


class FixedCosts(NamedTuple):
    """Arguments of :class:`.CostModel` that follow from the model; see there for their units."""

    experts: float = 0.0
    overlap: float = 1.0
    states: float = 0.0


def fixed_costs(decoder: Decoder, state_bytes: int = 0) -> FixedCosts:
    """Return the costs of experts, and of states of recurrent layers.

    ``state_bytes`` is the size of a request's state, which a pass reads and writes.
    """
    mixture = decoder.config.mixture
    if mixture is None and not state_bytes:
        return FixedCosts()
    total = sum(linear.packed.nbytes for linear in decoder.linears())
    unread = _unread_bytes(decoder)
    traffic = 2 * state_bytes
    read = total - unread + traffic
    if mixture is None:
        return FixedCosts(states=traffic / read)
    experts = (expert_bytes(decoder) - unread) / read
    return FixedCosts(experts, mixture.per_row / mixture.experts, traffic / read)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, without quantization scales.

    A tied embedding and head count once.
    """
    tensors = {
        tensor.name: tensor.shape for part in plan_tensors(config) for tensor in part.tensors
    }
    return sum(map(math.prod, tensors.values()))
