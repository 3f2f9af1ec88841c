"""Description of a model family: how its config is read and how its checkpoints name tensors.

The families are the modules of :mod:`pronk.models.families`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pronk.checkpoint.config import ModelConfig
from pronk.models.config_reader import ConfigReader
from pronk.models.gguf_reader import GgufReader

# beginning of the names of the language model's tensors in a multimodal checkpoint
_LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.")


@dataclass(frozen=True)
class TensorNames:
    """Names and layout of a family's tensors in a format of checkpoints.

    :mod:`pronk.models.tensor_plan` adds the shapes.
    """

    prefix: str  # common beginning of the names in most checkpoints of the family
    layers: str  # name of the list of layers, such as ``h``: layer 0 is ``h.0``
    # For each module of ``decoder.Layer``, the checkpoint's modules that are stacked in it. For
    # experts, names of tensors: ``{}`` stands for the number of the expert; without it, one tensor
    # has the matrices of all experts.
    layer: Mapping[str, tuple[str, ...]]
    embedding: str  # name of the token embedding
    norm: str  # name of the final norm
    # Names of the embeddings of single layers: ``table``, ``projection``, ``norm``.
    layer_inputs: Mapping[str, str] = field(default_factory=dict)
    positions: str | None = None  # name of the learned position embeddings; ``None`` with RoPE
    head: str = "lm_head"  # name of the LM head
    # Names that replace those in ``layer`` if a checkpoint has all of these tensors.
    alternatives: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    transposed: bool = False  # whether matrices are stored ``[inputs, outputs]``
    # Whether rows of queries and keys are permuted: RoPE rotates the values 2i and 2i + 1 of heads.
    # In pronk, it rotates the values i and i + size / 2.
    permuted_heads: bool = False
    # Whether matrices of experts are stored ``[inputs, outputs]``, with alternating outputs of gate
    # and up projection.
    interleaved_experts: bool = False
    # Whether layers that follow the model's are MTP heads, whose tensors are not used.
    skips_heads: bool = False
    # Whether the output of an MTP layer is normed before the layer reads it for the next draft
    # token; without it, the output is normed for the LM head only.
    norms_drafts: bool = False
    # Whether the factors of decays are stored as logarithms: ``decay_rate`` is ``-exp`` of them.
    log_decay: bool = False
    # Modules whose tensor has the module's name, without ``.weight``: some norms in GGUF files.
    bare_norms: tuple[str, ...] = ()
    # Last parts of the names of modules in transformers that differ from the checkpoint's, by the
    # checkpoint's. Adapters have transformers' names.
    modules: Mapping[str, str] = field(default_factory=dict)
    # pattern of the names of tensors that are not used; by default none
    ignored: re.Pattern[str] = re.compile(r"(?!)")

    def canonical(self, name: str) -> str:
        """Return the name of a tensor without the family's ``prefix``.

        In multimodal models, ``language_model.`` before the name is removed, too.
        """
        return _LANGUAGE_MODEL.sub("", name).removeprefix(self.prefix)

    def in_file(self, name: str) -> str:
        """Return a name that :meth:`canonical` returns as messages show it to the user."""
        return name

    def module_name(self, name: str) -> str:
        """Return the name of a module in transformers, for its name in a checkpoint."""
        parent, _, last = name.rpartition(".")
        return f"{parent}.{self.modules.get(last, last)}"


LLAMA_LAYER: dict[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# Names of the tensors of experts in checkpoints that transformers 5 has saved with one tensor for
# all experts.
FUSED_EXPERTS: dict[str, tuple[str, ...]] = {
    "router": ("mlp.gate",),
    "experts.up": ("mlp.experts.gate_up_proj",),
    "experts.down": ("mlp.experts.down_proj",),
}
# Names of the tensors of experts in checkpoints with a tensor for each expert.
SINGLE_EXPERTS: dict[str, tuple[str, ...]] = {
    "router": ("mlp.gate",),
    "experts.up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "experts.down": ("mlp.experts.{}.down_proj.weight",),
}
# Names of DeepSeek: a correction of the choice, and shared experts.
DEEPSEEK_EXPERTS: dict[str, tuple[str, ...]] = {
    **SINGLE_EXPERTS,
    "correction": ("mlp.gate.e_score_correction_bias",),
    "shared_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_down": ("mlp.shared_experts.down_proj",),
}
# Names of the tensors of Mamba 2 in checkpoints of hybrid models.
MAMBA_LAYER: dict[str, tuple[str, ...]] = {
    "mixer_in": ("mamba.in_proj",),
    "mixer_filter": ("mamba.conv1d",),
    "decay_rate": ("mamba.A_log",),
    "decay_bias": ("mamba.dt_bias",),
    "skip": ("mamba.D",),
    "mixer_norm": ("mamba.norm",),
    "mixer_out": ("mamba.out_proj",),
}
LLAMA_NAMES = TensorNames(
    prefix="model.",
    layers="layers",
    layer=LLAMA_LAYER,
    embedding="embed_tokens",
    norm="norm",
    # MTP heads are loaded by the drafter ``mtp``. Images are not supported.
    ignored=re.compile(
        r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
        r"|(mtp(_layers)?|vision_tower|multi_modal_projector)\..*"
    ),
)
# Names that Bamba and Falcon-H1 share.
HYBRID_NAMES = replace(
    LLAMA_NAMES,
    layer={
        **LLAMA_LAYER,
        **MAMBA_LAYER,
        "mlp_norm": ("pre_ff_layernorm",),
        "up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "down": ("feed_forward.down_proj",),
    },
    norm="final_layernorm",
    log_decay=True,
)
# As LLAMA_NAMES, for families that norm the outputs of attention and MLP. Families that norm only
# the outputs have no tensor for ``mlp_norm``.
OUTPUT_NORM_NAMES = replace(
    LLAMA_NAMES,
    layer={
        **LLAMA_LAYER,
        "attention_output_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_output_norm": ("post_feedforward_layernorm",),
    },
)

# llama.cpp has a name for each kind of tensor, whatever the architecture. Tensors ``rope_*`` are
# read with the config.
GGUF_NAMES = TensorNames(
    prefix="",
    layers="blk",
    layer={
        "attention_norm": ("attn_norm",),
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "q_norm": ("attn_q_norm",),
        "k_norm": ("attn_k_norm",),
        "out": ("attn_output",),
        # Multi-head latent attention.
        "q_a": ("attn_q_a",),
        "q_a_norm": ("attn_q_a_norm",),
        "q_b": ("attn_q_b",),
        "q": ("attn_q",),
        "kv_a": ("attn_kv_a_mqa",),
        "kv_a_norm": ("attn_kv_a_norm",),
        "k_b": ("attn_k_b",),
        "v_b": ("attn_v_b",),
        "gates": ("shortconv.in_proj",),
        "filter": ("shortconv.conv",),
        "convolution_out": ("shortconv.out_proj",),
        # Projections, convolution, decay, skip and norm of a recurrent layer.
        "mixer_in": ("attn_qkv", "attn_gate"),
        "mixer_gates": ("ssm_beta", "ssm_alpha"),
        "mixer_filter": ("ssm_conv1d",),
        "decay_rate": ("ssm_a",),
        "decay_bias": ("ssm_dt.bias",),
        "skip": ("ssm_d",),
        "mixer_norm": ("ssm_norm",),
        "mixer_out": ("ssm_out",),
        "attention_output_norm": ("post_attention_norm",),
        "mlp_norm": ("ffn_norm",),
        "up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
        "mlp_output_norm": ("post_ffw_norm",),
        "router": ("ffn_gate_inp",),
        "correction": ("exp_probs_b.bias",),
        "experts.up": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "experts.down": ("ffn_down_exps.weight",),
        "shared_up": ("ffn_gate_shexp", "ffn_up_shexp"),
        "shared_down": ("ffn_down_shexp",),
        "shared_gate": ("ffn_gate_inp_shexp",),
        "sinks": ("attn_sinks.weight",),
    },
    embedding="token_embd",
    norm="output_norm",
    head="output",
    alternatives=({"experts.up": ("ffn_gate_up_exps.weight",)},),
    ignored=re.compile(
        r"rope_(freqs|factors_(long|short))\.weight|blk\.\d+\.attn_rot_embd(\.weight)?"
        # The rows of the LM head for "yes" and "no", once more, in files of Qwen3-Reranker.
        r"|cls\.output\.weight",
    ),
)
PERMUTED_GGUF_NAMES = replace(GGUF_NAMES, permuted_heads=True)


def _unchanged(_: GgufReader, config: ModelConfig) -> ModelConfig:
    return config


@dataclass(frozen=True)
class GgufArchitecture:
    """Architecture of models in GGUF files.

    ``PERMUTED_GGUF_NAMES`` are for architectures whose rotations llama.cpp applies to consecutive
    values: ``LLAMA_ROPE_TYPE_NORM`` in its function ``llama_model_rope_type``.
    """

    name: str  # value of ``general.architecture``
    # Changes the config of a Llama into that of the architecture, by the keys that it reads. The
    # family of the config is the one that has the architecture, unless this function changes it.
    parse: Callable[[GgufReader, ModelConfig], ModelConfig] = _unchanged
    names: TensorNames = GGUF_NAMES
    partial_rope: bool = False  # whether RoPE may rotate a part of each head
    has_own_values: bool = False  # whether the size of values may differ from that of keys
    skips_attention: bool = False  # whether layers may have no attention: 0 key/value heads
    # Whether numbers of key/value heads and widths of MLPs may differ by layer. The config of a
    # Llama then has those of the first layer.
    varies: bool = False
    skips_mlps: bool = False  # whether layers may have no MLP: a width of 0
    # Whether the last layers of a file may be MTP heads, as many as ``nextn_predict_layers`` says.
    # The drafter ``mtp`` loads the first of them.
    skips_heads: bool = False


@dataclass(frozen=True)
class Family:
    """A family of models: how its configs are read, and how its tensors are stored.

    A module of :mod:`pronk.models.families` lists its families as ``FAMILIES``.
    """

    model_type: str  # value of ``model_type`` in ``config.json``
    parse: Callable[[ConfigReader], ModelConfig]  # reads ``config.json``; raises ConfigError
    names: TensorNames = LLAMA_NAMES  # names of the tensors in safetensors files
    # Values of keys that a config.json may leave out, as in transformers. If a key is present with
    # the value null, the default in the call that reads the key applies instead.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Values of ``model_type`` of multimodal models whose ``text_config`` is of this family, unless
    # it states another one.
    multimodal: tuple[str, ...] = ()
    gguf: tuple[GgufArchitecture, ...] = ()  # architectures of the family in GGUF files


@dataclass(frozen=True)
class RefusedFamily:
    """A family that is not supported, but close to a supported one or often asked for."""

    model_type: str
    reason: str  # the reason, and what to use instead
