"""Mapping of checkpoint tensors to the weights of the decoder.

The decoder has fewer, larger matrices than most checkpoints: ``qkv`` stacks the query, key and
value projections, and ``up`` the gate and up projections. A mixture of experts has an ``up`` and a
``down`` for each expert, and a ``router``. The names are :class:`~pronk.models.family.TensorNames`.
The config determines the shapes and whether there are biases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Literal

from pronk.checkpoint.config import (
    ConvolutionConfig,
    LatentConfig,
    MixtureConfig,
    ModelConfig,
    RecurrentConfig,
)
from pronk.checkpoint.rows import HeadRows
from pronk.models.families import get_family
from pronk.models.family import TensorNames


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, or the part of the tensor that belongs to one weight."""

    name: str  # name in the checkpoint, without the family's prefix
    # shape of the whole tensor, also if only an expert or some rows belong to the weight
    shape: tuple[int, ...]
    # number of the expert, an index into the first axis; ``None``: the whole tensor
    expert: int | None = None
    # rows of the tensor that belong to the weight; ``None``: all rows, in the tensor's order
    rows: HeadRows | None = None
    # number of matrices that are stacked in ``shape``, if a GGUF file stores them as one tensor of
    # three dimensions; 0: the tensor is one matrix
    heads: int = 0
    # shape in GGUF files, if they may have the numbers of ``shape`` in other dimensions
    gguf_shape: tuple[int, ...] | None = None
    factor: float = 1.0  # by which the stored numbers are multiplied

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part that belongs to the weight."""
        if self.expert is not None:
            return self.shape[1:]
        if self.rows is not None:
            return (self.rows.count(self.shape[0]), *self.shape[1:])
        return self.shape


@dataclass(frozen=True)
class DecoderPart:
    """A module or embedding, and the checkpoint tensors to stack for its weight and bias."""

    target: str  # attribute path in the decoder, such as ``layers.0.qkv``
    # ``table`` is one array in the dtype of the checkpoint, such as an embedding; ``mapped`` is a
    # table that stays in the mapped file, also if it is quantized; ``vector`` is an array in
    # float32 of few numbers, which may be stacked.
    kind: Literal["linear", "norm", "table", "mapped", "vector"]
    # tensors to stack for the weight; empty for an LM head that is tied to the embedding
    weight: tuple[CheckpointTensor, ...]
    bias: tuple[CheckpointTensor, ...] = ()  # tensors to stack for the bias; empty without a bias
    transposed: bool = False  # whether the ``weight`` tensors are stored ``[inputs, outputs]``
    # whether the outputs are in the order ``gate 0, up 0, gate 1, up 1, …``
    interleaved: bool = False
    offset: float = 0.0  # number to add to the weight of a norm
    factor: float = 1.0  # number by which the weight of a norm is then multiplied
    eps: float | None = None  # epsilon of a norm; ``None``: that of the config
    # number of heads, if the one tensor of ``weight`` has the transposed matrix of one head after
    # the other; 0: it is one matrix, which ``transposed`` describes
    transposed_heads: int = 0
    log_decay: bool = False  # whether the part is ``-exp`` of the stored array

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """All tensors: ``weight``, then ``bias``."""
        return self.weight + self.bias


def plan_tensors(config: ModelConfig, names: TensorNames | None = None) -> Iterator[DecoderPart]:
    """Yield each module of the decoder, with the checkpoint tensors that it stacks.

    ``names`` are by default those of the config's family.
    """
    names = names or get_family(config.family).names
    table = (config.vocab_size, config.hidden_size)
    yield DecoderPart("embedding", "table", (CheckpointTensor(f"{names.embedding}.weight", table),))
    if names.positions is not None:
        shape = (config.context, config.hidden_size)
        yield DecoderPart(
            "positions", "table", (CheckpointTensor(f"{names.positions}.weight", shape),)
        )
    yield DecoderPart(
        "head", "linear", () if config.tied else (CheckpointTensor(f"{names.head}.weight", table),)
    )
    yield plan_norm(config, "norm", names.norm, config.hidden_size)
    if config.layer_input_size:
        yield from _plan_layer_inputs(config, names)
    for index in range(config.num_layers):
        yield from plan_layer(config, names, index)


def _plan_layer_inputs(config: ModelConfig, names: TensorNames) -> Iterator[DecoderPart]:
    """Yield the table of the layers' own embeddings, and the projection that is added to them."""
    width = config.num_layers * config.layer_input_size
    target = "layer_inputs"
    stored = names.layer_inputs
    table = CheckpointTensor(f"{stored['table']}.weight", (config.vocab_size, width))
    yield DecoderPart(f"{target}.table", "mapped", (table,))
    projection = (stored["projection"],)
    yield plan_linear(f"{target}.projection", projection, (width,), config.hidden_size)
    yield plan_norm(config, f"{target}.norm", stored["norm"], config.layer_input_size)


