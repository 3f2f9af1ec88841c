"""What a pass costs by its rows: learned from the passes that are made anyway, which is what guessing has to pay for.

A pass of ``n`` rows takes ``speed · level(n)`` seconds. The *speed* is of the moment: other processes, threads, the
processor's frequency. It is a quantile of what the last 10 passes took over what their levels let expect, so that a
disturbed pass does not count, and a change is believed after 7. The *levels* are the machine's and the model's, and
change slowly: each is a quantile, too, of the last 7 passes of its number of rows. It learns from a pass 5 passes
later, when it is known what the speed was then, or else a jump of the speed would be taken for one of the level. The
mean of the levels seen of late stays where it is, or else they and the speed would drift apart, and away from the
others. Numbers of rows that are seen all the time need neither: their last passes are taken as they are.

Between the numbers of rows that have been seen it is interpolated, and beyond the largest, up to twice as many, a row
costs what it did on the way there; what is further out has no price yet. A level that was not seen for 256 passes is
forgotten, and sooner if it is of few. If it was that of passes without guesses, the next one is plain: guessing has to
know what it is compared with, and one pass alone may have been disturbed. So it is where passes over more rows have
come to take less than those that were not seen of late: or else rows would seem free, and nobody would look again.

Longer texts have levels of their own (:data:`_CONTEXT`), which begin with those of texts half as long.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

__all__ = ["CostCurve", "CostModel", "most_paying", "usual"]

# Passes that the speed is of, and how many of them come after the one that a level learns from. The window is even: of
# an odd one that is seen by turns from passes of two kinds, each kind would have the majority when its own is learned.
_WINDOW, _LATER = 10, 5

# Passes that a level is of.
_HEARD = 7

# So many passes of one number of rows among the last ones need no level, unless the speed has jumped since.
_FEW, _JUST_NOW, _JUMP = 3, 20, 0.1

_FORGET, _LASTS, _LOOK = 256, 16, 32

# Passes over more rows have to take so much less than what is known of fewer for that to be doubted.
_DOUBT = 0.05

# Changes of the logarithms that add up to less are left for later: to put the costs together takes 10 µs.
_MATTERS = 0.02

# Positions of all texts of a pass together; every doubling has levels of its own.
_CONTEXT = 1024

# What a row more costs where nobody has been, in plain passes: if nothing is known, at least, and at most. A model's
# first prompt takes longer than others, and must not make guesses look dearer than they can be.
_FIRST, _LEAST, _MOST = 0.1, 0.05, 0.25

# Of a pass without guesses is known what others of up to so many times the rows, or as many times fewer, have shown.
_ALIKE = 1.25

# So many rows, or twice as many as have been seen, have a price.
_REACH = 8


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a pass by its number of rows.

    Attributes:
        rows: numbers of rows, rising.
        seconds: of a pass over them, never falling; as many.
        slope: seconds of each row beyond the last; ``None`` goes on as between the last two.
        known: most rows that anything is known of.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    slope: float | None = None
    known: float = math.inf

    def at(self, rows: int) -> float:
        """Seconds of a pass over ``rows``, at least 1; infinite where nothing is known."""
        found = self._found.get(rows)
        if found is None:
            found = self._found[rows] = self._interpolate(rows) if rows <= self.known else math.inf
        return found

    def least_gain(self, requests: int = 1) -> float:
        """How likely a guess has to be at least to pay, 0..1: a few rows' mean price; 0 where they have none yet."""
        plain, more = self.at(requests), self.at(requests * _REACH)
        return min(1.0, (more - plain) / ((_REACH - 1) * plain)) if math.isfinite(more) else 0.0

    @cached_property
    def _found(self) -> dict[int, float]:
        return {}

    def _interpolate(self, rows: int) -> float:
        """Between two points, or on beyond the last."""
        if rows <= self.rows[0]:
            return self.seconds[0]
        if self.slope is not None and rows >= self.rows[-1]:
            return self.seconds[-1] + self.slope * (rows - self.rows[-1])
        upper = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        low, high = self.rows[upper - 1], self.rows[upper]
        before, after = self.seconds[upper - 1], self.seconds[upper]
        return before + (after - before) * (rows - low) / (high - low)


