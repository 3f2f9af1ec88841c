"""How much load: so many clients in a closed loop, or so many requests a second in an open one.

In a closed loop every client sends its next request when the last one is done, so that a slow server is asked less
often. In an open loop requests come when they come, as Poisson arrivals do, and a slow server has a queue. Latencies
are counted from the moment at which a request was meant to be sent, whenever it was: otherwise a server, or a client,
that stalls would hide the waiting of all who came meanwhile (Tene calls it coordinated omission).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pronk.checks import check_number
from pronk.errors import OptionError

__all__ = ["Level", "parse_levels", "poisson_arrivals"]

_MOST_CLIENTS = 1024


@dataclass(frozen=True)
class Level:
    """A load.

    Attributes:
        loop: ``"closed"`` or ``"open"``.
        value: clients, or requests a second.
    """

    loop: Literal["closed", "open"]
    value: float

    def __str__(self) -> str:
        if self.loop == "open":
            return f"{self.value:g} requests/s"
        return f"{self.value:g} client{'s' * (self.value != 1)}"


def parse_levels(concurrency: str | None, rate: str | None) -> tuple[Level, ...]:
    """The levels of ``"1,2,4"`` clients and of ``"0.5,1"`` requests a second, each once.

    Raises:
        OptionError: not numbers, or out of their range.
    """
    levels = []
    for value in _numbers("concurrency", concurrency):
        if not value.is_integer() or not 1 <= value <= _MOST_CLIENTS:
            msg = f"concurrency: expected numbers of clients in 1..{_MOST_CLIENTS} such as 1,2,4, found {value:g}"
            raise OptionError(msg)
        levels.append(Level("closed", value))
    levels += [Level("open", check_number("rate", value, 0, 1e4, above=True)) for value in _numbers("rate", rate)]
    return tuple(dict.fromkeys(levels))


def _numbers(name: str, text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        msg = f"{name}: expected numbers with commas between them such as 1,2,4, found {text!r}"
        raise OptionError(msg) from None


def poisson_arrivals(rate: float, count: int, seed: int, turn: int) -> list[float]:
    """Moments of ``count`` arrivals, in seconds from the start: independent exponential gaps with mean ``1 / rate``.

    The same seed and turn give the same gaps at every rate but for their scale, so that levels are compared on one
    pattern.

    Args:
        rate: arrivals per second, above 0.
        count: how many.
        seed: at least 0.
        turn: the round, at least 0; each has a pattern of its own.
    """
    gaps = np.random.default_rng([seed, turn]).standard_exponential(count)
    return (np.cumsum(gaps) / rate).tolist()