def plan_layer(config: ModelConfig, names: TensorNames, index: int) -> Iterator[DecoderPart]:
    """Yield each module of layer ``index``, from 0, with the checkpoint tensors that it stacks."""
    for part in _plan_parts(config, names, index):
        factors = config.weight_factors.get(part.target.split(".")[2])
        if factors is None:
            yield part
            continue
        pairs = zip(part.weight, factors, strict=True)
        weight = tuple(replace(tensor, factor=factor) for tensor, factor in pairs)
        yield replace(part, weight=weight)


def _plan_parts(config: ModelConfig, names: TensorNames, index: int) -> Iterator[DecoderPart]:
    """Yield each module of a layer, with tensors that no factors multiply."""
    config = config.of_layer(index)
    mixture = config.mixture_of(index)
    if mixture is not None:
        yield from _plan_experts(config, mixture, names, index)
    if config.layer_scalars:
        scalar = CheckpointTensor(_stored_modules(names, index, "scalar")[0], (1,))
        yield DecoderPart(f"layers.{index}.scalar", "vector", (scalar,))
    yield from _plan_mixer(config, names, index)
    linears = _linear_sizes(config, index)
    sizes = _norm_sizes(config, index)
    for module in names.layer:
        stored = _stored_modules(names, index, module)
        target = f"layers.{index}.{module}"
        if module in linears:
            outputs, inputs, bias = linears[module]
            # Some families store the gate and up projection as one matrix.
            outputs = outputs if len(stored) == len(outputs) else (sum(outputs),)
            yield plan_linear(
                target, stored, outputs, inputs, bias=bias, transposed=names.transposed
            )
        elif module in sizes:
            part = plan_norm(config, target, stored[0], sizes[module])
            if module in names.bare_norms:
                part = replace(part, weight=(replace(part.weight[0], name=stored[0]),))
            yield part


def _linear_sizes(config: ModelConfig, index: int) -> dict[str, tuple[tuple[int, ...], int, bool]]:
    """Return the sizes of a layer's linear modules apart from its mixer and its experts.

    These are for each module: the number of outputs of each stacked matrix, the number of inputs,
    and whether there is a bias.
    """
    hidden = config.hidden_size
    mixture = config.mixture_of(index)
    linears: dict[str, tuple[tuple[int, ...], int, bool]] = {}
    if mixture is not None:
        linears |= _shared_sizes(config, mixture)
    elif config.sublayers_of(index) != "mixer":
        up_sizes = (config.intermediate_size,) * (2 if config.gated else 1)
        linears["up"] = (up_sizes, hidden, config.mlp_bias)
        linears["down"] = ((hidden,), config.intermediate_size, config.mlp_bias)
    if config.layer_input_size:
        linears["input_gate"] = ((config.layer_input_size,), hidden, False)
        linears["input_projection"] = ((hidden,), config.layer_input_size, False)
    return linears


def _plan_mixer(config: ModelConfig, names: TensorNames, index: int) -> Iterator[DecoderPart]:
    """Yield the modules of what mixes the tokens in a layer, without its norms."""
    convolution = config.convolution_of(index)
    recurrent = config.recurrent_of(index)
    if convolution is not None:
        yield from _plan_convolution(config, convolution, names, index)
    if recurrent is not None:
        yield from _plan_recurrence(config, recurrent, names, index)
    if not config.has_attention(index):
        return
    if config.latent is not None:
        yield from _plan_latent_attention(config, config.latent, names, index)
    else:
        yield from _plan_attention(config, names, index)


