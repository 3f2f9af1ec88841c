"""Programs of the torch backend: an operation is a function on the tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.backends import (
    Experts,
    ForwardBatch,
    HeadNorms,
    KVSource,
    LinearOutput,
    MixtureConfig,
    ModelConfig,
    PagedCache,
    Program,
    SavedFeature,
    linear_output,
)
from pronk.base.arrays import Array, DType
from pronk.torch.cache import TorchCache, TorchPass, attend_rows, path_slots, visible_keys
from pronk.torch.convert import to_array, to_tensor


def choose_experts(
    outputs: Tensor, mixture: MixtureConfig, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each row and their weights, int64 and float32 ``[rows, per_row]``.

    The experts of a row are in rising order. Of equal ranks, the expert with the smaller number is
    chosen.

    Args:
        outputs: outputs of the router ``[rows, experts]``.
        mixture: how experts are chosen and weighted.
        correction: ``[experts]``, added to the scores for the choice; ``None``: nothing is added.
    """
    outputs = outputs.float()
    ranks = _rank_experts(outputs, mixture, correction)
    chosen = _first_largest(ranks, mixture.per_row).sort(dim=-1).values
    taken = outputs.gather(-1, chosen)
    if mixture.scores == "sigmoid":
        weights = taken.sigmoid()
        if mixture.normalized:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + mixture.epsilon)
    else:
        total = (taken if mixture.normalized else outputs).logsumexp(-1, keepdim=True)
        weights = torch.exp(taken - total)
    return chosen, weights * mixture.scale


