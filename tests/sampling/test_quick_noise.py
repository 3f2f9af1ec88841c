"""The NumPy noise of tests equals the noise of requests."""

import random

import pytest
import torch

import quick_noise
from pronk.sampling import noise
from pronk.sampling.noise import draft_noise, gumbel_noise, rejection_noise


def test_gumbel_noise_is_equal() -> None:
    dice = random.Random(0)
    tokens = torch.tensor([*range(200), 150_000, 2**31, -1, -7, -(2**33)])
    for _ in range(200):
        seed, position = dice.randrange(2**63), dice.randrange(5000)
        got, want = quick_noise.gumbel_noise(seed, position, tokens), gumbel_noise(seed, position, tokens)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    places = [(dice.randrange(2**63), dice.randrange(5000)) for _ in range(50)]
    want = torch.stack([gumbel_noise(*place, torch.arange(40)) for place in places])
    torch.testing.assert_close(quick_noise.noise_over(places, 40), want, rtol=1e-12, atol=1e-12)


def test_rejection_and_draft_noise_use_gumbel_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(9)
    want = [rejection_noise(5, 7, ids), draft_noise(5, 6, 7, ids)]
    monkeypatch.setattr(noise, "gumbel_noise", quick_noise.gumbel_noise)
    for got, other in zip((rejection_noise(5, 7, ids), draft_noise(5, 6, 7, ids)), want, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-12, atol=1e-12)
