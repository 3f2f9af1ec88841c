"""Mapping of checkpoint tensors to the weights of the decoder.

The decoder has fewer, larger matrices than most checkpoints: ``qkv`` stacks the query, key and
value projections, and ``up`` the gate and up projections. A mixture of experts has an ``up`` and a
``down`` for each expert, and a ``router``. The names are :class:`~pronk.models.family.TensorNames`.
The config determines the shapes and whether there are biases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Literal

from pronk.checkpoint.config import (
    ConvolutionConfig,
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
    # ``table`` is an array in the dtype of the checkpoint, such as an embedding; ``mapped`` is a
    # table that stays in the mapped file, also if it is quantized; ``vector`` is an array in
    # float32.
    kind: Literal["linear", "norm", "table", "mapped", "vector"]
    # tensors to stack for the weight; empty for an LM head that is tied to the embedding
    weight: tuple[CheckpointTensor, ...]
    bias: tuple[CheckpointTensor, ...] = ()  # tensors to stack for the bias; empty without a bias
    transposed: bool = False  # whether the ``weight`` tensors are stored ``[inputs, outputs]``
    # whether the outputs are in the order ``gate 0, up 0, gate 1, up 1, …``
    interleaved: bool = False
    offset: float = 0.0  # number to add to the weight of a norm
    factor: float = 1.0  # number by which the weight of a norm is then multiplied
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
    config = config.of_layer(index)
    up_sizes = (config.intermediate_size,) * (2 if config.gated else 1)
    # For each module: number of outputs of each stacked matrix, number of inputs, whether there is
    # a bias.
    linears = {
        "up": (up_sizes, config.hidden_size, config.mlp_bias),
        "down": ((config.hidden_size,), config.intermediate_size, config.mlp_bias),
    }
    sizes = _norm_sizes(config, index)
    mixture = config.mixture_of(index)
    convolution = config.convolution_of(index)
    recurrent = config.recurrent_of(index)
    if mixture is not None:
        yield from _plan_experts(config, mixture, names, index)
        linears = _shared_sizes(config, mixture)
    if config.layer_input_size:
        size = config.layer_input_size
        linears["input_gate"] = ((size,), config.hidden_size, False)
        linears["input_projection"] = ((config.hidden_size,), size, False)
    if config.layer_scalars:
        scalar = CheckpointTensor(_stored_modules(names, index, "scalar")[0], (1,))
        yield DecoderPart(f"layers.{index}.scalar", "vector", (scalar,))
    if convolution is not None:
        yield from _plan_convolution(config, convolution, names, index)
    elif recurrent is not None:
        yield from _plan_recurrence(config, recurrent, names, index)
    else:
        yield from _plan_attention(config, names, index)
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
            yield plan_norm(config, target, stored[0], sizes[module])


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
    """Yield the projections of a recurrent layer, its convolution, its decay and its norm."""
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
        sizes = (recurrent.key_dim, recurrent.key_dim, values, values)
        yield _plan_sections(f"{path}.mixer_in", inputs[0], key_heads, sizes, hidden)
    if len(gates) == 2:
        yield plan_linear(f"{path}.mixer_gates", gates, (value_heads,) * 2, hidden)
    else:
        # The rows of a key head are beta for each of its value heads, then the decay for each.
        numbers = (per_key_head, per_key_head)
        yield _plan_sections(f"{path}.mixer_gates", gates[0], key_heads, numbers, hidden)
    filter_ = f"{_stored_modules(names, index, 'mixer_filter')[0]}.weight"
    shape = (recurrent.num_channels, 1, recurrent.taps)
    yield DecoderPart(f"{path}.filter", "table", (CheckpointTensor(filter_, shape),))
    for module in ("decay_rate", "decay_bias"):
        stored = CheckpointTensor(_stored_modules(names, index, module)[0], (value_heads,))
        is_log = names.log_decay and module == "decay_rate"
        yield DecoderPart(f"{path}.{module}", "vector", (stored,), log_decay=is_log)
    norm = _stored_modules(names, index, "mixer_norm")[0]
    part = plan_norm(config, f"{path}.mixer_norm", norm, recurrent.value_dim)
    yield replace(part, offset=0.0)
    out = _stored_modules(names, index, "mixer_out")
    yield plan_linear(f"{path}.out", out, (hidden,), recurrent.num_outputs)


def _plan_sections(
    target: str, stored: str, heads: int, sections: Sequence[int], inputs: int
) -> DecoderPart:
    """Return a linear layer whose stored matrix has the rows of one head after the other.

    ``sections`` are the numbers of rows of a head in each section. The layer's outputs are those of
    the first section for all heads, then those of the second section, and so on.
    """
    bounds = [*accumulate(sections, initial=0)]
    rows = [HeadRows(heads, start, stop) for start, stop in pairwise(bounds)]
    count = len(sections)
    part = plan_linear(target, (stored,) * count, (heads * bounds[-1],) * count, inputs)
    return _take_rows(part, rows)


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
            f"layers.{index}.router_norm", "norm", (norm,), factor=config.hidden_size**-0.5
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
    if config.norm_places != "output":
        sizes |= {"attention_norm": config.hidden_size, "mlp_norm": config.hidden_size}
    if config.norm_places != "input":
        sizes |= {
            "attention_output_norm": config.hidden_size,
            "mlp_output_norm": config.hidden_size,
        }
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
