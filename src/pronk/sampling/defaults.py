"""Sampling settings that a model's files recommend, the defaults of conversations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pronk.architecture.config import ModelConfig
from pronk.errors import OptionError
from pronk.sampling.params import SamplingParams

# Options of SamplingParams, by their keys in the metadata of GGUF files.
GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def recommended_sampling(values: Mapping[str, Any], file: str) -> dict[str, float]:
    """Return the sampling options among the values of ``generation_config.json`` or of :data:`GGUF_KEYS`.

    ``do_sample: false`` means greedy decoding, ``true`` without a temperature the temperature 1; ``top_k`` below 0
    means all tokens. If an option is out of its range, all are ignored with a warning, which names ``file``.
    """
    options = {name: values[name] for name in GGUF_KEYS.values() if values.get(name) is not None}
    if values.get("do_sample") is not None:
        options["temperature"] = options.get("temperature", 1.0) if values["do_sample"] else 0.0
    if isinstance(options.get("top_k"), int):
        options["top_k"] = max(0, options["top_k"])
    try:
        replace(SamplingParams(), **options)
    except OptionError as error:
        warnings.warn(f"{file}: its sampling options are ignored: {error}", stacklevel=2)
        return {}
    return options


def recommended_params(config: ModelConfig) -> SamplingParams:
    """Return the default parameters of conversations with a model; greedy if its files recommend nothing."""
    options: dict[str, Any] = dict(config.sampling)
    return SamplingParams(**options)
