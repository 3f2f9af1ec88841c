"""Granite SWA: a Granite with windows in three of four layers, and attention sinks in all.

Each layer may have a base of its own for its rotary embedding, or no rotary embedding.
Source: ``models/granite_swa`` of transformers.
"""

from __future__ import annotations

from dataclasses import replace

from pronk.checkpoint.config import MAX_ROPES, ModelConfig
from pronk.checkpoint.rope import RopeConfig, check_positive, refuse_config
from pronk.models.config_reader import ConfigReader
from pronk.models.families.granite import parse_granite
from pronk.models.family import LLAMA_LAYER, LLAMA_NAMES, Family


def _parse(keys: ConfigReader) -> ModelConfig:
    window = keys.integer("sliding_window")
    windows = keys.windows(window, lambda layer: layer % 4 > 0)
    config = parse_granite(keys, windows)
    return replace(config, attention_sinks=True, layer_ropes=_layer_ropes(keys, config))


def _layer_ropes(keys: ConfigReader, config: ModelConfig) -> tuple[RopeConfig | None, ...]:
    """Return the rotary embedding of each layer, or ``()`` if all layers have the same one.

    ``layer_rope_theta`` has a base for each layer; layers with 0 or null do not rotate.
    """
    bases = keys.list_of("layer_rope_theta", object, ())
    if not bases or config.rope is None:
        return ()
    if len(bases) != config.num_layers:
        refuse_config(f"layer_rope_theta: expected {config.num_layers} numbers, found {len(bases)}")
    ropes = tuple(_with_theta(config.rope, base) for base in bases)
    different = {*ropes} - {None}
    if len(different) > MAX_ROPES:
        found = len(different)
        refuse_config(f"layer_rope_theta: expected at most {MAX_ROPES} bases, found {found}")
    return ropes


def _with_theta(rope: RopeConfig, base: object) -> RopeConfig | None:
    if base is None or base == 0:
        return None
    return replace(rope, theta=check_positive("config.json: layer_rope_theta", base, 1))


FAMILIES = (
    Family(
        "granite_swa",
        _parse,
        replace(LLAMA_NAMES, layer={**LLAMA_LAYER, "sinks": ("self_attn.sinks",)}),
        defaults={
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "tie_word_embeddings": True,
        },
    ),
)
