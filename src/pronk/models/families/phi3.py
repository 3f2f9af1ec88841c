"""Phi-3 and Phi-4: q, k and v are one matrix, as are gate and up, and a part of each head rotates.

Long contexts use the rotary embedding ``longrope``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pronk.checkpoint.config import ModelConfig
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import (
    GGUF_NAMES,
    LLAMA_LAYER,
    LLAMA_NAMES,
    Family,
    GgufArchitecture,
)
from pronk.models.gguf_reader import GgufReader


def _parse(keys: ConfigReader) -> ModelConfig:
    """Parse Phi-3 and Phi-4; early configs call *longrope* ``su`` or ``yarn``."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = keys.get(key)
        if isinstance(scaling, Mapping):
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            kind = "longrope" if kind in ("su", "yarn") else kind
            keys.raw = {**keys.raw, key: {**scaling, "rope_type": kind}}
    size = None if keys.get("sliding_window") is None else keys.integer("sliding_window")
    return llama_like(keys, windows=keys.windows(size), partial_rope=True)


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    # a period beyond the last layer: all layers have the window of the file
    every_layer = config.num_layers + 1
    return replace(config, windows=keys.windows(config.num_layers, every_layer))


FAMILIES = (
    Family(
        "phi3",
        _parse,
        replace(
            LLAMA_NAMES,
            layer={
                **LLAMA_LAYER,
                "qkv": ("self_attn.qkv_proj",),
                "up": ("mlp.gate_up_proj",),
            },
        ),
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        gguf=(
            GgufArchitecture(
                "phi3",
                _parse_gguf,
                replace(
                    GGUF_NAMES,
                    layer={**GGUF_NAMES.layer, "qkv": ("attn_qkv",), "up": ("ffn_up",)},
                ),
                partial_rope=True,
            ),
        ),
    ),
)
