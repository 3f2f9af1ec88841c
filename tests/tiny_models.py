"""Tiny random models, and engines that run them without a checkpoint.

The weights are large enough that the likeliest token has a probability of about 0.5, as in a
trained model. Greedy output does not loop, which would hide errors of position
(``tests/engine/test_equality.py`` checks it). The whole KV cache is filled with NaN, so that each
read of an unwritten slot shows in the logits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models

from gguf_files import STORED, encode
from guides import ToyFollower, with_forced
from oracle import INT4_NUMBERS, DenseLayer, DenseModel, to_array, torch_dtype
from pronk.base.arrays import FLOAT32, INT8, Array, DType
from pronk.cache.blocks import BlockAllocator, BlockTable
from pronk.cache.layout import PoolLayout, fill_poison
from pronk.cache.paged import PagedCache
from pronk.cache.states import StateCounts, StatePool
from pronk.checkpoint.config import (
    AttentionShape,
    ConvolutionConfig,
    LatentConfig,
    MixtureConfig,
    ModelConfig,
    RecurrentConfig,
)
from pronk.checkpoint.gguf.blocks import BlockMatrix, BlockRows
from pronk.checkpoint.rope import RopeConfig
from pronk.drafting import Proposer
from pronk.drafting.autoregressive import Autoregressive
from pronk.drafting.target import Target
from pronk.engine.engine import Engine
from pronk.engine.options import BatchOptions
from pronk.engine.request import Request, RequestResult, Speculation
from pronk.kernels.library import Kernels
from pronk.kernels.rounding import round_weights
from pronk.models.choice import compute_dtype
from pronk.models.cost_model import CostCurve, CostModel
from pronk.models.decoder import Decoder, Layer
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.kernels import load_kernels
from pronk.models.linear import (
    AnyWeight,
    Linear,
    LinearFactory,
    Norm,
    StackedLinear,
    WeightLayout,
    choose_linear,
)
from pronk.models.model_runner import ModelRunner
from pronk.models.program import KVSource
from pronk.sampling.logits_processors import BannedTokens, TokenContext
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.thinking import ThinkingBudget
from pronk.sampling.tree import TokenTree
from pronk.text.stream import TextStream
from pronk.text.thinking import ThinkingMarkers
from pronk.text.tokenizer import Tokenizer

VOCAB = 131
POISON = float("nan")


def tiny_config(
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 64,
    vocab: int = VOCAB,
    windows: tuple[int | None, ...] = (None, None),
    classic: bool = False,
    qk_norm: bool = False,
    dynamic: bool = False,
    special: str = "",
) -> ModelConfig:
    """Return a config with one layer per window.

    Args:
        special: a name of :func:`special_fields`.
        classic: as GPT-2: learned positions, LayerNorm, biases, tied head.
        dynamic: rotations with *dynamic* scaling, which depend on the length of the text.
    """
    family = (
        {"norm": "layer", "activation": "gelu_tanh", "gated": False, "tied": True}
        if classic
        else {}
    )
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), classic)
    scaling: dict[str, Any] = {"kind": "dynamic", "factor": 2.0, "original": 200} if dynamic else {}
    rope = None if classic else RopeConfig(head_dim, **scaling)
    inner = hidden * 4 if classic else hidden * 7 // 4
    shape = (vocab, hidden, inner, len(windows), heads, kv_heads, head_dim, 4096, 1e-5)
    made = {"rope": rope, "windows": windows, "qk_norm": qk_norm, **biases, **family}
    config = ModelConfig("test", *shape, **made)  # type: ignore[arg-type]
    return replace(config, **special_fields(special, head_dim, len(windows)))


def special_fields(name: str, head_dim: int, layers: int) -> dict[str, Any]:
    """Return the fields of a config in which a kind of model differs from a Llama.

    The kinds:

    - ``gemma``: all special fields of Gemma 2 and 3: norms before and after a branch, soft caps,
      scales, two rotary embeddings.
    - ``outputs``: norms after a branch, norms of queries and keys over all heads, layers without a
      rotary embedding.
    - ``growth``: queries that grow with the position.
    - ``others``: ``outputs``, ``growth`` and factors, which are all fields that ``gemma`` does not
      set.
    - ``experts``: a mixture of experts in all layers but the second.
    - ``routers``: as ``experts``, with a shared expert, groups of experts, MLPs without a gate, and
      a router whose scores are corrected for the choice.
    - ``convolutions``: a short convolution in all layers but the second.

    - ``recurrent``: Gated DeltaNet in all layers but the second, which has gated attention.
    - ``mamba``: Mamba 2 in all layers but the second, which has attention.
    - ``sublayers``: layers of one sublayer each, as in Nemotron 3: Mamba 2, the experts of
      ``routers``, attention without a rotary embedding, an MLP, and again from the first.
    - ``parallel``: Mamba 2 without a norm beside attention in all layers but the second.
    - ``gemma4``: layers of different shapes, the last two of which read the keys of the first two;
      inputs of layers; experts with separate norms in the second layer.
    - ``biases``: biases of queries, keys and values, those of keys as large as in Qwen2.5.
    - ``latent``: latent attention, with latents of queries.
    - ``plain latent``: latent attention, without latents of queries.

    :class:`~oracle.DenseModel`, the oracle in torch, has neither ``growth`` nor ``convolutions``
    nor ``gemma4`` nor ``latent`` nor recurrences.
    """
    return _SPECIAL_FIELDS[name](head_dim, layers) if name else {}


def _all_but_second(layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is not the second, which is as in a Llama."""
    return tuple(layer != 1 for layer in range(layers))


