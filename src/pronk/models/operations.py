"""The operations of a forward pass, as C structures that the kernels run in one call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pronk.base.arrays import Array, DType, address_of
from pronk.cache.paged import PagedCache, SavedFeature
from pronk.checkpoint.config import MixtureConfig, ModelConfig
from pronk.checkpoint.gguf.blocks import BlockMatrix
from pronk.checkpoint.rope import RopeConfig, RopeTable
from pronk.kernels.library import TYPES, Kernels
from pronk.kernels.structures import (
    NUM_ROPE_TABLES,
    CAdapter,
    CDraftChain,
    CForward,
    COp,
    CWeights,
)
from pronk.kernels.threads import num_threads
from pronk.kernels.weights import describe_blocks
from pronk.models.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from pronk.models.decoder import Decoder, Layer
    from pronk.models.kernel_batch import KernelChoices
    from pronk.models.linear import Experts, Linear, Norm, StackedLinear

# Kinds of operations, numbered as ``pronk_kind`` in ``csrc/pronk.h``.
(
    _EMBED,
    _LINEAR,
    _QKV,
    _ATTEND,
    _STORE,
    _NORM,
    _ROUTE,
    _CONVOLVE,
    _GATE,
    _MIX,
    _RECUR,
    _LAYER_INPUTS,
    _HEADS,
    _LATENT,
    _GROUP_NORM,
) = range(15)
# Buffers that an operation reads or writes, numbered as ``pronk_buffer`` in ``csrc/pronk.h``.
_STREAM, _A, _B, _LOGITS, _SCORES, _C, _INPUTS, _SLOTS = range(8)
_BUFFERS = {"stream": _STREAM, "A": _A, "B": _B, "C": _C, "logits": _LOGITS, "scores": _SCORES}
# How a matrix product treats experts (``pronk_mixing``): one output row for each expert of a row,
# or the weighted sum over the experts of a row.
_SPREAD = 1
_GATHER = 2
# Kinds of norms, numbered as ``pronk_norm_kind`` in ``csrc/pronk.h``; 0 means no norm.
_RMS_NORM = 1
_LAYER_NORM = 2
# Update rules of recurrent layers, numbered as ``pronk_rule`` in ``csrc/pronk.h``.
_RULES = {"gated_delta": 0, "mamba2": 1}
_ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "clamped": 4, "relu2": 5}


class LinearOutput(NamedTuple):
    """Factors of a linear layer's outputs, and the place that they are written to."""

    scale: float = 1.0
    cap: float = 0.0  # soft cap: ``cap · tanh(output / cap)``; 0 for none
    # Layer (from 0) whose inputs the activated outputs are multiplied by; ``None``: none.
    layer_input: int | None = None
    # ``(i, n)``: the rows of the output, buffer ``A`` or ``B``, have ``n`` elements, of which those
    # from ``i`` on are written; ``None``: the outputs are the row.
    columns: tuple[int, int] | None = None
    # Feature of the cache that the outputs are, instead of those of a buffer; ``None``: none.
    feature: SavedFeature | None = None


class HeadNorms(NamedTuple):
    """Norms of the heads of queries, keys and values before the rotation; ``None``: no norm."""

    queries: Norm | None = None
    keys: Norm | None = None
    values: Norm | None = None


class KVSource(NamedTuple):
    """The keys and values that an attention reads: a layer of its model's cache, or another's.

    A forward pass writes the model's own cache: a layer can read what an earlier layer has stored,
    also in this pass. Other caches hold what other models have stored; the pass only reads them.

    A row at position ``p`` of its text sees the cached tokens before ``p`` and, in the model's own
    cache, its ancestors in the token tree and itself. If the source's layer has a sliding window of
    ``w`` tokens, only positions above ``p - w`` are seen. The queries have the rotations of the
    source's layer.
    """

    layer: int  # number of the layer, from 0
    cache: int = 0  # 0: the model's own cache; ``n > 0``: ``Program.other_caches[n - 1]``


