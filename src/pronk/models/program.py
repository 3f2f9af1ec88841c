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

from typing import TYPE_CHECKING

from pronk.checkpoint.config import ModelConfig
from pronk.models.linear import Experts, Linear, Norm, StackedLinear
from pronk.models.operations import HeadNorms, KVSource, LinearOutput, Operations

if TYPE_CHECKING:
    from pronk.models.decoder import Attention, Layer


class Program(Operations):
    """A list of operations to which layers append theirs; built once and run any number of times.

    The arguments are those of :class:`Operations`.
    """

    def attention(self, layer: Attention, index: int, *, partial: bool = False) -> None:
        """Append an :class:`~pronk.models.decoder.Attention`, with its residual connection.

        The keys and values are stored as those of layer ``index`` (from 0), unless the layer reads
        those of another one (``layer.reads``).

        With ``partial`` (tensor parallelism), the output for this process's heads is written to the
        buffer ``logits`` instead of being added to the stream.
        """
        self._project_heads(layer, index)
        self._attend_heads(layer, index, partial=partial)

    def _project_heads(self, layer: Attention, index: int) -> None:
        """Append the projections to queries, keys and values of a layer with attention."""
        self.project(
            layer.qkv,
            layer.attention_norm,
            layer.config,
            layer.reads or KVSource(index),
            HeadNorms(layer.q_norm, layer.k_norm, layer.v_norm),
            only_queries=layer.reads is not None,
        )

    def _attend_heads(self, layer: Attention, index: int, *, partial: bool = False) -> None:
        """Append the attention of the projected queries, with its residual connection."""
        self.attend(layer.config, layer.reads or KVSource(index), sinks=layer.sinks)
        if layer.attention_gate is not None:
            gates = "scores" if layer.config.head_gates else "B"
            self.linear(layer.attention_gate, norm=layer.attention_norm, to=gates)
            self.gate("A", gates, layer.out.in_features, heads=layer.config.num_heads)
        self._add_branch(layer.out, "A", layer.attention_output_norm, layer.config, partial=partial)

    def latent_attention(self, layer: Attention, index: int) -> None:
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

    def convolution(self, layer: Layer, index: int) -> None:
        """Append the operations of a layer's short convolution, with its residual connection."""
        assert self.cache is not None
        assert layer.gates is not None, "expected a layer with a short convolution"
        self.linear(layer.gates, norm=layer.attention_norm, to="B")
        self.convolve(layer.filter, layer.filter_bias, self.cache, index)
        self._add_branch(layer.out, "A", layer.attention_output_norm, layer.config, partial=False)

    def recurrence(self, layer: Layer, index: int) -> None:
        """Append the operations of a layer's recurrence, with its residual connection."""
        self._recurrence_outputs(layer, index)
        norm = layer.attention_output_norm
        self._add_branch(layer.mixer_out, "A", norm, layer.config, partial=False)

    def parallel(self, layer: Layer, index: int) -> None:
        """Append a recurrence and attention, which read the same rows: the sum of both is added."""
        is_plain = layer.attention_output_norm is None and layer.attention_gate is None
        assert is_plain, "expected plain attention beside a recurrence"
        self._recurrence_outputs(layer, index)
        self._project_heads(layer, index)
        self._add_branch(layer.mixer_out, "A", None, layer.config, partial=False)
        self._attend_heads(layer, index)

    def _recurrence_outputs(self, layer: Layer, index: int) -> None:
        """Append ``A``: the gated outputs of a layer's recurrence, normed if it has a norm."""
        self.linear(layer.mixer_in, norm=layer.attention_norm, to="B")
        self.linear(layer.mixer_gates, norm=layer.attention_norm, to="scores")
        self.recur(layer, index)
        config = layer.recurrent
        assert config is not None, "expected a recurrent layer"
        if config.norm == "after_gate":
            assert layer.mixer_norm is not None, "expected a norm of the outputs"
            self.group_norm(layer.mixer_norm, config.key_heads)

    def mlp(self, layer: Layer, *, partial: bool = False) -> None:
        """Append the MLP of a decoder layer, with its residual connection.

        With ``partial`` (tensor parallelism), the output of this process's columns is written to
        the buffer ``logits`` instead of being added to the stream.
        """
        activation = "clamped" if layer.config.clamped_gate else layer.config.activation
        if layer.router_norm is not None:
            assert not partial, "expected no experts in tensor parallelism"
            self._separate_mlps(layer, activation)
            return
        if isinstance(layer.up, Experts):
            assert layer.router is not None, "expected a router of experts"
            self.norm(layer.mlp_norm, to="A")
            self.linear(layer.router, source="A", to="scores")
            self.route(layer.up.mixture, layer.correction, layer.expert_scale)
            self.experts(layer.up, source="A", activation=activation, to="B")
        else:
            self.linear(layer.up, norm=layer.mlp_norm, activation=activation, to="B")
        self._add_branch(layer.down, "B", layer.mlp_output_norm, layer.config, partial=partial)
        if layer.shared_up is not None:
            self.linear(layer.shared_up, source="A", activation=activation, to="B")
            if layer.shared_gate is not None:
                self.linear(layer.shared_gate, source="A", to="scores")
                self.gate("B", "scores", layer.shared_down.in_features)
            self._add_branch(layer.shared_down, "B", None, layer.config, partial=partial)

    def _separate_mlps(self, layer: Layer, activation: str) -> None:
        """Append a shared expert and experts with separate norms, and their residual connection."""
        assert layer.shared_up is not None
        assert layer.router is not None
        assert isinstance(layer.up, Experts)
        assert isinstance(layer.down, Experts)
        self.linear(layer.shared_up, norm=layer.mlp_norm, activation=activation, to="B")
        self.linear(layer.shared_down, source="B", to="A")
        self.norm(layer.shared_output_norm, source="A", to="C")
        self.linear(layer.router, norm=layer.router_norm, to="scores")
        self.route(layer.up.mixture, layer.correction, layer.expert_scale)
        self.norm(layer.expert_norm, to="A")
        self.experts(layer.up, source="A", activation=activation, to="B")
        self.experts(layer.down, source="B", to="A")
        self.norm(layer.expert_output_norm, source="A", to="C", residual=True)
        self.norm(
            layer.mlp_output_norm, source="C", residual=True, scale=layer.config.residual_scale
        )

    def layer_input(self, layer: Layer, index: int) -> None:
        """Append what the layer's own embedding of the token adds to the stream.

        ``index`` is the number (from 0) of the layer.
        """
        assert layer.input_gate is not None, "expected a layer with an embedding of its own"
        factors = LinearOutput(layer_input=index)
        activation = layer.config.activation
        self.linear(layer.input_gate, activation=activation, to="A", output=factors)
        self.linear(layer.input_projection, source="A", to="B")
        self.norm(layer.input_norm, source="B", residual=True)

    def _add_branch(
        self,
        linear: Linear | StackedLinear | Experts,
        source: str,
        norm: Norm | None,
        config: ModelConfig,
        *,
        partial: bool,
    ) -> None:
        """Append ``stream += scale · norm(source Wᵀ + b)``, the output of attention or MLP.

        With ``partial``, the output is written to the buffer ``logits`` instead of being added.
        """
        scale = config.residual_scale
        if isinstance(linear, Experts):
            assert not partial, "expected no experts in tensor parallelism"
            self._add_experts(linear, source, norm, scale)
            return
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

    def _add_experts(self, experts: Experts, source: str, norm: Norm | None, scale: float) -> None:
        """Append the output of a mixture of experts, as :meth:`_add_branch`."""
        if norm is None:
            output = LinearOutput(scale)
            self.experts(experts, source=source, to="stream", residual=True, output=output)
            return
        buffer = "B" if source == "A" else "A"
        self.experts(experts, source=source, to=buffer)
        self.norm(norm, source=buffer, residual=True, scale=scale)
