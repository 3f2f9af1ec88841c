"""How often guesses were right, by their kind, across the requests of one model: what a new request begins with.

Counts alone, and nothing of any text: of each source, kind of guess, depth in the tree and temperature, how many had a
parent that was accepted, and how many of these were the model's choice, too. A request adds at most :data:`SHARE`
guesses of each source, so that no single one decides what is believed of all, and old counts fade.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["DEEP", "SHARE", "AcceptanceStats", "Key"]

# Guesses of one source for one request that count for all.
SHARE = 256

# Depths from here on are one.
DEEP = 4

# Temperatures up to each of these are alike, and those above.
_HEATS = (0.0, 0.5, 1.0)

# Guesses of one kind after which all counts of it are halved.
_MANY = 4096.0

# Guesses that what is believed without any counts for.
_PRIOR = 16.0

# A source, a kind of its guesses, a depth, and a class of temperatures.
Key = tuple[str, int, int, int]


class AcceptanceStats:
    """Counts of guesses.

    Attributes:
        counts: by source, kind, depth and class of temperatures: guesses, and those that were right.
    """

    def __init__(self) -> None:
        self.counts: dict[Key, list[float]] = {}

    def rate(self, source: str, kind: int, depth: int, temperature: float | None, prior: float) -> float:
        """How often such guesses are right.

        Args:
            source: whose they are.
            kind: a number that means something to that source.
            depth: in the tree, from 1; 0 is any.
            temperature: of the request; ``None`` is any.
            prior: what is believed before there were some, 0..1.
        """
        depths = range(1, DEEP + 1) if not depth else (min(depth, DEEP),)
        heats = range(len(_HEATS) + 1) if temperature is None else (_heat(temperature),)
        offered, taken = _PRIOR, prior * _PRIOR
        for place in depths:
            for heat in heats:
                found = self.counts.get((source, kind, place, heat))
                if found is not None:
                    offered, taken = offered + found[0], taken + found[1]
        return taken / offered

    def learn(self, source: str, kind: int, depth: int, temperature: float, *, right: bool) -> None:
        """A guess whose parent was accepted was right, or not."""
        found = self.counts.setdefault((source, kind, min(depth, DEEP), _heat(temperature)), [0.0, 0.0])
        found[0] += 1.0
        found[1] += right
        if found[0] > _MANY:
            found[:] = [0.5 * each for each in found]


def _heat(temperature: float) -> int:
    return bisect_left(_HEATS, temperature)
