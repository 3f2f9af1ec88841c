"""Rotary position embedding (RoPE, Su et al. 2021) with the scalings of Llama-like checkpoints.

A scaling extends the context: *linear* (position interpolation), *dynamic* (NTK-aware), *yarn* (Peng et al. 2023),
*llama3* (Llama 3.1's frequency-dependent rule), or *factors* (a GGUF file has a divisor for each frequency).

The rotation of a token depends on its position alone, so splitting a prompt into chunks changes no keys. With *dynamic*
scaling the rotation also depends on a text length. All tokens of a prompt of ``P`` tokens then use length ``P``, and a
generated token at position ``p`` uses length ``p + 1``, so that splitting changes no keys either.
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

_MAX_NUMBER = 1e15  # a larger number in config.json means a damaged file; its powers would overflow float32
_INITIAL_POSITIONS = 1024  # number of positions in a new RopeTable; for a longer text it grows to the next power of 2
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_KNOWN_KEYS = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings partial_rotary_factor low_freq_factor "
    "high_freq_factor beta_fast beta_slow mscale mscale_all_dim attention_factor truncate finetuned".split()
)


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding, most of which apply to one kind of scaling only."""

    head_dim: int
    theta: float = 10000.0  # base of the frequencies: frequency ``i`` is ``theta ** (-2 i / head_dim)``
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "factors"] = "default"
    factor: float = 1.0
    original: int = 2048  # context length of pre-training, in tokens; after scaling it is ``factor`` times as long
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scale: float = 1.0  # for *yarn*: factor of all cosines and sines
    divisors: tuple[float, ...] = ()  # for *factors*: divisor of each frequency, ``head_dim / 2`` of them

    def extend(self, context: int) -> int:
        """Return the context length after scaling; ``context`` is ``max_position_embeddings`` of config.json.

        ``context`` is the length before scaling for *linear* and *dynamic*, and the length after scaling for all other
        kinds, except that some *yarn* checkpoints store the length before scaling.
        """
        if self.kind in ("linear", "dynamic"):
            return int(context * self.factor)
        return max(context, int(self.original * self.factor)) if self.kind == "yarn" else context


