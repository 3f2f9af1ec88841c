"""Mapping of checkpoint tensors to the weights of the decoder, per model family.

The decoder has fewer, larger matrices than most checkpoints: ``qkv`` stacks the query, key and value projections, and
``up`` the gate and up projections. A mixture of experts has an ``up`` and a ``down`` for each expert, and a ``router``.
A :class:`FamilyNames` lists, for each module of a decoder layer, the names of the checkpoint's modules to stack. The
config determines the shapes and whether there are biases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from pronk.architecture.config import MixtureConfig, ModelConfig

__all__ = [
    "FAMILY_NAMES",
    "FUSED_EXPERTS",
    "GGUF_FUSED_NAMES",
    "GGUF_NAMES",
    "CheckpointTensor",
    "DecoderPart",
    "FamilyNames",
    "plan_layer",
    "plan_linear",
    "plan_norm",
    "plan_tensors",
]


# Beginning of the names of a multimodal model's language model.
_LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.")


@dataclass(frozen=True)
class FamilyNames:
    """Names of modules and embeddings in checkpoints of one family, without the ``prefix``."""

    prefix: str  # common beginning of the names in most checkpoints of the family
    layers: str  # name of the list of layers, such as ``h``: layer 0 is ``h.0``
    # By module of ``decoder.Layer``: names of the modules to stack. For experts: names of tensors, in which ``{}`` is
    # the number of the expert; without it, a tensor has the matrices of all experts.
    layer: Mapping[str, tuple[str, ...]]
    embedding: str
    norm: str
    positions: str | None = None  # name of the learned position embeddings; ``None`` with RoPE
    head: str = "lm_head"
    transposed: bool = False  # whether matrices are stored ``[inputs, outputs]``
    # Whether matrices of experts are stored ``[inputs, outputs]``, with alternating outputs of gate and up projection.
    interleaved_experts: bool = False
    ignored: re.Pattern[str] = re.compile(r"(?!)")  # names of tensors that are not used; by default none

    def canonical(self, name: str) -> str:
        """Return the name of a tensor without ``prefix`` and that of a multimodal model's language model."""
        return _LANGUAGE_MODEL.sub("", name).removeprefix(self.prefix)


