"""Typed access to the metadata of a GGUF file's model."""

from __future__ import annotations

import struct
from typing import Any

from pronk.checks import check_integer, check_number
from pronk.errors import ConfigError
from pronk.quantization.gguf.checkpoint import GgufCheckpoint

__all__ = ["MAX_NUMBER", "Keys", "shortest_decimal"]

MAX_NUMBER = 1e15  # larger RoPE bases, scaling factors and epsilons are refused; no model has them
# Keys that turn on computations, with the values that turn them off. Other values raise an error, unless the function
# of the architecture reads the key.
_UNSUPPORTED_KEYS: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.q_lora_rank": (0,),
    "attention.relative_buckets_count": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1, 3),  # 1: softmax of all scores, 3: of those of the chosen experts
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "full_attention_interval": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (0,),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "shortconv.l_cache": (0,),
    "ssm.conv_kernel": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}


class Keys:
    """Typed access to the metadata keys ``ARCHITECTURE.KEY``; invalid values raise a ConfigError."""

    def __init__(self, checkpoint: GgufCheckpoint, architecture: str) -> None:
        self.checkpoint, self.architecture = checkpoint, architecture
        self.used: set[str] = set()  # keys that were read

    def label(self, key: str) -> str:
        """Return the path of the file and the full key, for error messages."""
        return f"{self.checkpoint.folder}: {self.architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or ``default`` if absent; an array must hold the same value for all layers."""
        self.used.add(key)
        value = self.checkpoint.header.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                msg = f"{self.label(key)}: expected the same value in all layers, found several"
                raise ConfigError(msg)
            value = value[0]
        value = value[:80] if isinstance(value, str) else value
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, maximum: int = 2**31 - 1) -> int:
        """Return an integer from 1 to ``maximum``."""
        return check_integer(self.label(key), self.get(key, default), 1, maximum, error=ConfigError)

    def per_layer(self, key: str, num_layers: int) -> list[int]:
        """Return an integer for each layer, of which all that are not 0 are equal."""
        self.used.add(key)
        value = self.checkpoint.header.get(f"{self.architecture}.{key}")
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers or not all(isinstance(each, int) and each >= 0 for each in values):
            msg = f"{self.label(key)}: expected a number for each of {num_layers} layers, found {values!r:.80}"
            raise ConfigError(msg)
        if len({*values} - {0}) > 1:
            msg = f"{self.label(key)}: expected 0 or the same value in all layers, found {sorted({*values})!r:.80}"
            raise ConfigError(msg)
        return values

    def number(self, key: str, default: float | None = None, bound: float = 0) -> float:
        """Return a number above ``bound``."""
        value = check_number(
            self.label(key), self.get(key, default), bound, MAX_NUMBER, exclusive_min=True, error=ConfigError
        )
        return shortest_decimal(value)

    def optional_number(self, key: str) -> float | None:
        """Return a number above 0, or ``None`` if the key is absent or 0."""
        return self.number(key) if self.get(key) else None

    def windows(self, num_layers: int, period: int, size: int | None = None) -> tuple[int | None, ...]:
        """Return the sliding window of each layer; all ``None`` if the key and ``size`` are absent or 0.

        ``attention.sliding_window_pattern`` says which layers have a window: a boolean for each layer, or the period
        of the layers without one, by default ``period``.
        """
        key = "attention.sliding_window_pattern"
        size = self.integer("attention.sliding_window", size) if self.get("attention.sliding_window", size) else None
        pattern = self.checkpoint.header.get(f"{self.architecture}.{key}")
        if not isinstance(pattern, list):
            period = self.integer(key, period)
            pattern = [(layer + 1) % period > 0 for layer in range(num_layers)]
        if len(pattern) != num_layers:
            msg = f"{self.label(key)}: expected a boolean for each of {num_layers} layers, found {len(pattern)}"
            raise ConfigError(msg)
        return tuple(size if slides else None for slides in pattern)

    def check_unsupported(self) -> None:
        """Raise a ConfigError if a key that was not read turns on a computation."""
        for key, off_values in _UNSUPPORTED_KEYS.items():
            if key in self.used:
                continue
            value = self.checkpoint.header.get(f"{self.architecture}.{key}")
            values = value if isinstance(value, list) else [value]
            if value is not None and any(item not in off_values for item in values):
                msg = f"{self.label(key)} = {value!r:.80} is not supported; expected a plain {self.architecture} model"
                raise ConfigError(msg)
        if "attention.sliding_window" in self.used:
            return
        window = self.get("attention.sliding_window", 0)
        if isinstance(window, int) and 0 < window < self.integer("context_length"):
            msg = f"{self.label('attention.sliding_window')} = {window} is not supported; expected full attention"
            raise ConfigError(msg)


def shortest_decimal(value: float) -> float:
    """Return 7 digits of ``value`` if their float32 is the same: 1e-05 for 9.999999747378752e-06."""
    decimal = float(f"{value:.7g}")
    return decimal if struct.pack("<f", decimal) == struct.pack("<f", value) else value
