"""Granite 3 and 4: constant factors scale embeddings, branches, attention scores and logits.

Some models have mixtures of experts.
"""

from __future__ import annotations

from dataclasses import replace

from pronk.checkpoint.config import ModelConfig
from pronk.models.config_reader import ConfigReader
from pronk.models.families.llama import parse_llama
from pronk.models.family import (
    LLAMA_LAYER,
    LLAMA_NAMES,
    PERMUTED_GGUF_NAMES,
    Family,
    GgufArchitecture,
)
from pronk.models.gguf_reader import GgufReader


def parse_granite(keys: ConfigReader, windows: tuple[int | None, ...] | None = None) -> ModelConfig:
    """Parse the keys of Granite; without ``windows``, all layers have full attention."""
    return replace(
        parse_llama(keys, windows),
        attention_scale=keys.number("attention_multiplier", 1.0),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logits_scale=1.0 / keys.number("logits_scaling", 1.0),
    )


def _parse_moe(keys: ConfigReader) -> ModelConfig:
    return replace(parse_granite(keys), mixture=keys.mixture())


def parse_granite_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a Granite, whose layers may have no rotary embedding."""
    has_rope = keys.get("rope.scaling.finetuned") is not False
    return replace(
        config,
        layer_ropes=() if has_rope else (None,) * config.num_layers,
        attention_scale=keys.optional_number("attention.scale"),
        embedding_scale=keys.optional_number("embedding_scale") or 1.0,
        residual_scale=keys.optional_number("residual_scale") or 1.0,
        logits_scale=1.0 / (keys.optional_number("logit_scale") or 1.0),
    )


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a dense Granite.

    GGUF files of the hybrid family's dense models have keys of Mamba layers and of a shared expert,
    which are ignored.
    """
    keys.used |= {"ssm.conv_kernel", "expert_shared_feed_forward_length"}
    return parse_granite_gguf(keys, config)


def _parse_moe_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    return replace(parse_granite_gguf(keys, config), mixture=keys.mixture(config.num_layers))


FAMILIES = (
    Family(
        "granite",
        parse_granite,
        gguf=(GgufArchitecture("granite", _parse_gguf, PERMUTED_GGUF_NAMES),),
    ),
    Family(
        "granitemoe",
        _parse_moe,
        replace(
            LLAMA_NAMES,
            layer={
                **LLAMA_LAYER,
                "router": ("block_sparse_moe.router.layer",),
                "experts.up": ("block_sparse_moe.input_linear.weight",),
                "experts.down": ("block_sparse_moe.output_linear.weight",),
            },
        ),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        gguf=(GgufArchitecture("granitemoe", _parse_moe_gguf, PERMUTED_GGUF_NAMES),),
    ),
)