_LLAMA_LAYER: dict[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# Layers with norms of the branches' outputs; those with such norms only have no ``mlp_norm``.
_OUTPUT_NORMS_LAYER = _LLAMA_LAYER | {
    "attention_output_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_output_norm": ("post_feedforward_layernorm",),
}
_FUSED_LAYER = _LLAMA_LAYER | {"qkv": ("self_attn.qkv_proj",), "up": ("mlp.gate_up_proj",)}
_SHARED_MLP_LAYER = _LLAMA_LAYER | {"up": ("shared_mlp.input_linear",), "down": ("shared_mlp.output_linear",)}

_MIXTRAL_LAYER = _LLAMA_LAYER | {
    "router": ("block_sparse_moe.gate",),
    "experts.up": ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    "experts.down": ("block_sparse_moe.experts.{}.w2.weight",),
}
_QWEN_MOE_LAYER = _LLAMA_LAYER | {
    "router": ("mlp.gate",),
    "experts.up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "experts.down": ("mlp.experts.{}.down_proj.weight",),
}
_GRANITE_MOE_LAYER = _LLAMA_LAYER | {
    "router": ("block_sparse_moe.router.layer",),
    "experts.up": ("block_sparse_moe.input_linear.weight",),
    "experts.down": ("block_sparse_moe.output_linear.weight",),
}
_GPT_OSS_LAYER = _LLAMA_LAYER | {
    "sinks": ("self_attn.sinks",),
    "router": ("mlp.router",),
    "experts.up": ("mlp.experts.gate_up_proj",),
    "experts.down": ("mlp.experts.down_proj",),
}
# Names in checkpoints of transformers 5 that were not saved in a family's original format.
FUSED_EXPERTS: dict[str, tuple[str, ...]] = {
    "router": ("mlp.gate",),
    "experts.up": ("mlp.experts.gate_up_proj",),
    "experts.down": ("mlp.experts.down_proj",),
}

_LLAMA = FamilyNames(
    prefix="model.",
    layers="layers",
    layer=_LLAMA_LAYER,
    embedding="embed_tokens",
    norm="norm",
    # MTP heads are loaded by the drafter ``mtp``. Images are not supported.
    ignored=re.compile(
        r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(mtp(_layers)?|vision_tower|multi_modal_projector)\..*"
    ),
)

_OUTPUT_NORMS = replace(_LLAMA, layer=_OUTPUT_NORMS_LAYER)

_GPT2 = FamilyNames(
    prefix="transformer.",
    layers="h",
    layer={
        "attention_norm": ("ln_1",),
        "qkv": ("attn.c_attn",),
        "out": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "up": ("mlp.c_fc",),
        "down": ("mlp.c_proj",),
    },
    embedding="wte",
    norm="ln_f",
    positions="wpe",
    transposed=True,
    ignored=re.compile(r"h\.\d+\.attn\.(masked_)?bias"),
)

# Tensor names in GGUF files are the same for all families. The ``rope`` tensors are read with the config.
GGUF_NAMES = FamilyNames(
    prefix="",
    layers="blk",
    layer={
        "attention_norm": ("attn_norm",),
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "q_norm": ("attn_q_norm",),
        "k_norm": ("attn_k_norm",),
        "out": ("attn_output",),
        "attention_output_norm": ("post_attention_norm",),
        "mlp_norm": ("ffn_norm",),
        "up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
        "mlp_output_norm": ("post_ffw_norm",),
    },
    embedding="token_embd",
    norm="output_norm",
    head="output",
    ignored=re.compile(r"rope_(freqs|factors_(long|short))\.weight|blk\.\d+\.attn_rot_embd(\.weight)?"),
)
# As GGUF_NAMES, in files with fused matrices (Phi-3).
GGUF_FUSED_NAMES = replace(GGUF_NAMES, layer={**GGUF_NAMES.layer, "qkv": ("attn_qkv",), "up": ("ffn_up",)})

FAMILY_NAMES: dict[str, FamilyNames] = {
    "gemma2": _OUTPUT_NORMS,
    "gemma3_text": _OUTPUT_NORMS,
    "gpt2": _GPT2,
    "gpt_oss": replace(_LLAMA, layer=_GPT_OSS_LAYER, interleaved_experts=True),
    "granite": _LLAMA,
    "granitemoehybrid": replace(_LLAMA, layer=_SHARED_MLP_LAYER),
    "granitemoe": replace(_LLAMA, layer=_GRANITE_MOE_LAYER),
    "llama": _LLAMA,
    "mimo": _LLAMA,
    "ministral3": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": replace(_LLAMA, layer=_MIXTRAL_LAYER),
    "olmo2": _OUTPUT_NORMS,
    "olmo3": _OUTPUT_NORMS,
    "phi3": replace(_LLAMA, layer=_FUSED_LAYER),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": replace(_LLAMA, layer=_QWEN_MOE_LAYER),
    "smollm3": _LLAMA,
}


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor that a checkpoint must have: its name without the family's prefix, and its shape.

    With ``expert``, the tensor ``[experts, outputs, inputs]`` has the matrices of all experts, and this one is meant.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None


@dataclass(frozen=True)
class DecoderPart:
    """A module or embedding of the decoder, and the checkpoint tensors to stack for its weight and bias."""

    target: str  # attribute path in the decoder, such as ``layers.0.qkv``
    kind: Literal["linear", "norm", "table"]  # ``table`` is an embedding
    weight: tuple[CheckpointTensor, ...]  # tensors to stack; empty for an LM head tied to the embedding
    bias: tuple[CheckpointTensor, ...] = ()  # tensors to stack; empty without a bias
    transposed: bool = False  # whether the ``weight`` tensors are stored ``[inputs, outputs]``
    interleaved: bool = False  # whether the outputs alternate: of the gate, of the up projection, …

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """All tensors: ``weight``, then ``bias``."""
        return self.weight + self.bias


def plan_tensors(config: ModelConfig, names: FamilyNames | None = None) -> Iterator[DecoderPart]:
    """Yield every part of the decoder; ``names`` are by default those of the config's family."""
    names = names or FAMILY_NAMES[config.family]
    table = (config.vocab_size, config.hidden_size)
    yield DecoderPart("embedding", "table", (CheckpointTensor(f"{names.embedding}.weight", table),))
    if names.positions is not None:
        shape = (config.context, config.hidden_size)
        yield DecoderPart("positions", "table", (CheckpointTensor(f"{names.positions}.weight", shape),))
    yield DecoderPart("head", "linear", () if config.tied else (CheckpointTensor(f"{names.head}.weight", table),))
    yield plan_norm(config, "norm", names.norm, config.hidden_size)
    for index in range(config.num_layers):
        yield from plan_layer(config, names, index)


def plan_layer(config: ModelConfig, names: FamilyNames, index: int) -> Iterator[DecoderPart]:
    """Yield the parts of a decoder layer."""
    up_sizes = (config.intermediate_size,) * (2 if config.gated else 1)
    # By module: number of outputs of each stacked matrix, number of inputs, whether there is a bias.
    linears = {
        "qkv": (config.qkv_sizes, config.hidden_size, config.qkv_bias),
        "out": ((config.hidden_size,), config.num_heads * config.head_dim, config.out_bias),
        "up": (up_sizes, config.hidden_size, config.mlp_bias),
        "down": ((config.hidden_size,), config.intermediate_size, config.mlp_bias),
    }
    sizes, mixture = _norm_sizes(config), config.mixture_of(index)
    if mixture is not None:
        yield from _plan_experts(config, mixture, names, index)
        del linears["up"], linears["down"]
    for module, stored_modules in names.layer.items():
        stored = tuple(f"{names.layers}.{index}.{name}" for name in stored_modules)
        target = f"layers.{index}.{module}"
        if module in linears:
            outputs, inputs, bias = linears[module]
            # Some families store the query, key and value projections, or gate and up projection, as one matrix.
            outputs = outputs if len(stored) == len(outputs) else (sum(outputs),)
            yield plan_linear(target, stored, outputs, inputs, bias=bias, transposed=names.transposed)
        elif module in sizes:
            yield plan_norm(config, target, stored[0], sizes[module])


def _plan_experts(config: ModelConfig, mixture: MixtureConfig, names: FamilyNames, index: int) -> Iterator[DecoderPart]:
    """Yield the router of a layer, and the two matrices of each expert."""
    hidden, path = config.hidden_size, f"{names.layers}.{index}"
    router = (f"{path}.{names.layer['router'][0]}",)
    yield plan_linear(f"layers.{index}.router", router, (mixture.experts,), hidden, bias=mixture.bias)
    shapes = {"up": (mixture.width * (2 if config.gated else 1), hidden), "down": (hidden, mixture.width)}
    for expert, (module, (outputs, inputs)) in product(range(mixture.experts), shapes.items()):
        stored = [f"{path}.{name}" for name in names.layer[f"experts.{module}"]]
        shape = outputs // len(stored), inputs
        tensors = tuple(
            CheckpointTensor(name.format(expert), shape)
            if "{}" in name
            else CheckpointTensor(name, (mixture.experts, *shape), expert)
            for name in stored
        )
        biases = tuple[CheckpointTensor, ...]()
        if mixture.bias:
            biases = tuple(CheckpointTensor(f"{name}_bias", (mixture.experts, shape[0]), expert) for name in stored)
        part = DecoderPart(f"layers.{index}.{module}.{expert}", "linear", tensors, biases)
        if names.interleaved_experts:
            tensors = tuple(replace(tensor, shape=(*tensor.shape[:-2], *shape[::-1])) for tensor in tensors)
            part = replace(part, weight=tensors, transposed=True, interleaved=module == "up")
        yield part
    if config.attention_sinks:
        sinks = CheckpointTensor(f"{path}.{names.layer['sinks'][0]}", (config.num_heads,))
        yield DecoderPart(f"layers.{index}.sinks", "table", (sinks,))


def _norm_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the number of features of each norm that a layer has."""
    sizes = dict[str, int]()
    if config.norm_places != "output":
        sizes |= {"attention_norm": config.hidden_size, "mlp_norm": config.hidden_size}
    if config.norm_places != "input":
        sizes |= {"attention_output_norm": config.hidden_size, "mlp_output_norm": config.hidden_size}
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
        CheckpointTensor(f"{name}.weight", (inputs, size) if transposed else (size, inputs)) for name, size in sizes
    )
    biases = tuple(CheckpointTensor(f"{name}.bias", (size,)) for name, size in sizes) if bias else ()
    return DecoderPart(target, "linear", weight, biases, transposed)


def plan_norm(config: ModelConfig, target: str, stored: str, size: int) -> DecoderPart:
    """Return a norm over ``size`` features."""
    bias = (CheckpointTensor(f"{stored}.bias", (size,)),) if config.norm == "layer" else ()
    return DecoderPart(target, "norm", (CheckpointTensor(f"{stored}.weight", (size,)),), bias)
