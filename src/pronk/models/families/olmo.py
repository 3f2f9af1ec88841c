"""OLMo 2 and 3: attention and MLP have a norm after them and none before them.

Queries have one norm over all heads together, and so do keys. GGUF files of OLMo 3 have the
architecture ``olmo2``.
"""

from __future__ import annotations

from dataclasses import replace

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import RopeConfig
from pronk.models.config_reader import ConfigReader, llama_like
from pronk.models.families.llama import parse_llama
from pronk.models.family import OUTPUT_NORM_NAMES, Family, GgufArchitecture
from pronk.models.gguf_reader import GgufReader


def _parse_olmo2(keys: ConfigReader) -> ModelConfig:
    config = parse_llama(keys)
    return replace(config, norm_places="output", qk_norm=True, whole_qk_norm=True)


def _parse_olmo3(keys: ConfigReader) -> ModelConfig:
    """Parse OLMo 3, whose layers have a sliding window, except for every fourth.

    The scaling of the rotary embedding applies to every fourth layer only.
    """
    windows = keys.periodic_windows(4)
    theta = keys.number("rope_theta", 500000.0)
    return llama_like(
        keys,
        windows=windows,
        norm_places="output",
        qk_norm=True,
        whole_qk_norm=True,
        **keys.ropes(windows, theta, theta),
        **keys.attention_bias(),
    )


def _parse_gguf(keys: GgufReader, config: ModelConfig) -> ModelConfig:
    """Return the config of an OLMo 3 if the file has sliding windows, else that of an OLMo 2."""
    config = replace(config, norm_places="output", qk_norm=True, whole_qk_norm=True)
    windows = keys.windows(config.num_layers, 4)
    if config.rope is None or all(window is None for window in windows):
        return config
    theta = keys.number("rope.freq_base_swa", config.rope.theta, bound=1)
    sliding = RopeConfig(config.head_dim, theta)
    ropes = tuple(config.rope if window is None else sliding for window in windows)
    return replace(config, family="olmo3", windows=windows, layer_ropes=ropes)


FAMILIES = (
    Family(
        "olmo2",
        _parse_olmo2,
        OUTPUT_NORM_NAMES,
        defaults={"rms_norm_eps": 1e-5},
        gguf=(GgufArchitecture("olmo2", _parse_gguf),),
    ),
    Family(
        "olmo3",
        _parse_olmo3,
        OUTPUT_NORM_NAMES,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    ),
)
