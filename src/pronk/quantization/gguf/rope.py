"""Rotary embedding of a GGUF file's model."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

from pronk.architecture.rope import RopeConfig, yarn_scale
from pronk.checks import check_number
from pronk.errors import ConfigError
from pronk.quantization.gguf.keys import MAX_NUMBER, Keys, shortest_decimal

__all__ = ["read_rope"]

# Tensors of divisors, one per RoPE frequency: of Llama 3.1, and of LongRoPE for long and for short contexts.
_DIVISORS, _LONG_DIVISORS, _SHORT_DIVISORS = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)


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
        msg = f"{keys.label('rope.scaling.type')}: expected none, linear or yarn, found {kind!r}"
        raise ConfigError(msg)
    is_scaled = kind != "none" and factor not in (0, 1)
    if _DIVISORS in keys.checkpoint:
        if is_scaled:
            msg = f"{keys.label('rope.scaling.type')}: expected none with {_DIVISORS}, found {kind}"
            raise ConfigError(msg)
        return replace(unscaled, kind="factors", divisors=_read_divisors(keys, _DIVISORS, dim))
    if not is_scaled:
        return unscaled
    factor = check_number(
        keys.label("rope.scaling.factor"), factor, 0, MAX_NUMBER, exclusive_min=True, error=ConfigError
    )
    factor = shortest_decimal(factor)
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
    """Return the number of dimensions of a head that are rotated."""
    dim = keys.integer("rope.dimension_count", head_dim)
    if dim != head_dim and not (partial and dim < head_dim):
        expected = f"at most {head_dim}" if partial else str(head_dim)
        msg = f"{keys.label('rope.dimension_count')}: expected {expected} as attention.key_length, found {dim}"
        raise ConfigError(msg)
    if dim % 2:
        key = "attention.key_length" if dim == head_dim else "rope.dimension_count"
        msg = f"{keys.label(key)}: expected an even size, as RoPE rotates pairs, found {dim}"
        raise ConfigError(msg)
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
        msg = f"{keys.label('rope.scaling.type')}: expected none or longrope with {_LONG_DIVISORS}, found {kind!r}"
        raise ConfigError(msg)
    return replace(
        unscaled,
        kind="longrope",
        original=keys.integer("rope.scaling.original_context_length", context),
        attention_scale=keys.number("rope.scaling.attn_factor", 1.0),
        divisors=long,
        short_divisors=short,
    )


def _read_divisors(keys: Keys, name: str, dim: int) -> tuple[float, ...]:
    """Return the divisors of the ``dim / 2`` frequencies from a tensor."""
    checkpoint = keys.checkpoint
    if name not in checkpoint:
        msg = f"{checkpoint.folder}: tensor {name}: expected {dim // 2} divisors of RoPE frequencies, found no tensor"
        raise ConfigError(msg)
    shape, type_ = checkpoint.shape(name), checkpoint.type(name)
    if shape != (dim // 2,) or type_ != "F32":
        found = f"{list(shape)} in {type_}"
        msg = f"{checkpoint.folder}: tensor {name}: expected [{dim // 2}] in F32, found {found}"
        raise ConfigError(msg)
    values = struct.unpack(f"<{dim // 2}f", bytes(checkpoint.raw_bytes(name).tolist()))
    if not all(0 < value < math.inf for value in values):
        msg = f"{checkpoint.folder}: tensor {name}: expected finite numbers above 0, found others"
        raise ConfigError(msg)
    return values