class Operations:
    """A list of operations that is built once; the kernels run it in one call, any number of times.

    :class:`~pronk.models.program.Program` adds the operations of whole layers.

    Attributes:
        keeps_states: whether a run advances the states of recurrent layers past the tokens of the
            text. False if the operations compute only some of the layers.
    """

    def __init__(
        self,
        kernels: Kernels,
        hidden: int,
        dtype: DType,
        cache: PagedCache | None = None,
        other_caches: Sequence[PagedCache] = (),
    ) -> None:
        """Create an empty list.

        Args:
            kernels: library and instruction set that run the operations.
            hidden: width of the residual stream (the *stream*).
            dtype: data type of the stream, float32 or bfloat16.
            cache: KV cache of the model; ``None`` without attention, convolution and recurrence.
            other_caches: KV caches of other models that layers read (:class:`KVSource`).
        """
        self.kernels = kernels
        self.hidden = hidden
        self.dtype = dtype
        self.cache = cache
        self.other_caches = other_caches
        self.keeps_states = True
        self._ops: list[COp] = []
        # RoPE tables that the operations use, in the order of the kernels' list ``pronk_pass.rope``
        self._ropes: dict[RopeConfig, RopeTable] = {}
        self._kept_alive: list[object] = []  # objects whose memory the operations point to
        self._has_recurrence = False
        # C array of the operations; ``None`` before the first run
        self._compiled: ctypes.Array[COp] | None = None
        # what is equal in all passes
        self._any_pass = CForward(
            type=TYPES[self.dtype], hidden=hidden, isa=kernels.isa, fast=int(kernels.fast)
        )

    def cache_of(self, kv: KVSource) -> PagedCache:
        """Return the cache with the keys and values of ``kv``.

        Its ``config`` has the sizes of their heads.
        """
        if kv.cache:
            return self.other_caches[kv.cache - 1]
        assert self.cache is not None, "expected a KV cache for attention, found none"
        return self.cache

    def embed(
        self,
        decoder: Decoder,
        *,
        norm: Norm | None = None,
        part: tuple[int, int] | None = None,
        zero_first: bool = False,
    ) -> None:
        """Append ``stream = norm(scale · token embeddings (+ learned position embeddings))``.

        The scale is ``config.embedding_scale`` of ``decoder``. With ``part=(i, n)``, the result is
        written to the buffer ``A`` instead, whose rows are ``n`` times as wide as the stream: it is
        part ``i``, from 0, of each row. With ``zero_first``, the row of a text's first token is
        zero.
        """
        op = self._append(_EMBED)
        op.output = _STREAM if part is None else _A
        op.zero_first = int(zero_first)
        op.part, op.parts = part or (0, 0)
        self._set_norm(op, norm)
        op.scale = float(np.asarray(decoder.config.embedding_scale).astype(self.dtype))
        # the kernels read token and position embeddings in the same data type
        if decoder.positions is not None:
            op.positions = self._keep_alive(
                decoder.positions.astype(decoder.embedding.dtype, copy=False)
            )
        if decoder.table is not None:
            self._set_weights(op, decoder.table)
        else:
            op.table = self._keep_alive(decoder.embedding)
        op.table_type = TYPES[decoder.embedding.dtype]

    def layer_inputs(self, decoder: Decoder) -> None:
        """Append the computation of per-layer inputs (Gemma 3n, Gemma 4), for :meth:`layer_input`.

        A row has one input per layer, of ``n = config.layer_input_size`` elements::

            (norm(x W / sqrt(hidden size)) + sqrt(n) * embedding) / sqrt(2)

        ``x`` is the row of the stream, ``W`` a projection to the inputs of all layers, and
        ``embedding`` the row's token in the layer's own table. The norm is over the elements of one
        layer. The attribute ``layer_inputs`` of ``decoder`` has the weights.
        """
        inputs = decoder.layer_inputs
        assert inputs is not None, "expected a model with embeddings of single layers"
        config = decoder.config
        scale = LinearOutput(1.0 / math.sqrt(config.hidden_size))
        self.linear(inputs.projection, to="B", output=scale)
        op = self._append(_LAYER_INPUTS)
        op.output = _INPUTS
        op.parts = config.num_layers
        op.columns = config.layer_input_size
        op.scale = float(np.asarray(math.sqrt(config.layer_input_size)).astype(self.dtype))
        self._set_norm(op, inputs.norm)
        if isinstance(inputs.table, BlockMatrix):
            op.table_format, struct = describe_blocks(inputs.table)
            self._kept_alive.append(struct)
            op.w = ctypes.pointer(struct)
            op.table = self._keep_alive(inputs.table.parts[0].stored)
        else:
            op.table_type = TYPES[inputs.table.dtype]
            op.table = self._keep_alive(inputs.table)

    def project(
        self,
        linear: Linear | StackedLinear,
        norm: Norm | None,
        config: ModelConfig,
        kv: KVSource,
        head_norms: HeadNorms | None = None,
        *,
        only_queries: bool = False,
        source: str = "stream",
    ) -> None:
        """Append queries, keys and values: ``norm(source) Wᵀ + b``, rotated.

        Keys and values are stored.

        Args:
            linear: layer with the outputs of all query heads, then of the key heads, then of the
                value heads.
            norm: norm of ``source``, which is then the stream; ``None``: ``source`` is read as it
                is.
            config: number, scale and growth of the queries.
            kv: where keys and values are stored: a layer of the model's own cache, which determines
                the rotations.
            head_norms: norms of queries, keys and values; ``None``: none.
            only_queries: whether ``linear`` has only queries. An earlier layer or another model has
                stored ``kv``.
            source: ``"stream"`` or ``"A"``.
        """
        head_norms = head_norms or HeadNorms()
        if config.whole_qk_norm:
            assert head_norms.queries is not None, "expected a norm of all queries"
            self.linear(linear, norm=norm, source=source, to="B")
            op = self._heads(config, kv, head_norms, only_queries=only_queries)
            op.input = _B
            op.eps = head_norms.queries.eps
            return
        first_head = 0
        for part in linear.parts:
            op = self._heads(config, kv, head_norms, only_queries=only_queries)
            op.input = _BUFFERS[source]
            self._set_weights(op, part)
            self._set_norm(op, norm)
            op.eps = op.eps if head_norms.queries is None else head_norms.queries.eps
            op.first_head = first_head
            first_head += part.out_features // config.head_dim
        num_heads = config.num_heads + (0 if only_queries else 2 * config.num_kv_heads)
        assert first_head == num_heads, "expected as many outputs as heads"

    def _heads(
        self, config: ModelConfig, kv: KVSource, head_norms: HeadNorms, *, only_queries: bool
    ) -> COp:
        """Append an operation that rotates the heads of a layer, and stores keys and values."""
        op = self._append(_QKV)
        op.heads = config.num_heads
        op.head_dim = config.head_dim
        rope = self.cache_of(kv).config.rope_of(kv.layer)
        if rope is not None:
            op.rope = self._rope_index(rope, self.cache_of(kv)) + 1
            op.rope_dim = rope.dim
        op.scale = config.query_scale
        op.query_growth, op.query_period = config.query_growth or (0.0, 1)
        if not only_queries:
            assert not kv.cache, (
                "expected keys of the model's own cache, found another, which is only read"
            )
            op.kv_heads = config.num_kv_heads
            self._kv_cache(op, kv)
        op.q_norm, op.k_norm, op.v_norm = [
            None if norm is None else self._keep_alive(norm.weight) for norm in head_norms
        ]
        return op

    def _rope_index(self, rope: RopeConfig, cache: PagedCache) -> int:
        """Return the index of a RoPE table among those that the program passes to the kernels."""
        if rope not in self._ropes:
            assert len(self._ropes) < NUM_ROPE_TABLES, (
                f"expected at most {NUM_ROPE_TABLES} different rotations"
            )
            self._ropes[rope] = cache.rope_table(rope)
        return [*self._ropes].index(rope)

    def attend(self, config: ModelConfig, kv: KVSource, *, sinks: Array | None = None) -> None:
        """Append ``A = attention`` of the queries to ``kv``.

        ``config`` has the number of query heads and the soft cap of scores. ``sinks`` has a score
        for each head, which takes part in the softmax without a value.
        """
        cache = self.cache_of(kv)
        op = self._append(_ATTEND)
        op.sinks = self._keep_alive(_as_float32(sinks))
        op.heads = config.num_heads
        op.kv_heads = cache.config.shape_of(kv.layer).num_kv_heads
        op.head_dim = config.head_dim
        op.value_dim = config.value_dim
        op.window = cache.config.window_of(kv.layer) or 0
        op.cap = config.attention_cap or 0.0
        op.cache = kv.cache
        op.block_size = cache.block_size
        op.slots = cache.num_slots
        self._kv_cache(op, kv)

    def per_head(self, linear: Linear, *, source: str, width: int, to: str) -> None:
        """Append a product for each head, from buffer to buffer.

        The rows of ``source`` have ``width`` elements. Head ``h`` multiplies the columns ``h · K ..
        (h + 1) · K - 1`` by its matrix. ``linear`` has the outputs of one head after the other,
        ``layout.unit`` of each, and ``K`` inputs.
        """
        op = self._append(_HEADS)
        op.input = _BUFFERS[source]
        op.output = _BUFFERS[to]
        op.input_columns = width
        self._set_matrix(op, linear)

    def latent(self, norm: Norm, config: ModelConfig, kv: KVSource) -> None:
        """Append the queries of latent attention, and store a row ``[c ; r]`` for each token.

        Args:
            norm: norm of ``c``, the token's latent.
            config: number and sizes of the queries, and of the buffers' rows. A row of ``A`` has,
                for each head, the plain part of its query times the head's matrix of keys. A row of
                ``B`` has the plain parts of the queries, the parts to rotate, and ``c`` and ``r``
                before norm and rotation.
            kv: where the row is stored: a layer of the model's own cache.
        """
        sizes = config.latent
        assert sizes is not None
        op = self._append(_LATENT)
        op.heads = config.num_heads
        op.head_dim = config.head_dim
        op.value_dim = sizes.rank
        op.rope_dim = sizes.rope_dim
        rope = self.cache_of(kv).config.rope_of(kv.layer)
        assert rope is not None, "expected a rotation of latent attention, found none"
        op.rope = self._rope_index(rope, self.cache_of(kv)) + 1
        op.scale = config.query_scale
        op.first_column = config.num_heads * sizes.plain_dim
        op.columns = config.num_heads * sizes.query_dim + config.head_dim
        self._set_norm(op, norm)
        self._kv_cache(op, kv)

    def convolve(self, weights: Array, bias: Array | None, cache: PagedCache, layer: int) -> None:
        """Append ``A = c · (convolution of the states b · x)`` of ``B = [b, c, x]``.

        A row's state is stored in its slot of the layer (from 0) of ``cache``, rounded to
        ``cache.dtype``; sums take the rounded states. ``weights`` are ``[hidden, …, taps]``,
        ``bias`` is ``[hidden]``.
        """
        op = self._append(_CONVOLVE)
        self._set_filter(op, weights, bias)
        op.taps = weights.shape[-1]
        op.keys = self._keep_alive(cache.keys[layer])
        op.kv_type = TYPES[cache.dtype]

    def linear(
        self,
        linear: Linear | StackedLinear,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        source: str = "stream",
        to: str = "stream",
        residual: bool = False,
        only_logits_rows: bool = False,
        output: LinearOutput | None = None,
    ) -> None:
        """Append ``to = cap(scale · activation(norm(source) Wᵀ + b))``.

        With ``residual``, the result is added: ``to += …``.

        ``source`` and ``to`` are buffers: ``"stream"``, ``"A"``, ``"B"``, ``"scores"`` or
        ``"logits"``. With ``only_logits_rows``, only the rows of :attr:`ForwardBatch.logits_rows`
        are computed. A gated layer yields ``activation(gate) · up``. ``output`` has the factors and
        the place of the outputs, by default the scale and the cap of ``linear``. Each matrix of a
        stacked layer is an operation, whose input must not be the stream unless it is normed.
        """
        output = output or LinearOutput(linear.scale, linear.cap or 0.0)
        is_stacked = len(linear.parts) > 1
        first, width = output.columns or (0, linear.out_features)
        for part in linear.parts:
            place = output._replace(columns=(first, width)) if is_stacked else output
            op = self._product(norm, activation, source, to, place)
            self._set_weights(op, part)
            op.residual = int(residual)
            op.wanted = int(only_logits_rows)
            first += part.out_features

    def experts(
        self,
        experts: Experts,
        *,
        source: str,
        to: str,
        activation: str | None = None,
        residual: bool = False,
        output: LinearOutput | None = None,
    ) -> None:
        """Append :meth:`linear` of the experts that the last :meth:`route` chose for each row."""
        op = self._product(None, activation, source, to, output or LinearOutput())
        self._set_mixture(op, experts.mixture)
        op.mixing = _GATHER if experts.gathers else _SPREAD
        packed = [each.packed for each in experts.parts]
        structs = (CWeights * len(packed))(*[each.struct for each in packed])
        self._kept_alive += [packed, structs]
        op.w = ctypes.cast(structs, ctypes.POINTER(CWeights))
        op.residual = int(residual)

    def _product(
        self,
        norm: Norm | None,
        activation: str | None,
        source: str,
        to: str,
        output: LinearOutput,
    ) -> COp:
        """Append a matrix product, without its weights."""
        op = self._append(_LINEAR)
        op.scale = output.scale
        op.cap = output.cap
        op.layer_input = 0 if output.layer_input is None else output.layer_input + 1
        op.first_column, op.columns = output.columns or (0, 0)
        op.input = _BUFFERS[source]
        op.output = _BUFFERS[to]
        self._set_feature(op, output.feature)
        op.activation = _ACTIVATIONS[activation]
        self._set_norm(op, norm)
        return op

    def recur(self, layer: Layer, index: int) -> None:
        """Append ``A = norm(o) · silu(z)`` for the outputs ``o`` of a recurrence.

        The norm is left out unless it comes before the gate. Buffer ``B`` has the inputs of the
        convolution and ``z``, the gates of the outputs. ``scores`` has the scalars of each row:
        ``beta`` before its sigmoid, if the update rule has one, and the decay before its bias and
        softplus, for each value head. The states are those of layer ``index`` (from 0) of the
        cache. :class:`~pronk.checkpoint.config.RecurrentConfig` has the formulas, and
        :mod:`pronk.cache.states` explains how the states are kept.

        Args:
            layer: a :class:`~pronk.models.decoder.Layer` with ``recurrent``.
            index: layer number (from 0).
        """
        assert self.cache is not None
        states = self.cache.states
        assert states is not None, "expected a cache with states of recurrent layers"
        config = layer.recurrent
        assert config is not None, "expected a recurrent layer"
        for kind in (_MIX, _RECUR):
            op = self._append(kind)
            op.heads = config.value_heads
            op.kv_heads = config.key_heads
            op.head_dim = config.key_dim
            op.value_dim = config.value_dim
            op.tiled = int(config.tiled_heads)
            op.taps = config.taps
            op.rule = _RULES[config.rule]
            op.slots = states.num_slots
            op.num_updates = states.num_updates
            op.state_size = math.prod(states.states[index].shape[1:])
            op.update_size = math.prod(states.updates[index].shape[1:])
            op.states = self._keep_alive(states.states[index])
            op.inputs = self._keep_alive(states.inputs[index])
            op.updates = self._keep_alive(states.updates[index])
        mix, recur = self._ops[-2:]
        self._set_filter(mix, layer.filter, layer.filter_bias)
        recur.decay_rate = self._keep_alive(_as_float32(layer.decay_rate))
        recur.decay_bias = self._keep_alive(_as_float32(layer.decay_bias))
        recur.skip = self._keep_alive(_as_float32(layer.skip))
        if config.norm == "before_gate":
            self._set_norm(recur, layer.mixer_norm)
        self._has_recurrence = True

    def group_norm(self, norm: Norm, groups: int) -> None:
        """Append ``A = norm(A)``, over each of ``groups`` equal parts of its rows.

        ``norm`` has a weight for each element of a row.
        """
        op = self._append(_GROUP_NORM)
        op.heads = groups
        op.columns = len(norm.weight)
        self._set_norm(op, norm)

    def gate(self, target: str, gates: str, width: int, *, heads: int = 1) -> None:
        """Append ``target = target · sigmoid(gates)``.

        ``target`` is buffer ``A`` or ``B``, whose rows have ``width`` elements. ``gates`` is
        buffer ``B`` with as many elements per row, or ``scores`` with one number for each of
        ``heads`` equal parts of a row.
        """
        op = self._append(_GATE)
        op.heads = heads
        op.input = _BUFFERS[gates]
        op.output = _BUFFERS[target]
        op.columns = width

    def norm(
        self,
        norm: Norm | None,
        *,
        source: str | int = "stream",
        to: str = "stream",
        residual: bool = False,
        scale: float = 1.0,
        part: tuple[int, int] | None = None,
        width: int | None = None,
        feature: SavedFeature | None = None,
    ) -> None:
        """Append a norm of a buffer; ``norm=None`` copies the buffer.

        The operation is ``to = scale · norm(source)``, or ``to += scale · norm(source)`` with
        ``residual``. ``to`` is ``"stream"``, ``"A"`` or ``"C"``. A ``source`` ``i`` is
        ``collected[i]``, an argument of :meth:`run`. For ``part``, see :meth:`embed`. Rows have
        ``width`` elements, if both are buffers; by default, as many as the stream. With
        ``feature``, the cache saves the result as this feature, and ``to`` is not changed.
        """
        op = self._append(_NORM)
        if isinstance(source, int):
            op.collected = source + 1
        else:
            op.input = _BUFFERS[source]
        op.output = _BUFFERS[to] if part is None else _A
        self._set_feature(op, feature)
        op.residual = int(residual)
        op.scale = scale
        op.part, op.parts = part or (0, 0)
        op.columns = width or 0
        self._set_norm(op, norm)

    def route(
        self, mixture: MixtureConfig, correction: Array | None, expert_scale: Array | None
    ) -> None:
        """Append the choice of each row's experts and their weights.

        Buffer ``scores`` has the router's outputs. ``correction``, float32 ``[experts]``, is added
        to the scores for the choice; ``None``: nothing is added. The weights of an expert are
        multiplied by its number in ``expert_scale``, float32 ``[experts]``; ``None``: by 1.
        """
        op = self._append(_ROUTE)
        self._set_mixture(op, mixture)
        op.normalized = int(mixture.normalized)
        op.sigmoid = int(mixture.scores == "sigmoid")
        op.groups = mixture.groups
        op.row_groups = mixture.row_groups
        op.group_best = mixture.group_best
        op.scale = mixture.scale
        op.eps = mixture.epsilon
        op.correction = self._keep_alive(correction)
        op.expert_scale = self._keep_alive(expert_scale)

    def store_feature(self, layer: int) -> None:
        """Append an operation: save the residual stream after ``layer`` (from 1) as a feature."""
        assert self.cache is not None
        self._append(_STORE).keys = self._keep_alive(self.cache.features[layer])

    def collect_hidden(self, index: int) -> None:
        """Append an operation: copy the residual stream to ``collected[index]`` of :meth:`run`."""
        self._append(_STORE).collected = index + 1

    def run(
        self,
        batch: ForwardBatch | None,
        stream: Array,
        logits: Array | None = None,
        collected: Array | None = None,
        choices: KernelChoices | None = None,
    ) -> int:
        """Run the program on the rows of a batch.

        Return the number of experts read, over all layers. ``batch`` may be ``None`` for a program
        without embedding, attention and convolution, which needs only the rows of ``stream``.

        ``stream`` ``[rows, hidden]`` is contiguous and changed in place. The operations fill
        ``logits``, float32 ``[rows, outputs]`` or ``[len(batch.logits_rows), outputs]``, and
        ``collected`` ``[collected layers, rows, hidden]``. With ``choices``, the last operation is
        the LM head; the same call then chooses tokens by its logits.
        """
        call = self._make_pass(batch, stream)
        experts_read = ctypes.c_int64()
        call.experts_read = ctypes.addressof(experts_read)
        if logits is not None:
            call.logits = address_of(logits)
        if collected is not None:
            call.collected = address_of(collected)
        if choices is not None:
            call.choices = choices.structs
        self.kernels.run(self._compiled or self._compile(), len(self._ops), call)
        return experts_read.value

    def draft_chain(
        self, batch: ForwardBatch, stream: Array, logits: Array, chain: CDraftChain
    ) -> int:
        """Draft a chain: run the program on one request's rows, then on each draft token.

        Returns the number of forward passes; see :meth:`Kernels.draft_chain`.

        ``logits``, float32 ``[1, vocab]``, is overwritten with the logits of each forward pass.
        """
        call = self._make_pass(batch, stream, extra_positions=chain.steps)
        call.logits = address_of(logits)
        ops = self._compiled or self._compile()
        return self.kernels.draft_chain(ops, len(self._ops), call, chain)

    def first_op(self) -> int:
        """Return the address of the first operation, as long as nothing is appended."""
        return ctypes.addressof(self._compiled or self._compile())

    def _make_pass(
        self, batch: ForwardBatch | None, stream: Array, *, extra_positions: int = 0
    ) -> CForward:
        """Return the arguments of a forward pass as a C structure, without addresses of results."""
        call = CForward.from_buffer_copy(self._any_pass)
        call.rows = len(stream)
        call.threads = num_threads()
        call.stream = address_of(stream)
        if batch is None:
            return call
        arrays = batch.for_kernels
        call.segments = len(arrays.segments)
        call.segment = arrays.segments
        if arrays.others is not None:
            call.num_others = arrays.num_others
            call.others = arrays.others
        call.tokens = arrays.tokens.buffer_info()[0]
        call.num_wanted = len(batch.logits_rows)
        call.wanted = arrays.logits_rows
        if self._has_recurrence:
            assert self.cache is not None
            call.recurrence = batch.begin_states(
                self.cache, keeps=self.keeps_states, num_extra=extra_positions
            )
            traffic = None if self.cache.states is None else self.cache.states.traffic
            if traffic is not None:
                call.state_bytes = address_of(traffic)
        for index, rope in enumerate(self._ropes.values()):
            if rope.dynamic:
                call.rope[index] = address_of(batch.dynamic_rope_entries(rope))
                call.rope_by_row[index] = 1
            else:
                call.rope[index] = rope.address_up_to(batch.num_positions + extra_positions)
        return call

    def _compile(self) -> ctypes.Array[COp]:
        """Return the operations as a C array, which is kept for later passes."""
        self._compiled = (COp * len(self._ops))(*self._ops)
        return self._compiled

    def _append(self, kind: int) -> COp:
        op = COp(kind=kind, scale=1.0)
        if self.cache is not None:
            op.block_size = self.cache.block_size
            op.slots = self.cache.num_slots
        self._ops.append(op)
        return op

    def _kv_cache(self, op: COp, kv: KVSource) -> None:
        cache = self.cache_of(kv)
        op.kv_type = TYPES[cache.kv_dtype]
        keys = cache.keys[kv.layer]
        op.keys = self._keep_alive(keys if len(keys) else None)
        op.values = self._keep_alive(cache.values[kv.layer])
        bias = cache.key_biases.get(kv.layer)
        if bias is not None:
            rope = cache.config.rope_of(kv.layer)
            assert rope is not None, "expected a rotation of keys with biases, found none"
            op.rope = self._rope_index(rope, cache) + 1
            op.rope_dim = rope.dim
            op.key_bias = self._keep_alive(bias.values)
            op.bias_pairs = self._keep_alive(bias.pairs)
            op.num_bias_pairs = len(bias.pairs)

    def _set_matrix(self, op: COp, linear: Linear) -> None:
        """Set the matrix of an operation, without its adapters."""
        self._kept_alive.append(linear.packed)
        op.w = ctypes.pointer(linear.packed.struct)

    def _set_weights(self, op: COp, linear: Linear) -> None:
        """Set the matrix of an operation, and its adapters."""
        self._set_matrix(op, linear)
        adapters = linear.adapters
        structs = (CAdapter * len(adapters))(
            *[CAdapter() if each is None else each.struct for each in adapters]
        )
        self._kept_alive += [adapters, structs]
        op.num_adapters = len(adapters)
        op.adapters = structs

    def _set_filter(self, op: COp, weights: Array, bias: Array | None) -> None:
        """Set the weights ``[channels, …, taps]`` and the bias ``[channels]`` of a convolution."""
        by_tap = weights.reshape(len(weights), -1).T
        op.filter = self._keep_alive(_as_float32(by_tap))
        op.filter_bias = self._keep_alive(_as_float32(bias))

    def _set_feature(self, op: COp, feature: SavedFeature | None) -> None:
        """Let an operation write a feature of the cache, if there is one, instead of a buffer."""
        if feature is None:
            return
        assert self.cache is not None
        op.output = _SLOTS
        op.keys = self._keep_alive(self.cache.features[feature])

    @staticmethod
    def _set_mixture(op: COp, mixture: MixtureConfig) -> None:
        op.experts = mixture.experts
        op.per_row = mixture.per_row

    def _set_norm(self, op: COp, norm: Norm | None) -> None:
        if norm is None:
            return
        op.norm = _RMS_NORM if norm.bias is None else _LAYER_NORM
        op.eps = norm.eps
        op.norm_weight = self._keep_alive(norm.weight)
        op.norm_bias = self._keep_alive(norm.bias)

    def _keep_alive(self, array: Array | None) -> int | None:
        """Return the address of an array, and keep its memory as long as the program exists."""
        if array is None:
            return None
        array = np.ascontiguousarray(array)
        self._kept_alive.append(array)
        return address_of(array)


def _as_float32(array: Array | None) -> Array | None:
    return None if array is None else array.astype(np.float32)