def _stored_modules(names: TensorNames, index: int, module: str) -> tuple[str, ...]:
    """Return the names of the modules or tensors that a module of layer ``index`` stacks."""
    return tuple(f"{names.layers}.{index}.{name}" for name in names.layer[module])


def _plan_attention(config: ModelConfig, names: TensorNames, index: int) -> Iterator[DecoderPart]:
    """Yield the projections and sinks of a layer's attention, with their checkpoint tensors.

    The norms are left out.
    """
    hidden = config.hidden_size
    shape = config.shape_of(index)
    qkv = _stored_modules(names, index, "qkv")
    out = _stored_modules(names, index, "out")
    num_outputs = config.num_heads * config.head_dim
    # Some families store the query, key and value projections as one matrix.
    outputs = config.qkv_sizes if len(qkv) == 3 else (sum(config.qkv_sizes),)
    if shape.tied_values:
        qkv = (*qkv[:2], qkv[1])
    if shape.reads is not None:
        qkv = qkv[:1]
        outputs = outputs[:1]
    rows: Sequence[HeadRows | None] = (None,) * len(qkv)
    if config.gated_attention:
        # Each head of the query projection has the rows of the queries, then those of the gates.
        outputs = (2 * num_outputs, *outputs[1:])
        rows = (HeadRows(config.num_heads, stop=config.head_dim), None, None)
    elif names.permuted_heads:
        queries = HeadRows(config.num_heads, pairs=True)
        keys = HeadRows(config.num_kv_heads, pairs=True)
        rows = (queries, keys, None)
    bias = config.qkv_bias
    part = plan_linear(
        f"layers.{index}.qkv", qkv, outputs, hidden, bias=bias, transposed=names.transposed
    )
    yield _take_rows(part, rows)
    if config.gated_attention:
        part = plan_linear(
            f"layers.{index}.attention_gate", qkv[:1], outputs[:1], hidden, bias=bias
        )
        yield _take_rows(part, [HeadRows(config.num_heads, start=config.head_dim)])
    if config.head_gates:
        gates = _stored_modules(names, index, "attention_gate")
        yield plan_linear(f"layers.{index}.attention_gate", gates, (config.num_heads,), hidden)
    yield plan_linear(
        f"layers.{index}.out",
        out,
        (hidden,),
        num_outputs,
        bias=config.out_bias,
        transposed=names.transposed,
    )
    if config.attention_sinks:
        sinks = CheckpointTensor(_stored_modules(names, index, "sinks")[0], (config.num_heads,))
        yield DecoderPart(f"layers.{index}.sinks", "table", (sinks,))


