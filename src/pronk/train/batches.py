"""Batches of token sequences, addressed by number, so that a run resumes exactly where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pronk import OptionError
from pronk.train.clock import limit_time
from pronk.train.corpus.encoder import token_dtype


class Batches(Protocol):
    """Endless series of training sequences of ``length`` tokens, numbered from 0."""

    @property
    def length(self) -> int:
        """Tokens per sequence."""

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` sequences from number ``start`` on: inputs and targets ``[count, length]``, int64."""


class Sequences:
    """Training sequences of ``length`` tokens: a part of a token file, cut up and shuffled by ``seed``.

    ``start`` and ``stop`` are the borders of the part as fractions of the file. The targets of a
    sequence are its tokens shifted by one, so the token after the sequence is read, too. After the
    last sequence, the first one follows.
    """

    def __init__(
        self,
        file: Path,
        vocab_size: int,
        length: int,
        seed: int,
        start: float = 0.0,
        stop: float = 1.0,
    ) -> None:
        dtype = token_dtype(vocab_size)
        # An empty file cannot be mapped.
        self._tokens = (
            np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)
        )
        self.length = length
        first = int(start * (len(self._tokens) - 1))
        last = int(stop * (len(self._tokens) - 1))
        self.num_tokens = max(0, last - first)
        self._starts = first + length * np.random.default_rng(seed).permutation(
            self.num_tokens // length
        )

    def __len__(self) -> int:
        return len(self._starts)

    def check(self) -> None:
        """Raise :class:`~pronk.base.errors.OptionError` if the part is shorter than one sequence."""
        if not len(self):
            msg = (
                f"text: expected at least {self.length + 1} tokens for sequences of {self.length}, "
                "found "
                f"{self.num_tokens}; give more --steps, a smaller --length and --final-length, or "
                "more text "
                "(--on-policy: the target's own)"
            )
            raise OptionError(msg)

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        begins = self._starts[np.arange(start, start + count) % len(self._starts)]
        rows = torch.from_numpy(
            self._tokens[begins[:, None] + np.arange(self.length + 1)].astype(np.int64)
        )
        return rows[:, :-1], rows[:, 1:]

    def batches(self, tokens: int, seconds: float = inf) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each sequence once, in batches of ``tokens`` tokens.

        Begin no further batch after ``seconds``.
        """
        count = max(1, tokens // self.length)
        for start in limit_time(seconds, range(0, len(self), count)):
            yield self.batch(start, min(count, len(self) - start))


@dataclass(frozen=True)
class Mixture:
    """Mixture of two series: the fraction ``share`` of the sequences, evenly spread, is from ``second``."""

    first: Sequences
    second: Sequences
    share: float

    @property
    def length(self) -> int:
        return self.first.length

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return sequences ``start`` to ``start + count - 1`` of the mixture, those from ``first`` first.

        For every ``n``, ``floor(n * share)`` of the sequences with numbers below ``n`` are from
        ``second``.
        """
        before = int(start * self.share)
        after = int((start + count) * self.share)
        first = self.first.batch(start - before, count - (after - before))
        second = self.second.batch(before, after - before)
        return torch.cat((first[0], second[0])), torch.cat((first[1], second[1]))
