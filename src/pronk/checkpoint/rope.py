"""Rotary position embedding (RoPE, Su et al. 2021) with the scalings of Llama-like checkpoints.

A scaling extends the context: *linear* (position interpolation), *dynamic* (NTK-aware), *yarn*
(Peng et al. 2023), *llama3* (Llama 3.1's frequency-dependent rule), *factors* (a divisor for each
frequency), or *longrope* (Ding et al. 2024: two lists of divisors, for short and for long texts,
between which :meth:`RopeConfig.for_context` chooses).

The rotation of a token depends on its position alone, so splitting a prompt into chunks changes no
keys. With *dynamic* scaling the rotation also depends on a text length. All tokens of a prompt of
``P`` tokens then use length ``P``, and a generated token at position ``p`` uses length ``p + 1``,
so that splitting changes no keys either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import numpy as np

from pronk.base.arrays import FLOAT32, Array
from pronk.base.checks import check_number
from pronk.base.errors import ConfigError, refuse

_MAX_NUMBER = 1e15  # a larger number means a damaged file; its powers would overflow float32
# number of positions in a new RopeTable; for a longer text it grows to the next power of 2
_INITIAL_POSITIONS = 1024
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_KNOWN_KEYS = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings partial_rotary_factor "
    "low_freq_factor "
    "high_freq_factor beta_fast beta_slow mscale mscale_all_dim attention_factor truncate "
    "finetuned short_factor "
    "long_factor".split()
)


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding, most of which apply to one kind of scaling only."""

    dim: int  # number of dimensions of a head that are rotated, the first ones; mostly all of them
    theta: float = 10000.0  # base of the frequencies: frequency ``i`` is ``theta ** (-2 i / dim)``
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "factors", "longrope"] = (
        "default"
    )
    factor: float = 1.0
    # context length of pre-training, in tokens; after scaling it is ``factor`` times as long
    original: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scale: float = 1.0  # factor of all cosines and sines
    # For *factors* and *longrope*: divisor of each frequency, ``dim / 2`` of them; for *longrope*
    # those of long texts.
    divisors: tuple[float, ...] = ()
    # for *longrope*: those of texts of at most ``original`` tokens
    short_divisors: tuple[float, ...] = ()

    def extend(self, context: int) -> int:
        """Return the context length after scaling.

        ``context`` is ``max_position_embeddings`` of config.json.

        ``context`` is the length before scaling for *linear* and *dynamic*, and the length after
        scaling for all other kinds, except that some *yarn* checkpoints store the length before
        scaling.
        """
        if self.kind in ("linear", "dynamic"):
            return int(context * self.factor)
        return max(context, int(self.original * self.factor)) if self.kind == "yarn" else context

    def for_context(self, context: int) -> RopeConfig:
        """Return the RoPE of a model that is opened for texts of at most ``context`` tokens.

        *longrope* takes one list of divisors for all texts, those of long texts if ``context``
          exceeds ``original``:
        keys in the KV cache cannot change when a text grows.
        """
        if self.kind != "longrope":
            return self
        divisors = self.divisors if context > self.original else self.short_divisors
        return replace(self, kind="factors", divisors=divisors, short_divisors=())


def refuse_config(problem: str) -> NoReturn:
    """Raise a ConfigError about an entry of ``config.json``."""
    refuse("config.json", problem, ConfigError)


def check_positive(name: str, value: object, low: float = 0) -> float:
    """Return a number above ``low``.

    Raise a ConfigError for another value, or one that no model has.
    """
    return check_number(name, value, low, _MAX_NUMBER, exclusive_min=True, error=ConfigError)