def _plan_latent_attention(
    config: ModelConfig, latent: LatentConfig, names: TensorNames, index: int
) -> Iterator[DecoderPart]:
    """Yield the projections and norms of a layer's latent attention, except the layer's own norm.

    The outputs of ``q_b`` are the part ``q`` of all queries, then the part ``p`` of all queries.
    The rows of ``k_b`` are the transposed matrix of keys of one head after the other.
    """
    hidden = config.hidden_size
    heads = config.num_heads
    rank = latent.rank
    path = f"layers.{index}"
    bias = config.qkv_bias
    pairs = names.permuted_heads
    stored = {
        module: _stored_modules(names, index, module)
        for module in ("q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "k_b", "v_b", "out")
    }
    query_inputs = hidden
    query = stored["q_b"]
    if latent.query_rank is None:
        query = _stored_modules(names, index, "q")
    else:
        query_inputs = latent.query_rank
        yield plan_linear(f"{path}.q_a", stored["q_a"], (query_inputs,), hidden, bias=bias)
        yield _plan_latent_norm(config, f"{path}.q_a_norm", stored["q_a_norm"][0], query_inputs)
    outputs = (heads * latent.query_dim,) * 2
    part = plan_linear(f"{path}.q_b", query * 2, outputs, query_inputs)
    plain = HeadRows(heads, stop=latent.plain_dim)
    rotated = HeadRows(heads, start=latent.plain_dim, pairs=pairs)
    yield _take_rows(part, [plain, rotated])
    part = plan_linear(
        f"{path}.kv_a", stored["kv_a"] * 2, (config.head_dim,) * 2, hidden, bias=bias
    )
    yield _take_rows(part, [HeadRows(1, stop=rank), HeadRows(1, start=rank, pairs=pairs)])
    yield _plan_latent_norm(config, f"{path}.kv_a_norm", stored["kv_a_norm"][0], rank)
    keys = f"{stored['k_b'][0]}.weight"
    values = f"{stored['v_b'][0]}.weight"
    if keys == values:  # one matrix has the keys and values of each head
        shape = (heads * (latent.plain_dim + latent.value_dim), rank)
        of_keys = CheckpointTensor(keys, shape, rows=plain)
        yield DecoderPart(f"{path}.k_b", "linear", (of_keys,), transposed_heads=heads)
        of_values = CheckpointTensor(keys, shape, rows=HeadRows(heads, start=latent.plain_dim))
        yield DecoderPart(f"{path}.v_b", "linear", (of_values,))
    else:
        of_keys = CheckpointTensor(keys, (heads * rank, latent.plain_dim), heads=heads)
        yield DecoderPart(f"{path}.k_b", "linear", (of_keys,))
        of_values = CheckpointTensor(values, (heads * latent.value_dim, rank), heads=heads)
        yield DecoderPart(f"{path}.v_b", "linear", (of_values,))
    num_outputs = heads * latent.value_dim
    yield plan_linear(f"{path}.out", stored["out"], (hidden,), num_outputs, bias=config.out_bias)


def _plan_latent_norm(config: ModelConfig, target: str, stored: str, size: int) -> DecoderPart:
    """Return the norm of a latent, whose epsilon is not that of the other norms."""
    assert config.latent is not None
    return replace(plan_norm(config, target, stored, size), eps=config.latent.norm_eps)


def _take_rows(part: DecoderPart, rows: Sequence[HeadRows | None]) -> DecoderPart:
    """Return a linear layer changed to use only some rows of each of its tensors."""

    def take(tensors: tuple[CheckpointTensor, ...]) -> tuple[CheckpointTensor, ...]:
        # ``tensors`` is empty if the layer has no biases
        return tuple(
            replace(tensor, rows=taken)
            for tensor, taken in zip(tensors, rows[: len(tensors)], strict=True)
        )

    return replace(part, weight=take(part.weight), bias=take(part.bias))


def _plan_convolution(
    config: ModelConfig, convolution: ConvolutionConfig, names: TensorNames, index: int
) -> Iterator[DecoderPart]:
    """Yield the projections of a layer's short convolution, its weights and its bias."""
    hidden = config.hidden_size
    bias = convolution.bias
    gates = _stored_modules(names, index, "gates")
    out = _stored_modules(names, index, "convolution_out")
    filter_ = _stored_modules(names, index, "filter")[0]
    yield plan_linear(f"layers.{index}.gates", gates, (3 * hidden,), hidden, bias=bias)
    yield plan_linear(f"layers.{index}.out", out, (hidden,), hidden, bias=bias)
    weight = CheckpointTensor(f"{filter_}.weight", (hidden, 1, convolution.taps))
    yield DecoderPart(f"layers.{index}.filter", "table", (weight,))
    if bias:
        yield DecoderPart(
            f"layers.{index}.filter_bias",
            "table",
            (CheckpointTensor(f"{filter_}.bias", (hidden,)),),
        )


def _plan_recurrence(
    config: ModelConfig, recurrent: RecurrentConfig, names: TensorNames, index: int
) -> Iterator[DecoderPart]:
    """Yield the projections of a recurrence, its convolution, its decay, its skip and its norm."""
    path = f"layers.{index}"
    value_heads = recurrent.value_heads
    if recurrent.rule == "mamba2":
        yield from _plan_mamba_inputs(config, recurrent, names, index)
    else:
        yield from _plan_delta_inputs(config, recurrent, names, index)
    has_skip = recurrent.rule == "mamba2"
    vectors = ("decay_rate", "decay_bias", "skip") if has_skip else ("decay_rate", "decay_bias")
    for module in vectors:
        name = _stored_modules(names, index, module)[0]
        stored = CheckpointTensor(name, (value_heads,), gguf_shape=(value_heads, 1))
        is_log = names.log_decay and module == "decay_rate"
        yield DecoderPart(f"{path}.{module}", "vector", (stored,), log_decay=is_log)
    if recurrent.norm != "none":
        yield _plan_mixer_norm(config, recurrent, names, index)
    out = _stored_modules(names, index, "mixer_out")
    yield plan_linear(f"{path}.mixer_out", out, (config.hidden_size,), recurrent.num_outputs)


def _plan_mixer_norm(
    config: ModelConfig, recurrent: RecurrentConfig, names: TensorNames, index: int
) -> DecoderPart:
    """Return the norm of a recurrence's outputs.

    In GGUF files, the weight after the gates has a row for each key head.
    """
    (stored,) = _stored_modules(names, index, "mixer_norm")
    target = f"layers.{index}.mixer_norm"
    if recurrent.norm == "before_gate":
        return replace(plan_norm(config, target, stored, recurrent.value_dim), offset=0.0)
    size = recurrent.num_outputs
    part = plan_norm(config, target, stored, size)
    in_rows = (recurrent.key_heads, size // recurrent.key_heads)
    weight = replace(part.weight[0], gguf_shape=in_rows)
    return replace(part, weight=(weight,), offset=0.0)


def _plan_mamba_inputs(
    config: ModelConfig, recurrent: RecurrentConfig, names: TensorNames, index: int
) -> Iterator[DecoderPart]:
    """Yield the projections to the inputs of Mamba 2, and its convolution.

    The stored projection has the rows of the gates, values, keys and queries, and of ``dt``; the
    stored convolution has those of the values, keys and queries.
    """
    path = f"layers.{index}"
    (stored,) = _stored_modules(names, index, "mixer_in")
    num_keys = recurrent.key_heads * recurrent.key_dim
    channels = (recurrent.num_outputs, num_keys, num_keys)
    sizes = (recurrent.num_outputs, *channels, recurrent.num_scalars)
    gates, values, keys, queries, scalars = _sections(1, sizes)
    inputs = (queries, keys, values, gates)
    yield _plan_rows(f"{path}.mixer_in", stored, sum(sizes), inputs, config.hidden_size)
    yield _plan_rows(f"{path}.mixer_gates", stored, sum(sizes), (scalars,), config.hidden_size)
    values, keys, queries = _sections(1, channels)
    yield from _plan_filter(recurrent, names, index, (queries, keys, values))


def _plan_delta_inputs(
    config: ModelConfig, recurrent: RecurrentConfig, names: TensorNames, index: int
) -> Iterator[DecoderPart]:
    """Yield the projections to the inputs of Gated DeltaNet, and its convolution."""
    hidden = config.hidden_size
    path = f"layers.{index}"
    key_heads = recurrent.key_heads
    value_heads = recurrent.value_heads
    per_key_head = value_heads // key_heads
    inputs = _stored_modules(names, index, "mixer_in")
    gates = _stored_modules(names, index, "mixer_gates")
    if len(inputs) == 2:
        outputs = (recurrent.num_channels, recurrent.num_outputs)
        yield plan_linear(f"{path}.mixer_in", inputs, outputs, hidden)
    else:
        # The rows of a key head are its queries, keys, values and gates of the outputs.
        values = per_key_head * recurrent.value_dim
        rows = _sections(key_heads, (recurrent.key_dim, recurrent.key_dim, values, values))
        num_rows = recurrent.num_channels + recurrent.num_outputs
        yield _plan_rows(f"{path}.mixer_in", inputs[0], num_rows, rows, hidden)
    if len(gates) == 2:
        yield plan_linear(f"{path}.mixer_gates", gates, (value_heads,) * 2, hidden)
    else:
        # The rows of a key head are beta for each of its value heads, then the decay for each.
        rows = _sections(key_heads, (per_key_head, per_key_head))
        yield _plan_rows(f"{path}.mixer_gates", gates[0], recurrent.num_scalars, rows, hidden)
    yield from _plan_filter(recurrent, names, index, (None,))


def _sections(heads: int, sizes: Sequence[int]) -> list[HeadRows]:
    """Return the rows of each section of a tensor with the rows of one head after the other.

    ``sizes`` are the numbers of rows of a head in each section.
    """
    bounds = accumulate(sizes, initial=0)
    return [HeadRows(heads, start, stop) for start, stop in pairwise(bounds)]


def _plan_rows(
    target: str, stored: str, num_rows: int, rows: Sequence[HeadRows], inputs: int
) -> DecoderPart:
    """Return a linear layer that stacks sections of the rows of one stored matrix."""
    count = len(rows)
    part = plan_linear(target, (stored,) * count, (num_rows,) * count, inputs)
    return _take_rows(part, rows)


def _plan_filter(
    recurrent: RecurrentConfig,
    names: TensorNames,
    index: int,
    rows: Sequence[HeadRows | None],
) -> Iterator[DecoderPart]:
    """Yield the weights and the bias of a recurrence's convolution, which stack ``rows``."""
    (stored,) = _stored_modules(names, index, "mixer_filter")
    shapes: dict[str, tuple[int, ...]] = {"weight": (recurrent.num_channels, 1, recurrent.taps)}
    if recurrent.filter_bias:
        shapes["bias"] = (recurrent.num_channels,)
    targets = {"weight": "filter", "bias": "filter_bias"}
    for name, shape in shapes.items():
        tensors = tuple(CheckpointTensor(f"{stored}.{name}", shape, rows=taken) for taken in rows)
        yield DecoderPart(f"layers.{index}.{targets[name]}", "vector", tensors)


def _shared_sizes(
    config: ModelConfig, mixture: MixtureConfig
) -> dict[str, tuple[tuple[int, ...], int, bool]]:
    """Return the sizes of the modules of the shared expert; empty if there is none.

    For each module: outputs of each stacked matrix, number of inputs, whether there is a bias.
    """
    width = mixture.shared_width
    if not width:
        return {}
    hidden = config.hidden_size
    sizes: dict[str, tuple[tuple[int, ...], int, bool]] = {
        "shared_up": ((width,) * (2 if config.gated else 1), hidden, False),
        "shared_down": ((hidden,), width, False),
    }
    if mixture.shared_gate:
        sizes["shared_gate"] = ((1,), hidden, False)
    return sizes


def _plan_experts(
    config: ModelConfig, mixture: MixtureConfig, names: TensorNames, index: int
) -> Iterator[DecoderPart]:
    """Yield the router of a layer, and the two matrices of each expert."""
    hidden = config.hidden_size
    path = f"{names.layers}.{index}"
    if mixture.separate_norms:
        # The router's input is divided by the square root of the hidden size besides its norm.
        norm = CheckpointTensor(f"{path}.{names.layer['router_norm'][0]}", (hidden,))
        yield DecoderPart(
            f"layers.{index}.router_norm",
            "norm",
            (norm,),
            factor=1.0 / math.sqrt(config.hidden_size),
        )
    if mixture.expert_scales:
        name = f"{path}.{names.layer['expert_scale'][0]}"
        scale = CheckpointTensor(name, (mixture.experts,))
        yield DecoderPart(f"layers.{index}.expert_scale", "vector", (scale,))
    router = (f"{path}.{names.layer['router'][0]}",)
    yield plan_linear(
        f"layers.{index}.router", router, (mixture.experts,), hidden, bias=mixture.bias
    )
    if mixture.correction:
        stored_correction = CheckpointTensor(
            _stored_modules(names, index, "correction")[0], (mixture.experts,)
        )
        yield DecoderPart(f"layers.{index}.correction", "vector", (stored_correction,))
    shapes = {
        "up": (mixture.width * (2 if config.gated else 1), hidden),
        "down": (hidden, mixture.width),
    }
    for expert, (module, (outputs, inputs)) in product(range(mixture.experts), shapes.items()):
        stored = [f"{path}.{name}" for name in names.layer[f"experts.{module}"]]
        shape = outputs // len(stored), inputs
        tensors = tuple(
            CheckpointTensor(name, (mixture.experts, *shape), expert) for name in stored
        )
        if "{}" in stored[0]:  # each expert has tensors of its own
            tensors = tuple(CheckpointTensor(name.format(expert), shape) for name in stored)
        biased = stored if mixture.bias else []
        biases = tuple(
            CheckpointTensor(_bias_of(name), (mixture.experts, shape[0]), expert) for name in biased
        )
        part = DecoderPart(f"layers.{index}.{module}.{expert}", "linear", tensors, biases)
        if names.interleaved_experts:
            tensors = tuple(
                replace(tensor, shape=(*tensor.shape[:-2], *shape[::-1])) for tensor in tensors
            )
            part = replace(part, weight=tensors, transposed=True, interleaved=module == "up")
        yield part


def _bias_of(name: str) -> str:
    """Return the name of the tensor of experts' biases, given that of their weights.

    Names of weights end with ``.weight`` in GGUF files only.
    """
    module = name.removesuffix(".weight")
    return f"{module}_bias" if module == name else f"{module}.bias"


def _norm_sizes(config: ModelConfig, index: int) -> dict[str, int]:
    """Return the number of features of each norm of a layer.

    The norms of a recurrence and of a router's input are left out.
    """
    sizes = dict[str, int]()
    branches = {"both": ("attention", "mlp"), "mixer": ("attention",), "mlp": ("mlp",)}
    for branch in branches[config.sublayers_of(index)]:
        if config.norm_places != "output":
            sizes[f"{branch}_norm"] = config.hidden_size
        if config.norm_places != "input":
            sizes[f"{branch}_output_norm"] = config.hidden_size
    if config.qk_norm and config.has_attention(index):
        queries, keys, _ = config.qkv_sizes if config.whole_qk_norm else (config.head_dim,) * 3
        sizes["q_norm"] = queries
        if config.stores_keys(index):
            sizes["k_norm"] = keys
    mixture = config.mixture_of(index)
    if mixture is not None and mixture.separate_norms:
        names = ("expert_norm", "expert_output_norm", "shared_output_norm")
        sizes |= dict.fromkeys(names, config.hidden_size)
    if config.layer_input_size:
        sizes["input_norm"] = config.hidden_size
    return sizes


def plan_linear(
    target: str,
    stored: tuple[str, ...],
    outputs: tuple[int, ...],
    inputs: int,
    *,
    bias: bool = False,
    transposed: bool = False,
) -> DecoderPart:
    """Return the checkpoint tensors that are stacked to a linear layer.

    ``target`` is the layer's attribute path in the decoder. ``stored`` has the names of the stacked
    modules in the checkpoint, and ``outputs`` the number of outputs of each.
    """
    sizes = list(zip(stored, outputs, strict=True))
    weight = tuple(
        CheckpointTensor(f"{name}.weight", (inputs, size) if transposed else (size, inputs))
        for name, size in sizes
    )
    biases = (
        tuple(CheckpointTensor(f"{name}.bias", (size,)) for name, size in sizes) if bias else ()
    )
    return DecoderPart(target, "linear", weight, biases, transposed)


def plan_norm(config: ModelConfig, target: str, stored: str, size: int) -> DecoderPart:
    """Return the checkpoint tensors of a norm over ``size`` features.

    ``target`` is the norm's attribute path in the decoder, and ``stored`` its name in the
    checkpoint.
    """
    bias = (CheckpointTensor(f"{stored}.bias", (size,)),) if config.norm == "layer" else ()
    weight = (CheckpointTensor(f"{stored}.weight", (size,)),)
    return DecoderPart(target, "norm", weight, bias, offset=config.norm_offset)
