"""Qwen3.5 and its successors, and Qwen3-Next: Gated DeltaNet in most layers, gated attention.

Every fourth layer has attention, whose outputs are gated, and rotates a quarter of each head. The
weights of norms are stored as ``weight - 1``, in GGUF files as ``weight``; those of the norms of
recurrent layers are stored as they are. Images are not supported: for a text, the three positions
of a token (``mrope_section``) are equal, so that the rotation is the ordinary one.

A GGUF file of Qwen3.5 has the value heads of recurrent layers in another order than a safetensors
file, in all of their tensors: :attr:`~pronk.checkpoint.config.RecurrentConfig.tiled_heads`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from pronk.checkpoint.config import (
    MAX_HEAD_DIM,
    MAX_TAPS,
    MixtureConfig,
    ModelConfig,
    RecurrentConfig,
)
from pronk.checkpoint.rope import RopeConfig, parse_rope, refuse_config
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import (
    FUSED_EXPERTS,
    GGUF_NAMES,
    LLAMA_LAYER,
    LLAMA_NAMES,
    SINGLE_EXPERTS,
    Family,
    GgufArchitecture,
)
from pronk.models.gguf_reader import GgufReader


def _parse(keys: ConfigReader, mixture: MixtureConfig | None = None) -> ModelConfig:
    if not keys.flag("attn_output_gate", default=True):
        refuse_config("expected attn_output_gate = true, found false; use a model with it")
    layers = _recurrent_layers(keys)
    return llama_like(
        keys,
        windows=(None,) * len(layers),
        norm_offset=1.0,
        qk_norm=True,
        gated_attention=True,
        recurrent=_recurrent(keys, layers) if any(layers) else None,
        mixture=mixture,
        rope=_rope(keys),
        **keys.attention_bias(),
    )


def _parse_mixture(keys: ConfigReader) -> ModelConfig:
    """Parse Qwen3.5-MoE: all layers have experts, whose weights sum to 1."""
    return _parse(keys, _mixture(keys))


def _parse_next(keys: ConfigReader) -> ModelConfig:
    """Parse the config of Qwen3-Next, in which some layers have a plain MLP.

    These are the layers in ``mlp_only_layers``, and those whose number, from 1, is no multiple of
    ``decoder_sparse_step``.
    """
    plain = keys.list_of("mlp_only_layers", int, ())
    step = keys.integer("decoder_sparse_step", 1)
    count = keys.layers("num_hidden_layers")
    layers = tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(count))
    mixture = replace(_mixture(keys), layers=layers, normalized=keys.flag("norm_topk_prob"))
    return _parse(keys, mixture if any(layers) else None)


def _mixture(keys: ConfigReader) -> MixtureConfig:
    mixture = keys.mixture("num_experts", "moe_intermediate_size")
    assert mixture is not None, "expected experts in all layers"
    width = keys.integer("shared_expert_intermediate_size")
    return replace(mixture, shared_width=width, shared_gate=True)


def _recurrent_layers(keys: ConfigReader) -> tuple[bool, ...]:
    """Return for each layer whether it is recurrent."""
    num_layers = keys.layers("num_hidden_layers")
    interval = keys.integer("full_attention_interval", 4)
    implied = [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(num_layers)
    ]
    kinds = keys.list_of("layer_types", str, implied)
    if len(kinds) != num_layers or not {*kinds} <= {"linear_attention", "full_attention"}:
        expected = f"expected {num_layers} layer_types, each linear_attention or full_attention"
        refuse_config(f"{expected}, found {kinds!r:.80}")
    return tuple(kind == "linear_attention" for kind in kinds)


def _recurrent(keys: ConfigReader, layers: tuple[bool, ...]) -> RecurrentConfig:
    keys.require_silu("hidden_act")
    key_heads = keys.integer("linear_num_key_heads")
    value_heads = keys.integer("linear_num_value_heads")
    if value_heads % key_heads:
        expected = f"expected a multiple of linear_num_key_heads = {key_heads}"
        refuse_config(f"linear_num_value_heads: {expected}, found {value_heads}")
    return RecurrentConfig(
        layers=layers,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=keys.integer("linear_key_head_dim", high=MAX_HEAD_DIM),
        value_dim=keys.integer("linear_value_head_dim", high=MAX_HEAD_DIM),
        taps=keys.integer("linear_conv_kernel_dim", high=MAX_TAPS),
    )


def _rope(keys: ConfigReader) -> RopeConfig:
    """Return the rotation, without the keys that distribute positions of images."""
    scaling = keys.mapping("rope_scaling") or keys.mapping("rope_parameters")
    plain = {
        key: value
        for key, value in scaling.items()
        if key not in ("mrope_section", "mrope_interleaved")
    }
    raw = {**keys.raw, "rope_scaling": None, "rope_parameters": plain}
    head_dim = keys.integer("head_dim")
    context = keys.integer("max_position_embeddings")
    return parse_rope(raw, head_dim, context, partial=True)


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a Qwen3.5 in a GGUF file, which stores value heads in another order.

    The order is that of :attr:`~pronk.checkpoint.config.RecurrentConfig.tiled_heads`.
    """
    config = _parse_next_gguf(keys, config)
    recurrent = config.recurrent
    if recurrent is None or recurrent.key_heads == recurrent.value_heads:
        return config
    return replace(config, recurrent=replace(recurrent, tiled_heads=True))


