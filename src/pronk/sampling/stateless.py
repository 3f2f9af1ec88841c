"""Choices that take logits, seed and position alone, so that whoever has the logits can make them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from pronk.kernels.library import Kernels
from pronk.sampling.noise import noise_key

__all__ = ["Logits", "StatelessSampler"]


class StatelessSampler(NamedTuple):
    """How a request's tokens are chosen: by the coupled rule, with nothing between logits and noise.

    Attributes:
        temperature: 0 is greedy.
        seed: of the noise.
    """

    temperature: float
    seed: int

    def choose(self, kernels: Kernels, logits: Tensor, position: int) -> int:
        """The token at a position; -1 if a number is not finite.

        Args:
            kernels: make the choice.
            logits: float32 ``[vocab]``.
            position: of the token in the text, from 0.
        """
        key = 0 if self.temperature == 0.0 else noise_key(self.seed, position)
        return kernels.choose(logits.contiguous(), self.temperature, key)


class Logits(Protocol):
    """Rows of logits, ``[rows, vocab]``: a tensor, or what becomes one where somebody looks."""

    def __len__(self) -> int:
        """Rows."""

    def __getitem__(self, rows: int | slice | list[int], /) -> Tensor:
        """Some of them."""
