"""GLM-4 (0414), and GLM-4.5 with mixtures of experts (GLM-4.5 Air).

Half of each head is rotated. GLM-4 has a norm before and after each branch, and rotates consecutive
values. GLM-4.5 has the router of DeepSeek-V3 and a shared expert, and an MTP head that is not used.
"""

from __future__ import annotations

from dataclasses import replace

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import refuse_config
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import (
    DEEPSEEK_EXPERTS,
    FUSED_EXPERTS,
    GGUF_NAMES,
    LLAMA_LAYER,
    LLAMA_NAMES,
    PERMUTED_GGUF_NAMES,
    Family,
    GgufArchitecture,
)
from pronk.models.gguf_reader import GgufReader


def _parse_glm4(keys: ConfigReader) -> ModelConfig:
    config = llama_like(
        keys,
        windows=keys.windows(None),
        partial_rope=True,
        norm_places="both",
        qkv_bias=keys.flag("attention_bias", default=True),
    )
    return _rotate_consecutive(config)


def _rotate_consecutive(config: ModelConfig) -> ModelConfig:
    """Return the config of a model that rotates consecutive values, the first ones of each head."""
    rope = config.rope
    if rope is None or rope.kind != "default":
        found = None if rope is None else rope.kind
        refuse_config(f"rope: expected no scaling in a glm4 model, found {found}; use glm4_moe")
    return replace(config, rope=rope.over_whole_heads(config.head_dim))


def _parse_moe(keys: ConfigReader) -> ModelConfig:
    num_dense = keys.integer("first_k_dense_replace", 1, low=0)
    mixture = keys.mixture(
        "n_routed_experts",
        "moe_intermediate_size",
        is_mixture=lambda layer: layer >= num_dense,
    )
    if mixture is not None:
        num_shared = keys.integer("n_shared_experts", 1, low=0)
        shared_width = num_shared * mixture.width
        mixture = replace(mixture, **keys.grouped_router(), shared_width=shared_width)
    return llama_like(
        keys,
        windows=keys.windows(None),
        partial_rope=True,
        qkv_bias=keys.flag("attention_bias"),
        qk_norm=keys.flag("use_qk_norm"),
        mixture=mixture,
    )


def _parse_glm4_gguf(_: GgufReader, config: ModelConfig) -> ModelConfig:
    return _rotate_consecutive(replace(config, norm_places="both"))


def _parse_moe_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a GLM-4.5; ``block_count`` counts the MTP head."""
    num_layers = keys.num_layers()
    keys.used.add("rope.dimension_sections")  # positions of images, which are 0 in text models
    mixture = keys.mixture(num_layers, normalized=False, scores="sigmoid", epsilon=1e-20)
    return replace(
        config,
        num_layers=num_layers,
        windows=(None,) * num_layers,
        qk_norm="blk.0.attn_q_norm.weight" in keys.checkpoint,
        mixture=mixture,
    )


_ROPE_DEFAULTS = {"partial_rotary_factor": 0.5}

FAMILIES = (
    Family(
        "glm4",
        _parse_glm4,
        replace(
            LLAMA_NAMES,
            layer={
                **LLAMA_LAYER,
                "up": ("mlp.gate_up_proj",),
                "attention_output_norm": ("post_self_attn_layernorm",),
                "mlp_output_norm": ("post_mlp_layernorm",),
            },
            permuted_heads=True,
        ),
        defaults={
            **_ROPE_DEFAULTS,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-07,
        },
        gguf=(
            GgufArchitecture(
                "glm4",
                _parse_glm4_gguf,
                replace(
                    PERMUTED_GGUF_NAMES,
                    layer={**GGUF_NAMES.layer, "up": ("ffn_up",)},
                ),
                partial_rope=True,
            ),
        ),
    ),
    Family(
        "glm4_moe",
        _parse_moe,
        replace(
            LLAMA_NAMES,
            layer={
                **LLAMA_LAYER,
                **DEEPSEEK_EXPERTS,
            },
            alternatives=(FUSED_EXPERTS,),
            skips_heads=True,
        ),
        defaults={
            **_ROPE_DEFAULTS,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
        gguf=(
            GgufArchitecture(
                "glm4moe",
                _parse_moe_gguf,
                replace(
                    GGUF_NAMES,
                    layer={**GGUF_NAMES.layer, "mlp_norm": ("post_attention_norm",)},
                ),
                partial_rope=True,
                skips_heads=True,
            ),
        ),
    ),
)