def _gemma_fields(head_dim: int, layers: int) -> dict[str, Any]:
    ropes = tuple(RopeConfig(head_dim, 500.0 if layer % 2 else 10000.0) for layer in range(layers))
    return {
        "activation": "gelu_tanh",
        "layer_ropes": ropes,
        "norm_places": "both",
        "qk_norm": True,
        "embedding_scale": 8.0,
        "attention_scale": 0.2,
        "attention_cap": 6.0,
        "logits_cap": 9.0,
    }


def _outputs_fields(head_dim: int, layers: int) -> dict[str, Any]:
    rope = RopeConfig(head_dim // 4 * 2)
    return {
        "layer_ropes": tuple(rope if layer % 2 == 0 else None for layer in range(layers)),
        "norm_places": "output",
        "qk_norm": True,
        "whole_qk_norm": True,
        "residual_scale": 0.7,
        "logits_scale": 1.25,
    }


def _growth_fields(head_dim: int, layers: int) -> dict[str, Any]:
    del head_dim, layers
    return {"query_growth": (0.3, 32)}


def _others_fields(head_dim: int, layers: int) -> dict[str, Any]:
    scales = {"embedding_scale": 3.0, "attention_scale": 0.2}
    return _outputs_fields(head_dim, layers) | _growth_fields(head_dim, layers) | scales


def _experts_fields(head_dim: int, layers: int) -> dict[str, Any]:
    del head_dim
    with_experts = _all_but_second(layers)
    mixture = MixtureConfig(experts=9, per_row=3, width=40, normalized=True, layers=with_experts)
    return {"mixture": mixture}


def _routers_fields(head_dim: int, layers: int) -> dict[str, Any]:
    mixture = replace(
        _experts_fields(head_dim, layers)["mixture"],
        experts=12,
        scores="sigmoid",
        correction=True,
        groups=4,
        row_groups=2,
        scale=1.5,
        epsilon=1e-20,
        shared_width=24,
    )
    return {"mixture": mixture, "gated": False, "activation": "relu2"}


def _convolutions_fields(head_dim: int, layers: int) -> dict[str, Any]:
    del head_dim
    return {"convolution": ConvolutionConfig(taps=3, layers=_all_but_second(layers), bias=True)}


def _recurrent_fields(head_dim: int, layers: int) -> dict[str, Any]:
    del head_dim
    recurrent = RecurrentConfig(
        _all_but_second(layers), key_heads=2, value_heads=4, key_dim=8, value_dim=24, taps=4
    )
    return {"recurrent": recurrent, "gated_attention": True}


def _mamba_fields(head_dim: int, layers: int) -> dict[str, Any]:
    recurrent = replace(
        _recurrent_fields(head_dim, layers)["recurrent"],
        rule="mamba2",
        norm="after_gate",
        filter_bias=True,
    )
    return {"recurrent": recurrent}


def _parallel_fields(head_dim: int, layers: int) -> dict[str, Any]:
    recurrent = _mamba_fields(head_dim, layers)["recurrent"]
    return {"recurrent": replace(recurrent, norm="none", parallel=True)}


def _sublayers_fields(head_dim: int, layers: int) -> dict[str, Any]:
    kinds = [("mamba", "experts", "attention", "mlp")[layer % 4] for layer in range(layers)]
    routers = _routers_fields(head_dim, layers)
    recurrent = _mamba_fields(head_dim, layers)["recurrent"]
    with_state = tuple(kind == "mamba" for kind in kinds)
    with_experts = tuple(kind == "experts" for kind in kinds)
    return routers | {
        "sublayers": tuple("mixer" if layer % 2 == 0 else "mlp" for layer in range(layers)),
        "recurrent": replace(recurrent, layers=with_state),
        "mixture": replace(routers["mixture"], layers=with_experts),
        "layer_ropes": (None,) * layers,
    }


def _latent_fields(head_dim: int, query_rank: int | None) -> dict[str, Any]:
    latent = LatentConfig(
        rank=48, rope_dim=head_dim // 2, plain_dim=12, value_dim=16, query_rank=query_rank
    )
    return {
        "latent": latent,
        "head_dim": latent.rank + latent.rope_dim,
        "num_kv_heads": 1,
        "attention_scale": latent.query_dim**-0.5,
        "rope": RopeConfig(latent.rope_dim),
    }


def _gemma4_fields(head_dim: int, layers: int) -> dict[str, Any]:
    first = AttentionShape(2, head_dim)
    second = AttentionShape(1, 2 * head_dim, tied_values=True)
    own = (first, second) * (layers // 2 - 1)
    readers = (replace(first, reads=0), replace(second, reads=1, tied_values=False))
    shapes = own + readers
    ropes = tuple(
        RopeConfig(shape.head_dim, 500.0 if layer % 2 else 10000.0)
        for layer, shape in enumerate(shapes)
    )
    mixture = MixtureConfig(
        experts=5,
        per_row=2,
        width=24,
        normalized=True,
        layers=tuple(layer == 1 for layer in range(layers)),
        shared_width=40,
        separate_norms=True,
        expert_scales=True,
    )
    return {
        "activation": "gelu_tanh",
        "norm_places": "both",
        "qk_norm": True,
        "value_norm": True,
        "layer_scalars": True,
        "layer_input_size": 8,
        "attention_shapes": shapes,
        "intermediate_sizes": (48,) * (layers - 2) + (96,) * 2,
        "layer_ropes": ropes,
        "mixture": mixture,
        "attention_scale": 1.0,
        "embedding_scale": 3.0,
        "logits_cap": 9.0,
    }


_SPECIAL_FIELDS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "gemma": _gemma_fields,
    "gemma4": _gemma4_fields,
    "outputs": _outputs_fields,
    "growth": _growth_fields,
    "others": _others_fields,
    "experts": _experts_fields,
    "routers": _routers_fields,
    "convolutions": _convolutions_fields,
    "recurrent": _recurrent_fields,
    "mamba": _mamba_fields,
    "parallel": _parallel_fields,
    "sublayers": _sublayers_fields,
    "biases": lambda head_dim, layers: {"qkv_bias": True},
    "latent": lambda head_dim, _: _latent_fields(head_dim, 24),
    "plain latent": lambda head_dim, _: _latent_fields(head_dim, None),
}


@cache
def tiny_module(dtype: DType = FLOAT32, *, seed: int = 0, **shape: Any) -> DenseModel:
    """Return the oracle with random weights; ``shape`` as in :func:`tiny_config`."""
    config = tiny_config(**shape)
    module = DenseModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in ("embedding", "positions"):
                parameter.normal_(0.0, 1.0, generator=generator)
            elif parameter.dim() > 1:
                gain = 4.0 if name.startswith("head") else 2.0
                parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5, generator=generator)
            elif name.endswith(("bias", "correction")):
                parameter.normal_(0.0, 0.3, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
        if config.qkv_bias and config.rope is not None:
            keys = slice(config.num_heads * config.head_dim, None)
            for layer in module.layers:
                layer.qkv.bias[keys][: config.num_kv_heads * config.head_dim].mul_(50.0)
        if config.tied:
            # the embedding is larger than an untied head
            module.norm.weight.mul_(4.0 * config.hidden_size**-0.5)
    return module.to(torch_dtype(dtype)).requires_grad_(requires_grad=False).eval()


@cache
def tiny_decoder(
    dtype: DType = FLOAT32,
    *,
    weights: str = "plain",
    seed: int = 0,
    **shape: Any,
) -> Decoder:
    """Return the decoder of :func:`tiny_module`; decoders have no state, so equal ones are shared.

    Args:
        weights: as in :func:`~pronk.models.linear.choose_linear`, or ``stored`` for
            :func:`stored_linear`.
    """
    return decoder_of(tiny_module(dtype, seed=seed, **shape), kernels(), weights)


def decoder_of(
    module: DenseModel,
    by: Kernels,
    weights: str = "plain",
    linear: LinearFactory | None = None,
) -> Decoder:
    """Return the decoder with the weights of a module.

    ``linear`` packs them; by default as the option ``weights``.
    """
    config = module.config
    if linear is None:
        linear = stored_linear(by) if weights == "stored" else choose_linear(by, weights)
    decoder = Decoder(config, by)

    def norm(of: torch.nn.Module) -> Norm | None:
        if isinstance(of, torch.nn.Identity):
            return None
        bias = getattr(of, "bias", None)
        return Norm.of(config, to_array(of.weight), None if bias is None else to_array(bias))

    decoder.embedding = to_array(module.embedding)
    decoder.positions = None if module.positions is None else to_array(module.positions)
    # type: ignore[assignment]
    decoder.norm = norm(module.norm)
    head = to_array(module.head.weight)
    decoder.head = linear(head, None, WeightLayout(head=True))
    decoder.head.scale = config.logits_scale
    decoder.head.cap = config.logits_cap
    for index, (own, layer) in enumerate(zip(module.layers, decoder.layers, strict=True)):
        for name in ("attention_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm"):
            setattr(layer, name, norm(getattr(own, name)))
        set_weights(layer, index, own, linear)
    if decoder.layer_inputs is not None:
        add_layer_inputs(decoder, linear)
    return decoder


def stored_linear(by: Kernels) -> LinearFactory:
    """Return a function that builds layers of random GGUF blocks, of one stored kind after another.

    The blocks are of the magnitude of the given weights, whose inputs are a multiple of 64.
    """
    kinds = cycle(STORED)

    def build(weight: AnyWeight, bias: Array | None, layout: WeightLayout) -> Linear:
        assert isinstance(weight, np.ndarray)
        if layout.head:
            return Linear(by, weight, bias, layout, None)
        inputs = weight.shape[1]
        kind = next(kinds) if inputs % 256 == 0 else "NVFP4"
        stored = encode(kind, weight.astype(np.float32), seed=inputs)
        return Linear(by, BlockMatrix(kind, inputs, (BlockRows(stored),)), bias, layout, None)

    return build


def set_weights(layer: Layer, index: int, own: DenseLayer, linear: LinearFactory) -> None:
    """Set a layer's weights from a module's layer; those that the module lacks are random."""
    config = own.config
    like = own.out.weight
    if config.attention_shapes:
        add_shapes(layer, index, linear, like)
        return
    if config.recurrent_of(index) is not None:
        add_recurrence(layer, linear, like)
    if config.convolution_of(index) is not None:
        add_convolution(layer, linear, like)
    if config.has_attention(index):
        set_attention(layer, own, linear)
    if layer.sublayers != "mixer":
        set_linears(layer, own, linear, "up", "down")


def set_attention(layer: Layer, own: DenseLayer, linear: LinearFactory) -> None:
    """Set the weights of a layer's attention; those that the module lacks are random."""
    if own.config.latent is not None:
        add_latent_attention(layer, linear, own.out.weight)
        return
    set_linears(layer, own, linear, "qkv", "out")
    if own.config.gated_attention:
        add_attention_gate(layer, linear, own.out.weight)


def sharing_decoder(module: DenseModel, by: Kernels, reads: Mapping[int, KVSource]) -> Decoder:
    """Return a decoder with the weights of a module, in which some layers share keys and values.

    Such a layer has queries only, and reads the keys and values of another layer.
    """
    decoder = decoder_of(module, by)
    for index, kv in reads.items():
        layer = decoder.layers[index]
        weight = to_array(module.layers[index].qkv.weight)
        layer.reads = kv
        layer.k_norm = None
        layer.qkv = Linear(by, weight[: layer.config.qkv_sizes[0]], None, layer.layout("qkv"), None)
    return decoder


def set_linears(layer: Layer, own: DenseLayer, linear: LinearFactory, *names: str) -> None:
    """Set a layer's linear layers, norms of queries and keys, and router from a module's layer."""
    if own.q_norm is not None and "qkv" in names:
        layer.q_norm, layer.k_norm = (
            Norm(to_array(each.weight.float()), None, layer.config.norm_eps)
            for each in (own.q_norm, own.k_norm)
        )
    if own.router is not None:
        layer.router = linear(to_array(own.router.weight.float()), None, layer.layout("router"))
        assert own.mixture is not None
        if own.mixture.correction:
            layer.correction = to_array(own.correction.float())
        if own.mixture.shared_width:
            names = (*names, "shared_up", "shared_down")
    for name in names:
        part = getattr(own, name)
        if isinstance(part, torch.nn.ModuleList):
            experts = getattr(layer, name)
            for number, each in enumerate(part):
                experts.set(number, linear(to_array(each.weight), None, experts.layout))
            continue
        bias = None if part.bias is None else to_array(part.bias)
        setattr(layer, name, linear(to_array(part.weight), bias, layer.layout(name)))


def add_convolution(layer: Layer, linear: LinearFactory, like: torch.Tensor) -> None:
    """Set a random short convolution, with the dtype of ``like`` and a seed made from ``like``."""
    assert layer.config.convolution is not None
    dice = np.random.default_rng(np.frombuffer(to_array(like).tobytes()[:64], np.uint32))
    hidden = layer.config.hidden_size
    taps = layer.config.convolution.taps
    dtype = to_array(like).dtype

    def draw(*shape: int, scale: float = 1.0) -> Array:
        return (scale * dice.standard_normal(shape)).astype(dtype)

    layer.gates = linear(
        draw(3 * hidden, hidden, scale=hidden**-0.5),
        draw(3 * hidden, scale=0.3),
        layer.layout("gates"),
    )
    layer.filter = draw(hidden, 1, taps, scale=0.7)
    layer.filter_bias = draw(hidden, scale=0.3)
    layer.out = linear(
        draw(hidden, hidden, scale=hidden**-0.5), draw(hidden, scale=0.3), layer.layout("out")
    )


def add_shapes(layer: Layer, index: int, linear: LinearFactory, like: torch.Tensor) -> None:
    """Set random weights of a layer of the kind ``gemma4``, with the dtype of ``like``.

    The seed is made from ``like``. ``index`` is the number of the layer, from 0.
    """
    config = layer.config
    dice = np.random.default_rng(np.frombuffer(to_array(like).tobytes()[:64], np.uint32))
    hidden = config.hidden_size
    dtype = to_array(like).dtype

    def draw(outputs: int, inputs: int) -> Array:
        return (inputs**-0.5 * dice.standard_normal((outputs, inputs))).astype(dtype)

    def norm(size: int, scale: float = 1.0) -> Norm:
        return Norm.of(config, (scale * dice.uniform(0.5, 1.5, size)).astype(np.float32))

    def project(name: str, outputs: int, inputs: int) -> None:
        setattr(layer, name, linear(draw(outputs, inputs), None, layer.layout(name)))

    queries, keys, _ = config.qkv_sizes
    weights = [draw(queries, hidden)]
    layer.q_norm = norm(config.head_dim)
    if config.stores_keys(index):
        layer.k_norm = norm(config.head_dim)
        weights += [draw(keys, hidden), draw(keys, hidden)]
    if config.shape_of(index).tied_values:
        weights[2] = weights[1]
    layer.qkv = linear(np.concatenate(weights), None, layer.layout("qkv"))
    project("out", hidden, queries)
    project("input_gate", config.layer_input_size, hidden)
    project("input_projection", hidden, config.layer_input_size)
    layer.input_norm = norm(hidden)
    layer.scalar = np.float32([0.8])
    mixture = config.mixture_of(index)
    if mixture is None:
        project("up", 2 * config.intermediate_size, hidden)
        project("down", hidden, config.intermediate_size)
        return
    project("shared_up", 2 * mixture.shared_width, hidden)
    project("shared_down", hidden, mixture.shared_width)
    router = draw(mixture.experts, hidden).astype(np.float32)
    layer.router = linear(router, None, layer.layout("router"))
    layer.router_norm = norm(hidden, 2.0)
    layer.expert_norm = norm(hidden)
    layer.expert_output_norm = norm(hidden)
    layer.shared_output_norm = norm(hidden)
    layer.expert_scale = dice.uniform(0.5, 1.5, mixture.experts).astype(np.float32)
    sizes = {"up": (2 * mixture.width, hidden), "down": (hidden, mixture.width)}
    for name, (outputs, inputs) in sizes.items():
        experts = getattr(layer, name)
        for number in range(mixture.experts):
            experts.set(number, linear(draw(outputs, inputs), None, experts.layout))


def add_layer_inputs(decoder: Decoder, linear: LinearFactory) -> None:
    """Set random inputs of layers, with the dtype of the embedding."""
    inputs = decoder.layer_inputs
    assert inputs is not None
    config = decoder.config
    dice = np.random.default_rng(config.num_layers)
    size = config.layer_input_size
    width = config.num_layers * size
    dtype = decoder.embedding.dtype
    inputs.table = dice.standard_normal((config.vocab_size, width)).astype(dtype)
    weight = dice.standard_normal((width, config.hidden_size)).astype(dtype)
    inputs.projection = linear(weight, None, inputs.layout("projection"))
    inputs.norm = Norm.of(config, dice.uniform(0.5, 1.5, size).astype(np.float32))


def add_recurrence(layer: Layer, linear: LinearFactory, like: torch.Tensor) -> None:
    """Set a random recurrence, with the dtype of ``like`` and a seed made from ``like``."""
    config = layer.recurrent
    assert config is not None
    dice = np.random.default_rng(np.frombuffer(to_array(like).tobytes()[:64], np.uint32))
    hidden = layer.config.hidden_size
    dtype = to_array(like).dtype

    def draw(*shape: int, scale: float) -> Array:
        return (scale * dice.standard_normal(shape)).astype(dtype)

    def project(name: str, outputs: int) -> Linear:
        weight = draw(outputs, hidden, scale=hidden**-0.5)
        return linear(weight, None, layer.layout(name))

    layer.mixer_in = StackedLinear(
        [project("mixer_in", config.num_channels), project("mixer_in", config.num_outputs)]
    )
    layer.mixer_gates = project("mixer_gates", config.num_scalars)
    layer.filter = draw(config.num_channels, 1, config.taps, scale=0.7)
    layer.decay_rate = -np.exp(dice.uniform(-0.5, 2.0, config.value_heads)).astype(np.float32)
    layer.decay_bias = draw(config.value_heads, scale=0.5).astype(np.float32)
    outputs = config.num_outputs
    if config.norm != "none":
        size = config.value_dim if config.norm == "before_gate" else outputs
        layer.mixer_norm = Norm.of(layer.config, 1 + draw(size, scale=0.2))
    if config.filter_bias:
        layer.filter_bias = draw(config.num_channels, scale=0.3)
    if config.rule == "mamba2":
        layer.skip = draw(config.value_heads, scale=1.0)
    weight = draw(hidden, outputs, scale=outputs**-0.5)
    layer.mixer_out = linear(weight, None, layer.layout("mixer_out"))


def add_latent_attention(layer: Layer, linear: LinearFactory, like: torch.Tensor) -> None:
    """Set a random latent attention, with the dtype of ``like`` and a seed made from ``like``."""
    config = layer.config
    latent = config.latent
    assert latent is not None
    dice = np.random.default_rng(np.frombuffer(to_array(like).tobytes()[:64], np.uint32))
    heads = config.num_heads

    def project(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Linear:
        weight = gain * inputs**-0.5 * dice.standard_normal((outputs, inputs))
        return linear(weight.astype(to_array(like).dtype), None, layer.layout(name))

    def norm(size: int) -> Norm:
        return Norm(dice.uniform(0.5, 1.5, size).astype(np.float32), None, latent.norm_eps)

    query_inputs = config.hidden_size
    if latent.query_rank is not None:
        query_inputs = latent.query_rank
        layer.q_a = project("q_a", query_inputs, config.hidden_size)
        layer.q_a_norm = norm(query_inputs)
    layer.q_b = project("q_b", heads * latent.query_dim, query_inputs, 2.0)
    layer.kv_a = project("kv_a", config.head_dim, config.hidden_size)
    layer.kv_a_norm = norm(latent.rank)
    layer.k_b = project("k_b", heads * latent.rank, latent.plain_dim)
    layer.v_b = project("v_b", heads * latent.value_dim, latent.rank)
    layer.out = project("out", config.hidden_size, heads * latent.value_dim)


def add_attention_gate(layer: Layer, linear: LinearFactory, like: torch.Tensor) -> None:
    """Set random gates of attention, with the dtype of ``like`` and a seed made from ``like``."""
    dice = np.random.default_rng(np.frombuffer(to_array(like).tobytes()[:64], np.uint32))
    queries, _, _ = layer.config.qkv_sizes
    hidden = layer.config.hidden_size
    weight = (dice.standard_normal((queries, hidden)) * hidden**-0.5).astype(to_array(like).dtype)
    layer.attention_gate = linear(weight, None, layer.layout("attention_gate"))


def several_forms(layer: DenseLayer, by: Kernels) -> list[tuple[AnyWeight, Array | None]]:
    """Return weights and biases of the query, key and value projections in three forms.

    The query projection has 4 bits with minima, the key projection 8 bits with an order of inputs,
    and the value projection is not quantized.
    """
    c = layer.config
    bias = layer.qkv.bias
    q, k, v = (to_array(part) for part in layer.qkv.weight.split(c.qkv_sizes))
    low = round_weights(by, q, 4, 16)
    order = to_array(torch.randperm(c.hidden_size, generator=torch.Generator().manual_seed(7)))
    keys = replace(round_weights(by, k[:, order], 8, 24), order=order)
    biases = [None] * 3 if bias is None else [to_array(part) for part in bias.split(c.qkv_sizes)]
    return list(
        zip((replace(low, minimum=low.scale * np.float32(-8.0)), keys, v), biases, strict=True)
    )


def pack_several_forms(module: DenseModel, by: Kernels) -> Decoder:
    """Return the model for the kernels with q, k and v of all layers in :func:`several_forms`."""
    made = decoder_of(module, by)
    for own, layer in zip(module.layers, made.layers, strict=True):
        layout = layer.layout("qkv")
        layer.qkv = StackedLinear(
            [Linear(by, *part, layout, None) for part in several_forms(own, by)]
        )
    return made


# The instruction set of ``pytest --kernels=avx2``.
asked = "auto"


def kernels() -> Kernels:
    return load_kernels(asked)


def read_kv(cache: PagedCache, layer: int, block_table: BlockTable) -> tuple[Array, Array]:
    """Return the keys and values of the committed tokens with a block.

    Both are ``[kv_heads, tokens, head_dim]``.

    Of a layer with a short convolution, the keys are its states ``[1, tokens, hidden]``, and there
    are no values. Of a layer that reads the keys of another one, there is neither.
    """
    slots = cache.slots(
        block_table, block_table.num_released * cache.block_size, block_table.length
    )
    if cache.kernels is None:
        index = torch.from_numpy(slots)
        return to_array(cache.keys[layer][:, index]), to_array(cache.values[layer][:, index])
    values = _numbers(cache._value_layout, cache.values[layer], slots)
    if cache.config.has_values_in_keys:
        return values, values[..., : cache.config.value_dim]
    if not len(cache.keys[layer]):
        return values, values
    key_layout = next(
        layout for layout, pool in cache._layouts_and_pools() if pool is cache.keys[layer]
    )
    return _numbers(key_layout, cache.keys[layer], slots), values


def _numbers(layout: PoolLayout, pool: Array, slots: Array) -> Array:
    """Return the numbers ``[kv_heads, tokens, head_dim]`` in some slots of a pool."""
    if not len(pool):
        return np.empty((0, len(slots), 0), np.float32)
    parts = [part[:, slots // layout.panel, :, slots % layout.panel] for part in layout.parts(pool)]
    first, *scales = (
        np.swapaxes(part.reshape(*part.shape[:2], part.shape[2] * part.shape[3]), 0, 1)
        for part in parts
    )
    if pool.dtype != INT8:
        return first
    quantization = layout.quantization
    assert quantization is not None
    if not scales:  # rows: codes, then the scales
        size = quantization.scale_bytes(first.shape[-1])
        stored = np.ascontiguousarray(first[..., -size:]).view(quantization.scale_dtype)
        first, scales = first[..., :-size], [stored]
    if quantization.bits == 8:
        return first * scales[0]
    # Codes of 4 bits: a byte of a key has two adjacent dimensions, a byte of a value those of the
    # two halves of a group. The numbers are rotated (``rotate_head``).
    pairs = first.view(np.uint8)
    groups = pairs.reshape(*pairs.shape[:2], -1, 16)
    axis = -2 if layout.panel == 1 else -1
    codes = np.stack((groups & 15, groups >> 4), axis=axis).reshape(*groups.shape[:-1], 32)
    numbers = np.array(INT4_NUMBERS, np.float32)[codes] * scales[0].astype(np.float32)[..., None]
    return numbers.reshape(*pairs.shape[:2], -1)


def make_cache(
    config: ModelConfig,
    dtype: DType,
    *,
    num_blocks: int = 400,
    block_size: int = 16,
    poison: float | None = POISON,
    kv_dtype: DType | None = None,
    share_prefixes: bool = False,
    kind: type[PagedCache] = PagedCache,
    state_counts: StateCounts | None = None,
) -> PagedCache:
    """Return a KV cache filled with ``poison``."""
    made = kind(
        config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        kernels=kernels(),
        kv_dtype=kv_dtype,
        poison=poison,
        share_prefixes=share_prefixes,
    )
    if state_counts is not None and config.recurrent is not None:
        made.resize_states(state_counts)
    for pool in (*made.keys, *made.values):
        if poison is not None:
            fill_poison(pool, poison)
    return made


class Clock:
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class GivenTimes(CostModel):
    """A cost model with fixed costs of forward passes, which ignores measured durations."""

    def __init__(self, costs: CostCurve | None) -> None:
        super().__init__()
        self.given = costs

    def learn(self, rows: int, context: int, seconds: float, **options: Any) -> None:
        pass

    def costs(self, context: int, requests: int = 1) -> CostCurve | None:
        return self.given


def set_costs(engine: Engine, costs: CostCurve | None) -> None:
    """Set fixed costs of forward passes; see :class:`GivenTimes`."""
    engine.runner.cost_model = GivenTimes(costs)


def make_engine(
    decoder: Decoder,
    *,
    num_blocks: int = 400,
    block_size: int = 16,
    poison: float | None = POISON,
    kv_dtype: DType | None = None,
    share_prefixes: bool = False,
    costs: CostCurve | None = None,
    kind: type[PagedCache] = PagedCache,
    runner: Callable[[Decoder, PagedCache], ModelRunner] | None = None,
    state_counts: StateCounts | None = None,
    **options: Any,
) -> Engine:
    """Return an engine with its own KV cache in the decoder's dtype.

    Args:
        costs: fixed costs of forward passes, by which the engine drops draft tokens; ``None``: keep
            all draft tokens.
        kind: class of the KV cache.
        runner: makes the model runner; ``None``: a runner in this process.
        state_counts: numbers of states of recurrent layers.
        options: options of the engine, of :class:`BatchOptions` and of :class:`Target`, and the
            ``clock`` of a runner in this process.
    """
    dtype = decoder.embedding.dtype
    shape: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "kv_dtype": kv_dtype,
        "kind": kind,
        "state_counts": state_counts,
    }
    pool = make_cache(decoder.config, dtype, **shape, poison=poison, share_prefixes=share_prefixes)
    pool.allocator = StrictAllocator(num_blocks, block_size)
    if pool.prefix_cache is not None:
        pool.prefix_cache.attach(pool.allocator)
    make_runner = runner or partial(ModelRunner, clock=options.pop("clock", perf_counter))
    of_batch = {
        name: options.pop(name)
        for name in ("max_batch", "max_wait", "prefill_chunk")
        if name in options
    }
    of_target = {
        name: options.pop(name) for name in ("tokenizer", "folder", "max_tree") if name in options
    }
    target = Target(make_runner(decoder, pool), **of_target)
    engine = Engine(
        target, BatchOptions(**of_batch), **({} if costs is None else {"budget": True}), **options
    )
    if costs is not None:
        set_costs(engine, costs)
    return engine


def text_logits(
    decoder: Decoder,
    tokens: Sequence[int],
    dtype: DType = FLOAT32,
    kv_dtype: DType | None = None,
    *,
    adapter: int = -1,
) -> Array:
    """Return the logits of a text, computed as a prompt in one pass: ``[len(tokens), vocab]``."""
    shape: dict[str, Any] = {"num_blocks": len(tokens) // 16 + 1, "kv_dtype": kv_dtype}
    cache = make_cache(decoder.config, compute_dtype(dtype), **shape)
    block_table = BlockTable(adapter=adapter)
    cache.prepare(block_table, len(tokens))
    entry = BatchEntry(block_table, TokenTree.chain(tokens), range(len(tokens)), len(tokens))
    return ModelRunner(decoder, cache).forward(ForwardBatch([entry])).logits[0][:]


class StrictAllocator(BlockAllocator):
    """Block allocator that fails if the engine resets it while a block is in use."""

    def reset(self) -> None:
        assert not any(self.references)
        assert self.num_free == self.num_blocks
        super().reset()


class NullText:
    """The text stream of a request without text."""

    def push(self, token: int, *, is_end: bool = False) -> tuple[str, str | None]:
        return "", None

    def flush(self) -> tuple[str, str | None]:
        return "", None


SILENT = 11  # token of the texts below that is special, so that it has a name and no text


@cache
def toy_tokenizer(vocab: int = VOCAB) -> Tokenizer:
    """Return a tokenizer with the texts ``(0)``, ``(1)``, … and the special token ``<|11|>``."""
    texts = {f"<|{token}|>" if token == SILENT else f"({token})": token for token in range(vocab)}
    backend = tokenizers.Tokenizer(models.WordLevel(texts, unk_token="(0)"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([f"<|{SILENT}|>"])
    return Tokenizer(backend)


# Thoughts of tests: one character per token; two tokens end them.
THOUGHTS = ThinkingMarkers(chr(3), chr(5) + chr(50), (5, 50), chr, repeats=True)


def make_request(
    prompt: Sequence[int],
    params: SamplingParams,
    drafter: Proposer[Any] | None = None,
    *,
    stop_token_ids: Iterable[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    parent: Request | None = None,
    vocab: int = VOCAB,
) -> Request:
    """Return a request with the seed of ``params``, or the seed 0.

    A guide is replaced by the guide of :mod:`guides`.

    Only if ``params`` has stop strings, the request has a text, made by :func:`toy_tokenizer`.
    """
    seed = params.seed or 0
    stop_token_ids = frozenset(stop_token_ids)
    tokens = list(prompt)
    guide = None if params.guide is None else ToyFollower(vocab, stop_token_ids)
    if guide is not None and drafter is not None and params.guide_mode == "forced":
        drafter = with_forced(drafter)
    banned = BannedTokens(sorted(stop_token_ids), bad_words)
    budget = (
        []
        if params.thinking_budget is None
        else [
            ThinkingBudget(
                params.thinking_budget,
                THOUGHTS,
                prompt,
                message=[*map(ord, params.thinking_message)],
            )
        ]
    )
    sampler = Sampler(
        params,
        seed,
        TokenContext(tokens),
        vocab,
        banned=banned,
        kernels=kernels(),
        processors=budget,
        guide=guide,
    )
    stops = params.stops
    text = (
        TextStream(toy_tokenizer(vocab), prompt, stops, params.min_tokens) if stops else NullText()
    )
    speculation = Speculation(drafter or Autoregressive())
    return Request(
        prompt,
        tokens,
        params,
        seed,
        sampler,
        speculation,
        RequestResult(text),
        stop_token_ids,
        parent,
    )


def samples(
    prompt: Sequence[int], params: SamplingParams, drafter: Proposer[Any] | None = None
) -> list[Request]:
    """Return the ``params.n`` samples of a prompt; later ones use the KV cache of the first."""
    made: list[Request] = []
    for sample in range(params.n):
        own = replace(params, seed=derive_seed(params.seed or 0, sample))
        made.append(make_request(prompt, own, drafter, parent=made[0] if made else None))
    return made


def context_of(sampler: Sampler) -> list[int]:
    """Return the tokens before the sampler's next choice."""
    return sampler.context.last_tokens(len(sampler.context))


def run(engine: Engine, requests: Sequence[Request]) -> None:
    """Run requests to their end; fail if a request or a proposer fails, or a block stays in use."""
    for request in requests:
        engine.add(request)
    steps = 0
    while not all(request.ended for request in requests):
        engine.step()
        steps += 1
        assert steps < 20_000, "the requests do not end"
    for request in requests:
        if request.result.error is not None:
            raise request.result.error
        assert request.stats.draft_error is None, request.stats.draft_error
    assert_idle(engine)


def run_alone(
    decoder: Decoder, prompt: Sequence[int], params: SamplingParams, **given: Any
) -> Request:
    """Run a request by plain decoding in a new engine; return it.

    ``given`` is as in :func:`make_request`.
    """
    request = make_request(prompt, params, **given)
    run(make_engine(decoder), [request])
    return request


def assert_idle(engine: Engine) -> None:
    """Check that no request runs or waits, and that every block is free."""
    allocator = engine.cache.allocator
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert allocator.num_free == allocator.num_blocks
    assert not any(allocator.references)
    if engine.cache.states is not None:
        assert_states_free(engine.cache.states)


def assert_states_free(pool: StatePool) -> None:
    """Check that each slot of recurrent layers is free once, or that of a checkpoint."""
    requests = range(pool.counts.requests)
    taken = pool.checkpoints.slots()
    assert sorted(pool._free_requests) == [*requests]
    assert sorted([*pool._free_checkpoints, *taken]) == [*range(len(requests), pool.num_slots)]
    assert sorted(pool._free_updates) == [*range(pool.num_updates)]
