"""Qwen2, Qwen2.5 and MiMo (a Qwen2 with an MTP head), Qwen3, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from pronk.checkpoint.config import MixtureConfig, ModelConfig
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import (
    FUSED_EXPERTS,
    LLAMA_LAYER,
    LLAMA_NAMES,
    SINGLE_EXPERTS,
    Family,
    GgufArchitecture,
)
from pronk.models.gguf_reader import GgufReader


def qwen_windows(keys: ConfigReader) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, in tokens; ``None`` for full attention.

    Only with ``use_sliding_window``, layers from ``max_window_layers`` on have a window.
    """
    if not keys.get("use_sliding_window", False) or keys.get("sliding_window") is None:
        return keys.windows(None)
    first = keys.integer("max_window_layers", 28, low=0)
    return keys.windows(keys.integer("sliding_window"), lambda layer: layer >= first)


def _parse_qwen2(keys: ConfigReader) -> ModelConfig:
    return llama_like(keys, windows=qwen_windows(keys), qkv_bias=True)


def _parse_qwen3(keys: ConfigReader) -> ModelConfig:
    return llama_like(keys, windows=qwen_windows(keys), qk_norm=True, **keys.attention_bias())


def _parse_qwen2_moe(keys: ConfigReader) -> ModelConfig:
    """Parse the config of Qwen2-MoE, which has a shared expert with a gate.

    With ``use_sliding_window``, every second layer below ``max_window_layers`` has a window.
    """
    size = keys.integer("sliding_window") if keys.flag("use_sliding_window") else None
    stop = keys.integer("max_window_layers", 28, low=0)
    windows = keys.windows(size, lambda layer: layer % 2 == 0 and layer < stop)
    mixture = _mixture(keys)
    if mixture is not None:
        width = keys.integer("shared_expert_intermediate_size")
        mixture = replace(mixture, shared_width=width, shared_gate=True)
    bias = keys.flag("qkv_bias", default=True)
    return llama_like(keys, windows=windows, qkv_bias=bias, mixture=mixture)


def _parse_qwen3_moe(keys: ConfigReader) -> ModelConfig:
    return replace(_parse_qwen3(keys), mixture=_mixture(keys))


def _mixture(keys: ConfigReader) -> MixtureConfig | None:
    """Return the mixture of experts; some layers may have a plain MLP.

    These are the layers in ``mlp_only_layers``, and those whose number, from 1, is no multiple of
    ``decoder_sparse_step``.
    """
    plain = keys.list_of("mlp_only_layers", int, ())
    step = keys.integer("decoder_sparse_step", 1)
    sums_to_1 = keys.flag("norm_topk_prob")
    # transformers 5 has another name for the number of experts.
    is_renamed = keys.get("num_experts") is None and keys.get("num_local_experts") is not None
    return keys.mixture(
        "num_local_experts" if is_renamed else "num_experts",
        "moe_intermediate_size",
        normalized=sums_to_1,
        is_mixture=lambda layer: layer not in plain and (layer + 1) % step == 0,
    )


def _parse_qwen3_gguf(_: GgufReader, config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True)


def _parse_qwen2_moe_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a Qwen2-MoE, in which the weights of a row's experts sum to any number.

    llama.cpp assumes it, as the files do not say it.
    """
    mixture = keys.mixture(config.num_layers, normalized=False)
    if mixture is not None:
        width = mixture.shared_width or config.intermediate_size
        mixture = replace(mixture, shared_width=width, shared_gate=True)
    return replace(config, mixture=mixture)


def _parse_qwen3_moe_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True, mixture=keys.mixture(config.num_layers))


_QWEN2_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}
_MOE_NAMES = replace(
    LLAMA_NAMES,
    layer={
        **LLAMA_LAYER,
        **SINGLE_EXPERTS,
    },
    alternatives=(FUSED_EXPERTS,),
)

FAMILIES = (
    Family("qwen2", _parse_qwen2, defaults=_QWEN2_DEFAULTS, gguf=(GgufArchitecture("qwen2"),)),
    Family("mimo", _parse_qwen2, defaults=_QWEN2_DEFAULTS),
    Family(
        "qwen3",
        _parse_qwen3,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "head_dim": 128,
        },
        gguf=(GgufArchitecture("qwen3", _parse_qwen3_gguf),),
    ),
    Family(
        "qwen2_moe",
        _parse_qwen2_moe,
        replace(
            _MOE_NAMES,
            layer={
                **_MOE_NAMES.layer,
                "shared_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
                "shared_down": ("mlp.shared_expert.down_proj",),
                "shared_gate": ("mlp.shared_expert_gate",),
            },
        ),
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        gguf=(GgufArchitecture("qwen2moe", _parse_qwen2_moe_gguf),),
    ),
    Family(
        "qwen3_moe",
        _parse_qwen3_moe,
        _MOE_NAMES,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
        },
        gguf=(GgufArchitecture("qwen3moe", _parse_qwen3_moe_gguf),),
    ),
)
