"""Sampling options that the table of short names recommends for a model.

A model's row of the table is found by the name in the model's own files (``ModelConfig.name``), not
by their path. A renamed file, another quantization and the short name therefore have the same row.
Names are compared by their letters and digits, without case, other characters, and "GGUF" at the
end: ``Qwen2.5 Coder 7B Instruct GGUF`` is ``Qwen2.5-Coder-7B-Instruct``. A model whose name is not
in the table, such as a fine-tuned one, has no row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.hub.names import known_models


def add_known_sampling(config: ModelConfig) -> ModelConfig:
    """Return a config with the sampling options that the table of short names recommends.

    Options that the model's own files recommend stay as they are.
    """
    known = _sampling_by_name().get(_simplify(config.name), {})
    return replace(config, sampling={**known, **config.sampling})


@cache
def _sampling_by_name() -> Mapping[str, Mapping[str, float]]:
    """Return the recommended options of all models in the table, by their simplified names."""
    options = {}
    for row in known_models().values():
        for name in row.names:
            options[_simplify(name)] = row.sampling
    return MappingProxyType(options)


def _simplify(name: str) -> str:
    """Return the part of a name that is compared, such as ``qwen2-5-coder-7b-instruct``.

    Two names are of the same model if their results are equal.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(words[:-1] if words[-1:] == ["gguf"] else words)
