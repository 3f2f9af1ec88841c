"""Rotary position embedding (RoPE, Su et al. 2021) with the scalings of Llama-like checkpoints.

A scaling extends the context: *linear* (position interpolation), *dynamic* (NTK-aware), *yarn*
(Peng et al. 2023), *llama3* (Llama 3.1's frequency-dependent rule), *factors* (a divisor for each
frequency), or *longrope* (Ding et al. 2024). *proportional* rotates the pairs of a head with the
highest frequencies only, and is read as *factors*. *longrope* has two lists of divisors, for short
and for long texts, of which :meth:`RopeConfig.for_context` chooses one.

The rotation of a token depends on its position alone, so the keys of a prompt are the same if it is
split into chunks. With *dynamic* scaling the rotation also depends on a text length. All tokens of
a prompt of ``P`` tokens are rotated for the length ``P``, and a generated token at position ``p``
for the length ``p + 1``. Therefore a prompt that is split into chunks has the same keys here, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import numpy as np

from pronk.base.arrays import FLOAT32, Array, address_of
from pronk.base.checks import check_number
from pronk.base.errors import ConfigError, refuse
from pronk.base.exact_math import cos_sin, log, power

_MAX_NUMBER = 1e15  # larger numbers mean a damaged file; their powers would overflow float32
# Number of positions in a new RopeTable. A longer text extends the table to the next power of 2.
_INITIAL_POSITIONS = 1024
# Number of positions whose entries are computed at a time, so that temporary arrays stay in the
# processor's cache.
_SLICE = 256
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
# Divisor of a frequency that makes all angles 0 in float32, as in GGUF files.
_NO_ROTATION = float(np.float32(1e30))
_KNOWN_KEYS = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings partial_rotary_factor "
    "low_freq_factor high_freq_factor beta_fast beta_slow mscale mscale_all_dim attention_factor "
    "truncate finetuned short_factor long_factor".split()
)


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding; most of them apply to one kind of scaling only.

    Attributes:
        dim: number of dimensions of a head that are rotated, from the first one; mostly all.
        theta: base of the frequencies: frequency ``i`` is ``theta ** (-2 i / dim)``.
        kind: kind of scaling; *default* is none.
        factor: ratio of the context length after scaling to the length before scaling.
        original: context length of pre-training, in tokens.
        low_freq_factor: *llama3*: longer wavelengths than ``original / low_freq_factor`` are
            scaled.
        high_freq_factor: *llama3*: shorter wavelengths than ``original / high_freq_factor`` are not
            scaled.
        beta_fast: *yarn*: frequencies with more turns in ``original`` positions are not scaled.
        beta_slow: *yarn*: frequencies with fewer turns in ``original`` positions are scaled.
        truncate: *yarn*: whether the limits between these frequencies are rounded to whole pairs.
        attention_scale: factor of all cosines and sines.
        divisors: *factors* and *longrope*: a divisor for each of the ``dim / 2`` frequencies; of
            *longrope*, those of long texts.
        short_divisors: *longrope*: the divisors of texts of at most ``original`` tokens.
    """

    dim: int
    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "factors", "longrope"] = (
        "default"
    )
    factor: float = 1.0
    original: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scale: float = 1.0
    divisors: tuple[float, ...] = ()
    short_divisors: tuple[float, ...] = ()

    def extend(self, context: int) -> int:
        """Return the context length after scaling, in tokens.

        Args:
            context: ``max_position_embeddings`` of config.json. This is the length before scaling
                for *linear* and *dynamic*, the length after scaling for the other kinds, and in
                *yarn* checkpoints either of them.
        """
        if self.kind in ("linear", "dynamic"):
            return int(context * self.factor)
        if self.kind == "yarn":
            return max(context, int(self.original * self.factor))
        return context

    def over_whole_heads(self, head_dim: int) -> RopeConfig:
        """Return an unscaled rotation of the first ``dim`` values as one of all ``head_dim``.

        The frequencies are the same, and those of the other pairs are 0. The pairs of the result
        are the values i and i + ``head_dim / 2``. If a checkpoint has the values 2i and 2i + 1 as a
        pair, and rows of whole heads are permuted, these are the pairs that the checkpoint rotates.
        """
        theta = float(power(self.theta, head_dim / self.dim))
        return RopeConfig(head_dim, theta).limited_to(self.dim // 2)

    def limited_to(self, pairs: int, divisor: float = 1.0) -> RopeConfig:
        """Return the rotation of the first ``pairs`` pairs; others have the angle 0.

        ``divisor`` divides the frequencies.
        """
        num_others = self.dim // 2 - pairs
        divisors = (divisor,) * pairs + (_NO_ROTATION,) * num_others
        return replace(self, kind="factors", divisors=divisors)

    def for_context(self, context: int) -> RopeConfig:
        """Return the rotary embedding of a model for texts of at most ``context`` tokens.

        *longrope* becomes *factors*: all texts get the divisors of long texts if ``context``
        exceeds ``original``, because keys in the KV cache cannot change while a text grows.
        """
        if self.kind != "longrope":
            return self
        divisors = self.divisors if context > self.original else self.short_divisors
        return replace(self, kind="factors", divisors=divisors, short_divisors=())


def refuse_config(problem: str) -> NoReturn:
    """Raise a ConfigError with the message ``problem`` about an entry of ``config.json``."""
    refuse("config.json", problem, ConfigError)


def check_positive(name: str, value: object, low: float = 0) -> float:
    """Return a number above ``low`` and at most 1e15; raise a ConfigError for any other value."""
    return check_number(name, value, low, _MAX_NUMBER, exclusive_min=True, error=ConfigError)


def parse_rope(
    raw: Mapping[str, Any], head_dim: int, context: int, *, partial: bool = False
) -> RopeConfig:
    """Read the rotary embedding from ``config.json``.

    Newer checkpoints have ``rope_parameters``, older ones ``rope_theta`` and ``rope_scaling``.

    Args:
        raw: the content of ``config.json``.
        head_dim: dimensions of a head.
        context: maximum number of tokens in ``config.json``.
        partial: whether the family may rotate a part of each head's dimensions
            (``partial_rotary_factor``).

    Raises:
        ConfigError: the embedding is unsupported, or a value is wrong.
    """
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    dim = _check_supported(scaling, raw, head_dim, partial=partial)
    kind = scaling.get("rope_type", scaling.get("type", "default"))

    def number(key: str, default: Any = None) -> float:
        value = default if scaling.get(key) is None else scaling[key]
        return check_positive(f"config.json: {key} ({kind} rope)", value)

    theta = number("rope_theta", raw.get("rope_theta") or 10000.0)
    theta = check_number("config.json: rope_theta", theta, 1, exclusive_min=True, error=ConfigError)
    config = RopeConfig(dim, theta)
    if kind == "default":
        return config
    if kind == "proportional":
        return RopeConfig(head_dim, theta).limited_to(dim // 2, number("factor", 1.0))
    factor = number("factor", 1.0 if kind == "longrope" else None)
    config = replace(config, kind=kind, factor=factor, original=context)
    if kind in ("linear", "dynamic"):
        return config
    key = "original_max_position_embeddings"
    original = number(key, raw.get(key) or context)
    config = replace(config, original=max(1, int(original)))
    if kind == "longrope":
        return _parse_longrope(scaling, config, context)
    if kind == "llama3":
        low = number("low_freq_factor")
        high = number("high_freq_factor")
        return replace(config, low_freq_factor=low, high_freq_factor=high)
    mscale = number("mscale") if scaling.get("mscale") else 0.0
    mscale_all_dim = number("mscale_all_dim") if scaling.get("mscale_all_dim") else 0.0
    default_scale = yarn_scale(config.factor, mscale, mscale_all_dim)
    return replace(
        config,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_scale=number("attention_factor", default_scale),
    )


def _check_supported(scaling: Any, raw: Mapping[str, Any], head_dim: int, *, partial: bool) -> int:
    """Check the rotary embedding, and return the number of rotated dimensions of a head.

    Raises:
        ConfigError: the rotary embedding has a property that pronk does not support.
    """
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
    if share not in (None, 1) and not partial and kind != "proportional":
        refuse_config(f"partial_rotary_factor = {share!r} is not supported; expected 1.0")
    if share is None:
        share = 1
    share = check_number("config.json: partial_rotary_factor", share, 0, 1, error=ConfigError)
    dim = int(head_dim * share)
    if dim % 2 or not dim:
        name = "head_dim" if share == 1 else "partial_rotary_factor * head_dim"
        refuse_config(f"expected an even {name} for a rotary embedding, found {dim}")
    return dim


def _parse_longrope(scaling: Mapping[str, Any], config: RopeConfig, context: int) -> RopeConfig:
    """Add the divisors of *longrope* to a configuration: ``long_factor`` and ``short_factor``."""

    def divisors(key: str) -> tuple[float, ...]:
        values = scaling.get(key)
        count = config.dim // 2
        if not isinstance(values, list) or len(values) != count:
            refuse_config(
                f"{key} (longrope): expected a list of {count} numbers, found {values!r:.80}"
            )
        return tuple(check_positive(f"config.json: {key} (longrope)", each) for each in values)

    factor = config.factor if scaling.get("factor") else context / config.original
    default_scale = 1.0
    if factor > 1 and config.original > 1:
        default_scale = math.sqrt(1 + float(log(factor)) / float(log(config.original)))
    scale = scaling.get("attention_factor") or default_scale
    scale = check_number("config.json: attention_factor (longrope)", scale, 0, error=ConfigError)
    long = divisors("long_factor")
    short = divisors("short_factor")
    return replace(config, factor=1.0, attention_scale=scale, divisors=long, short_divisors=short)


def yarn_scale(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """Return YaRN's factor of cosines and sines (Peng et al. 2023).

    ``mscale`` and ``mscale_all_dim`` are values of ``config.json``; 0 if it does not have them.
    """

    def scale_for(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * float(log(factor)) + 1.0

    if mscale and mscale_all_dim:
        return scale_for(mscale) / scale_for(mscale_all_dim)
    return scale_for(1.0)


class RopeTable:
    """Table of cosines and sines, float32 ``[entries, 2, dim / 2]``; entry ``i`` is of position i.

    A rotation turns each pair of coordinates ``i`` and ``i + dim / 2`` of a query or key. Its angle
    is the product of position and frequency in float32, as in training. Cosines and sines are
    computed in float64 and rounded, so that the bits of an entry do not depend on the number of
    entries that are computed at once.
    """

    def __init__(self, config: RopeConfig | None) -> None:
        self.config = config
        self._frequencies = np.empty(0, np.float32) if config is None else _frequencies(config)
        self._table: Array = np.empty((0, 2, 0), np.float32)
        self._address = address_of(self._table)
        # Whether a token's rotation depends on the text length, not on its position alone.
        self.dynamic = config is not None and config.kind == "dynamic"

    def up_to(self, stop: int) -> Array:
        """Return the table with entries for at least the positions ``0 .. stop - 1``."""
        if len(self._table) < stop:
            num_entries = max(_INITIAL_POSITIONS, 1 << (stop - 1).bit_length())
            self._table = self.compute_entries(range(num_entries), ())
            self._address = address_of(self._table)
        return self._table

    def address_up_to(self, stop: int) -> int:
        """Return the address of the table of :meth:`up_to`, valid until the table grows."""
        if len(self._table) < stop:
            self.up_to(stop)
        return self._address

    def compute_entries(self, positions: Sequence[int], spans: Sequence[int]) -> Array:
        """Return entries, float32 ``[positions, 2, dim / 2]``.

        Args:
            positions: positions of the tokens.
            spans: text length of each token, in tokens; only *dynamic* uses it.
        """
        assert self.config is not None
        frequencies = self._frequencies
        if self.dynamic:
            by_span = {span: _dynamic_frequencies(self.config, span) for span in set(spans)}
            frequencies = np.stack([by_span[span] for span in spans])
        angles = (np.asarray(positions, np.float32)[:, None] * frequencies).astype(np.float64)
        entries = np.empty((len(angles), 2, angles.shape[1]), np.float32)
        for start in range(0, len(angles), _SLICE):
            part = slice(start, start + _SLICE)
            for number, values in enumerate(cos_sin(angles[part])):
                entries[part, number] = values * self.config.attention_scale
        return entries


def _inverse_powers(base: float, dim: int) -> Array:
    """Return ``base ** (-2 i / dim)`` for ``i`` in ``0 .. dim / 2 - 1``, float32 ``[dim / 2]``.

    The powers are computed in float64 (:func:`pronk.base.exact_math.power`).
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1.0) / power(base, exponents).astype(FLOAT32)


def _dynamic_frequencies(config: RopeConfig, span: int) -> Array:
    """Return the frequencies of *dynamic* scaling for a text length, float32 ``[dim / 2]``.

    ``span`` is the length in tokens. Every operation on the base of the frequencies is rounded to
    float32, as in training.
    """
    length = np.float32(max(span, config.original))
    growth = length * config.factor / config.original - (config.factor - 1)
    exponent = config.dim / (config.dim - 2)
    base = np.float32(power(float(growth), exponent)) * config.theta
    return _inverse_powers(float(base), config.dim)


def _frequencies(config: RopeConfig) -> Array:
    """Return the frequencies after scaling, float32 ``[dim / 2]``.

    For *dynamic*, they are unscaled, because its scaling depends on the text length.
    """
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

    The wavelength of a high frequency is below ``original / high_freq_factor``, the wavelength of a
    low frequency is above ``original / low_freq_factor``.
    """
    # torch, with which the models were trained, computes number / array as number · (1 / array).
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

    The frequencies in between make ``beta_slow`` to ``beta_fast`` full turns within ``original``
    positions.
    """

    def index_with(turns: float) -> float:
        """Return the index, not rounded, of the frequency that makes ``turns`` full turns.

        The turns are counted within ``original`` positions.
        """
        log_wavelength = float(log(config.original / (turns * 2 * math.pi)))
        return config.dim * log_wavelength / (2 * float(log(config.theta)))

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
