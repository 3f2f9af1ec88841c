"""Mapping of checkpoint tensors to the weights of the decoder.

The decoder has fewer, larger matrices than most checkpoints: ``qkv`` stacks the query, key and
value projections, and ``up`` the gate and up projections. A mixture of experts has an ``up`` and a
``down`` for each expert, and a ``router``. The names are :class:`~pronk.models.family.TensorNames`.
The config determines the shapes and whether there are biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from pronk.checkpoint.config import ConvolutionConfig, MixtureConfig, ModelConfig
from pronk.models.families import get_family
from pronk.models.family import TensorNames


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, or the part of the tensor that belongs to one expert."""

    name: str  # without the family's prefix
    shape: tuple[int, ...]  # of the whole tensor, also with ``expert``
    # number of the expert, an index into the first axis; ``None``: the whole tensor
    expert: int | None = None
    # number of heads whose rows the file permutes; see :class:`TensorNames`
    permuted_heads: int = 0


@dataclass(frozen=True)
class DecoderPart:
    """A module or embedding, and the checkpoint tensors to stack for its weight and bias."""

    target: str  # attribute path in the decoder, such as ``layers.0.qkv``
    kind: Literal["linear", "norm", "table"]  # ``table`` is an embedding
    # tensors to stack; empty for an LM head tied to the embedding
    weight: tuple[CheckpointTensor, ...]
    bias: tuple[CheckpointTensor, ...] = ()  # tensors to stack; empty without a bias
    transposed: bool = False  # whether the ``weight`` tensors are stored ``[inputs, outputs]``
    # whether the outputs are in the order ``gate 0, up 0, gate 1, up 1, …``
    interleaved: bool = False

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """All tensors: ``weight``, then ``bias``."""
        return self.weight + self.bias


def plan_tensors(config: ModelConfig, names: TensorNames | None = None) -> Iterator[DecoderPart]:
    """Yield every part of the decoder; ``names`` are by default those of the config's family."""
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
    for index in range(config.num_layers):
        yield from plan_layer(config, names, index)


def plan_layer(config: ModelConfig, names: TensorNames, index: int) -> Iterator[DecoderPart]:
    """Yield the parts of a decoder layer."""
    up_sizes = (config.intermediate_size,) * (2 if config.gated else 1)
    # By module: number of outputs of each stacked matrix, number of inputs, whether there is a
    # bias.
    linears = {
        "qkv": (config.qkv_sizes, config.hidden_size, config.qkv_bias),
        "out": ((config.hidden_size,), config.num_heads * config.head_dim, config.out_bias),
        "up": (up_sizes, config.hidden_size, config.mlp_bias),
        "down": ((config.hidden_size,), config.intermediate_size, config.mlp_bias),
    }
    sizes = _norm_sizes(config)
    mixture = config.mixture_of(index)
    if mixture is not None:
        yield from _plan_experts(config, mixture, names, index)
        del linears["up"], linears["down"]
    convolution = config.convolution_of(index)
    if convolution is not None:
        yield from _plan_convolution(config, convolution, names, index)
        del linears["qkv"], linears["out"]
        sizes = {
            module: size for module, size in sizes.items() if module not in ("q_norm", "k_norm")
        }
    if config.attention_sinks:
        sinks = f"{names.layers}.{index}.{names.layer['sinks'][0]}"
        yield DecoderPart(
            f"layers.{index}.sinks", "table", (CheckpointTensor(sinks, (config.num_heads,)),)
        )
    for module, stored_modules in names.layer.items():
        stored = tuple(f"{names.layers}.{index}.{name}" for name in stored_modules)
        target = f"layers.{index}.{module}"
        if module in linears:
            outputs, inputs, bias = linears[module]
            # Some families store the query, key and value projections, or gate and up projection,
            # as one matrix.
            outputs = outputs if len(stored) == len(outputs) else (sum(outputs),)
            part = plan_linear(
                target, stored, outputs, inputs, bias=bias, transposed=names.transposed
            )
            is_permuted = names.permuted_heads and module == "qkv"
            yield _mark_permuted(part, config) if is_permuted else part
        elif module in sizes:
            yield plan_norm(config, target, stored[0], sizes[module])


def _mark_permuted(qkv: DecoderPart, config: ModelConfig) -> DecoderPart:
    """Return the tensors of queries, keys and values, each with its number of permuted heads."""
    heads = (config.num_heads, config.num_kv_heads, 0)

    def mark(tensors: tuple[CheckpointTensor, ...]) -> tuple[CheckpointTensor, ...]:
        # An empty tuple is that of absent biases.
        return tuple(
            replace(tensor, permuted_heads=count)
            for tensor, count in zip(tensors, heads[: len(tensors)], strict=True)
        )

    return replace(qkv, weight=mark(qkv.weight), bias=mark(qkv.bias))


def _plan_convolution(
    config: ModelConfig, convolution: ConvolutionConfig, names: TensorNames, index: int
) -> Iterator[DecoderPart]:
    """Yield the projections of a layer's short convolution, its weights and its bias."""
    hidden = config.hidden_size
    bias = convolution.bias
    gates, filter_, out = (
        f"{names.layers}.{index}.{names.layer[module][0]}"
        for module in ("gates", "filter", "convolution_out")
    )
    yield plan_linear(f"layers.{index}.gates", (gates,), (3 * hidden,), hidden, bias=bias)
    yield plan_linear(f"layers.{index}.out", (out,), (hidden,), hidden, bias=bias)
    middle = () if names.flat_filters else (1,)
    weight = CheckpointTensor(f"{filter_}.weight", (hidden, *middle, convolution.taps))
    yield DecoderPart(f"layers.{index}.filter", "table", (weight,))
    if bias:
        yield DecoderPart(
            f"layers.{index}.filter_bias",
            "table",
            (CheckpointTensor(f"{filter_}.bias", (hidden,)),),
        )


def _plan_experts(
    config: ModelConfig, mixture: MixtureConfig, names: TensorNames, index: int
) -> Iterator[DecoderPart]:
    """Yield the router of a layer, and the two matrices of each expert."""
    hidden = config.hidden_size
    path = f"{names.layers}.{index}"
    router = (f"{path}.{names.layer['router'][0]}",)
    yield plan_linear(
        f"layers.{index}.router", router, (mixture.experts,), hidden, bias=mixture.bias
    )
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
    """Return the name of experts' biases by that of their weights: ``….weight`` in GGUF files."""
    module = name.removesuffix(".weight")
    return f"{module}_bias" if module == name else f"{module}.bias"


def _norm_sizes(config: ModelConfig) -> dict[str, int]:
    sizes = dict[str, int]()
    if config.norm_places != "output":
        sizes |= {"attention_norm": config.hidden_size, "mlp_norm": config.hidden_size}
    if config.norm_places != "input":
        sizes |= {
            "attention_output_norm": config.hidden_size,
            "mlp_output_norm": config.hidden_size,
        }
    if config.qk_norm:
        queries, keys, _ = config.qkv_sizes if config.whole_qk_norm else (config.head_dim,) * 3
        sizes |= {"q_norm": queries, "k_norm": keys}
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
    """Return a linear layer of stacked matrices; ``outputs`` has the number of outputs of each."""
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
    """Return a norm over ``size`` features."""
    bias = (CheckpointTensor(f"{stored}.bias", (size,)),) if config.norm == "layer" else ()
    return DecoderPart(target, "norm", (CheckpointTensor(f"{stored}.weight", (size,)),), bias)
