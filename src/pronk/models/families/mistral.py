"""Mistral, Mixtral and Ministral 3.

GGUF files of Mistral and Mixtral have the architecture ``llama``.
"""

from __future__ import annotations

from dataclasses import replace

from pronk.base.checks import check_number
from pronk.base.errors import ConfigError
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import refuse_config, yarn_scale
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import (
    FUSED_EXPERTS,
    LLAMA_LAYER,
    LLAMA_NAMES,
    PERMUTED_GGUF_NAMES,
    Family,
    GgufArchitecture,
)
from pronk.models.gguf_reader import GgufReader


def _parse_mistral(keys: ConfigReader) -> ModelConfig:
    size = None if keys.get("sliding_window") is None else keys.integer("sliding_window")
    windows = keys.windows(size)
    if None in windows and size is not None:
        found = "layer_types asks for full attention in some layers"
        refuse_config(f"{found}; expected sliding_attention in all")
    return llama_like(keys, windows=windows)


def _parse_mixtral(keys: ConfigReader) -> ModelConfig:
    return replace(_parse_mistral(keys), mixture=keys.mixture())


def _parse_ministral3(keys: ConfigReader) -> ModelConfig:
    """Parse Ministral 3, whose queries grow with the position in long texts.

    The keys of this growth are in ``rope_parameters``.
    """
    rope = dict(keys.mapping("rope_parameters"))
    growth = rope.pop("llama_4_scaling_beta", None)
    rope.pop("max_position_embeddings", None)
    raw = {**keys.raw, "rope_parameters": rope}
    config = _parse_mistral(ConfigReader(raw, keys.family, keys.used))
    if growth is None or config.rope is None:
        return config
    growth = check_number("config.json: llama_4_scaling_beta", growth, 0, error=ConfigError)
    return replace(config, query_growth=(growth, config.rope.original))


def _parse_mistral3_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a Ministral 3 or Mistral Small 3.

    With YaRN, the cosines and sines of the rotary embedding are multiplied by a factor
    (:func:`~pronk.checkpoint.rope.yarn_scale`). It depends on ``mscale``, which the file lacks and
    which is taken to be 1, and on ``mscale_all_dim``, which the file has. Queries grow with the
    position if the file has ``attention.temperature_scale``.
    """
    rope = config.rope
    growth = keys.optional_number("attention.temperature_scale")
    mscale_all_dim = keys.optional_number("rope.scaling.yarn_log_multiplier")
    if rope is not None and rope.kind == "yarn":
        rope = replace(rope, attention_scale=yarn_scale(rope.factor, 1.0, mscale_all_dim or 0.0))
    query_growth = None if rope is None or growth is None else (growth, rope.original)
    return replace(config, rope=rope, query_growth=query_growth)


FAMILIES = (
    Family(
        "mistral",
        _parse_mistral,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        multimodal=("mistral3",),
    ),
    Family(
        "mixtral",
        _parse_mixtral,
        replace(
            LLAMA_NAMES,
            layer={
                **LLAMA_LAYER,
                "router": ("block_sparse_moe.gate",),
                "experts.up": (
                    "block_sparse_moe.experts.{}.w1.weight",
                    "block_sparse_moe.experts.{}.w3.weight",
                ),
                "experts.down": ("block_sparse_moe.experts.{}.w2.weight",),
            },
            alternatives=(FUSED_EXPERTS,),
        ),
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    Family(
        "ministral3",
        _parse_ministral3,
        defaults={
            "max_position_embeddings": 262144,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        gguf=(GgufArchitecture("mistral3", _parse_mistral3_gguf, PERMUTED_GGUF_NAMES),),
    ),
)
