"""The noise of :mod:`pronk.sampling.noise` in NumPy, for tests that draw with thousands of seeds.

For a small vocabulary it costs a tenth of the time in torch. ``tests/sampling/test_quick_noise.py`` compares both.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.sampling.noise import noise_key

INCREMENT = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12)


def by_keys(keys: NDArray[np.uint64], tokens: Any) -> Tensor:
    """Return the Gumbel noise of ``tokens`` for keys of :func:`noise_key`; the arrays are broadcast."""
    x = tokens * INCREMENT + keys
    x = (x ^ (x >> SHIFTS[0])) * MULTIPLIERS[0]
    x = (x ^ (x >> SHIFTS[1])) * MULTIPLIERS[1]
    x ^= x >> SHIFTS[2]
    return torch.from_numpy(-np.log(-np.log(((x >> SHIFTS[3]).astype(np.float64) + 0.5) * 2.0**-52)))


def gumbel_noise(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Replace :func:`pronk.sampling.noise.gumbel_noise`."""
    return by_keys(np.array([noise_key(seed, position)], dtype=np.uint64), tokens.numpy().astype(np.uint64))


def noise_over(places: Iterable[tuple[int, int]], vocab: int) -> Tensor:
    """Return the noise of all tokens at each (seed, position): ``[places, vocab]``."""
    keys = np.array([noise_key(seed, position) for seed, position in places], dtype=np.uint64)
    return by_keys(keys[:, None], np.arange(vocab, dtype=np.uint64))