def parse_rope(raw: Mapping[str, Any], head_dim: int, context: int) -> RopeConfig:
    """Parse ``rope_parameters`` (newer checkpoints) or ``rope_theta`` and ``rope_scaling`` (older ones)."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    _check_supported(scaling, raw, head_dim)
    kind = scaling.get("rope_type", scaling.get("type", "default"))

    def number(key: str, default: Any = None) -> float:
        value = default if scaling.get(key) is None else scaling[key]
        return check_number(
            f"config.json: {key} ({kind} rope)", value, 0, _MAX_NUMBER, exclusive_min=True, error=ConfigError
        )

    theta = number("rope_theta", raw.get("rope_theta") or 10000.0)
    config = RopeConfig(
        head_dim, check_number("config.json: rope_theta", theta, 1, exclusive_min=True, error=ConfigError)
    )
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
    mscale, mscale_all_dim = (number(key) if scaling.get(key) else 0.0 for key in ("mscale", "mscale_all_dim"))
    return replace(
        config,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_scale=number("attention_factor", _yarn_scale(config.factor, mscale, mscale_all_dim)),
    )


def _check_supported(scaling: Any, raw: Mapping[str, Any], head_dim: int) -> None:
    if not isinstance(scaling, Mapping):
        msg = f"config.json: expected an object for the rotary embedding, found {scaling!r}"
        raise ConfigError(msg)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _KINDS:
        msg = f"config.json: rope scaling type {kind!r} is not supported; supported are {', '.join(_KINDS)}"
        raise ConfigError(msg)
    unknown = sorted(set(scaling) - _KNOWN_KEYS)
    if unknown:
        known = ", ".join(sorted(_KNOWN_KEYS))
        msg = f"config.json: rotary embedding: {unknown[0]!r} is not supported; known are {known}"
        raise ConfigError(msg)
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        msg = f"config.json: partial_rotary_factor = {partial!r} is not supported; expected 1.0"
        raise ConfigError(msg)
    if head_dim % 2:
        msg = f"config.json: expected an even head_dim for a rotary embedding, found {head_dim}"
        raise ConfigError(msg)


def _yarn_scale(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Return the default of ``attention_factor``; 0 for ``mscale`` or ``mscale_all_dim`` means not given."""

    def scale_for(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale_for(mscale) / scale_for(mscale_all_dim) if mscale and mscale_all_dim else scale_for(1.0)


class RotaryEmbedding:
    """Computes the cosines and sines that the torch operators need for the rows of a forward pass."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.config = config
        self.frequencies = _frequencies(config).to(device)

    def __call__(self, positions: Tensor, spans: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``(cos, cos)`` and ``(-sin, sin)``, each ``[rows, 1, head_dim]``, for :func:`apply_rope`.

        ``spans`` ``[rows]`` has the text length of each row, which only *dynamic* scaling uses (see the module).
        """
        frequencies = self.frequencies
        if self.config.kind == "dynamic":
            frequencies = self.dynamic_frequencies(spans)
        angles = positions.to(torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * self.config.attention_scale, angles.sin() * self.config.attention_scale
        return torch.cat((cos, cos), dim=-1)[:, None].to(dtype), torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)

    def dynamic_frequencies(self, spans: Tensor) -> Tensor:
        """Return the frequencies ``[rows, head_dim / 2]`` of *dynamic* scaling; ``spans``: text lengths."""
        config = self.config
        lengths = spans.clamp(min=config.original).to(torch.float32)
        growth = config.factor * lengths / config.original - (config.factor - 1)
        bases = config.theta * growth ** (config.head_dim / (config.head_dim - 2))
        exponents = torch.arange(0, config.head_dim, 2, device=spans.device, dtype=torch.float32) / config.head_dim
        return 1.0 / bases[:, None] ** exponents


class RopeTable:
    """Table of cosines and sines for the kernels, float32 ``[entries, 2, head_dim / 2]``.

    Entry ``i`` belongs to position ``i``. Angles are products of position and frequency in float32, as in training.
    Cosines and sines are computed in float64 and rounded, so that an entry has the same bits however many entries are
    computed at once.
    """

    def __init__(self, config: RopeConfig | None) -> None:
        self.config = config
        self._embedding = None if config is None else RotaryEmbedding(config, torch.device("cpu"))
        self._table = torch.empty(0)

    @property
    def dynamic(self) -> bool:
        """Whether a rotation depends on position and text length; each row then needs an entry of its own."""
        return self.config is not None and self.config.kind == "dynamic"

    def up_to(self, stop: int) -> Tensor:
        """Return the table, extended if necessary, so that it has entries for the positions ``0 … stop - 1``."""
        if len(self._table) < stop:
            size = max(_INITIAL_POSITIONS, 1 << (stop - 1).bit_length())
            self._table = self.compute_entries(range(size), ())
        return self._table

    def compute_entries(self, positions: Sequence[int], spans: Sequence[int]) -> Tensor:
        """Return one entry per position; ``spans``: text length of each one, which only *dynamic* uses."""
        assert self._embedding is not None
        assert self.config is not None
        frequencies = self._embedding.frequencies
        if self.dynamic:
            # Make one call per text length: the last bit of torch's pow depends on the number of rows in the call.
            by_span = {span: self._embedding.dynamic_frequencies(torch.tensor([span])) for span in set(spans)}
            frequencies = torch.cat([by_span[span] for span in spans])
        angles = (torch.tensor(positions, dtype=torch.float32)[:, None] * frequencies).double()
        entries = torch.stack((angles.cos(), angles.sin()), dim=1) * self.config.attention_scale
        return entries.to(torch.float32)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of coordinates ``i`` and ``i + head_dim / 2`` of ``x`` ``[rows, heads, head_dim]``."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def _frequencies(config: RopeConfig) -> Tensor:
    """Return the scaled frequencies, float32 ``[head_dim / 2]``; for *dynamic*, those before scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "factors":
        return plain / torch.tensor(config.divisors, dtype=torch.float32)
    if config.kind == "llama3":
        return _llama3_frequencies(config, plain)
    if config.kind == "yarn":
        return _yarn_frequencies(config, plain)
    return plain


def _llama3_frequencies(config: RopeConfig, plain: Tensor) -> Tensor:
    """Keep high frequencies, divide low ones by ``factor``, and blend those in between.

    High: the wavelength is below ``original / high_freq_factor``. Low: it is above ``original / low_freq_factor``.
    """
    wavelength = 2 * math.pi / plain
    low, high = config.low_freq_factor, config.high_freq_factor
    long, short = config.original / low, config.original / high
    smooth = (config.original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / config.factor + smooth * plain
    scaled = torch.where(wavelength > long, plain / config.factor, plain)
    return torch.where((wavelength >= short) & (wavelength <= long), blended, scaled)


def _yarn_frequencies(config: RopeConfig, plain: Tensor) -> Tensor:
    """Keep high frequencies, divide low frequencies by ``factor``, and blend linearly in between.

    In between: frequencies that make ``beta_slow`` to ``beta_fast`` full turns within ``original`` positions.
    """

    def index_with(turns: float) -> float:
        return config.head_dim * math.log(config.original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = index_with(config.beta_fast), index_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp)
