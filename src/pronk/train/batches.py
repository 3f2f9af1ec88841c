"""Batches of token sequences, addressed by number, so that a run resumes exactly where it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pronk import OptionError
from pronk.train.clock import limit_time
from pronk.train.corpus.encoder import token_dtype


class Batches(Protocol):
    """Endless series of training sequences of ``length`` tokens, each with a number from 0 on."""

    @property
    def length(self) -> int:
        """Number of tokens of a sequence."""

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return input and target tokens of sequences ``start`` to ``start + count - 1``.

        Both are int64 ``[count, length]``; the target of a token is the token after it.
        """


class Sequences:
    """Training sequences of ``length`` tokens from a part of a token file, in random order.

    ``seed`` determines the order, and ``start`` and ``stop`` are the borders of the part as
    fractions of the file. The targets of a sequence are its tokens shifted by one, so the token
    after the sequence is read, too. After the last sequence, the first one follows.
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
        self._tokens: np.ndarray[Any, np.dtype[Any]] = np.empty(0, dtype)
        if file.stat().st_size:  # an empty file cannot be mapped
            self._tokens = np.memmap(file, dtype=dtype, mode="r")
        self.length = length
        first = int(start * (len(self._tokens) - 1))
        last = int(stop * (len(self._tokens) - 1))
        self.num_tokens = max(0, last - first)
        order = np.random.default_rng(seed).permutation(self.num_tokens // length)
        self._starts = first + length * order

    def __len__(self) -> int:
        return len(self._starts)

    def check(self) -> None:
        """Raise OptionError if the part of the token file is shorter than one sequence."""
        if not len(self):
            msg = (
                f"text: expected at least {self.length + 1} tokens for sequences of {self.length}, "
                f"found {self.num_tokens}; give more --steps, a smaller --length and "
                "--final-length, or more text (--on-policy: the target's own)"
            )
            raise OptionError(msg)

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        begins = self._starts[np.arange(start, start + count) % len(self._starts)]
        places = begins[:, None] + np.arange(self.length + 1)
        rows = torch.from_numpy(self._tokens[places].astype(np.int64))
        return rows[:, :-1], rows[:, 1:]

    def batches(self, tokens: int, seconds: float = inf) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all sequences once, in batches of ``tokens`` tokens, until ``seconds`` are over."""
        count = max(1, tokens // self.length)
        for start in limit_time(seconds, range(0, len(self), count)):
            yield self.batch(start, min(count, len(self) - start))


@dataclass(frozen=True)
class Mixture:
    """Training sequences from two series, mixed in a fixed proportion."""

    first: Sequences
    second: Sequences
    share: float  # fraction 0..1 of the sequences that are from ``second``, evenly spread

    @property
    def length(self) -> int:
        return self.first.length

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return sequences ``start .. start + count - 1``, those from ``first`` before the others.

        For every ``n``, ``floor(n * share)`` of the sequences with numbers below ``n`` are from
        ``second``.
        """
        before = int(start * self.share)
        after = int((start + count) * self.share)
        first = self.first.batch(start - before, count - (after - before))
        second = self.second.batch(before, after - before)
        return torch.cat((first[0], second[0])), torch.cat((first[1], second[1]))
