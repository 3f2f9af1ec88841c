"""Llama 2 and 3, and models in their format (CodeLlama, Vicuna, TinyLlama, …)."""

from __future__ import annotations

from dataclasses import replace

from pronk.checkpoint.config import ModelConfig
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.family import PERMUTED_GGUF_NAMES, Family, GgufArchitecture
from pronk.models.gguf_reader import GgufReader


def parse_llama(keys: ConfigReader, windows: tuple[int | None, ...] | None = None) -> ModelConfig:
    """Parse the keys of Llama; without ``windows``, all layers have full attention."""
    windows = keys.windows(None) if windows is None else windows
    return llama_like(
        keys,
        windows=windows,
        mlp_bias=keys.flag("mlp_bias"),
        **keys.attention_bias(),
    )


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a Llama, Mistral or Mixtral.

    In GGUF files these have the same architecture, ``llama``; a Mixtral is recognized by its
    experts.
    """
    return replace(config, mixture=keys.mixture(config.num_layers))


FAMILIES = (
    Family(
        "llama",
        parse_llama,
        gguf=(GgufArchitecture("llama", _parse_gguf, PERMUTED_GGUF_NAMES),),
    ),
)
