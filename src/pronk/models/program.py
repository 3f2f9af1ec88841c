"""A program is the list of operations of a forward pass, compiled once and run for each batch.

Each layer of a model appends its operations to a program once, with ``layer.compile(program,
index)``. A forward pass is then one call into the library. A decoder layer has these operations,
where ``x`` is the residual stream, and ``A`` and ``B`` are buffers for intermediate activations ::

    qkv     norm(x) W_qkv          rotates queries and keys, stores keys and values; one per matrix
    attend  A = attention
    linear  x = x + A W_out
    linear  B = act(norm(x) W_gate) · (norm(x) W_up)
    linear  x = x + B W_down

An attention that reads the keys of another layer (:class:`KVSource`) has only queries in ``qkv``,
and stores nothing.

A layer with a mixture of experts has these operations in place of the last two ::

    norm    A = norm(x)
    linear  scores = A W_router
    route   choose experts by their scores, and compute their shares, for each row
    linear  B = act(A W_gate) · (A W_up)                for each row and each of its experts
    linear  x = x + sum over experts of share · B W_down

A layer with a short convolution has these operations in place of the first three ::

    linear    B = norm(x) W_gates
    convolve  A = gated convolution of B and of the last tokens' states; stores the rows' states
    linear    x = x + A W_out

A recurrent layer has these operations in place of the first three ::

    linear    B = norm(x) W_in            inputs of the convolution, then gates of the outputs
    linear    scores = norm(x) W_gates    scalars of the row, one or two for each value head
    recur     A = gated outputs of the recurrence of B and scores; before the gates, perhaps normed
    norm      A = norm(A)                 if the norm comes after the gates
    linear    x = x + A W_mixer_out

A layer with a recurrence and attention of the same input has the operations of both. The
recurrence adds its outputs to ``x`` after ``qkv`` has read ``x``, and before ``attend``.

Latent attention (:class:`~pronk.checkpoint.config.LatentConfig`) has these operations in place of
the first three; the first two only if queries have a latent ::

    linear    A = norm(x) W_q_a
    norm      A = norm(A)
    linear    B = [A W_q_b, norm(x) W_kv_a]   queries, the token's latent and its key
    per_head  A = plain parts of the queries of B, each times its head's matrix of keys
    latent    queries of A and B, rotated; stores the token's normalized latent and rotated key
    attend    A = attention, whose values are the latents
    per_head  B = outputs of A, each times its head's matrix of values
    linear    x = x + B W_out

With gated attention, ``attend`` is followed by ::

    linear    B = norm(x) W_gate          with a gate for each head: scores
    gate      A = A · sigmoid(B)

With a shared expert, the operations of the experts are followed by ::

    linear    B = act(A W_gate) · (A W_up)
    linear    scores = A W_shared_gate
    gate      B = B · sigmoid(scores)                   one number for each row
    linear    x = x + B W_down

With separate norms of experts and shared expert, the MLP has these operations, where ``C`` is a
buffer as wide as the stream ::

    linear  B = act(norm(x) W_gate) · (norm(x) W_up)       shared expert
    linear  A = B W_down
    norm    C = norm(A)
    linear  scores = norm(x) W_router
    route   …
    norm    A = norm(x)
    linear  B = act(A W_gate) · (A W_up)                    experts
    linear  A = sum over experts of share · B W_down
    norm    C = C + norm(A)
    norm    x = x + norm(C)

If layers have embeddings of their own, these operations follow that of the model's embedding ::

    linear  B = x W_inputs                                  inputs of all layers
    inputs  inputs = (norm(B) + layer embeddings of the tokens) / sqrt(2)

and these end a layer, the last one if the layers' outputs are scaled ::

    linear  A = act(x W_input_gate) · inputs of the layer
    linear  B = A W_input_projection
    norm    x = x + norm(B)
    norm    x = scalar · x

Operations of a feature (:class:`~pronk.cache.paged.Feature`) follow a layer. They leave ``x`` as it
is, and write to the cache. Those of an EAGLE-3 head, where ``y`` is the output of an earlier
layer, are ::

    norm    A = [norm(y), norm(x)]                          one operation for each part
    linear  feature = A W_fc

With a norm of a branch's output, ``linear`` writes to a buffer, and ``norm`` adds it to ``x``. With
norms of queries and keys that span all heads, ``linear`` writes the projections to ``B``, and one
``qkv`` operation reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from pronk.base.arrays import Array, DType
from pronk.cache.paged import PagedCache, SavedFeature
from pronk.checkpoint.config import MixtureConfig, ModelConfig
from pronk.models.forward_batch import ForwardBatch


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

    queries: Any = None
    keys: Any = None
    values: Any = None


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


class Program(ABC):
    """A list of operations that is built once and run any number of times.

    ``hidden`` is the width of the residual stream (the *stream*), and ``dtype`` is its dtype,
    float32 or bfloat16. ``cache`` is the KV cache of the model. ``other_caches`` are those of other
    models that layers read (:class:`KVSource`).
    """

    def __init__(
        self,
        hidden: int,
        dtype: DType,
        cache: PagedCache | None,
        other_caches: Sequence[PagedCache],
    ) -> None:
        self.hidden = hidden
        self.dtype = dtype
        self.cache = cache
        self.other_caches = other_caches
        # Whether a run advances the states of recurrent layers past the tokens of the text. False
        # if the program computes only some of the layers.
        self.keeps_states = True

    def cache_of(self, kv: KVSource) -> PagedCache:
        """Return the cache with the keys and values of ``kv``.

        Its ``config`` has the sizes of their heads.
        """
        if kv.cache:
            return self.other_caches[kv.cache - 1]
        assert self.cache is not None, "expected a KV cache for attention, found none"
        return self.cache

    def attention(self, layer: Any, index: int, *, partial: bool = False) -> None:
        """Append an :class:`~pronk.models.decoder.Attention`, with its residual connection.

        The keys and values are stored as those of layer ``index`` (from 0), unless the layer reads
        those of another one (``layer.reads``).

        With ``partial`` (tensor parallelism), the output for this process's heads is written to the
        buffer ``logits`` instead of being added to the stream.
        """
        self._project_heads(layer, index)
        self._attend_heads(layer, index, partial=partial)

    def _project_heads(self, layer: Any, index: int) -> None:
        """Append the projections to queries, keys and values of a layer with attention."""
        self.project(
            layer.qkv,
            layer.attention_norm,
            layer.config,
            layer.reads or KVSource(index),
            HeadNorms(layer.q_norm, layer.k_norm, layer.v_norm),
            only_queries=layer.reads is not None,
        )

    def _attend_heads(self, layer: Any, index: int, *, partial: bool = False) -> None:
        """Append the attention of the projected queries, with its residual connection."""
        self.attend(layer.config, layer.reads or KVSource(index), sinks=layer.sinks)
        if layer.attention_gate is not None:
            gates = "scores" if layer.config.head_gates else "B"
            self.linear(layer.attention_gate, norm=layer.attention_norm, to=gates)
            self.gate("A", gates, layer.out.in_features, heads=layer.config.num_heads)
        self._add_branch(layer.out, "A", layer.attention_output_norm, layer.config, partial=partial)

    def latent_attention(self, layer: Any, index: int) -> None:
        """Append a layer's latent attention, with its residual connection."""
        config = layer.config
        kv = KVSource(index)
        norm = layer.attention_norm
        source = "stream"
        if layer.q_a is not None:
            self.linear(layer.q_a, norm=norm, to="A")
            self.norm(layer.q_a_norm, source="A", to="A", width=layer.q_a.out_features)
            source = "A"
            norm = None
        num_queries = layer.q_b.out_features
        width = num_queries + layer.kv_a.out_features
        self.linear(
            layer.q_b, norm=norm, source=source, to="B", output=LinearOutput(columns=(0, width))
        )
        latents = LinearOutput(columns=(num_queries, width))
        self.linear(layer.kv_a, norm=layer.attention_norm, to="B", output=latents)
        self.per_head(layer.k_b, source="B", width=width, to="A")
        self.latent(layer.kv_a_norm, config, kv)
        self.attend(config, kv)
        self.per_head(layer.v_b, source="A", width=layer.k_b.out_features, to="B")
        self._add_branch(layer.out, "B", layer.attention_output_norm, config, partial=False)

    def convolution(self, layer: Any, index: int) -> None:
        """Append the operations of a layer's short convolution, with its residual connection."""
        assert self.cache is not None
        self.linear(layer.gates, norm=layer.attention_norm, to="B")
        self.convolve(layer.filter, layer.filter_bias, self.cache, index)
        self._add_branch(layer.out, "A", layer.attention_output_norm, layer.config, partial=False)

    def recurrence(self, layer: Any, index: int) -> None:
        """Append the operations of a layer's recurrence, with its residual connection."""
        self._recurrence_outputs(layer, index)
        norm = layer.attention_output_norm
        self._add_branch(layer.mixer_out, "A", norm, layer.config, partial=False)

    def parallel(self, layer: Any, index: int) -> None:
        """Append a recurrence and attention, which read the same rows: the sum of both is added."""
        is_plain = layer.attention_output_norm is None and layer.attention_gate is None
        assert is_plain, "expected plain attention beside a recurrence"
        self._recurrence_outputs(layer, index)
        self._project_heads(layer, index)
        self._add_branch(layer.mixer_out, "A", None, layer.config, partial=False)
        self._attend_heads(layer, index)

    def _recurrence_outputs(self, layer: Any, index: int) -> None:
        """Append ``A``: the gated outputs of a layer's recurrence, normed if it has a norm."""
        self.linear(layer.mixer_in, norm=layer.attention_norm, to="B")
        self.linear(layer.mixer_gates, norm=layer.attention_norm, to="scores")
        self.recur(layer, index)
        if layer.recurrent.norm == "after_gate":
            self.group_norm(layer.mixer_norm, layer.recurrent.key_heads)

    def mlp(self, layer: Any, *, partial: bool = False) -> None:
        """Append the MLP of a decoder layer, with its residual connection.

        With ``partial`` (tensor parallelism), the output of this process's columns is written to
        the buffer ``logits`` instead of being added to the stream.
        """
        activation = "clamped" if layer.config.clamped_gate else layer.config.activation
        if layer.router_norm is not None:
            assert not partial, "expected no experts in tensor parallelism"
            self._separate_mlps(layer, activation)
            return
        if layer.router is None:
            self.linear(layer.up, norm=layer.mlp_norm, activation=activation, to="B")
        else:
            self.norm(layer.mlp_norm, to="A")
            self.linear(layer.router, source="A", to="scores")
            self.route(layer.up.mixture, layer.correction, layer.expert_scale)
            self.linear(layer.up, source="A", activation=activation, to="B")
        self._add_branch(layer.down, "B", layer.mlp_output_norm, layer.config, partial=partial)
        if layer.shared_up is not None:
            self.linear(layer.shared_up, source="A", activation=activation, to="B")
            if layer.shared_gate is not None:
                self.linear(layer.shared_gate, source="A", to="scores")
                self.gate("B", "scores", layer.shared_down.in_features)
            self._add_branch(layer.shared_down, "B", None, layer.config, partial=partial)

    def _separate_mlps(self, layer: Any, activation: str) -> None:
        """Append a shared expert and experts with separate norms, and their residual connection."""
        self.linear(layer.shared_up, norm=layer.mlp_norm, activation=activation, to="B")
        self.linear(layer.shared_down, source="B", to="A")
        self.norm(layer.shared_output_norm, source="A", to="C")
        self.linear(layer.router, norm=layer.router_norm, to="scores")
        self.route(layer.up.mixture, layer.correction, layer.expert_scale)
        self.norm(layer.expert_norm, to="A")
        self.linear(layer.up, source="A", activation=activation, to="B")
        self.linear(layer.down, source="B", to="A")
        self.norm(layer.expert_output_norm, source="A", to="C", residual=True)
        self.norm(
            layer.mlp_output_norm, source="C", residual=True, scale=layer.config.residual_scale
        )

    def layer_input(self, layer: Any, index: int) -> None:
        """Append what the layer's own embedding of the token adds to the stream.

        ``index`` is the number (from 0) of the layer.
        """
        factors = LinearOutput(layer_input=index)
        activation = layer.config.activation
        self.linear(layer.input_gate, activation=activation, to="A", output=factors)
        self.linear(layer.input_projection, source="A", to="B")
        self.norm(layer.input_norm, source="B", residual=True)

    def _add_branch(
        self, linear: Any, source: str, norm: Any, config: ModelConfig, *, partial: bool
    ) -> None:
        """Append ``stream += scale · norm(source Wᵀ + b)``, the output of attention or MLP.

        With ``partial``, the output is written to the buffer ``logits`` instead of being added.
        """
        scale = config.residual_scale
        if norm is None:
            self.linear(
                linear,
                source=source,
                to="logits" if partial else "stream",
                residual=not partial,
                output=LinearOutput(scale),
            )
            return
        assert not partial, "expected no norm after a sum over processes"
        buffer = "B" if source == "A" else "A"
        self.linear(linear, source=source, to=buffer)
        self.norm(norm, source=buffer, residual=True, scale=scale)

    @abstractmethod
    def embed(
        self,
        decoder: Any,
        *,
        norm: Any = None,
        part: tuple[int, int] | None = None,
        zero_first: bool = False,
    ) -> None:
        """Append ``stream = norm(scale · token embeddings (+ learned position embeddings))``.

        The scale is ``config.embedding_scale`` of ``decoder``. With ``part=(i, n)``, the result is
        written to the buffer ``A`` instead, whose rows are ``n`` times as wide as the stream: it is
        part ``i``, from 0, of each row. With ``zero_first``, the row of a text's first token is
        zero.
        """

    @abstractmethod
    def layer_inputs(self, decoder: Any) -> None:
        """Append the computation of per-layer inputs (Gemma 3n, Gemma 4), for :meth:`layer_input`.

        A row has one input per layer, of ``n = config.layer_input_size`` elements::

            (norm(x W / sqrt(hidden size)) + sqrt(n) * embedding) / sqrt(2)

        ``x`` is the row of the stream, ``W`` a projection to the inputs of all layers, and
        ``embedding`` the row's token in the layer's own table. The norm is over the elements of one
        layer. The attribute ``layer_inputs`` of ``decoder`` has the weights.
        """

    @abstractmethod
    def project(
        self,
        linear: Any,
        norm: Any,
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

    @abstractmethod
    def attend(self, config: ModelConfig, kv: KVSource, *, sinks: Array | None = None) -> None:
        """Append ``A = attention`` of the queries to ``kv``.

        ``config`` has the number of query heads and the soft cap of scores. ``sinks`` has a score
        for each head, which takes part in the softmax without a value.
        """

    @abstractmethod
    def per_head(self, linear: Any, *, source: str, width: int, to: str) -> None:
        """Append a product for each head, from buffer to buffer.

        The rows of ``source`` have ``width`` elements. Head ``h`` multiplies the columns ``h · K ..
        (h + 1) · K - 1`` by its matrix. ``linear`` has the outputs of one head after the other,
        ``layout.unit`` of each, and ``K`` inputs.
        """

    @abstractmethod
    def latent(self, norm: Any, config: ModelConfig, kv: KVSource) -> None:
        """Append the queries of latent attention, and store a row ``[c ; r]`` for each token.

        Args:
            norm: norm of ``c``, the token's latent.
            config: number and sizes of the queries, and of the buffers' rows. A row of ``A`` has,
                for each head, the plain part of its query times the head's matrix of keys. A row of
                ``B`` has the plain parts of the queries, the parts to rotate, and ``c`` and ``r``
                before norm and rotation.
            kv: where the row is stored: a layer of the model's own cache.
        """

    @abstractmethod
    def convolve(self, weights: Array, bias: Array | None, cache: PagedCache, layer: int) -> None:
        """Append ``A = c · (convolution of the states b · x)`` of ``B = [b, c, x]``.

        A row's state is stored in its slot of the layer (from 0) of ``cache``, rounded to
        ``cache.dtype``; sums take the rounded states. ``weights`` are ``[hidden, …, taps]``,
        ``bias`` is ``[hidden]``.
        """

    @abstractmethod
    def recur(self, layer: Any, index: int) -> None:
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

    @abstractmethod
    def group_norm(self, norm: Any, groups: int) -> None:
        """Append ``A = norm(A)``, over each of ``groups`` equal parts of its rows.

        ``norm`` has a weight for each element of a row.
        """

    @abstractmethod
    def gate(self, target: str, gates: str, width: int, *, heads: int = 1) -> None:
        """Append ``target = target · sigmoid(gates)``.

        ``target`` is buffer ``A`` or ``B``, whose rows have ``width`` elements. ``gates`` is
        buffer ``B`` with as many elements per row, or ``scores`` with one number for each of
        ``heads`` equal parts of a row.
        """

    @abstractmethod
    def linear(
        self,
        linear: Any,
        *,
        norm: Any = None,
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
        ``"logits"``. ``linear`` may be :class:`~pronk.models.linear.Experts`, of which each row
        uses those of the last :meth:`route`. With ``only_logits_rows``, only the rows of
        :attr:`ForwardBatch.logits_rows` are computed. A gated layer yields ``activation(gate)
        · up``. ``output`` has the factors and the place of the outputs, by default the scale and
        the cap of ``linear``.
        """

    @abstractmethod
    def norm(
        self,
        norm: Any,
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

    @abstractmethod
    def route(
        self, mixture: MixtureConfig, correction: Array | None, expert_scale: Array | None
    ) -> None:
        """Append the choice of each row's experts and their weights.

        Buffer ``scores`` has the router's outputs. ``correction``, float32 ``[experts]``, is added
        to the scores for the choice; ``None``: nothing is added. The weights of an expert are
        multiplied by its number in ``expert_scale``, float32 ``[experts]``; ``None``: by 1.
        """

    @abstractmethod
    def store_feature(self, layer: int) -> None:
        """Append an operation: save the residual stream after ``layer`` (from 1) as a feature."""

    @abstractmethod
    def collect_hidden(self, index: int) -> None:
        """Append an operation: copy the residual stream to ``collected[index]`` of :meth:`run`."""

    @abstractmethod
    def run(
        self,
        batch: ForwardBatch | None,
        stream: Array,
        logits: Array | None = None,
        collected: Array | None = None,
    ) -> int:
        """Run the program on the rows of a batch.

        Return the number of experts read, over all layers. ``batch`` may be ``None`` for a program
        without embedding, attention and convolution, which needs only the rows of ``stream``.

        ``stream`` ``[rows, hidden]`` is contiguous and changed in place. The operations fill
        ``logits``, float32 ``[rows, outputs]`` or ``[len(batch.logits_rows), outputs]``, and
        ``collected`` ``[collected layers, rows, hidden]``.
        """


def linear_output(linear: Any) -> LinearOutput:
    """Return the scale and the soft cap of a linear layer's outputs; by default 1 and no cap."""
    return LinearOutput(getattr(linear, "scale", 1.0), getattr(linear, "cap", None) or 0.0)
