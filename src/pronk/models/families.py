"""Names of checkpoint tensors, per model family.

A :class:`FamilyNames` lists, for each module of a decoder layer, the names of the checkpoint's modules to stack.
:mod:`pronk.models.tensor_plan` adds the shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    flat_filters: bool = False  # whether weights of convolutions are ``[hidden, taps]``, not ``[hidden, 1, taps]``
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
_SHARED_MLP_LAYER = _LLAMA_LAYER | {"up": ("shared_mlp.input_linear",), "down": ("shared_mlp.output_linear",)}

# Names in checkpoints of transformers 5 that were not saved in a family's original format.
FUSED_EXPERTS: dict[str, tuple[str, ...]] = {
    "router": ("mlp.gate",),
    "experts.up": ("mlp.experts.gate_up_proj",),
    "experts.down": ("mlp.experts.down_proj",),
}

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
_GPT_OSS_LAYER = _LLAMA_LAYER | FUSED_EXPERTS | {"sinks": ("self_attn.sinks",), "router": ("mlp.router",)}
# ``gates`` and ``filter`` are the projection and the weights of a short convolution; see ``_plan_convolution``.
_LFM2_LAYER = {
    "attention_norm": ("operator_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_layernorm",),
    "k_norm": ("self_attn.k_layernorm",),
    "out": ("self_attn.out_proj",),
    "gates": ("conv.in_proj",),
    "filter": ("conv.conv",),
    "convolution_out": ("conv.out_proj",),
    "mlp_norm": ("ffn_norm",),
    "up": ("feed_forward.w1", "feed_forward.w3"),
    "down": ("feed_forward.w2",),
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
        "gates": ("shortconv.in_proj",),
        "filter": ("shortconv.conv",),
        "convolution_out": ("shortconv.out_proj",),
        "attention_output_norm": ("post_attention_norm",),
        "mlp_norm": ("ffn_norm",),
        "up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
        "mlp_output_norm": ("post_ffw_norm",),
        "router": ("ffn_gate_inp",),
        "experts.up": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "experts.down": ("ffn_down_exps.weight",),
        "sinks": ("attn_sinks.weight",),
    },
    embedding="token_embd",
    norm="output_norm",
    head="output",
    flat_filters=True,
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
    "lfm2": replace(_LLAMA, layer=_LFM2_LAYER, norm="embedding_norm"),
    "llama": _LLAMA,
    "mimo": _LLAMA,
    "ministral3": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": replace(_LLAMA, layer=_MIXTRAL_LAYER),
    "olmo2": _OUTPUT_NORMS,
    "olmo3": _OUTPUT_NORMS,
    "phi3": replace(_LLAMA, layer=_LLAMA_LAYER | {"qkv": ("self_attn.qkv_proj",), "up": ("mlp.gate_up_proj",)}),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": replace(_LLAMA, layer=_QWEN_MOE_LAYER),
    "smollm3": _LLAMA,
}
