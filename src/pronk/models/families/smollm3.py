"""SmolLM3: every fourth layer has no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import refuse_config
from pronk.models.config_reader import ConfigReader
from pronk.models.families.llama import parse_llama
from pronk.models.families.qwen import qwen_windows
from pronk.models.family import PERMUTED_GGUF_NAMES, Family, GgufArchitecture
from pronk.models.gguf_reader import GgufReader


def _parse(keys: ConfigReader) -> ModelConfig:
    """Parse SmolLM3: a layer does not rotate if its element of ``no_rope_layers`` is 0.

    Without that key, every 4th layer does not rotate, or every ``no_rope_layer_interval``-th.
    """
    config = parse_llama(keys, qwen_windows(keys))
    period = keys.integer("no_rope_layer_interval", 4)
    implied = [(layer + 1) % period for layer in range(config.num_layers)]
    rotates = keys.get("no_rope_layers", implied)
    if not isinstance(rotates, list) or len(rotates) != config.num_layers:
        expected = f"expected {config.num_layers} numbers in no_rope_layers"
        refuse_config(f"{expected}, found {rotates!r:.80}")
    return replace(config, layer_ropes=tuple(config.rope if each else None for each in rotates))


def _parse_gguf(_: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of a SmolLM3; as in llama.cpp, every fourth layer does not rotate.

    GGUF files do not say which layers rotate.
    """
    ropes = (config.rope if (layer + 1) % 4 else None for layer in range(config.num_layers))
    return replace(config, layer_ropes=tuple(ropes))


FAMILIES = (
    Family(
        "smollm3",
        _parse,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        gguf=(GgufArchitecture("smollm3", _parse_gguf, PERMUTED_GGUF_NAMES),),
    ),
)