def _parse_next_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    # Positions of images; a GGUF file has sections that are 0 for a text model.
    keys.used.add("rope.dimension_sections")
    num_layers = keys.num_layers()
    layers = _recurrent_layers_gguf(keys, num_layers)
    mixture = keys.mixture(num_layers)
    if mixture is not None:
        width = mixture.shared_width or mixture.width
        mixture = replace(mixture, shared_width=width, shared_gate=True)
    return replace(
        config,
        num_layers=num_layers,
        windows=(None,) * num_layers,
        qk_norm=True,
        gated_attention=True,
        recurrent=keys.recurrence(layers) if any(layers) else None,
        mixture=mixture,
    )


def _recurrent_layers_gguf(keys: GgufReader, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is recurrent.

    The array may also have entries for MTP heads, which follow the layers.
    """
    key = "attention.recurrent_layers"
    keys.used.add(key)
    stated = keys.checkpoint.header.get(f"{keys.architecture}.{key}")
    interval = keys.integer("full_attention_interval", 4)
    if stated is None:
        return tuple((layer + 1) % interval > 0 for layer in range(num_layers))
    if not isinstance(stated, list) or len(stated) < num_layers:
        keys.refuse(
            key, f"expected a boolean for each of {num_layers} layers, found {stated!r:.80}"
        )
    return tuple(bool(each) for each in stated[:num_layers])


_DEFAULTS = {
    "head_dim": 256,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}
_MIXTURE_DEFAULTS = {
    **_DEFAULTS,
    "moe_intermediate_size": 512,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
_NAMES = replace(
    LLAMA_NAMES,
    layer={
        **LLAMA_LAYER,
        "mixer_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        "mixer_gates": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        "mixer_filter": ("linear_attn.conv1d",),
        "decay_rate": ("linear_attn.A_log",),
        "decay_bias": ("linear_attn.dt_bias",),
        "mixer_norm": ("linear_attn.norm",),
        "mixer_out": ("linear_attn.out_proj",),
        **SINGLE_EXPERTS,
        "shared_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "shared_down": ("mlp.shared_expert.down_proj",),
        "shared_gate": ("mlp.shared_expert_gate",),
    },
    alternatives=(FUSED_EXPERTS,),
    log_decay=True,
    ignored=re.compile(rf"{LLAMA_NAMES.ignored.pattern}|visual\..*"),
)
# In Qwen3-Next, the matrices of recurrent layers have all rows of the first key head, then those of
# the next one.
_NEXT_NAMES = replace(
    _NAMES,
    layer={
        **_NAMES.layer,
        "mixer_in": ("linear_attn.in_proj_qkvz",),
        "mixer_gates": ("linear_attn.in_proj_ba",),
    },
)
# In these files, the norm before the MLP has the name that other architectures use for the norm of
# the attention's output.
_GGUF_NAMES = replace(
    GGUF_NAMES,
    layer={**GGUF_NAMES.layer, "mlp_norm": ("post_attention_norm",)},
    norms_drafts=True,
)
_NEXT_GGUF_NAMES = replace(
    _GGUF_NAMES,
    layer={**_GGUF_NAMES.layer, "mixer_gates": ("ssm_ba",)},
    # name of the projection in early files, where one matrix has queries, keys, values and gates
    alternatives=(*_GGUF_NAMES.alternatives, {"mixer_in": ("ssm_in",)}),
)

FAMILIES = (
    Family(
        "qwen3_5_text",
        _parse,
        _NAMES,
        defaults={**_DEFAULTS, "num_key_value_heads": 4},
        multimodal=("qwen3_5",),
        gguf=(
            GgufArchitecture(
                "qwen35", _parse_gguf, _GGUF_NAMES, partial_rope=True, skips_heads=True
            ),
        ),
    ),
    Family(
        "qwen3_5_moe_text",
        _parse_mixture,
        _NAMES,
        defaults={**_MIXTURE_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
        multimodal=("qwen3_5_moe",),
        gguf=(
            GgufArchitecture(
                "qwen35moe", _parse_gguf, _GGUF_NAMES, partial_rope=True, skips_heads=True
            ),
        ),
    ),
    Family(
        "qwen3_next",
        _parse_next,
        _NEXT_NAMES,
        defaults={
            **_MIXTURE_DEFAULTS,
            "intermediate_size": 5632,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
        gguf=(
            GgufArchitecture(
                "qwen3next",
                _parse_next_gguf,
                _NEXT_GGUF_NAMES,
                partial_rope=True,
                skips_heads=True,
            ),
        ),
    ),
)
