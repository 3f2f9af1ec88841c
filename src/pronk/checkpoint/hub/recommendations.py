"""Sampling options that the table of short names recommends for a model.

The row of a model is found by the name in the model's own files (``ModelConfig.name``), not by
their path: a renamed file, another quantization and the short name have the same row. Of a name,
letters and digits count, but not its case, other characters, or "GGUF" at the end: ``Qwen2.5 Coder
7B Instruct GGUF`` is ``Qwen2.5-Coder-7B-Instruct``. A model whose name is not in the table, such as
a fine-tuned one, has no row.
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
    """Return the config with the options of the model's row, where its files recommend none."""
    known = _sampling_by_name().get(_simplify(config.name), {})
    return replace(config, sampling={**known, **config.sampling})


@cache
def _sampling_by_name() -> Mapping[str, Mapping[str, float]]:
    rows = known_models().values()
    return MappingProxyType({_simplify(name): row.sampling for row in rows for name in row.names})


def _simplify(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(words[:-1] if words[-1:] == ["gguf"] else words)