def _rank_experts(outputs: Tensor, mixture: MixtureConfig, correction: Tensor | None) -> Tensor:
    """Return the numbers whose order decides the choice, ``[rows, experts]``.

    They are minus infinity for experts of groups that are not chosen.
    """
    if correction is None and mixture.groups == 1:
        return outputs
    scores = outputs.sigmoid() if mixture.scores == "sigmoid" else outputs.softmax(dim=-1)
    ranks = scores if correction is None else scores + correction.to(scores.device)
    if mixture.groups == 1:
        return ranks
    grouped = ranks.unflatten(-1, (mixture.groups, -1))
    values = grouped.topk(mixture.group_best, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(values).scatter(-1, _first_largest(values, mixture.row_groups), 1.0)
    return grouped.masked_fill(kept[..., None] == 0.0, -torch.inf).flatten(-2)


def _first_largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest values of each row, of equal ones the first."""
    # A stable sort keeps the order of equal values.
    return values.argsort(dim=-1, descending=True, stable=True)[..., :count]


def _clamped(gate: Tensor) -> Tensor:
    """Return ``gate · sigmoid(1.702 · gate)``, the activation of gpt-oss.

    The caller has limited ``gate`` to values of at most 7.
    """
    return gate * torch.sigmoid(1.702 * gate)


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamped": _clamped,
    "relu2": lambda x: F.relu(x).square(),
}


class TorchProgram(Program):
    """Program of the torch backend; its operations run one after the other on the device."""

    def __init__(
        self,
        device: str,
        hidden: int,
        dtype: DType,
        cache: PagedCache | None,
        other_caches: Sequence[PagedCache],
    ) -> None:
        super().__init__(hidden, dtype, cache, other_caches)
        self.device = device
        self._ops: list[Callable[[TorchPass], None]] = []

    def embed(
        self,
        decoder: Any,
        *,
        norm: Any = None,
        part: tuple[int, int] | None = None,
        zero_first: bool = False,
    ) -> None:
        """Append the operation :meth:`Program.embed`.

        The embedding table stays in the main memory; only the rows of the batch's tokens are copied
        to the device.
        """
        scale = float(np.asarray(decoder.config.embedding_scale).astype(self.dtype))
        normalize = self._norm(norm)

        def run(state: TorchPass) -> None:
            x = to_tensor(decoder.embedding[state.batch.tokens])
            x = x.to(self.device, state.buffers["stream"].dtype) * scale
            if decoder.positions is not None:
                x = x + to_tensor(decoder.positions[state.batch.positions]).to(self.device, x.dtype)
            x = normalize(x)
            if zero_first:
                x[torch.from_numpy(state.batch.positions == 0).to(self.device)] = 0
            state.store("stream", part, x)

        self._ops.append(run)

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
        """Append the operation :meth:`Program.project`; it writes the buffer ``queries``."""
        normalize = self._norm(norm)
        cache = self.cache_of(kv)
        assert isinstance(cache, TorchCache)
        norms = [self._norm(each) for each in head_norms or HeadNorms()]
        config_of_rope = cache.config.rope_of(kv.layer)
        rope = None if config_of_rope is None else cache.rope_table(config_of_rope)
        sizes = config.qkv_sizes[: 1 if only_queries else 3]
        whole = config.whole_qk_norm
        growth = config.query_growth

        def run(state: TorchPass) -> None:
            x = normalize(state.buffers[source])
            projected = torch.cat(
                [_multiply(part, x, state) for part in linear.parts], dim=-1
            ).split(sizes, dim=-1)
            parts = list(projected) if whole else [_heads(part, config) for part in projected]
            for part, normalize_heads in enumerate(norms[: len(parts)]):
                parts[part] = _heads(normalize_heads(parts[part]), config)
            rotated = [part if rope is None else state.rotate(part, rope) for part in parts[:2]]
            if not only_queries:
                cache.write(kv.layer, state.slots, rotated[1], _heads(parts[2], config))
            state.buffers["queries"] = (
                rotated[0] if growth is None else rotated[0] * state.growth(*growth)
            )

        self._ops.append(run)

    def attend(self, config: ModelConfig, kv: KVSource, *, sinks: Array | None = None) -> None:
        cache = self.cache_of(kv)
        assert isinstance(cache, TorchCache)
        scale = config.query_scale
        cap = config.attention_cap
        window = cache.config.window_of(kv.layer)
        scores = None if sinks is None else to_tensor(sinks).to(self.device)

        def run(state: TorchPass) -> None:
            keys = state.once(
                (window, kv.cache), lambda: visible_keys(state.batch, cache, kv.cache, window)
            )
            state.buffers["A"] = attend_rows(
                state.buffers["queries"], keys, cache, kv.layer, scale, cap, sinks=scores
            )

        self._ops.append(run)

    def convolve(self, weights: Array, bias: Array | None, cache: PagedCache, layer: int) -> None:
        assert isinstance(cache, TorchCache)
        taps = to_tensor(weights.reshape(len(weights), -1).T.astype(np.float32)).to(self.device)
        start = to_tensor(np.zeros(1, np.float32) if bias is None else bias.astype(np.float32)).to(
            self.device
        )

        def run(state: TorchPass) -> None:
            b, c, x = state.buffers["B"].chunk(3, dim=-1)
            slots, exists = state.once(
                ("path", len(taps)), lambda: path_slots(state.batch, cache, len(taps))
            )
            states = cache.keys[layer][0]
            states[state.slots] = (b * x).to(states.dtype)
            total = start
            for tap, weight in enumerate(taps):
                seen = torch.where(exists[:, tap, None], states[slots[:, tap]].float(), 0.0)
                total = total + weight * seen
            state.buffers["A"] = c * total.to(c.dtype)

        self._ops.append(run)

    def recur(self, layer: Any, index: int) -> None:
        raise NotImplementedError

    def group_norm(self, norm: Any, groups: int) -> None:
        raise NotImplementedError

    def per_head(self, linear: Any, *, source: str, width: int, to: str) -> None:
        raise NotImplementedError

    def latent(self, norm: Any, config: ModelConfig, kv: KVSource) -> None:
        raise NotImplementedError

    def layer_inputs(self, decoder: Any) -> None:
        inputs = decoder.layer_inputs
        config = decoder.config
        self.linear(inputs.projection, to="B", output=LinearOutput(config.hidden_size**-0.5))
        size = config.layer_input_size
        scale = float(np.asarray(size**0.5).astype(self.dtype))
        normalize = self._norm(inputs.norm)

        def run(state: TorchPass) -> None:
            projected = normalize(state.buffers["B"].unflatten(-1, (-1, size)))
            rows = to_tensor(inputs.rows(state.batch.tokens)).to(self.device, projected.dtype)
            embedded = rows.unflatten(-1, (-1, size)) * scale
            state.buffers["inputs"] = (projected + embedded) * 2**-0.5

        self._ops.append(run)

    def gate(self, target: str, gates: str, width: int, *, heads: int = 1) -> None:
        repeats = width // heads if gates == "scores" else 1

        def run(state: TorchPass) -> None:
            factors = state.buffers[gates].sigmoid().repeat_interleave(repeats, dim=-1)
            x = state.buffers[target]
            state.buffers[target] = (x * factors).to(x.dtype)

        self._ops.append(run)

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
        factor, limit, layer_input, columns, feature = output or linear_output(linear)
        assert columns is None, "expected no latent attention"
        normalize = self._norm(norm)
        multiply = self._mix_experts if isinstance(linear, Experts) else _multiply_activated
        activate = ACTIVATIONS[activation]

        def run(state: TorchPass) -> None:
            x = state.buffers[source]
            if only_logits_rows:
                x = x[torch.tensor(list(state.batch.logits_rows), device=x.device)]
            x = normalize(x)
            y = multiply(linear, x.float() if to == "scores" else x, activate, state)
            if layer_input is not None:
                y = y * state.buffers["inputs"][:, layer_input]
            y = y if factor == 1.0 else y * factor
            y = limit * torch.tanh(y / limit) if limit else y
            if feature is not None:
                self._write_feature(feature, state, y)
                return
            state.buffers[to] = state.buffers[to] + y if residual else y

        self._ops.append(run)

    def norm(
        self,
        norm: Any,
        *,
        source: str | int = "stream",
        to: str = "stream",
        residual: bool = False,
        scale: float = 1.0,
        part: tuple[int, int] | None = None,
        width: int | None = None,  # noqa: ARG002 - a row of a tensor knows its width
        feature: SavedFeature | None = None,
    ) -> None:
        normalize = self._norm(norm)

        def run(state: TorchPass) -> None:
            if isinstance(source, int):
                assert state.collected is not None
                x = to_tensor(state.collected[source]).to(self.device)
            else:
                x = state.buffers[source]
            y = normalize(x) * scale
            if feature is not None:
                self._write_feature(feature, state, y)
                return
            state.store(to, part, state.buffers[to] + y if residual else y)

        self._ops.append(run)

    def route(
        self, mixture: MixtureConfig, correction: Array | None, expert_scale: Array | None
    ) -> None:
        scale = None if expert_scale is None else to_tensor(expert_scale).to(self.device)
        added = None if correction is None else to_tensor(correction).to(self.device)

        def run(state: TorchPass) -> None:
            outputs = state.buffers["scores"]
            chosen, shares = choose_experts(outputs, mixture, added)
            state.buffers["shares"] = shares if scale is None else shares * scale[chosen]
            # Pairs of a row and an expert, in the order of the experts.
            expert, order = chosen.flatten().sort(stable=True)
            state.buffers["pair_rows"] = order // mixture.per_row
            state.buffers["pairs"] = order
            state.pairs_per_expert = torch.bincount(expert, minlength=mixture.experts).tolist()
            state.num_experts_read += sum(count > 0 for count in state.pairs_per_expert)

        self._ops.append(run)

    def store_feature(self, layer: int) -> None:
        self._ops.append(lambda state: self._write_feature(layer, state, state.buffers["stream"]))

    def _write_feature(self, feature: SavedFeature, state: TorchPass, rows: Tensor) -> None:
        assert isinstance(self.cache, TorchCache)
        self.cache.write_feature(feature, state.slots, rows)

    def collect_hidden(self, index: int) -> None:
        def run(state: TorchPass) -> None:
            assert state.collected is not None
            state.collected[index] = to_array(state.buffers["stream"])

        self._ops.append(run)

    @torch.inference_mode()
    def run(
        self,
        batch: ForwardBatch | None,
        stream: Array,
        logits: Array | None = None,
        collected: Array | None = None,
    ) -> int:
        """Run the operations; the results are copied to the arrays; see :meth:`Program.run`."""
        state = TorchPass(
            batch, to_tensor(stream).to(self.device), self.cache, collected, self.device
        )
        for operation in self._ops:
            operation(state)
        stream[...] = to_array(state.buffers["stream"])
        if logits is not None and "logits" in state.buffers:
            logits[...] = to_array(state.buffers["logits"].float())
        return state.num_experts_read

    @staticmethod
    def _mix_experts(
        experts: Any, x: Tensor, activate: Callable[[Tensor], Tensor], state: TorchPass
    ) -> Tensor:
        """Return the outputs of the experts that the router has chosen for each row.

        The result has one output for each pair of a row and an expert, ordered by expert. If
        ``experts.gathers``, it has one output for each row: the sum of the outputs of the row's
        experts, weighted by the router.
        """
        rows = state.buffers["pair_rows"]
        shares = state.buffers["shares"]
        pairs = (x if experts.gathers else x[rows]).split(state.pairs_per_expert)
        outputs = [
            _multiply_activated(linear, part, activate, state)
            for linear, part in zip(experts.parts, pairs, strict=True)
            if len(part)
        ]
        y = torch.cat(outputs)
        if not experts.gathers:
            return y
        # The outputs of a row's experts are added in rising order of the experts, so that the sum
        # does not depend on the other rows of the batch.
        by_row = torch.empty_like(y).index_copy_(0, state.buffers["pairs"], y)
        by_row = by_row.view(*shares.shape, -1).float() * shares[:, :, None]
        total = by_row[:, 0]
        for part in by_row.unbind(1)[1:]:
            total = total + part
        return total.to(y.dtype)

    def _norm(self, norm: Any) -> Callable[[Tensor], Tensor]:
        """Return a function that applies a norm to rows; without a norm, it returns the rows."""
        if norm is None:
            return ACTIVATIONS[None]
        weight = to_tensor(norm.weight).to(self.device)
        bias = None if norm.bias is None else to_tensor(norm.bias).to(self.device)

        def normalize(x: Tensor) -> Tensor:
            if bias is None:
                # In float32, because a weight 1 + w has more digits than bfloat16.
                return F.rms_norm(x.float(), weight.shape, weight, norm.eps).to(x.dtype)
            return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), norm.eps)

        return normalize


def _heads(x: Tensor, config: ModelConfig) -> Tensor:
    """Return ``x`` ``[rows, heads · head_dim]`` as ``[rows, heads, head_dim]``."""
    return x if x.dim() == 3 else x.unflatten(-1, (-1, config.head_dim))


def _multiply_activated(
    linear: Any, x: Tensor, activate: Callable[[Tensor], Tensor], state: TorchPass
) -> Tensor:
    """Apply a linear layer and an activation to rows: ``activate(x Wᵀ + b)``.

    A gated matrix has the outputs ``gate`` and ``up``; its result is ``activate(gate) · up``.
    """
    y = _multiply(linear, x, state)
    if not linear.packed.gated:
        return activate(y)
    gate, up = y.chunk(2, dim=-1)
    if activate is _clamped:
        return activate(gate.clamp(max=7.0)) * (up.clamp(-7.0, 7.0) + 1.0)
    return activate(gate) * up


def _multiply(linear: Any, x: Tensor, state: TorchPass) -> Tensor:
    """Return ``x Wᵀ + b``, plus the products of the rows' adapters, in the dtype of ``x``."""
    matrix = linear.packed
    y = F.linear(x.to(matrix.weight.dtype), matrix.weight, matrix.bias).to(x.dtype)
    for number, rows in state.adapted_rows if linear.adapters else ():
        for start, down, up in linear.adapters[number] or ():
            outputs = slice(start, start + len(up))
            added = F.linear(F.linear(x[rows].float(), down), up)
            y[rows, outputs] = (y[rows, outputs].float() + added).to(y.dtype)
    return y
