"""Batches of token sequences, addressed by number, so that a run resumes exactly where it stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["Sequences"]


class Sequences:
    """The sequences of ``length`` tokens in one part of a token file, in a shuffled order that only the seed decides.

    Each sequence comes with the token after it, so that there is a target for every position. After the last
    sequence the first one follows again.
    """

    def __init__(self, file: Path, length: int, seed: int, start: float = 0.0, stop: float = 1.0) -> None:
        self._tokens = np.memmap(file, dtype=np.uint16, mode="r")
        self.length = length
        first, last = int(start * (len(self._tokens) - 1)), int(stop * (len(self._tokens) - 1))
        count = max(0, (last - first) // length)
        self._starts = first + length * np.random.default_rng(seed).permutation(count)

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each ``[count, length]`` int64, of the sequences ``start .. start + count - 1``."""
        begins = self._starts[np.arange(start, start + count) % len(self._starts)]
        rows = torch.from_numpy(self._tokens[begins[:, None] + np.arange(self.length + 1)].astype(np.int64))
        return rows[:, :-1], rows[:, 1:]
