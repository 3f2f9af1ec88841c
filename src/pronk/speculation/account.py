"""Seconds that drafting has cost an engine and saved it, and measurements of each drafter."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from pronk.speculation.cost_model import usual

_SHARE = 0.01  # part of the elapsed time that may be lost, and that may be spent on learning
_PASSES = 2.0  # forward passes that may be lost in addition
_PRIOR_TOKENS = 2.0  # weight, in tokens, of the prior that a source adds what it is expected to add
_KEEP = 0.9  # weight of a step relative to the next one in the expected contribution of a source: half after 7 steps


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
        self.total, self.weight, self.step = keep * self.total + added, keep * self.weight + room, step

    def value(self, prior: float, step: int) -> float:
        """Return the mean in step number ``step``; ``prior`` counts like one room."""
        keep = _KEEP ** (step - self.step)
        return (keep * self.total + prior) / (keep * self.weight + 1.0)


@dataclass(slots=True)
class Source:
    """Measurements of a source over all requests."""

    prices: deque[list[float]] = field(default_factory=lambda: deque(maxlen=8))  # seconds of the last proposals
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=8))  # seconds besides reading and draft tokens
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

        ``saves`` asks for time without learning until then, which is granted if learning has had as much time since the
        last such time. Learning takes all that may be lost: without saving, a drafter that is expected to pay, but once
        had bad luck, could never afford to read a text again.
        """
        until, (start, end) = self.elapsed + seconds / _SHARE, self.saving
        if saves and self.elapsed >= 2.0 * end - start:
            self.saving = self.elapsed, until
        return until
