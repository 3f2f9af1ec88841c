"""Parsing of ``config.json``; the readers of families are in :mod:`pronk.architecture.family_readers`.

A key of ``config.json`` that turns on an unsupported computation raises a ConfigError that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pronk.architecture.config import ModelConfig
from pronk.architecture.config_reader import DEFAULTS, MULTIMODAL, REFUSED, UNSUPPORTED_KEYS, ConfigReader
from pronk.architecture.family_readers import FAMILIES
from pronk.architecture.rope import refuse_config
from pronk.errors import ConfigError


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse a ``config.json`` document; raise a ConfigError if it is invalid or not supported.

    The result is for the longest context, see :meth:`ModelConfig.for_context`.
    """
    raw = _text_config(raw)
    family = raw.get("model_type")
    if isinstance(family, str) and family in REFUSED:
        msg = f"config.json has model_type {family!r}: {REFUSED[family]}"
        raise ConfigError(msg)
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *MULTIMODAL]))
        msg = f"unknown architecture: config.json has model_type {family!r}; supported are {known}"
        raise ConfigError(msg)
    # Early versions of compressed-tensors wrote compression_config.
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization and not isinstance(quantization, Mapping):
        refuse_config(f"expected an object as quantization_config, found {quantization!r:.80}")
    keys = ConfigReader({**DEFAULTS.get(family, {}), **raw}, family)
    config = FAMILIES[family](keys)
    unsupported = [key for key in UNSUPPORTED_KEYS if raw.get(key) and key not in keys.used]
    unsupported += ["is_causal"] * (raw.get("is_causal") is False)
    if unsupported:
        refuse_config(f"{unsupported[0]} = {raw[unsupported[0]]!r} is not supported; expected a plain {family} model")
    _check_heads(config)
    return replace(config, quantization=quantization or None)


def _text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a multimodal model's language model, with missing keys of the whole model."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in MULTIMODAL:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        refuse_config(f"expected an object as text_config, found {text!r:.80}")
    shared = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config", "compression_config")
    inherited = {key: raw[key] for key in shared if raw.get(key) is not None}
    tied = {} if raw.get("tie_word_embeddings") is None else {"tie_word_embeddings": raw["tie_word_embeddings"]}
    return {"model_type": MULTIMODAL[family], **inherited, **text, **tied}


def _check_heads(config: ModelConfig) -> None:
    """Raise ConfigError unless num_kv_heads divides num_heads and (GPT-2) num_heads divides hidden_size."""
    if config.num_heads % config.num_kv_heads:
        refuse_config(
            f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key/value heads; expected a divisor"
        )
    if config.norm == "layer" and config.hidden_size % config.num_heads:
        refuse_config(f"{config.num_heads} heads do not divide the hidden size {config.hidden_size}")
