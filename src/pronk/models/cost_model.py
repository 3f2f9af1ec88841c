"""Measured costs of forward passes: a roofline, fitted to the passes that decoding makes anyway.

A forward pass over ``rows`` rows of ``requests`` requests with ``context`` cached tokens together
takes ::

    seconds = speed · (max(bytes, b + c · rows) + d · context + states · (requests - 1))

The unit of the terms in parentheses is the duration of a forward pass of one row without context.
With few rows, the pass is limited by memory bandwidth, and with more rows by arithmetic (Williams
et al. 2009). ``d · context`` is the time in which attention reads the cached keys and values.
``states`` is the time in which recurrent layers read and write the state of a further request,
whatever its number of rows; it is not measured, but the share of a state in the bytes of a pass of
one row.

``bytes`` are the weights that the pass reads, relative to a pass of one row. They are 1 in dense
models. With mixtures of experts, a pass reads each expert that any of its rows chooses ::

    bytes = 1 + experts · (experts_read - 1)
    experts_read = 1 + (1 - overlap) + (1 - overlap)² + …, one term per row

``experts`` is the share of experts in the bytes that one row reads, and ``experts_read`` the number
of experts read, relative to one row. A pass counts ``experts_read``; before the pass it is
predicted from ``overlap``, the probability that two rows choose the same expert.

Several measured durations are summarized by their lower third, because disturbances only prolong a
measurement. Several measured ratios are summarized by their median, because a disturbance of the
denominator lowers a ratio.

- ``speed`` (seconds) is measured by the last 8 passes: each duration is divided by the terms in
  parentheses, and ``speed`` is the lower third of the quotients. It follows a change of the
  machine's load after 6 passes.
- ``b`` and ``c`` are a line through the *levels*. The level of a number of rows is the median of
  its last 8 passes, each divided by the speed of recent passes with fewer rows. Passes that all
  have the same number of rows say nothing about the line.
- ``d`` is the slope of a regression of seconds on the context, over hundreds of passes.
- ``overlap`` is the median of the last 8 passes with several rows. Before any such pass, it is the
  overlap of rows that choose their experts independently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from pronk.sampling.tree_size import MAX_TREE

_WINDOW = 8  # number of recent passes by which the speed and each level are measured
_ROW = 0.15  # value of c before a pass with several rows is measured, in units of a pass of one row
# In the line and in the regression, the factor by which the weight of each earlier pass falls with
# every new pass: to one half after 140 passes.
_KEEP = 0.995
# d, the time per cached token, is the slope of a regression over passes with different context
# lengths. If their standard deviation is this number of tokens, d is half the measured slope; if
# they differ less, d is closer to 0, because the measured slope is then mostly noise.
_SPREAD = 256.0
# number of passes since the last one without draft tokens, after which such a pass is due again
_LASTS = 256


class CostCurve(NamedTuple):
    """Seconds of a forward pass as a function of its number of rows, for a given cached context.

    The formula is in the docstring of :mod:`pronk.models.cost_model`.
    """

    speed: float  # seconds of a pass of one row without context
    # b of the formula: time that does not depend on the number of rows, in units of a pass of one
    # row
    start: float = 1.0 - _ROW
    slope: float = _ROW  # c of the formula: time per row, in units of a pass of one row
    # time for cached tokens and for states of further requests, in units of a pass of one row
    context: float = 0.0
    experts: float = 0.0  # share of experts in the bytes of weights that a pass of one row reads
    overlap: float = 1.0  # probability that two rows choose the same expert

    def at(self, rows: int, experts_read: float | None = None) -> float:
        """Return the seconds of a forward pass over ``rows`` rows.

        ``experts_read`` is the number of experts that it reads, relative to a pass of one row; by
        default the expected one.
        """
        read = self.read_bytes(rows, experts_read) if self.experts else 1.0
        return self.speed * (max(read, self.start + self.slope * rows) + self.context)

    def table(self, numbers: Iterable[int]) -> list[float]:
        """Return :meth:`at` for several numbers of rows; one call, as each takes time in a step."""
        if self.experts:
            return [self.at(rows) for rows in numbers]
        speed, start, slope, context, *_ = self
        return [speed * (max(1.0, start + slope * rows) + context) for rows in numbers]

    def read_bytes(self, rows: int, experts_read: float | None = None) -> float:
        """Return the bytes of weights that a pass reads, relative to a pass of one row.

        ``experts_read`` is the number of experts that the pass reads, relative to a pass of one
        row; by default the expected one.
        """
        if experts_read is None:
            experts_read = _expected_experts_read(rows, self.overlap)
        return 1.0 + self.experts * (experts_read - 1.0)

    @property
    def row_seconds(self) -> float:
        """Seconds that each further row takes once the pass is limited by arithmetic."""
        return self.speed * self.slope

    @property
    def free_rows(self) -> int:
        """Number of rows whose forward pass takes no longer than that of one row."""
        if self.experts:
            return 1
        return max(1, int((1.0 - self.start) / self.slope)) if self.slope > 0.0 else MAX_TREE


@dataclass
class _Regression:
    """Weighted linear regression of y on x, stored as the weighted sums of 1, x, y, x² and x·y."""

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, weight: float = 1.0, *, keep: float = 1.0) -> None:
        """Add a point; multiply the weights of earlier points by ``keep``, so that they fade."""
        self.count = keep * self.count + weight
        self.x = keep * self.x + weight * x
        self.y = keep * self.y + weight * y
        self.xx = keep * self.xx + weight * x * x
        self.xy = keep * self.xy + weight * x * y

    def line(self, spread: float) -> tuple[float, float]:
        """Return the intercept and the slope of the line; the slope is at least 0.

        The slope shrinks towards 0 if the points are close together: ``spread`` is the standard
        deviation of x at which it is half the least-squares slope.
        """
        count = self.count
        x = self.x
        y = self.y
        slope = max(0.0, (self.xy - x * y / count) / (self.xx - x * x / count + count * spread**2))
        return (y - slope * x) / count, slope

    def slope_through(self, x: float, y: float) -> float:
        """Return the slope, at least 0, of the regression line that passes through ``(x, y)``."""
        products = self.xy - x * self.y - y * self.x + x * y * self.count
        return max(0.0, products / (self.xx - 2.0 * x * self.x + x * x * self.count))


@dataclass
class _Level:
    """Costs of recent passes that had the same number of rows.

    A cost is the duration in units of a pass of one row, divided by the bytes of weights read,
    which are in the same unit.
    """

    costs: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    middle: float = 0.0  # median of ``costs``, the level of this number of rows
    latest: int = 0  # number of the latest of these passes, counted over all passes of the model


class CostModel:
    """Learns the costs of one model's forward passes.

    Args:
        experts: share of experts in the bytes that a forward pass of one row reads.
        overlap: probability that two rows choose the same expert, until passes are measured.
        states: share of a request's state, read and written, in the bytes of a pass of one row.
    """

    def __init__(self, experts: float = 0.0, overlap: float = 1.0, states: float = 0.0) -> None:
        self._experts = experts
        self._overlap = overlap
        self._states = states
        self._overlaps: deque[float] = deque(maxlen=_WINDOW)
        # b, c and d of the module's formula
        self._start = 1.0 - _ROW
        self._slope = _ROW
        self._per_token = 0.0
        # for each of the last passes, its number of rows, and the speed that it implies
        self._rows: deque[int] = deque(maxlen=_WINDOW)
        self._speeds: deque[float] = deque(maxlen=_WINDOW)
        self._speed = 0.0  # seconds of a pass of one row without context, by the last passes
        self._levels: dict[int, _Level] = {}
        self._by_context = _Regression()
        # seconds per row of each of the last passes over prompts
        self._prompt_rows: deque[float] = deque(maxlen=_WINDOW)
        self._num_passes = 0
        self._next_plain = 0

    def learn(
        self,
        rows: int,
        context: int,
        seconds: float,
        *,
        requests: int = 1,
        plain: bool | None = None,
        experts_read: float | None = None,
    ) -> None:
        """Record a forward pass that reads no prompt.

        Args:
            rows: number of rows, at least 1.
            context: number of cached tokens, summed over the requests.
            seconds: duration.
            requests: number of requests.
            plain: whether the pass has no draft tokens; by default, whether it has one row.
            experts_read: number of experts that the pass read, relative to a pass of one row; by
                default the expected one.
        """
        if experts_read is not None and rows > 1 and self._experts:
            self._overlaps.append(_overlap(rows, experts_read))
            self._overlap = median_low(self._overlaps)
        shape = self._curve(1.0, context, requests)
        units = shape.at(rows, experts_read)
        slower = list[float]()
        if rows > 1:
            pairs = zip(self._rows, self._speeds, strict=True)
            slower = [speed for other, speed in pairs if other < rows]
        self._rows.append(rows)
        self._speeds.append(max(seconds, 1e-9) / units)
        self._speed = usual(self._speeds)
        self._num_passes += 1
        if plain or (plain is None and rows == 1):
            self._next_plain = self._num_passes + _LASTS
        if slower:
            cost = seconds / usual(slower) - shape.context
            if self._experts:
                cost /= shape.read_bytes(rows, experts_read)
            self._learn_level(rows, cost)
        expected = self._speed * units
        one_row_units = max(1.0, self._start + self._slope) + self._per_token * context
        one_row = min(seconds, 2.0 * expected) - expected + self._speed * one_row_units
        self._by_context.add(context, one_row, keep=_KEEP)
        at_zero, slope = self._by_context.line(_SPREAD)
        self._per_token = slope / at_zero if at_zero > 0.0 else 0.0

    def learn_prompt(self, rows: int, seconds: float) -> None:
        """Record a forward pass that reads prompts.

        These passes are recorded apart, because with many rows the arithmetic has another
        efficiency.
        """
        self._prompt_rows.append(seconds / rows)

    @property
    def prompt_row(self) -> float | None:
        """Seconds to read a token of a prompt; ``None`` before the first prompt."""
        return usual(self._prompt_rows) if self._prompt_rows else None

    def costs(self, context: int, requests: int = 1) -> CostCurve | None:
        """Return the cost curve for ``context`` cached tokens, summed over the requests.

        The result is ``None`` if a forward pass without draft tokens must be measured first,
        because drafting is compared with such passes: before the first one, and 256 passes after
        the last one.
        """
        if self._num_passes >= self._next_plain:
            return None
        return self._curve(self._speed, context, requests)

    def _curve(self, speed: float, context: int, requests: int = 1) -> CostCurve:
        per_context = self._per_token * context + self._states * (requests - 1)
        return CostCurve(speed, self._start, self._slope, per_context, self._experts, self._overlap)

    def _learn_level(self, rows: int, cost: float) -> None:
        level = self._levels.setdefault(rows, _Level())
        level.costs.append(cost)
        before = level.middle
        level.middle = median_low(level.costs)
        level.latest = self._num_passes
        if level.middle == before and not self._experts:
            # Only weights of the points have changed, so the line would move little. With experts,
            # it would also move with the overlap.
            return
        line = _Regression()
        now = self._num_passes
        curve = self._curve(1.0, 0)
        line.add(1.0, 1.0, 0.1)
        line.add(8.0, 1.0 + 7.0 * _ROW, 0.01)
        for number, level in [*self._levels.items()]:
            weight = _KEEP ** (now - level.latest)
            read = curve.read_bytes(number)
            if weight < 0.01:  # 0.01 is the weight of the prior's second point
                del self._levels[number]
                continue
            cost = level.middle * read
            if level.middle > 1.05 or curve.start + curve.slope * number > read:
                line.add(number, cost, weight / (cost * cost))
        self._start, self._slope = line.line(0.0)
        # at one row, the line must not exceed the unit, a pass of one row
        if self._start + self._slope > 1.0:
            self._slope = line.slope_through(1.0, 1.0)
            self._start = 1.0 - self._slope


def _expected_experts_read(rows: int, overlap: float) -> float:
    """Return the expected number of experts that ``rows`` rows choose, relative to one row."""
    return (1.0 - (1.0 - overlap) ** rows) / overlap


def _overlap(rows: int, experts_read: float) -> float:
    """Return the overlap with which ``rows`` rows, at least 2, would read ``experts_read`` experts.

    ``experts_read`` is relative to one row; the result inverts :func:`_expected_experts_read`.
    """
    low = 0.0
    high = 1.0
    for _ in range(20):
        middle = (low + high) / 2.0
        if _expected_experts_read(rows, middle) > experts_read:
            low = middle
        else:
            high = middle
    return high


def usual(values: Collection[float]) -> float:
    """Return a usual value of a few measured durations: the one at a third of the sorted values.

    Lower than the median, because disturbances only prolong a measurement.
    """
    return sorted(values)[(len(values) - 1) // 3]