@dataclass
class _Level:
    """What passes of one number of rows take: logarithms of seconds.

    Attributes:
        log: the estimate where the speed is 1, of ``heard`` but for the first passes.
        count: passes so far.
        heard: what the last ones say.
        latest: number and time of the last ones.
    """

    log: float
    count: int = 0
    heard: deque[float] = field(default_factory=lambda: deque(maxlen=_HEARD))
    latest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_HEARD))

    @property
    def seen(self) -> int:
        """Number of the last pass."""
        return self.latest[-1][0]

    @property
    def lasts(self) -> int:
        """Number of the pass with which it is forgotten: the fewer passes it is of, the sooner."""
        return self.seen + min(_FORGET, _LASTS * self.count)

    def shift(self, step: float) -> None:
        """Say the same of another speed."""
        self.log += step
        for place, each in enumerate(self.heard):
            self.heard[place] = each + step

    def now(self, speed: float, since: int) -> float:
        """What a pass takes; where there were some since pass number ``since``, they say it themselves."""
        own = [log for number, log in self.latest if number >= since]
        return usual(own) if len(own) >= _FEW else speed + self.log


class _Pass(NamedTuple):
    rows: int
    log: float


@dataclass
class _Levels:
    """Passes over texts of about one length.

    Attributes:
        levels: by the number of rows.
        recent: the last passes.
        speed: the logarithm of the speed.
        changed: number of the pass with which it last changed by much.
        passes: so far.
        made: what they amount to, until that has changed by as much as matters.
    """

    levels: dict[int, _Level] = field(default_factory=dict)
    recent: deque[_Pass] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    speed: float = 0.0
    changed: int = 0
    passes: int = 0
    made: CostCurve | None = None
    _moved: float = 0.0
    _steady: float = 0.0

    @property
    def since(self) -> int:
        """Number of the first of the last passes that were made as they would be now."""
        return max(self.changed, self.passes - _JUST_NOW)

    def learn(self, rows: int, log: float) -> None:
        """Hear of a pass, by the logarithm of its seconds."""
        self.passes += 1
        level = self.levels.get(rows)
        if level is None:
            level = self.levels[rows] = _Level(log - self.speed)
        if not level.latest or level.lasts <= self.passes:
            self.made = None
        level.count += 1
        was = level.now(self.speed, self.since)
        level.latest.append((self.passes, log))
        self._move(level.now(self.speed, self.since) - was)
        self.recent.append(_Pass(rows, log))
        before, self.speed = self.speed, self._speed(self.recent)
        self._move(self.speed - before)
        if abs(self.speed - self._steady) > _JUMP:
            self.changed, self._steady = self.passes - _LATER, self.speed
        if len(self.recent) > _LATER:
            then = self.recent[-1 - _LATER]
            late = self.levels[then.rows]
            late.heard.append(then.log - self.speed)
            before, late.log = late.log, usual(late.heard)
            self._balance(late.log - before, then.rows)

    def _balance(self, step: float, rows: int) -> None:
        """The level of ``rows`` has moved; let the mean level of the last passes stay where it was."""
        counts = Counter(each.rows for each in self.recent)
        back = step * counts[rows] / len(self.recent)
        for each in counts:
            self.levels[each].shift(-back)
            self._move((step if each == rows else 0.0) - back)

    def know(self, rows: int) -> bool:
        """Whether there have been some passes of about so many rows of late, and nothing speaks against them."""
        alike = [level for each, level in self.levels.items() if rows <= _ALIKE * each and each <= _ALIKE * rows]
        near = max((each for each in alike if each.count > 1), key=lambda each: each.lasts, default=None)
        if near is None or near.lasts <= self.passes or near.seen > self.passes - _JUST_NOW:
            return near is not None and near.lasts > self.passes
        more = [level for each, level in self.levels.items() if each > _ALIKE * rows and level.seen > near.seen]
        least = near.now(self.speed, self.since) - _DOUBT
        return all(level.now(self.speed, self.since) >= least for level in more)

    def costs(self) -> CostCurve | None:
        """What passes cost at the present speed; ``None`` if there were none of late."""
        if self.made is None or not self.passes % _LOOK:
            rows = sorted(each for each, level in self.levels.items() if level.lasts > self.passes)
            seconds = [math.exp(self.levels[each].now(self.speed, self.since)) for each in rows]
            for place in reversed(range(len(seconds) - 1)):  # more rows never take less time
                seconds[place] = min(seconds[place], seconds[place + 1])
            self.made, self._moved = _bridged(rows, seconds) if rows else None, 0.0
        return self.made

    def _speed(self, passes: Iterable[_Pass]) -> float:
        """What passes took over what their levels let expect."""
        return usual([each.log - self.levels[each.rows].log for each in passes])

    def _move(self, step: float) -> None:
        self._moved += abs(step)
        if self._moved > _MATTERS:
            self.made = None