def parse_rope(
    raw: Mapping[str, Any], head_dim: int, context: int, *, partial: bool = False
) -> RopeConfig:
    """Parse ``rope_parameters`` (newer checkpoints) or ``rope_theta`` and ``rope_scaling`` (older ones).

    ``partial``: whether the family can rotate a part of each head, ``partial_rotary_factor`` of its
    dimensions.
    """
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    dim = _check_supported(scaling, raw, head_dim, partial=partial)
    kind = scaling.get("rope_type", scaling.get("type", "default"))

    def number(key: str, default: Any = None) -> float:
        value = default if scaling.get(key) is None else scaling[key]
        return check_positive(f"config.json: {key} ({kind} rope)", value)

    theta = number("rope_theta", raw.get("rope_theta") or 10000.0)
    config = RopeConfig(
        dim,
        check_number("config.json: rope_theta", theta, 1, exclusive_min=True, error=ConfigError),
    )
    if kind == "default":
        return config
    config = replace(
        config,
        kind=kind,
        factor=number("factor", 1.0 if kind == "longrope" else None),
        original=context,
    )
    if kind in ("linear", "dynamic"):
        return config
    original = number(
        "original_max_position_embeddings", raw.get("original_max_position_embeddings") or context
    )
    config = replace(config, original=max(1, int(original)))
    if kind == "longrope":
        return _parse_longrope(scaling, config, context)
    if kind == "llama3":
        low = number("low_freq_factor")
        high = number("high_freq_factor")
        return replace(config, low_freq_factor=low, high_freq_factor=high)
    mscale, mscale_all_dim = (
        number(key) if scaling.get(key) else 0.0 for key in ("mscale", "mscale_all_dim")
    )
    return replace(
        config,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_scale=number(
            "attention_factor", yarn_scale(config.factor, mscale, mscale_all_dim)
        ),
    )


def _check_supported(scaling: Any, raw: Mapping[str, Any], head_dim: int, *, partial: bool) -> int:
    """Return the number of rotated dimensions; raise a ConfigError for an unsupported embedding."""
    if not isinstance(scaling, Mapping):
        refuse_config(f"expected an object for the rotary embedding, found {scaling!r:.80}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _KINDS:
        refuse_config(
            f"rope scaling type {kind!r} is not supported; supported are {', '.join(_KINDS)}"
        )
    unknown = sorted(set(scaling) - _KNOWN_KEYS)
    if unknown:
        known = ", ".join(sorted(_KNOWN_KEYS))
        refuse_config(f"rotary embedding: {unknown[0]!r} is not supported; known are {known}")
    share = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1) and not partial:
        refuse_config(f"partial_rotary_factor = {share!r} is not supported; expected 1.0")
    share = (
        1
        if share is None
        else check_number("config.json: partial_rotary_factor", share, 0, 1, error=ConfigError)
    )
    dim = int(head_dim * share)
    if dim % 2 or not dim:
        name = "head_dim" if share == 1 else "partial_rotary_factor * head_dim"
        refuse_config(f"expected an even {name} for a rotary embedding, found {dim}")
    return dim


def _parse_longrope(scaling: Mapping[str, Any], config: RopeConfig, context: int) -> RopeConfig:
    """Return *longrope*, whose lists of divisors are ``long_factor`` and ``short_factor``."""

    def divisors(key: str) -> tuple[float, ...]:
        values = scaling.get(key)
        if not isinstance(values, list) or len(values) != config.dim // 2:
            refuse_config(
                f"{key} (longrope): expected a list of {config.dim // 2} numbers, found "
                f"{values!r:.80}"
            )
        return tuple(check_positive(f"config.json: {key} (longrope)", each) for each in values)

    factor = config.factor if scaling.get("factor") else context / config.original
    default = (
        math.sqrt(1 + math.log(factor) / math.log(config.original))
        if factor > 1 < config.original
        else 1.0
    )
    scale = scaling.get("attention_factor") or default
    scale = check_number("config.json: attention_factor (longrope)", scale, 0, error=ConfigError)
    long = divisors("long_factor")
    short = divisors("short_factor")
    return replace(config, factor=1.0, attention_scale=scale, divisors=long, short_divisors=short)


