"""Rotary position embedding (RoPE, Su et al. 2021) with the scalings of Llama-like checkpoints.

Scalings are position interpolation (*linear*), NTK-aware (*dynamic*), Peng et al. 2023 (*yarn*), Llama 3.1's
frequency-dependent rule (*llama3*), and divisors of the frequencies from a GGUF file (*factors*).

A rotation depends on the position alone, so a token's key does not depend on how the text is split into forward
passes. The exception is *dynamic* scaling, whose base grows with the length of the text. To make it a function of the
row, a prompt of ``P`` tokens is rotated for length ``P``, and the token at a later position ``p`` for length ``p + 1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pronk.checks import check_number
from pronk.errors import ConfigError

__all__ = ["RopeConfig", "RopeTable", "RotaryEmbedding", "apply_rope", "parse_rope"]

_HUGE = 1e15  # a larger value means a damaged file and would soon overflow float32
_FIRST_LINES = 1024  # positions of the first table; the size doubles as texts grow
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_KEYS = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings partial_rotary_factor low_freq_factor "
    "high_freq_factor beta_fast beta_slow mscale mscale_all_dim attention_factor truncate finetuned".split()
)


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding.

    Attributes:
        original: context length of pre-training, before scaling by ``factor``.
        divisors: divisors of the ``head_dim / 2`` frequencies, for the kind *factors*.
    """

    head_dim: int
    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "factors"] = "default"
    factor: float = 1.0
    original: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scale: float = 1.0
    divisors: tuple[float, ...] = ()

    def extend(self, context: int) -> int:
        """Return the number of supported positions, given ``max_position_embeddings`` = ``context``.

        With *linear* and *dynamic* scaling, checkpoints give the length before scaling; with *yarn* some do.
        """
        if self.kind in ("linear", "dynamic"):
            return int(context * self.factor)
        return max(context, int(self.original * self.factor)) if self.kind == "yarn" else context


