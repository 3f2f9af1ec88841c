"""Sampling on every instruction set: NumPy's token, and draft tokens with less precise noise."""

import math

import numpy as np
import pytest

from pronk.base.arrays import Array
from pronk.kernels.library import Kernels, candidates
from pronk.kernels.structures import CSampling
from pronk.sampling.noise import gumbel_noise, noise_key, seed_key
from softmax import softmax

EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
# Around the 16 lanes of a vector and the 256 tokens of a block.
SIZES = (1, 2, 15, 16, 17, 131, 255, 256, 257, 511, 513, 4096, 5001)


def random_logits(vocab: int, seed: int) -> Array:
    return 3 * np.random.default_rng(seed).standard_normal(vocab, np.float32)


def options(temperature: float, seed: int = 0) -> CSampling:
    return CSampling(
        key=seed_key(seed), temperature=temperature, log_min_p=-math.inf, top_p=1.0, repetition=1.0
    )


def scores(logits: Array, temperature: float, seed: int, position: int) -> Array:
    """Return logits over temperature plus Gumbel noise, in float64; the largest one is the
    sample.
    """
    if not temperature:
        return logits.astype(np.float64)
    return (logits / temperature).astype(np.float64) + gumbel_noise(
        seed, position, np.arange(len(logits))
    )


@pytest.mark.few(60)
@EVERY
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 0.3, 1.0, 20.0])
@pytest.mark.parametrize("vocab", SIZES)
def test_samples_equal_numpys(vocab: int, temperature: float, kernels: Kernels) -> None:
    chosen = set()
    for seed in range(30):
        logits = random_logits(vocab, seed)
        key = noise_key(seed, 7 * seed)
        want = int(scores(logits, temperature, seed, 7 * seed).argmax())
        before = logits.copy()
        assert kernels.choose(logits, temperature, key) == want
        token, share, made = kernels.draft_token(options(temperature, seed), logits, 7 * seed)
        assert token == want
        assert np.array_equal(logits, before)
        expected = scores(logits, temperature, seed, 7 * seed)
        assert np.allclose(made, expected, rtol=1e-6, atol=1e-5)
        assert share == pytest.approx(float(softmax(expected).max()), rel=1e-4)
        chosen.add(want)
    assert len(chosen) > 1 or vocab == 1


@EVERY
def test_ties_go_to_the_first_token(kernels: Kernels) -> None:
    for vocab in SIZES:
        flat = np.full(vocab, -2.5, np.float32)
        assert kernels.choose(flat, 0.0, 0) == 0
        drafted = kernels.draft_token(options(0.0), flat, 3)
        assert drafted[:2] == (0, pytest.approx(1 / vocab))
        flat[vocab // 2 :] = 4.0
        assert kernels.choose(flat, 0.0, 0) == vocab // 2
        assert kernels.draft_token(options(0.0), flat, 3)[0] == vocab // 2


@EVERY
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("vocab", SIZES)
def test_logits_that_are_not_finite_are_found(vocab: int, number: float, kernels: Kernels) -> None:
    for place in {0, vocab // 2, vocab - 1}:
        logits = random_logits(vocab, place)
        logits[place] = number
        for temperature in (0.0, 0.8):
            assert kernels.choose(logits, temperature, 5) == -1
            token, _, made = kernels.draft_token(options(temperature, seed=5), logits, 3)
            if number == -math.inf and vocab > 1:  # a banned draft token
                assert token == int(made.argmax()) != place
            else:
                assert token == -1


@pytest.mark.few(2)
@EVERY
def test_samples_follow_the_softmax_of_the_logits(kernels: Kernels) -> None:
    """Four of 700 tokens are likely: the kernels' bounds of the noise must skip none of these in
    40,000 samples.
    """
    shares = {3: 0.5, 255: 0.25, 256: 0.15, 699: 0.1}
    logits = np.full(700, -30.0, np.float32)
    logits[list(shares)] = np.log(list(shares.values()))
    counts = dict.fromkeys(shares, 0)
    draws = 40_000
    for position in range(draws):
        counts[kernels.choose(logits, 1.0, noise_key(1, position))] += 1
    for token, share in shares.items():
        assert abs(counts[token] - draws * share) < 5 * math.sqrt(draws * share * (1 - share))