class CostModel:
    """Learns what the passes of one model cost."""

    def __init__(self) -> None:
        self._by_context: dict[int, _Levels] = {}
        self._rests: dict[float, deque[float]] = {}

    def learn(self, rows: int, context: int, seconds: float) -> None:
        """Hear of a pass.

        Args:
            rows: that were computed, at least 1.
            context: positions before them, of all texts together.
            seconds: that it took.
        """
        self._at(context).learn(_kind(rows), math.log(max(seconds, 1e-9)))

    def learn_rest(self, share: float, rows: int, context: int, seconds: float) -> None:
        """Hear of a pass whose rows, but for one of each request, had been through the first layers.

        Args:
            share: of the layers, 0..1.
            rows: of the pass, those included.
            context: as in :meth:`learn`.
            seconds: the same.
        """
        whole = self.costs(context, rows)
        if whole is not None:
            ratios = self._rests.setdefault(share, deque(maxlen=_WINDOW))
            ratios.append(seconds / _rest(whole, share).at(rows))

    def rest(self, whole: CostCurve, share: float) -> CostCurve:
        """What passes cost that :meth:`learn_rest` hears of, if whole ones cost ``whole``."""
        rest, ratios = _rest(whole, share), self._rests.get(share)
        factor = usual(ratios) if ratios else 1.0
        seconds = tuple(factor * each for each in rest.seconds)
        return replace(rest, seconds=seconds, slope=None if rest.slope is None else factor * rest.slope)

    def costs(self, context: int, plain: int = 1) -> CostCurve | None:
        """What a pass costs now.

        Args:
            context: positions before its rows, of all texts together.
            plain: rows of a pass without guesses; ``None`` is returned if nothing is known of one.
        """
        levels = self._at(context)
        return levels.costs() if levels.know(_kind(plain)) else None

    def _at(self, context: int) -> _Levels:
        key = (context // _CONTEXT).bit_length()
        found = self._by_context.get(key)
        if found is None:
            near = min(self._by_context, key=lambda other: abs(other - key), default=None)
            found = self._by_context[key] = _Levels() if near is None else deepcopy(self._by_context[near])
        return found


def _rest(whole: CostCurve, share: float) -> CostCurve:
    """Passes of which a share has been computed but for one row."""
    seconds = tuple(each - share * (each - whole.seconds[0]) for each in whole.seconds)
    return replace(whole, seconds=seconds, slope=None if whole.slope is None else (1.0 - share) * whole.slope)


def most_paying(gains: Iterable[float], tokens: float, seconds: Callable[[int], float]) -> tuple[int, float]:
    """How many guesses are worth their rows: those for which expected tokens over time are most.

    Args:
        gains: the probability that each is reached, falling.
        tokens: that come without any guess.
        seconds: that a step takes with so many guesses.

    Returns:
        How many, and the tokens that are to be expected with them.
    """
    best, count, expected = tokens / seconds(0), 0, tokens
    for number, gain in enumerate(gains, 1):
        tokens += gain
        value = tokens / seconds(number)
        if value > best:
            best, count, expected = value, number, tokens
    return count, expected


def usual(values: Sequence[float]) -> float:
    """What something takes, by a few times that it did: their lower third, as what disturbs makes it longer."""
    return sorted(values)[(len(values) - 1) // 3]


def _kind(rows: int) -> int:
    """The number of rows that stands for this one: close ones together, the more the larger they are."""
    step = 1 if rows <= 16 else 4 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // step) * step


def _bridged(rows: list[int], seconds: list[float]) -> CostCurve:
    """Costs between what has been seen of guesses and of prompts, and beyond."""
    first, unit = rows[0], seconds[0]
    least, most = _LEAST * unit / first, min(_MOST, 1.2 / first) * unit
    near = 0
    while near + 1 < len(rows) and rows[near + 1] <= max(_REACH, 2 * rows[near]):
        near += 1
    reach = max(_REACH, 2 * rows[near])
    far = min(near + 1, len(rows) - 1)
    slope = (seconds[far] - unit) / (rows[far] - first) if far else _FIRST * unit / first
    slope = min(max(slope, least), most)
    if far == near:
        return CostCurve(tuple(rows), tuple(seconds), slope, reach)
    before = rows[far] - 1
    bridge = min(seconds[near] + slope * (before - rows[near]), seconds[far])
    return CostCurve((*rows[: near + 1], before, *rows[far:]), (*seconds[: near + 1], bridge, *seconds[far:]), slope)
