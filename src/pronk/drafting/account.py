"""Seconds that drafting has cost, saved or could have saved, and measurements of each drafter."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pronk.models.cost_model import usual

_SHARE = 0.01  # part of the elapsed time that may be lost, and that may be spent on learning
_PASSES = 2.0  # forward passes that may be lost in addition
_PRIOR_TOKENS = 2.0  # weight, in tokens, of the prior that a source adds what it is expected to add
# weight of a step relative to the next one in the expected contribution of a source: half after 7
# steps
_KEEP = 0.9


@dataclass(slots=True)
class Mean:
    """Decayed mean of the tokens that a source adds to a step.

    Each step counts by the probability that earlier sources have missed the next token: the room.
    """

    total: float = 0.0
    weight: float = 0.0  # sum of the rooms
    step: int = 0  # number of the step that the weights are for

    def learn(self, added: float, room: float, step: int) -> None:
        """Record the tokens added in step number ``step``."""
        keep = _KEEP ** (step - self.step)
        self.total = keep * self.total + added
        self.weight = keep * self.weight + room
        self.step = step

    def value(self, prior: float, step: int) -> float:
        """Return the mean in step number ``step``; ``prior`` counts like one room."""
        keep = _KEEP ** (step - self.step)
        return (keep * self.total + prior) / (keep * self.weight + 1.0)


@dataclass(slots=True)
class Source:
    """Measurements of a source over all requests."""

    # seconds of the last proposals
    prices: deque[list[float]] = field(default_factory=lambda: deque(maxlen=8))
    # seconds besides reading and draft tokens
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    explored: float = 0.0  # seconds of proposals that were not expected to pay
    contribution: Mean = field(default_factory=Mean)
    calls: int = 0  # number of calls, each for all requests of a step
    asked: int = 0  # number of proposals, one per request
    expected: float = _PRIOR_TOKENS  # tokens that the proposals were expected to add to their steps
    added: float = _PRIOR_TOKENS  # tokens that they have added

    @property
    def price(self) -> float:
        """Expected seconds of a proposal; 0 before the second one."""
        return sorted(self.prices)[len(self.prices) // 2][0] if self.prices else 0.0

    @property
    def start(self) -> float:
        """Expected seconds of a chain's proposal besides reading and draft tokens; 0 before the first."""
        return usual(self.starts) if self.starts else 0.0


@dataclass
class Policy:
    """Seconds that an engine's steps have spent on drafting and saved by it, and its sources."""

    elapsed: float = 0.0  # all steps with a request that has a drafter
    longest: float = 0.0  # longest forward pass that reads no prompt
    spent: float = 0.0  # drafting and draft rows, without the first proposal of each source
    saved: float = 0.0  # plain steps that accepted draft tokens made unnecessary
    # Measurements by name, created on first use.
    sources: defaultdict[str, Source] = field(default_factory=lambda: defaultdict(Source))
    # Values of ``elapsed`` between which nothing is spent on learning; see :meth:`next_loss`.
    saving: tuple[float, float] = (0.0, 0.0)

    @property
    def allowance(self) -> float:
        """Seconds that may still be lost."""
        return _SHARE * self.elapsed + _PASSES * self.longest + self.saved - self.spent

    def next_exploration(self, source: Source, seconds: float) -> float:
        """Return the ``elapsed`` at which a source's time for learning covers ``seconds`` more."""
        return max(self.saving[1], (source.explored + seconds) * max(1, len(self.sources)) / _SHARE)

    def next_loss(self, seconds: float, *, saves: bool) -> float:
        """Return the ``elapsed`` at which so many seconds more may be lost than now.

        ``saves`` asks for time without learning until then, which is granted if learning has had as
        much time since the last such time. Learning takes all that may be lost: without saving, a
        drafter that is expected to pay, but once had bad luck, could never afford to read a text
        again.
        """
        until = self.elapsed + seconds / _SHARE
        (start, end) = self.saving
        if saves and self.elapsed >= 2.0 * end - start:
            self.saving = self.elapsed, until
        return until


@dataclass
class Regret:
    """Regret: seconds that other choices of drafters and draft tokens would have saved, in hindsight.

    A step of one request that verifies ``k`` draft tokens and accepts ``a`` of them saves, compared
    with plain decoding ::

        a · t(1)  -  (t(1 + k) - t(1))  -  seconds of the proposals

    ``t(n)`` is the estimated time of a forward pass over ``n`` rows
    (:mod:`pronk.models.cost_model`). The *best choice of a step* verifies exactly the proposed
    tokens that turned out right, and asks only the drafter that proposed them. A *drafter alone*
    verifies all tokens that it proposed. Both figures use only the proposals that were made: a
    drafter counts in the steps in which it was asked.
    """

    seconds: float = 0.0  # duration of the steps whose costs are known, one request's part
    # saved by the choices that were made, compared with plain decoding; may be negative
    saved: float = 0.0
    best_steps: float = 0.0  # what the best choice of every step would have saved, at least 0
    # what each drafter would have saved alone; may be negative
    sources: dict[str, float] = field(default_factory=dict)

    def add_step(self, saved: float, alone: Mapping[str, float], best: float) -> None:
        """Add the seconds that one step's choices saved: those made, each drafter alone, and the best choice."""
        self.saved += saved
        self.best_steps += max(0.0, best)
        for source, seconds in alone.items():
            self.sources[source] = self.sources.get(source, 0.0) + seconds

    def add(self, other: Regret) -> None:
        """Add the seconds of other steps."""
        self.seconds += other.seconds
        self.add_step(other.saved, other.sources, other.best_steps)

    @property
    def best_source(self) -> str | None:
        """Name of the drafter that would have saved most.

        ``None`` if plain decoding would have been faster.
        """
        best = max(self.sources, key=self.sources.__getitem__, default=None)
        return best if best is not None and self.sources[best] > 0.0 else None

    @property
    def against_source(self) -> float | None:
        """Speed that was reached over that of the best drafter alone; may be above 1."""
        return self._against(max([0.0, *self.sources.values()]))

    @property
    def against_steps(self) -> float | None:
        """Speed that was reached over that of the best choice of every step, usually below 1."""
        return self._against(self.best_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the ratios as JSON values, ``None`` without any step of known costs."""
        return {
            name: getattr(self, name) for name in ("best_source", "against_source", "against_steps")
        }

    def _against(self, saved: float) -> float | None:
        # Plain decoding takes seconds + self.saved; the other choice takes ``saved`` less than
        # that.
        ratio = (self.seconds + self.saved - saved) / self.seconds if self.seconds > 0.0 else 0.0
        return ratio if ratio > 0.0 else None
