"""Falcon-H1: attention and Mamba 2 side by side in every layer.

Constant multipliers scale the inputs and outputs of most projections. They are multiplied into the
weights when a folder is loaded, as the converter of llama.cpp does.

Sources: ``models/falcon_h1`` of transformers, ``conversion/falcon_h1.py`` of llama.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from pronk.base.checks import check_number
from pronk.base.errors import ConfigError
from pronk.checkpoint.config import ModelConfig, RecurrentConfig
from pronk.checkpoint.rope import refuse_config
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import GGUF_NAMES, HYBRID_NAMES, Family, GgufArchitecture
from pronk.models.gguf_reader import GgufReader


def _parse(keys: ConfigReader) -> ModelConfig:
    num_layers = keys.layers("num_hidden_layers")
    for key in ("attention_bias", "mlp_bias", "projectors_bias"):
        if keys.flag(key):
            refuse_config(f"{key} = true is not supported; expected false")
    return llama_like(
        keys,
        windows=(None,) * num_layers,
        recurrent=_recurrent(keys, (True,) * num_layers),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logits_scale=keys.number("lm_head_multiplier", 1.0),
        weight_factors=_weight_factors(keys),
    )


def _recurrent(keys: ConfigReader, layers: tuple[bool, ...]) -> RecurrentConfig:
    expanded = keys.integer("mamba_expand", 2) * keys.integer("hidden_size")
    recurrent = keys.mamba2(layers, keys.integer("mamba_d_ssm", expanded))
    has_norm = keys.flag("mamba_rms_norm")
    if has_norm and keys.flag("mamba_norm_before_gate", default=True):
        expected = "expected false with mamba_rms_norm"
        refuse_config(f"mamba_norm_before_gate: {expected}, found true")
    return replace(recurrent, norm="after_gate" if has_norm else "none", parallel=True)


def _weight_factors(keys: ConfigReader) -> dict[str, tuple[float, ...]]:
    """Return the factors of each stacked weight (:attr:`.ModelConfig.weight_factors`)."""
    gate, down = _multipliers(keys, "mlp_multipliers", 2)
    attention = keys.number("attention_in_multiplier", 1.0)
    key = keys.number("key_multiplier", 1.0)
    mamba = keys.number("ssm_in_multiplier", 1.0)
    parts = [mamba * part for part in _multipliers(keys, "ssm_multipliers", 5)]
    gates, values, of_keys, queries, steps = parts
    return {
        "qkv": (attention, attention * key, attention),
        "out": (keys.number("attention_out_multiplier", 1.0),),
        "mixer_in": (queries, of_keys, values, gates),
        "mixer_gates": (steps,),
        "mixer_out": (keys.number("ssm_out_multiplier", 1.0),),
        "up": (gate, 1.0),
        "down": (down,),
    }


def _multipliers(keys: ConfigReader, key: str, count: int) -> list[float]:
    values = keys.list_of(key, object, [1.0] * count)
    if len(values) != count:
        refuse_config(f"{key}: expected {count} numbers, found {len(values)}")
    return [check_number(f"config.json: {key}", value, error=ConfigError) for value in values]


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    if config.tied:
        # The multipliers of embedding and head differ, and are in the weights.
        keys.refuse("vocab_size", "expected a tensor output.weight, found none; convert it again")
    has_norm = "blk.0.ssm_norm.weight" in keys.checkpoint
    recurrent = replace(
        keys.recurrence((True,) * config.num_layers),
        rule="mamba2",
        norm="after_gate" if has_norm else "none",
        parallel=True,
    )
    return replace(config, recurrent=recurrent, hides_factors=True)


FAMILIES = (
    Family(
        "falcon_h1",
        _parse,
        HYBRID_NAMES,
        defaults={
            "intermediate_size": 14336,
            "mamba_d_ssm": 1024,
            "mamba_d_state": 256,
            "mamba_n_heads": 128,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
        gguf=(
            GgufArchitecture(
                "falcon-h1",
                _parse_gguf,
                replace(
                    GGUF_NAMES,
                    layer={**GGUF_NAMES.layer, "mixer_in": ("ssm_in",)},
                    bare_norms=("mlp_norm",),
                ),
            ),
        ),
    ),
)
