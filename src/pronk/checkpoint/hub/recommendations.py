"""Sampling options that the table of short names recommends for a model.

A model's row of the table is found by the name in the model's own files (``ModelConfig.name``), not
by their path. A renamed file, another quantization and the short name therefore have the same row.
:mod:`pronk.checkpoint.hub.model_identity` compares the names. A model whose name is not in the
table, such as a fine-tuned one, has no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.hub.model_identity import simplify_name
from pronk.checkpoint.hub.names import known_models


def add_known_sampling(config: ModelConfig) -> ModelConfig:
    """Return a config with the sampling options that the table of short names recommends.

    Options that the model's own files recommend stay as they are.
    """
    known = _sampling_by_name().get(simplify_name(config.name), {})
    return replace(config, sampling={**known, **config.sampling})


@cache
def _sampling_by_name() -> Mapping[str, Mapping[str, float]]:
    """Return the recommended options of all models in the table, by their simplified names."""
    options = {}
    for row in known_models().values():
        for name in row.names:
            options[simplify_name(name)] = row.sampling
    return MappingProxyType(options)
