"""Sampling on every instruction set: torch's token, and draft tokens with less precise noise."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pronk.kernels.library import Kernels, candidates
from pronk.sampling.noise import gumbel_noise, noise_key

EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
# Around the 16 lanes of a vector and the 256 tokens of a block.
SIZES = (1, 2, 15, 16, 17, 131, 255, 256, 257, 511, 513, 4096, 5001)


def random_logits(vocab: int, seed: int) -> Tensor:
    return 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def scores(logits: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """Return logits over temperature plus Gumbel noise, in float64; the largest one is the sample."""
    if not temperature:
        return logits.double()
    return (logits / temperature).double() + gumbel_noise(seed, position, torch.arange(len(logits)))


@EVERY
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 0.3, 1.0, 20.0])
@pytest.mark.parametrize("vocab", SIZES)
def test_samples_equal_torchs(vocab: int, temperature: float, kernels: Kernels) -> None:
    chosen = set()
    for seed in range(30):
        logits = random_logits(vocab, seed)
        key = noise_key(seed, 7 * seed)
        want = int(scores(logits, temperature, seed, 7 * seed).argmax())
        before = logits.clone()
        assert kernels.choose(logits, temperature, key) == want
        token, share, made = kernels.draft_token(logits, temperature, key if temperature else None)
        assert token == want
        assert torch.equal(logits, before)
        expected = scores(logits, temperature, seed, 7 * seed)
        assert np.allclose(made, expected.numpy(), rtol=1e-6, atol=1e-5)
        assert share == pytest.approx(float(expected.softmax(0).max()), rel=1e-4)
        chosen.add(want)
    assert len(chosen) > 1 or vocab == 1


@EVERY
def test_ties_go_to_the_first_token(kernels: Kernels) -> None:
    for vocab in SIZES:
        flat = torch.full((vocab,), -2.5)
        assert kernels.choose(flat, 0.0, 0) == 0
        assert kernels.draft_token(flat, 0.0, None)[:2] == (0, pytest.approx(1 / vocab))
        flat[vocab // 2 :] = 4.0
        assert kernels.choose(flat, 0.0, 0) == kernels.draft_token(flat, 0.0, None)[0] == vocab // 2


@EVERY
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("vocab", SIZES)
def test_logits_that_are_not_finite_are_found(vocab: int, number: float, kernels: Kernels) -> None:
    for place in {0, vocab // 2, vocab - 1}:
        logits = random_logits(vocab, place)
        logits[place] = number
        for temperature in (0.0, 0.8):
            assert kernels.choose(logits, temperature, 5) == -1
            token, _, made = kernels.draft_token(logits, temperature, 5)
            if number == -math.inf and vocab > 1:  # a banned draft token
                assert token == int(made.argmax()) != place
            else:
                assert token == -1


@EVERY
def test_samples_follow_the_softmax_of_the_logits(kernels: Kernels) -> None:
    """Four of 700 tokens are likely: the kernels' bounds of the noise must skip none of these in 40,000 samples."""
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = torch.full((700,), -30.0)
    places = torch.tensor([3, 255, 256, 699])
    logits[places] = probs.log()
    counts = dict.fromkeys(places.tolist(), 0)
    draws = 40_000
    for position in range(draws):
        counts[kernels.choose(logits, 1.0, noise_key(1, position))] += 1
    for count, share in zip(counts.values(), probs.tolist(), strict=True):
        assert abs(count - draws * share) < 5 * math.sqrt(draws * share * (1 - share))
