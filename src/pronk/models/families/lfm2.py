"""LFM2 and LFM2.5: most layers have a gated short convolution in place of attention.

LFM2-MoE and LFM2.5-MoE have mixtures of experts in all layers but the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pronk.checkpoint.config import MAX_TAPS, ConvolutionConfig, ModelConfig
from pronk.checkpoint.rope import refuse_config
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import GGUF_NAMES, LLAMA_NAMES, Family, GgufArchitecture
from pronk.models.gguf_reader import GgufReader

# Added to the sum of the scores by which the weights of experts are divided.
_EPSILON = 1e-6


def _parse(keys: ConfigReader) -> ModelConfig:
    return _parse_lfm2(keys, intermediate_size=_intermediate_size(keys))


def _parse_moe(keys: ConfigReader) -> ModelConfig:
    num_dense = keys.integer("num_dense_layers", 2, low=0)
    mixture = keys.mixture(
        "num_experts",
        "moe_intermediate_size",
        normalized=keys.flag("norm_topk_prob", default=True),
        is_mixture=lambda layer: layer >= num_dense,
    )
    if mixture is not None:
        mixture = replace(
            mixture,
            scores="sigmoid",
            correction=keys.flag("use_expert_bias", default=True),
            scale=keys.number("routed_scaling_factor", 1.0),
            epsilon=_EPSILON,
        )
    return _parse_lfm2(keys, mixture=mixture)


def _parse_lfm2(keys: ConfigReader, **features: Any) -> ModelConfig:
    """Parse LFM2 and LFM2.5; in early configs, some keys have other names."""
    kinds = layer_kinds(keys, {"conv", "full_attention"})
    return llama_like(
        keys,
        windows=(None,) * len(kinds),
        norm_eps=keys.number("norm_eps", 1e-5),
        activation="silu",
        qk_norm=True,
        convolution=parse_convolution(keys, kinds, 3),
        tied=keys.flag("tie_embedding", default=keys.flag("tie_word_embeddings")),
        **features,
    )


def layer_kinds(keys: ConfigReader, supported: set[str]) -> list[str]:
    """Return the kind of each layer; raise a ConfigError for a kind that is not supported."""
    num_layers = keys.layers("num_hidden_layers")
    attends = keys.list_of("full_attn_idxs", int, range(num_layers))
    implied = ["full_attention" if layer in attends else "conv" for layer in range(num_layers)]
    kinds = keys.list_of("layer_types", str, implied)
    if len(kinds) != num_layers or not {*kinds} <= supported:
        expected = f"expected {num_layers} layer_types, each {' or '.join(sorted(supported))}"
        refuse_config(f"{expected}, found {kinds!r:.80}; use a dense LFM2")
    return kinds


def parse_convolution(
    keys: ConfigReader, kinds: Sequence[str], taps: int
) -> ConvolutionConfig | None:
    """Return the short convolutions of a model; ``None`` if it has none.

    Args:
        keys: the keys of ``config.json``.
        kinds: kind of each layer; those of kind ``conv`` have a convolution.
        taps: number of tokens in the sum of a convolution if the key ``conv_L_cache`` is absent.

    Raises:
        ConfigError: a key has an invalid value.
    """
    layers = tuple(kind == "conv" for kind in kinds)
    taps = keys.integer("conv_L_cache", taps, high=MAX_TAPS)
    bias = keys.flag("conv_bias")
    return ConvolutionConfig(taps, layers, bias) if any(layers) else None


def _intermediate_size(keys: ConfigReader) -> int:
    """Return the intermediate size of the MLPs: the number in the config, usually adjusted.

    Unless ``block_auto_adjust_ff_dim`` is false, the number is multiplied by 2/3. If
    ``block_ffn_dim_multiplier`` is set, it is also multiplied by this factor and then rounded up to
    a multiple of ``block_multiple_of``.
    """
    width = keys.integer("block_ff_dim", keys.integer("intermediate_size"))
    if not keys.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    factor = keys.optional_number("block_ffn_dim_multiplier")
    if factor is None:
        return width
    unit = keys.integer("block_multiple_of", 256)
    return -(-int(factor * width) // unit) * unit


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of an LFM2; a layer with 0 key/value heads has a short convolution."""
    counts = keys.per_layer("attention.head_count_kv", config.num_layers)
    layers = tuple(count == 0 for count in counts)
    taps = keys.integer("shortconv.l_cache", maximum=MAX_TAPS)
    convolution = ConvolutionConfig(taps, layers) if any(layers) else None
    return replace(config, qk_norm=True, convolution=convolution)


def _parse_moe_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    mixture = keys.mixture(config.num_layers, scores="sigmoid", epsilon=_EPSILON)
    return replace(_parse_gguf(keys, config), mixture=mixture)


# Layers with short convolutions: their input projection, and their weights over tokens.
CONVOLUTION_LAYER: dict[str, tuple[str, ...]] = {
    "attention_norm": ("operator_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gates": ("conv.in_proj",),
    "filter": ("conv.conv",),
    "convolution_out": ("conv.out_proj",),
    "mlp_norm": ("ffn_norm",),
    "up": ("feed_forward.w1", "feed_forward.w3"),
    "down": ("feed_forward.w2",),
}
_NAMES = replace(
    LLAMA_NAMES,
    layer={
        **CONVOLUTION_LAYER,
        "q_norm": ("self_attn.q_layernorm",),
        "k_norm": ("self_attn.k_layernorm",),
        "out": ("self_attn.out_proj",),
    },
    norm="embedding_norm",
)
_DEFAULTS = {
    "max_position_embeddings": 128000,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_GGUF_NAMES = replace(GGUF_NAMES, norm="token_embd_norm")

FAMILIES = (
    Family(
        "lfm2",
        _parse,
        _NAMES,
        defaults={
            **_DEFAULTS,
            "block_ffn_dim_multiplier": 1.0,
            "intermediate_size": 12288,
        },
        gguf=(GgufArchitecture("lfm2", _parse_gguf, _GGUF_NAMES, skips_attention=True),),
    ),
    Family(
        "lfm2_moe",
        _parse_moe,
        replace(
            _NAMES,
            layer={
                **_NAMES.layer,
                "router": ("feed_forward.gate",),
                "correction": ("feed_forward.expert_bias",),
                "experts.up": (
                    "feed_forward.experts.{}.w1.weight",
                    "feed_forward.experts.{}.w3.weight",
                ),
                "experts.down": ("feed_forward.experts.{}.w2.weight",),
            },
            alternatives=(
                {
                    "experts.up": ("feed_forward.experts.gate_up_proj",),
                    "experts.down": ("feed_forward.experts.down_proj",),
                },
            ),
        ),
        defaults={
            **_DEFAULTS,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
        },
        gguf=(GgufArchitecture("lfm2moe", _parse_moe_gguf, _GGUF_NAMES, skips_attention=True),),
    ),
)
