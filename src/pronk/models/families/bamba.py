"""Bamba: Mamba 2 in most layers, attention with a rotary embedding of half a head in the others.

llama.cpp stores Bamba as a hybrid Granite: :mod:`pronk.models.families.granite_hybrid`.
Source: ``models/bamba`` of transformers.
"""

from __future__ import annotations

from pronk.checkpoint.config import ModelConfig
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import HYBRID_NAMES, Family


def _parse(keys: ConfigReader) -> ModelConfig:
    num_layers = keys.layers("num_hidden_layers")
    attends = keys.list_of("attn_layer_indices", int, ())
    layers = tuple(layer not in attends for layer in range(num_layers))
    inner = keys.integer("mamba_expand", 2) * keys.integer("hidden_size")
    return llama_like(
        keys,
        windows=(None,) * num_layers,
        partial_rope=True,
        recurrent=keys.mamba2(layers, inner) if any(layers) else None,
        mlp_bias=keys.flag("mlp_bias"),
        **keys.attention_bias(),
    )


FAMILIES = (
    Family(
        "bamba",
        _parse,
        HYBRID_NAMES,
        defaults={
            "intermediate_size": 14336,
            "mamba_d_state": 256,
            "mamba_n_heads": 128,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
    ),
)
