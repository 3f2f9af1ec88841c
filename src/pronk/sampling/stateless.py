"""Sampling that needs only logits, seed and position.

A process that computes logits can thus sample without the state of the request.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from pronk.base.arrays import Array
from pronk.kernels.library import Kernels
from pronk.sampling.noise import noise_key


class StatelessSampler(NamedTuple):
    """Sampler of the coupled rule for requests without logits processors and truncation.

    Attributes:
        temperature: temperature of the request, at least 0; 0 means greedy decoding.
        seed: seed of the request's noise; greedy decoding does not read it.
    """

    temperature: float
    seed: int

    def choose(self, kernels: Kernels, logits: Array, position: int) -> int:
        """Return the token at text index ``position``; -1 if a logit is not finite.

        ``logits`` is ``[vocab]`` float32.
        """
        key = 0 if self.temperature == 0.0 else noise_key(self.seed, position)
        return kernels.choose(np.ascontiguousarray(logits), self.temperature, key)


class Logits(Protocol):
    """Rows of logits ``[rows, vocab]``: an array, or an object that loads rows on access."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, rows: int | slice | list[int], /) -> Array:
        """Return rows by their indices: ``[vocab]`` for an int, else ``[rows, vocab]``."""
