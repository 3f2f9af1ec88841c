"""Sampling options that a model recommends: the defaults of conversations and of the server.

The value of an option is the first one that is given in

1. the call,
2. the model's files (:func:`recommended_sampling`),
3. the model's row in the table of short names (:mod:`pronk.checkpoint.hub.recommendations`),
4. the defaults of :class:`~pronk.sampling.params.SamplingParams`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pronk.base.errors import OptionError
from pronk.checkpoint.config import ModelConfig
from pronk.sampling.params import SamplingParams

# Metadata keys of GGUF files that recommend sampling options, each with the option of
# SamplingParams.
GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
# Options of SamplingParams that the files of a model can recommend.
RECOMMENDABLE = (*GGUF_KEYS.values(), "presence_penalty")


def recommended_sampling(values: Mapping[str, Any], file: str) -> dict[str, float]:
    """Return the sampling options that the files of a model recommend.

    ``do_sample: false`` means greedy decoding, and ``do_sample: true`` without a temperature the
    temperature 1. A ``top_k`` below 0 means all tokens. If an option is out of its range, all
    options are ignored with a warning.

    Args:
        values: the content of ``generation_config.json``; or the metadata of a GGUF file, with
            the keys renamed to options by :data:`GGUF_KEYS`.
        file: name of the file with the values, for the warning.
    """
    options = {name: values[name] for name in RECOMMENDABLE if values.get(name) is not None}
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


def recommended_params(config: ModelConfig, **options: Any) -> SamplingParams:
    """Return the sampling parameters that the model with this ``config`` recommends.

    ``options`` are options of :class:`SamplingParams` that override the recommended values.
    """
    return SamplingParams(**{**config.sampling, **options})


def sampling_values(params: SamplingParams) -> dict[str, float]:
    """Return the values of the options in :data:`RECOMMENDABLE`, by the options' names."""
    return {name: getattr(params, name) for name in RECOMMENDABLE}
