"""Granite 3 and 4: constant factors scale embeddings, branches, attention scores and logits.

Some models have mixtures of experts.
"""

from __future__ import annotations

from dataclasses import replace

from pronk.base.checks import check_choice
from pronk.base.errors import ConfigError
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import refuse_config
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


def _parse_hybrid(keys: ConfigReader) -> ModelConfig:
    """Parse a Granite 4.0 of the hybrid family that has neither experts nor Mamba layers.

    Such a model computes as a Granite 3; only keys have other names.
    """
    num_layers = keys.layers("num_hidden_layers")
    kinds = keys.get("layer_types", [])
    attends = ("attention", "full_attention")
    is_dense = isinstance(kinds, list) and all(kind in attends for kind in kinds)
    if not is_dense or len(kinds) != num_layers:
        expected = f"expected {num_layers} layer_types, each attention"
        refuse_config(f"{expected}, found {kinds!r:.80}; use a dense Granite")
    if experts := keys.integer("num_local_experts", 8, low=0):
        expected = "expected a hybrid Granite without experts"
        refuse_config(f"{expected}, found {experts}; use a dense one or granitemoe")
    position = keys.get("position_embedding_type")
    check_choice("config.json: position_embedding_type", position, ("rope",), error=ConfigError)
    size = keys.integer("shared_intermediate_size", 1024)
    raw = {**keys.raw, "intermediate_size": size, "layer_types": None}
    return parse_granite(ConfigReader(raw, keys.family, keys.used))


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a Granite.

    GGUF files of the hybrid family's dense models have keys of Mamba layers, which are ignored.
    """
    keys.used.add("ssm.conv_kernel")
    if keys.get("rope.scaling.finetuned") is False:
        key = keys.label("rope.scaling.finetuned")
        msg = f"{key} = False is not supported; expected a rotary embedding"
        raise ConfigError(msg)
    return replace(
        config,
        attention_scale=keys.optional_number("attention.scale"),
        embedding_scale=keys.optional_number("embedding_scale") or 1.0,
        residual_scale=keys.optional_number("residual_scale") or 1.0,
        logits_scale=1.0 / keys.number("logit_scale"),
    )


def _parse_moe_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    return replace(_parse_gguf(keys, config), mixture=keys.mixture(config.num_layers))


FAMILIES = (
    Family(
        "granite",
        parse_granite,
        gguf=(GgufArchitecture("granite", _parse_gguf, PERMUTED_GGUF_NAMES),),
    ),
    Family(
        "granitemoehybrid",
        _parse_hybrid,
        replace(
            LLAMA_NAMES,
            layer={
                **LLAMA_LAYER,
                "up": ("shared_mlp.input_linear",),
                "down": ("shared_mlp.output_linear",),
            },
        ),
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
