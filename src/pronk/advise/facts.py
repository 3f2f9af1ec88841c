"""What is known when the measuring ends: plain data, of which the advice is made."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

__all__ = ["Facts", "Memory", "Passes", "Raced", "Rounded", "Span", "Trainable", "ratios", "resampled"]

_DRAWS = 500

Item = TypeVar("Item")


@dataclass(frozen=True)
class Span:
    """A number, and where it is with 90 % probability."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def resampled(items: Sequence[Item], figure: Callable[[Sequence[Item]], float]) -> Span:
    """A figure over items, and 90 % of what resampled ones give; at least one item."""
    dice = random.Random(0)  # noqa: S311 - the same figures for the same measurements
    values = sorted(figure(dice.choices(items, k=len(items))) for _ in range(_DRAWS))
    return Span(figure(items), values[_DRAWS // 20], values[-1 - _DRAWS // 20])


@dataclass(frozen=True)
class Raced:
    """A drafter on the user's texts.

    Attributes:
        drafter: by which it is made again.
        times: its speed over plain decoding's, after the first token.
        tokens: of a step, in the mean.
        texts: that it was measured on; those that fall behind are left out of the last ones.
    """

    drafter: str
    times: Span
    tokens: float
    texts: int


@dataclass(frozen=True)
class Trainable:
    """A drafter that could be trained for the model; nothing of it was measured here but what it would cost.

    Attributes:
        kind: word behind ``pronk train``.
        times: its speed over plain decoding's, if its acceptance becomes that of ``pronk-tiny``'s drafter of the kind.
        draft_tokens: of a step, at most as many as pay.
        tokens: to learn from.
        seconds: that learning would take on this machine, and that the target would write for.
        nbytes: of its weights.
        below: drop in acceptance, from that of ``pronk-tiny``'s drafter, at which it stops paying; negative where its
            acceptance has to be higher.
    """

    kind: str
    times: Span
    draft_tokens: int
    tokens: int
    seconds: float
    nbytes: int
    below: float


@dataclass(frozen=True)
class Rounded:
    """The same model with weights of fewer bits.

    Attributes:
        weights: ``int8`` or ``int4``.
        times: speed of its plain steps over those of the model as it is.
        perplexity: of it on the texts, over that of the model as it is.
        nbytes: that a pass reads.
    """

    weights: str
    times: Span
    perplexity: float
    nbytes: int


@dataclass(frozen=True)
class Passes:
    """What passes cost on this machine.

    Attributes:
        seconds: of a pass by its rows, 1 the first.
        floor: seconds that a pass takes to read the weights at least.
        teach, learn: multiplications and additions in a second, of torch in 16 bits: forward, and with gradients.
        threads: seconds of a plain step by the number of threads.
        used: threads of all other figures.
    """

    seconds: dict[int, float]
    floor: float
    teach: float
    learn: float
    threads: dict[int, float]
    used: int

    @property
    def plain(self) -> float:
        """Seconds of a step without guesses."""
        return self.seconds[1]

    @property
    def best_threads(self) -> int:
        """The fewest that are as fast as any, to three hundredths."""
        least = min(self.threads.values())
        return min(count for count, seconds in self.threads.items() if seconds <= 1.03 * least)


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        weights: that a pass reads.
        per_token: of keys and values.
        per_token_int8: the same in 8 bits.
        context: tokens of the longest text.
        free: of the machine, with the model loaded.
    """

    weights: int
    per_token: int
    per_token_int8: int
    context: int
    free: int


@dataclass(frozen=True)
class Facts:
    """All of it.

    Attributes:
        model: as the user named it, or ``None`` for the clone's ``pronk-tiny``.
        parameters: of the model.
        dtype: of its weights, as the passes read them.
        hardware: of this machine, as in a benchmark.
        kernels: that computed.
        temperature: of the texts.
        raced: drafters, fastest first; plain decoding is what they are compared with.
        trainable: that were not raced, the most promising first.
        passes: or ``None`` where there was no time for it.
        rounded: weights of fewer bits.
        unrounded: why there are none of a kind.
        memory: of the model.
        looped: prompts whose texts repeat themselves, of ``texts``.
        texts: prompts that were continued.
        interrupted: whether the user has ended it early.
    """

    model: str | None
    parameters: int
    dtype: str
    hardware: dict[str, object]
    kernels: str
    temperature: float
    raced: tuple[Raced, ...]
    trainable: tuple[Trainable, ...]
    passes: Passes | None
    rounded: tuple[Rounded, ...]
    unrounded: dict[str, str]
    memory: Memory
    looped: int
    texts: int
    interrupted: bool


def ratios(mine: Sequence[float], others: Sequence[float]) -> Span:
    """How many times as long others took, by pairs."""
    return resampled(list(zip(mine, others, strict=True)), lambda pairs: median(b / a for a, b in pairs))
