"""Typed access to the metadata of a GGUF file's model, and its rotary embedding."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any, NoReturn

from pronk.base.checks import check_integer
from pronk.base.errors import ConfigError, refuse
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.rope import RopeConfig, check_positive, yarn_scale

# Keys that turn on computations, with the values that turn them off. Other values raise an error, unless the function
# of the architecture reads the key.
_UNSUPPORTED_KEYS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        "attention.clamp_kqv attention.kv_lora_rank attention.max_alibi_bias attention.q_lora_rank "
        "attention.relative_buckets_count attention.scale attention.shared_kv_layers attention.temperature_scale "
        "attn_logit_softcapping embedding_length_per_layer_input expert_count expert_shared_count "
        "expert_shared_feed_forward_length final_logit_softcapping leading_dense_block_count n_deepstack_layers "
        "nextn_predict_layers rope.dimension_sections rope.scaling.yarn_log_multiplier shortconv.l_cache "
        "ssm.conv_kernel swiglu_clamp_exp swiglu_clamp_shexp swin_norm use_parallel_residual".split(),
        (0,),
    ),
    **dict.fromkeys(
        "attention.output_scale embedding_scale expert_group_count expert_weights_scale full_attention_interval "
        "logit_scale residual_scale rope.scaling.alpha".split(),
        (0, 1),
    ),
    **dict.fromkeys(
        "attention.causal expert_weights_norm rope.scaling.attn_factor rope.scaling.yarn_attn_factor".split(), (1,)
    ),
    "expert_gating_func": (0, 1, 3),  # 1: softmax of all scores, 3: of those of the chosen experts
    "rope.scaling.yarn_ext_factor": (1, -1),
}


class Keys:
    """Typed access to the metadata keys ``ARCHITECTURE.KEY``; invalid values raise a ConfigError."""

    def __init__(self, checkpoint: GgufCheckpoint, architecture: str) -> None:
        self.checkpoint, self.architecture = checkpoint, architecture
        self.used: set[str] = set()  # keys that were read

    def label(self, key: str) -> str:
        """Return the path of the file and the full key, for error messages."""
        return f"{self.checkpoint.folder}: {self.architecture}.{key}"

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise a ConfigError with the file, the key and a problem."""
        refuse(self.label(key), problem, ConfigError)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or ``default`` if absent; an array must hold the same value for all layers."""
        self.used.add(key)
        value = self.checkpoint.header.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                self.refuse(key, "expected the same value in all layers, found several")
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
            self.refuse(key, f"expected a number for each of {num_layers} layers, found {values!r:.80}")
        if len({*values} - {0}) > 1:
            self.refuse(key, f"expected 0 or the same value in all layers, found {sorted({*values})!r:.80}")
        return values

    def number(self, key: str, default: float | None = None, bound: float = 0) -> float:
        """Return a number above ``bound``."""
        return shortest_decimal(check_positive(self.label(key), self.get(key, default), bound))

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
            self.refuse(key, f"expected a boolean for each of {num_layers} layers, found {len(pattern)}")
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


# Tensors of divisors, one per RoPE frequency: of Llama 3.1, and of LongRoPE for long and for short contexts.
_DIVISORS = "rope_freqs.weight"
_LONG_DIVISORS, _SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"


def read_rope(keys: Keys, head_dim: int, context: int, *, partial: bool) -> RopeConfig:
    """Return the RoPE: unscaled, with linear or YaRN scaling, or with divisors of the frequencies.

    ``partial``: whether the architecture can rotate a part of each head, ``rope.dimension_count`` of its dimensions.
    """
    dim = _num_dimensions(keys, head_dim, partial=partial)
    unscaled = RopeConfig(dim, keys.number("rope.freq_base", 10000.0, bound=1))
    if _LONG_DIVISORS in keys.checkpoint or _SHORT_DIVISORS in keys.checkpoint:
        return _read_longrope(keys, unscaled, context)
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0))
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        keys.refuse("rope.scaling.type", f"expected none, linear or yarn, found {kind!r:.80}")
    is_scaled = kind != "none" and factor not in (0, 1)
    if _DIVISORS in keys.checkpoint:
        if is_scaled:
            keys.refuse("rope.scaling.type", f"expected none with {_DIVISORS}, found {kind}")
        return replace(unscaled, kind="factors", divisors=_read_divisors(keys, _DIVISORS, dim))
    if not is_scaled:
        return unscaled
    factor = shortest_decimal(check_positive(keys.label("rope.scaling.factor"), factor))
    if kind == "linear":
        return replace(unscaled, kind="linear", factor=factor, original=context)
    return replace(
        unscaled,
        kind="yarn",
        factor=factor,
        original=keys.integer("rope.scaling.original_context_length", context),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_scale=_yarn_attention_scale(keys, factor),
    )


def _num_dimensions(keys: Keys, head_dim: int, *, partial: bool) -> int:
    dim = keys.integer("rope.dimension_count", head_dim)
    if dim != head_dim and not (partial and dim < head_dim):
        expected = f"at most {head_dim}" if partial else str(head_dim)
        keys.refuse("rope.dimension_count", f"expected {expected} as attention.key_length, found {dim}")
    if dim % 2:
        key = "attention.key_length" if dim == head_dim else "rope.dimension_count"
        keys.refuse(key, f"expected an even size, as RoPE rotates pairs, found {dim}")
    return dim


def _yarn_attention_scale(keys: Keys, factor: float) -> float:
    """Return YaRN's factor of cosines and sines; ``yarn_attn_factor`` may state the same number."""
    key, scale = "rope.scaling.yarn_attn_factor", yarn_scale(factor)
    stated = keys.number(key, 1.0)
    if stated != 1.0 and not math.isclose(stated, scale, rel_tol=1e-5):
        msg = f"{keys.label(key)} = {stated} is not supported; expected 1 or {scale:.6g}, which YaRN computes itself"
        raise ConfigError(msg)
    return scale


def _read_longrope(keys: Keys, unscaled: RopeConfig, context: int) -> RopeConfig:
    long, short = (_read_divisors(keys, name, unscaled.dim) for name in (_LONG_DIVISORS, _SHORT_DIVISORS))
    kind = keys.get("rope.scaling.type", "longrope")
    if kind not in ("none", "longrope"):
        keys.refuse("rope.scaling.type", f"expected none or longrope with {_LONG_DIVISORS}, found {kind!r:.80}")
    return replace(
        unscaled,
        kind="longrope",
        original=keys.integer("rope.scaling.original_context_length", context),
        attention_scale=keys.number("rope.scaling.attn_factor", 1.0),
        divisors=long,
        short_divisors=short,
    )


def _read_divisors(keys: Keys, name: str, dim: int) -> tuple[float, ...]:
    checkpoint = keys.checkpoint
    where = f"{checkpoint.folder}: tensor {name}"
    if name not in checkpoint:
        refuse(where, f"expected {dim // 2} divisors of RoPE frequencies, found no tensor", ConfigError)
    shape, type_ = checkpoint.shape(name), checkpoint.type(name)
    if shape != (dim // 2,) or type_ != "F32":
        refuse(where, f"expected [{dim // 2}] in F32, found {list(shape)} in {type_}", ConfigError)
    values = struct.unpack(f"<{dim // 2}f", bytes(checkpoint.raw_bytes(name).tolist()))
    if not all(0 < value < math.inf for value in values):
        refuse(where, "expected finite numbers above 0, found others", ConfigError)
    return values