def parse_rope(raw: Mapping[str, Any], head_dim: int, context: int) -> RopeConfig:
    """Parse ``rope_parameters`` (newer checkpoints) or ``rope_theta`` and ``rope_scaling`` (older ones)."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    _check_supported(given, raw, head_dim)
    kind = given.get("rope_type", given.get("type", "default"))

    def number(key: str, default: Any = None) -> float:
        value = default if given.get(key) is None else given[key]
        return check_number(f"config.json: {key} ({kind} rope)", value, 0, _HUGE, above=True, error=ConfigError)

    theta = number("rope_theta", raw.get("rope_theta") or 10000.0)
    config = RopeConfig(head_dim, check_number("config.json: rope_theta", theta, 1, above=True, error=ConfigError))
    if kind == "default":
        return config
    config = replace(config, kind=kind, factor=number("factor"), original=context)
    if kind in ("linear", "dynamic"):
        return config
    original = number("original_max_position_embeddings", raw.get("original_max_position_embeddings") or context)
    config = replace(config, original=max(1, int(original)))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return replace(config, low_freq_factor=low, high_freq_factor=high)
    mscale, mscale_all_dim = (number(key) if given.get(key) else 0.0 for key in ("mscale", "mscale_all_dim"))
    return replace(
        config,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_scale=number("attention_factor", _yarn_scale(config.factor, mscale, mscale_all_dim)),
    )


def _check_supported(given: Any, raw: Mapping[str, Any], head_dim: int) -> None:
    if not isinstance(given, Mapping):
        msg = f"config.json: expected an object for the rotary embedding, found {given!r}"
        raise ConfigError(msg)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _KINDS:
        msg = f"config.json: rope scaling type {kind!r} is not supported; supported are {', '.join(_KINDS)}"
        raise ConfigError(msg)
    unknown = sorted(set(given) - _KEYS)
    if unknown:
        msg = f"config.json: rotary embedding: {unknown[0]!r} is not supported; known are {', '.join(sorted(_KEYS))}"
        raise ConfigError(msg)
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        msg = f"config.json: partial_rotary_factor = {partial!r} is not supported; expected 1.0"
        raise ConfigError(msg)
    if head_dim % 2:
        msg = f"config.json: expected an even head_dim for a rotary embedding, found {head_dim}"
        raise ConfigError(msg)


def _yarn_scale(factor: float, mscale: float, mscale_all_dim: float) -> float:
    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)


class RotaryEmbedding:
    """Cosines and sines for rows at given positions, computed once per forward pass."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.config = config
        self.frequencies = _frequencies(config).to(device)

    def __call__(self, positions: Tensor, spans: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and signed sine ``[rows, 1, head_dim]``, the arguments of :func:`apply_rope`.

        ``spans`` ``[rows]`` is the text length that each row is rotated for; only *dynamic* scaling uses it.
        """
        frequencies = self.frequencies
        if self.config.kind == "dynamic":
            frequencies = self._dynamic(spans)
        angles = positions.to(torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * self.config.attention_scale, angles.sin() * self.config.attention_scale
        return torch.cat((cos, cos), dim=-1)[:, None].to(dtype), torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)

    def _dynamic(self, spans: Tensor) -> Tensor:
        """Return frequencies ``[rows, head_dim / 2]``; the base grows beyond the original context."""
        c = self.config
        lengths = spans.clamp(min=c.original).to(torch.float32)
        growth = c.factor * lengths / c.original - (c.factor - 1)
        bases = c.theta * growth ** (c.head_dim / (c.head_dim - 2))
        exponents = torch.arange(0, c.head_dim, 2, device=spans.device, dtype=torch.float32) / c.head_dim
        return 1.0 / bases[:, None] ** exponents


class RopeTable:
    """Rotations for the kernels: float32 ``[lines, 2, head_dim / 2]`` cosines and sines, by position.

    Angles are float32 products, as in training. Cosines and sines are computed in float64, so that an entry does not
    depend on how many are computed together.
    """

    def __init__(self, config: RopeConfig | None) -> None:
        self.config = config
        self._embedding = None if config is None else RotaryEmbedding(config, torch.device("cpu"))
        self._table = torch.empty(0)

    @property
    def dynamic(self) -> bool:
        """Whether a rotation depends on the text length too, so that every row needs its own line."""
        return self.config is not None and self.config.kind == "dynamic"

    def upto(self, stop: int) -> Tensor:
        """Return the table for positions below ``stop``, or more."""
        if len(self._table) < stop:
            size = max(_FIRST_LINES, 1 << (stop - 1).bit_length())
            self._table = self.lines(range(size), ())
        return self._table

    def lines(self, positions: Sequence[int], spans: Sequence[int]) -> Tensor:
        """Compute a line for each position; ``spans`` as in :class:`RotaryEmbedding`."""
        assert self._embedding is not None
        assert self.config is not None
        frequencies = self._embedding.frequencies
        if self.dynamic:
            # One at a time, because torch's powers of one row and of several rows differ in the last bit.
            every = {span: self._embedding._dynamic(torch.tensor([span])) for span in set(spans)}  # noqa: SLF001
            frequencies = torch.cat([every[span] for span in spans])
        angles = (torch.tensor(positions, dtype=torch.float32)[:, None] * frequencies).double()
        lines = torch.stack((angles.cos(), angles.sin()), dim=1) * self.config.attention_scale
        return lines.to(torch.float32)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[rows, heads, head_dim]``; coordinates ``i`` and ``i + head_dim / 2`` form a plane."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def _frequencies(c: RopeConfig) -> Tensor:
    exponents = torch.arange(0, c.head_dim, 2, dtype=torch.int64).to(torch.float32) / c.head_dim
    base = 1.0 / (c.theta**exponents)
    if c.kind == "linear":
        return base / c.factor
    if c.kind == "factors":
        return base / torch.tensor(c.divisors, dtype=torch.float32)
    if c.kind == "llama3":
        return _llama3_frequencies(c, base)
    if c.kind == "yarn":
        return _yarn_frequencies(c, base)
    return base


def _llama3_frequencies(c: RopeConfig, base: Tensor) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, and blend in between."""
    wavelength = 2 * math.pi / base
    long, short = c.original / c.low_freq_factor, c.original / c.high_freq_factor
    smooth = (c.original / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
    blended = (1 - smooth) * base / c.factor + smooth * base
    scaled = torch.where(wavelength > long, base / c.factor, base)
    return torch.where((wavelength >= short) & (wavelength <= long), blended, scaled)


def _yarn_frequencies(c: RopeConfig, base: Tensor) -> Tensor:
    """Blend by a linear ramp between the dimensions of ``beta_fast`` and ``beta_slow`` turns per context."""

    def dimension(turns: float) -> float:
        return c.head_dim * math.log(c.original / (turns * 2 * math.pi)) / (2 * math.log(c.theta))

    low, high = dimension(c.beta_fast), dimension(c.beta_slow)
    if c.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.head_dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(c.head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base / c.factor * ramp + base * (1 - ramp)
