"""gpt-oss: experts with biases and a clamped gate, attention sinks, windows in half the layers."""

from __future__ import annotations

from dataclasses import replace

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import refuse_config
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import (
    FUSED_EXPERTS,
    GGUF_NAMES,
    LLAMA_LAYER,
    LLAMA_NAMES,
    Family,
    GgufArchitecture,
)
from pronk.models.gguf_reader import GgufReader


def _parse(keys: ConfigReader) -> ModelConfig:
    for key, expected in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if keys.number(key, expected) != expected:
            found = f"expected {key} = {expected}, found {keys.get(key)}"
            refuse_config(f"{found}; other values are not supported")
    return llama_like(
        keys,
        windows=keys.periodic_windows(2),
        clamped_gate=True,
        attention_sinks=True,
        mixture=keys.mixture(bias=True),
        **keys.attention_bias(),
    )


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a gpt-oss.

    Its GGUF files lack the key ``truncate`` of YaRN, which is false in these models.
    """
    return replace(
        config,
        rope=config.rope and replace(config.rope, truncate=False),
        windows=keys.windows(config.num_layers, 2),
        mixture=keys.mixture(config.num_layers, bias=True),
        attention_sinks=True,
        clamped_gate=True,
    )


FAMILIES = (
    Family(
        "gpt_oss",
        _parse,
        replace(
            LLAMA_NAMES,
            layer={
                **LLAMA_LAYER,
                **FUSED_EXPERTS,
                "sinks": ("self_attn.sinks",),
                "router": ("mlp.router",),
            },
            interleaved_experts=True,
        ),
        defaults={
            "max_position_embeddings": 131072,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        gguf=(
            GgufArchitecture(
                "gpt-oss",
                _parse_gguf,
                replace(
                    GGUF_NAMES,
                    layer={**GGUF_NAMES.layer, "mlp_norm": ("post_attention_norm",)},
                ),
            ),
        ),
    ),
)
