"""What asking a source for guesses is worth beside others, and what it takes: numbers, and nothing of any text.

A step without the source would give ``1 + e`` tokens in ``t`` seconds, with the best tree of what is offered already.
With it they are ``m`` tokens more, in ``r`` seconds more of the pass and ``a`` seconds for asking, so it pays where ::

    1 + e + m        1 + e
    ---------   >    -----
    t + r + a          t

``m`` and ``r`` are means of what asking has brought so far, of the steps alike: before anybody has guessed those that
end like an earlier place of the text are told from the others, later on it goes by ``e``. They are made of calibrated
gains, not of the few tokens that were accepted in a step, and so they are known after a step or two.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pronk.speculation.cost_model import CostCurve, most_paying, usual

__all__ = ["ALIKE", "BestOffer", "SourceCost", "SourceValue", "alike"]

# Expected guesses of others by which steps are told apart; two kinds more, where nobody has guessed.
_EXPECTED = (0.25, 0.75, 1.5, 3.0)
_REPEATS, _FIRST = 1, 2
ALIKE = _FIRST + len(_EXPECTED) + 1
_OTHERS = tuple(kind for kind in range(ALIKE) if kind != _REPEATS)

# How far a step moves the mean of a request, and of all requests; and how much of theirs a new one begins with.
_OWN, _ALL, _BELIEVED = 0.2, 0.02, 3.0

# What is hoped for before anything is known, for so many steps' worth.
_TOKENS, _HOPED = 0.5, 1.0

_HEARD = 9

# Tokens that come with a step or two: to read them is part of asking.
_STEP = 16

# What asking is believed to take after the first time, of what it took then.
_SINCE = 0.25


def alike(expected: float, *, first: bool, repeats: bool) -> int:
    """The kind of a step, a number below :data:`ALIKE`."""
    return int(repeats) if first else _FIRST + bisect(_EXPECTED, expected)


class BestOffer(NamedTuple):
    """The best of what is offered.

    Attributes:
        tokens: expected of the step, at least 1.
        seconds: of the pass, a request's share.
    """

    tokens: float
    seconds: float

    @classmethod
    def of(cls, gains: Sequence[float], costs: CostCurve, requests: int) -> BestOffer:
        """The part of a tree that is worth most, where ``requests`` do alike; without any, it is a plain step."""
        ranked = sorted(gains, reverse=True)
        count, tokens = most_paying(ranked, 1.0, lambda draft_tokens: costs.at(requests * (1 + draft_tokens)))
        return cls(tokens, costs.at(requests * (1 + count)) / requests)


@dataclass
class SourceValue:
    """What asking has brought, by the kind of step.

    Attributes:
        tokens: more of them.
        rows: plain steps that those take in the pass.
        count: of the steps, with those that it began with.
        step: how far one moves the means, at least.
    """

    tokens: list[float] = field(default_factory=lambda: [0.0] * ALIKE)
    rows: list[float] = field(default_factory=lambda: [0.0] * ALIKE)
    count: list[float] = field(default_factory=lambda: [0.0] * ALIKE)
    step: float = _ALL

    def own(self) -> SourceValue:
        """A request's, that begins with what is known of others."""
        return SourceValue([*self.tokens], [*self.rows], [min(count, _BELIEVED) for count in self.count], _OWN)

    def at(self, kind: int) -> tuple[float, float]:
        """Tokens and rows to be expected in a step, by those of its kind, or of the one next to it.

        Of steps whose text repeats itself, before anybody has guessed, the others say nothing, nor they of the others.
        """
        near, repeated = kind, self.count[_REPEATS]
        if not self.count[kind] and kind != _REPEATS:
            known = [each for each in _OTHERS if self.count[each]]
            near = min(known, key=lambda each: abs(each - kind), default=kind)
        hope = _HOPED / (_HOPED + (repeated if kind == _REPEATS else sum(self.count) - repeated))
        return self.tokens[near] + hope * (_TOKENS - self.tokens[near]), self.rows[near] * (1.0 - hope)

    def learn(self, kind: int, tokens: float, rows: float, *, afresh: bool = False) -> None:
        """It was asked in such a step; ``afresh`` after it was not for long, so that much may have changed."""
        self.count[kind] = 1.0 + (min(self.count[kind], 1.0) if afresh else self.count[kind])
        share = max(self.step, 1.0 / self.count[kind])
        self.tokens[kind] += share * (tokens - self.tokens[kind])
        self.rows[kind] += share * (rows - self.rows[kind])


@dataclass
class SourceCost:
    """What asking a source takes, with what it takes to hear of the step then.

    A proposal has to read the text since the last one, all of it the first time, and the first of all prepares the
    source for all: that one does not count.

    Attributes:
        asking: seconds of a request's share, by the logarithm of how many were asked together.
        hearing: seconds, where it had been asked.
        reading: seconds for each token of a text, beyond what asking takes.
        began: what the first proposal of all took.
    """

    asking: dict[int, deque[float]] = field(default_factory=dict)
    hearing: deque[float] = field(default_factory=lambda: deque(maxlen=_HEARD))
    reading: deque[float] = field(default_factory=lambda: deque(maxlen=_HEARD))
    began: float | None = None

    def learn(self, seconds: float, requests: int, new: Sequence[int]) -> None:
        """Hear of a proposal.

        Args:
            seconds: that it took.
            requests: that were asked for together.
            new: tokens of each one's text since the proposal before.
        """
        first = self.began is None
        if first:
            self.began = seconds / requests
        unread = sum(each for each in new if each > _STEP)
        if not unread:
            known = self.asking.setdefault(requests.bit_length(), deque(maxlen=_HEARD))
            known.append(seconds / requests)
        elif not first:
            self.reading.append(max(0.0, seconds - requests * self._asking(requests)) / unread)

    def hears_within(self, seconds: float) -> bool:
        """Whether it is known to hear of a step in so many seconds."""
        return bool(self.hearing) and usual(self.hearing) <= seconds

    def seconds(self, requests: int) -> float:
        """Of one request's share, if ``requests`` are asked for, where their texts have been read."""
        return self._asking(requests) + (usual(self.hearing) if self.hearing else 0.0)

    def reads(self, tokens: int) -> float:
        """Seconds for a text of which so many tokens are to be read."""
        return tokens * usual(self.reading) if self.reading and tokens > _STEP else 0.0

    def _asking(self, requests: int) -> float:
        kind = requests.bit_length()
        known = self.asking.get(kind)
        if known is None:
            near = min(self.asking, key=lambda each: abs(each - kind), default=None)
            if near is None:
                return _SINCE * (self.began or 0.0)
            known = self.asking[near]
        return usual(known)
