"""LFM3: short convolutions over 7 tokens, windows in half of the layers with attention.

As in Gemma, each branch has a norm before and after it. Each head of attention has a gate. Layers
with a window rotate whole heads; the others have a base of their own and rotate the pairs with the
higher half of the frequencies. No GGUF architecture is known.

Source: ``models/lfm3`` of transformers.
"""

from __future__ import annotations

from dataclasses import replace

from pronk.checkpoint.config import ModelConfig
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.families.lfm2 import CONVOLUTION_LAYER, layer_kinds, parse_convolution
from pronk.models.family import LLAMA_NAMES, Family


def _parse(keys: ConfigReader) -> ModelConfig:
    if keys.get("layer_types") is None:
        num_layers = keys.layers("num_hidden_layers")
        kinds = [_kind(layer) for layer in range(num_layers)]
        keys = ConfigReader({**keys.raw, "layer_types": kinds}, keys.family, keys.used)
    kinds = layer_kinds(keys, {"conv", "full_attention", "sliding_attention"})
    size = keys.integer("sliding_window", 256)
    windows = tuple(size if kind == "sliding_attention" else None for kind in kinds)
    return llama_like(
        keys,
        windows=windows,
        norm_eps=keys.number("norm_eps", 1e-5),
        norm_places="both" if keys.flag("use_sandwich_norm", default=True) else "input",
        activation="silu",
        qk_norm=True,
        head_gates=keys.flag("use_attention_gate", default=True),
        convolution=parse_convolution(keys, kinds, 7),
        tied=keys.flag("tie_word_embeddings"),
        **keys.ropes(windows, 1e6, 1e4),
        **keys.attention_bias(),
    )


def _kind(layer: int) -> str:
    """Return the default kind of a layer (from 0)."""
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer % 4 == 0 and layer > 0 else "conv"


FAMILIES = (
    Family(
        "lfm3",
        _parse,
        replace(
            LLAMA_NAMES,
            layer={
                **CONVOLUTION_LAYER,
                "q_norm": ("self_attn.q_norm",),
                "k_norm": ("self_attn.k_norm",),
                "out": ("self_attn.o_proj",),
                "attention_gate": ("self_attn.gate_proj",),
                "attention_output_norm": ("post_operator_norm",),
                "mlp_output_norm": ("post_ffn_norm",),
            },
            norm="embedding_norm",
            modules={"gate_proj": "g_proj"},
        ),
        defaults={
            "head_dim": 128,
            "intermediate_size": 7680,
            "max_position_embeddings": 128000,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1000000.0,
                    "partial_rotary_factor": 0.5,
                },
            },
            "tie_word_embeddings": True,
        },
    ),
)
