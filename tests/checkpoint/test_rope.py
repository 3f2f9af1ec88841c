"""RoPE tables: independent of their size, with the frequencies that models are trained with."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pronk.base.arrays import address_of
from pronk.checkpoint.rope import RopeConfig, RopeTable


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_entries_do_not_depend_on_how_many_are_computed(head_dim: int, theta: float) -> None:
    """Exactness needs it: the table is computed again when a text outgrows it."""
    table = RopeTable(RopeConfig(dim=head_dim, theta=theta))
    whole = table.compute_entries(range(20_000), ())
    assert len({tuple(entry.flatten().tolist()) for entry in whole[::500]}) == 40
    for count in (1, 3, 17, 513, 4096, 5001):
        assert np.array_equal(table.compute_entries(range(count), ()), whole[:count])


def test_the_address_is_that_of_a_table_with_enough_entries() -> None:
    """The kernels read the table at this address, also after another caller has let it grow."""
    table = RopeTable(RopeConfig(8))
    first = table.address_up_to(5)
    entries = table.up_to(5)
    assert first == address_of(entries)
    assert np.array_equal(entries[4], table.compute_entries([4], ())[0])
    longer = table.up_to(len(entries) + 1)
    assert len(longer) > len(entries)
    assert table.address_up_to(5) == address_of(longer) != first
    longest = table.address_up_to(len(longer) + 1)
    assert longest == address_of(table.up_to(1))
    assert len(table.up_to(1)) > len(longer)


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"kind": "linear", "factor": 3.0},
    "dynamic": {"kind": "dynamic", "factor": 2.0, "original": 2048},
    "llama3, factor 8": {"kind": "llama3", "factor": 8.0, "original": 8192},
    "llama3, factor 32": {"kind": "llama3", "factor": 32.0, "original": 8192},
    "yarn": {"kind": "yarn", "factor": 4.0, "original": 32768, "attention_scale": 1.1386},
    "yarn, not truncated": {"kind": "yarn", "factor": 40.0, "original": 4096, "truncate": False},
    "factors": {"kind": "factors"},
}


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_training(scaling: str, theta: float, head_dim: int) -> None:
    """Training computes in float32, where torch's powers may be off by their last bit.

    The frequency, one divided by the power, may then be off by two units in its last place.
    """
    config = RopeConfig(head_dim, theta, **SCALINGS[scaling])
    if config.kind == "factors":
        config = replace(
            config, divisors=tuple(np.random.default_rng(0).uniform(1, 8, head_dim // 2).tolist())
        )
    for span in (1, 2048, 2049, 4096, 100_000) if config.kind == "dynamic" else (1,):
        cos, sin = RopeTable(config).compute_entries([1], [span])[0].astype(np.float64)
        found = np.arctan2(sin, cos)
        want = torch_frequencies(config, span).numpy().astype(np.float64)
        # The angle of position 1 is the frequency. Rounding the sine to float32 adds an error of
        # half a unit.
        assert (np.abs(found - want) <= 2.5 * np.spacing(want.astype(np.float32))).all()
        assert np.hypot(cos, sin) == pytest.approx(config.attention_scale, rel=1e-6)


def torch_frequencies(config: RopeConfig, span: int) -> Tensor:
    """Return the frequencies as transformers computes them, with float32 operations of torch."""
    size = config.dim
    factor = config.factor
    original = config.original
    exponents = torch.arange(0, size, 2).float() / size
    theta = torch.tensor(config.theta)
    if config.kind == "dynamic":
        length = torch.tensor([span]).clamp(min=original).float()
        theta = theta * (factor * length / original - (factor - 1)) ** (size / (size - 2))
    plain = 1.0 / theta**exponents
    if config.kind == "linear":
        return plain / factor
    if config.kind == "factors":
        return plain / torch.tensor(config.divisors)
    if config.kind == "llama3":
        wavelength = 2 * math.pi / plain
        low = config.low_freq_factor
        high = config.high_freq_factor
        smooth = (original / wavelength - low) / (high - low)
        blended = (1 - smooth) * plain / factor + smooth * plain
        scaled = torch.where(wavelength > original / low, plain / factor, plain)
        return torch.where(
            (wavelength >= original / high) & (wavelength <= original / low), blended, scaled
        )
    if config.kind == "yarn":
        turns = (config.beta_fast, config.beta_slow)
        low, high = (
            size * math.log(original / (n * 2 * math.pi)) / (2 * math.log(config.theta))
            for n in turns
        )
        if config.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, size - 1)
        ramp = ((torch.arange(size // 2).float() - low) / (high - low)).clamp(0, 1)
        return plain / factor * ramp + plain * (1 - ramp)
    return plain
