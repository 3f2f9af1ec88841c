"""Gemma 2, and the language model of Gemma 3.

Each attention and each MLP has a norm before and after it; embeddings are scaled, and the MLPs use
GELU. Gemma 2 also caps attention scores and logits. Checkpoints store ``weight - 1`` of each norm,
and GGUF files ``weight``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import RopeConfig
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import OUTPUT_NORM_NAMES, Family, GgufArchitecture
from pronk.models.gguf_reader import GgufReader


def _parse_gemma(
    keys: ConfigReader,
    windows: tuple[int | None, ...],
    **features: Any,
) -> ModelConfig:
    return llama_like(
        keys,
        windows=windows,
        # already includes the scaling of the rotary embedding
        context=keys.integer("max_position_embeddings"),
        norm_places="both",
        norm_offset=1.0,
        activation=keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=1.0 / math.sqrt(keys.number("query_pre_attn_scalar", 256)),
        attention_cap=keys.optional_number("attn_logit_softcapping"),
        logits_cap=keys.optional_number("final_logit_softcapping"),
        embedding_scale=math.sqrt(keys.integer("hidden_size")),
        **keys.attention_bias(),
        **features,
    )


def _parse_gemma2(keys: ConfigReader) -> ModelConfig:
    return _parse_gemma(keys, keys.periodic_windows(keys.integer("sliding_window_pattern")))


def _parse_gemma3(keys: ConfigReader) -> ModelConfig:
    """Parse Gemma 3, whose layers with a sliding window have a rotary embedding of their own.

    It has the base ``rope_local_base_freq`` and no scaling.
    """
    windows = keys.periodic_windows(keys.integer("sliding_window_pattern"))
    theta = keys.number("rope_theta", 1e6)
    sliding_theta = keys.number("rope_local_base_freq", 1e4)
    ropes = keys.ropes(windows, theta, sliding_theta)
    return _parse_gemma(keys, windows, qk_norm=True, **ropes)


def _parse_gguf(
    keys: GgufReader,
    config: ModelConfig,
    *,
    period: int,
    whole_model: int,
) -> ModelConfig:
    """Return the config of a Gemma; every ``period``-th layer has full attention, others a window.

    GGUF files lack the attention scale. As in llama.cpp, the largest model of the family, which has
    ``whole_model`` layers, divides by the square root of ``hidden_size / num_heads``, and smaller
    ones by that of ``head_dim``.
    """
    is_largest = config.num_layers == whole_model
    scaled_size = config.hidden_size / config.num_heads if is_largest else config.head_dim
    return replace(
        config,
        norm_places="both",
        activation="gelu_tanh",
        windows=keys.windows(config.num_layers, period, 4096),
        embedding_scale=math.sqrt(config.hidden_size),
        attention_scale=1.0 / math.sqrt(scaled_size),
    )


def _parse_gemma2_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    return replace(
        _parse_gguf(keys, config, period=2, whole_model=46),
        attention_cap=keys.number("attn_logit_softcapping", 50),
        logits_cap=keys.number("final_logit_softcapping", 30),
    )


def _parse_gemma3_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    config = _parse_gguf(keys, config, period=6, whole_model=62)
    sliding = RopeConfig(config.head_dim, keys.number("rope.freq_base_swa", 10000.0, bound=1))
    ropes = tuple(config.rope if window is None else sliding for window in config.windows)
    return replace(
        config,
        qk_norm=True,
        layer_ropes=ropes,
        logits_cap=keys.optional_number("final_logit_softcapping"),
        # already includes the scaling of the rotary embedding
        context=keys.integer("context_length"),
    )


FAMILIES = (
    Family(
        "gemma2",
        _parse_gemma2,
        OUTPUT_NORM_NAMES,
        defaults={
            "max_position_embeddings": 8192,
            "head_dim": 256,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        gguf=(GgufArchitecture("gemma2", _parse_gemma2_gguf),),
    ),
    Family(
        "gemma3_text",
        _parse_gemma3,
        OUTPUT_NORM_NAMES,
        defaults={
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "head_dim": 256,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        multimodal=("gemma3",),
        gguf=(GgufArchitecture("gemma3", _parse_gemma3_gguf),),
    ),
)