def yarn_scale(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """Return YaRN's factor of cosines and sines; 0 for ``mscale`` or ``mscale_all_dim`` means not given."""

    def scale_for(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return (
        scale_for(mscale) / scale_for(mscale_all_dim)
        if mscale and mscale_all_dim
        else scale_for(1.0)
    )


class RopeTable:
    """Table of cosines and sines, float32 ``[entries, 2, dim / 2]``.

    Entry ``i`` belongs to position ``i``. Angles are products of position and frequency in float32,
    as in training. Cosines and sines are computed in float64 and rounded, so that an entry has the
    same bits however many entries are computed at once. A pair of coordinates ``i`` and ``i + dim /
    2`` of a query or key is rotated.
    """

    def __init__(self, config: RopeConfig | None) -> None:
        self.config = config
        self._frequencies = np.empty(0, np.float32) if config is None else _frequencies(config)
        self._table: Array = np.empty((0, 2, 0), np.float32)

    @property
    def dynamic(self) -> bool:
        """Whether a rotation depends on position and text length.

        Each row then needs an entry of its own.
        """
        return self.config is not None and self.config.kind == "dynamic"

    def up_to(self, stop: int) -> Array:
        """Return the table, extended if necessary, so that it has entries for the positions ``0 … stop - 1``."""
        if len(self._table) < stop:
            self._table = self.compute_entries(
                range(max(_INITIAL_POSITIONS, 1 << (stop - 1).bit_length())), ()
            )
        return self._table

    def compute_entries(self, positions: Sequence[int], spans: Sequence[int]) -> Array:
        """Return one entry per position.

        ``spans``: text length of each one, which only *dynamic* uses.
        """
        assert self.config is not None
        frequencies = self._frequencies
        if self.dynamic:
            by_span = {span: _dynamic_frequencies(self.config, span) for span in set(spans)}
            frequencies = np.stack([by_span[span] for span in spans])
        angles = (np.asarray(positions, np.float32)[:, None] * frequencies).astype(np.float64)
        return (
            np.stack((np.cos(angles), np.sin(angles)), axis=1) * self.config.attention_scale
        ).astype(np.float32)


def _inverse_powers(base: float, dim: int) -> Array:
    """Return ``base ** (-2 i / dim)`` of each pair ``i``, float32 ``[dim / 2]``, rounded from float64."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1.0) / np.power(base, exponents.astype(np.float64)).astype(FLOAT32)


def _dynamic_frequencies(config: RopeConfig, span: int) -> Array:
    """Return the frequencies, float32 ``[dim / 2]``, of *dynamic* scaling for a text length.

    The base is rounded to float32 after each operation, as in training.
    """
    length = np.float32(max(span, config.original))
    growth = length * config.factor / config.original - (config.factor - 1)
    base = np.float32(float(growth) ** (config.dim / (config.dim - 2))) * config.theta
    return _inverse_powers(float(base), config.dim)


def _frequencies(config: RopeConfig) -> Array:
    """Return the scaled frequencies, float32 ``[dim / 2]``; for *dynamic*, those before scaling."""
    assert config.kind != "longrope", "expected one list of divisors, see RopeConfig.for_context"
    plain = _inverse_powers(config.theta, config.dim)
    if config.kind == "linear":
        return plain / np.float32(config.factor)
    if config.kind == "factors":
        return plain / np.asarray(config.divisors, np.float32)
    if config.kind == "llama3":
        return _llama3_frequencies(config, plain)
    if config.kind == "yarn":
        return _yarn_frequencies(config, plain)
    return plain


def _llama3_frequencies(config: RopeConfig, plain: Array) -> Array:
    """Keep high frequencies, divide low ones by ``factor``, and blend those in between.

    High: the wavelength is below ``original / high_freq_factor``. Low: it is above ``original /
    low_freq_factor``.
    """
    # As torch computes them in training: it divides a number by an array as reciprocal times
    # number.
    wavelength = np.float32(1.0) / plain * np.float32(2 * math.pi)
    low = config.low_freq_factor
    high = config.high_freq_factor
    long = config.original / low
    short = config.original / high
    smooth = (np.float32(1.0) / wavelength * config.original - low) / (high - low)
    blended = (1 - smooth) * plain / config.factor + smooth * plain
    scaled = np.where(wavelength > long, plain / config.factor, plain)
    return np.where((wavelength >= short) & (wavelength <= long), blended, scaled)


def _yarn_frequencies(config: RopeConfig, plain: Array) -> Array:
    """Keep high frequencies, divide low frequencies by ``factor``, and blend linearly in between.

    In between: frequencies that make ``beta_slow`` to ``beta_fast`` full turns within ``original``
    positions.
    """

    def index_with(turns: float) -> float:
        return (
            config.dim
            * math.log(config.original / (turns * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low = index_with(config.beta_fast)
    high = index_with(config.beta_slow)
    if config.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, config.dim - 1)
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(config.dim // 2, dtype=np.float32) - low) / width, 0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp)
