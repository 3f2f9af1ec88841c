"""LFM2 and LFM2.5: most layers have a gated short convolution in place of attention."""

from __future__ import annotations

from dataclasses import replace

from pronk.checkpoint.config import MAX_TAPS, ConvolutionConfig, ModelConfig
from pronk.checkpoint.rope import refuse_config
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import GGUF_NAMES, LLAMA_NAMES, Family, GgufArchitecture
from pronk.models.gguf_reader import GgufReader


def _parse(keys: ConfigReader) -> ModelConfig:
    """Parse LFM2 and LFM2.5; in early configs, some keys have other names."""
    num_layers = keys.layers("num_hidden_layers")
    attends = keys.list_of("full_attn_idxs", int, range(num_layers))
    implied = ["full_attention" if layer in attends else "conv" for layer in range(num_layers)]
    kinds = keys.list_of("layer_types", str, implied)
    if len(kinds) != num_layers or not {*kinds} <= {"conv", "full_attention"}:
        expected = f"expected {num_layers} layer_types, each conv or full_attention"
        refuse_config(f"{expected}, found {kinds!r:.80}; use a dense LFM2")
    layers = tuple(kind == "conv" for kind in kinds)
    taps = keys.integer("conv_L_cache", 3, high=MAX_TAPS)
    bias = keys.flag("conv_bias")
    return llama_like(
        keys,
        windows=(None,) * num_layers,
        intermediate_size=_intermediate_size(keys),
        norm_eps=keys.number("norm_eps", 1e-5),
        activation="silu",
        qk_norm=True,
        convolution=ConvolutionConfig(taps, layers, bias) if any(layers) else None,
        tied=keys.flag("tie_embedding", default=keys.flag("tie_word_embeddings")),
    )


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


FAMILIES = (
    Family(
        "lfm2",
        _parse,
        replace(
            LLAMA_NAMES,
            layer={
                "attention_norm": ("operator_norm",),
                "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                "q_norm": ("self_attn.q_layernorm",),
                "k_norm": ("self_attn.k_layernorm",),
                "out": ("self_attn.out_proj",),
                # Tensors of a short convolution: its input projection, and its weights over tokens.
                "gates": ("conv.in_proj",),
                "filter": ("conv.conv",),
                "convolution_out": ("conv.out_proj",),
                "mlp_norm": ("ffn_norm",),
                "up": ("feed_forward.w1", "feed_forward.w3"),
                "down": ("feed_forward.w2",),
            },
            norm="embedding_norm",
        ),
        defaults={
            "block_ffn_dim_multiplier": 1.0,
            "intermediate_size": 12288,
            "max_position_embeddings": 128000,
            "num_key_value_heads": 8,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
        },
        gguf=(
            GgufArchitecture(
                "lfm2",
                _parse_gguf,
                replace(GGUF_NAMES, norm="token_embd_norm"),
                skips_attention=True,
            ),
        ),
    ),
)
