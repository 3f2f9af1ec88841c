"""The noise of many seeds and positions at once, for tests that draw thousands of times."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pronk.sampling.noise import noise_key

__all__ = ["noise_over"]

INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def noise_over(places: Iterable[tuple[int, int]], vocab: int) -> NDArray[np.float64]:
    """Return the noise of all tokens at each (seed, position): ``[places, vocab]``."""
    keys = np.array([noise_key(seed, position) for seed, position in places], dtype=np.uint64)
    x = np.arange(vocab, dtype=np.uint64) * INCREMENT + keys[:, None]
    x = (x ^ (x >> 30)) * MULTIPLIERS[0]
    x = (x ^ (x >> 27)) * MULTIPLIERS[1]
    x ^= x >> 31
    return -np.log(-np.log(((x >> 12).astype(np.float64) + 0.5) * 2.0**-52))
