"""What a request cost and what guessing gained it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pronk.errors import PronkError

__all__ = ["GainStats", "SourceStats", "Stats", "StepStats"]

_TENTHS = 10


class StepStats(NamedTuple):
    """One pass of the target that chose tokens for a request, and the request's clocks when it was through.

    The clocks run from the request's start, so that the difference of two neighbours is what a step took. The first
    step has the whole prompt before it.

    Attributes:
        rows: the request's rows in the pass.
        drafted: acceptable guesses among them.
        depth: how deep those went.
        accepted: guesses that the target confirmed.
        tokens: tokens that became certain.
        draft_clock: seconds in the drafter so far, of the batches this request was in.
        target_clock: seconds in the target's passes so far, of the batches this request was in.
        clock: seconds since the request's start.
    """

    rows: int
    drafted: int
    depth: int
    accepted: int
    tokens: int
    draft_clock: float
    target_clock: float
    clock: float


class SourceStats(NamedTuple):
    """One drafter's guesses: how many were computed, and how many were accepted."""

    drafted: int
    accepted: int


class GainStats(NamedTuple):
    """Guesses of which about the same was said: how many, the sum of what was said, and how many were right."""

    draft_tokens: int
    said: float
    right: int


@dataclass
class Stats:
    """Counts and seconds of one request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens of the output.
        preemptions: how often it had to give its blocks away, and to be read again.
        cached_tokens: tokens that it found in the cache, each time that it started.
        compile_seconds: what compiling its guide took whoever asked for it first.
        jumped: tokens that its guide forced, and that the model was not asked for.
        moved: rows of accepted guesses that did not lie where the text goes, and were moved there.
        draft_seconds: time in the drafter, of the batches this request was in.
        target_seconds: time in the target's forward pass, of the batches this request was in.
        total_seconds: from the request's start to its end.
        steps: the passes of the target that chose tokens; the last pass over the prompt is the first of them, so
            that plain decoding has exactly one token per step.
        sources: drafter's name to what became of its guesses.
        gain_stats: how likely guesses were said to be right, given that their parent was, and how often they were: by the
            tenth of what was said, guesses, the sum of what was said, and those that were right.
        draft_error: what the drafter raised, if the request had to go on without it.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    compile_seconds: float = 0.0
    jumped: int = 0
    moved: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    total_seconds: float = 0.0
    steps: list[StepStats] = field(default_factory=list, repr=False)
    sources: dict[str, SourceStats] = field(default_factory=dict)
    gain_stats: list[GainStats] = field(default_factory=lambda: [GainStats(0, 0.0, 0)] * _TENTHS, repr=False)
    draft_error: str | None = None

    def count_sources(self, draft_tokens: Iterable[tuple[str, bool]]) -> None:
        """Whose guesses a verified tree had, and whether each was accepted."""
        for name, accepted in draft_tokens:
            drafted, taken = self.sources.get(name, SourceStats(0, 0))
            self.sources[name] = SourceStats(drafted + 1, taken + accepted)

    def count_gains(self, draft_tokens: Iterable[tuple[float, bool]]) -> None:
        """How likely each guess was said to be, and whether it was right."""
        for said, right in draft_tokens:
            tenth = min(int(_TENTHS * said), _TENTHS - 1)
            count, sum_said, sum_right = self.gain_stats[tenth]
            self.gain_stats[tenth] = GainStats(count + 1, sum_said + said, sum_right + right)

    def check_proposer(self) -> None:
        """For whoever measures guesses: those of a request that went on without them say nothing of the drafter.

        Raises:
            PronkError: it has raised.
        """
        if self.draft_error is not None:
            found = " ".join(self.draft_error.split())
            msg = f"drafter: expected guesses to the end, found that it raised ({found}); nothing was measured"
            raise PronkError(msg)

    @property
    def target_steps(self) -> int:
        """Passes of the target that chose tokens."""
        return len(self.steps)

    @property
    def drafted(self) -> int:
        """Acceptable guesses that were computed."""
        return sum(step.drafted for step in self.steps)

    @property
    def accepted(self) -> int:
        """Guesses that the target confirmed."""
        return sum(step.accepted for step in self.steps)

    @property
    def ttft(self) -> float:
        """Seconds to the first token; 0 if there is none yet."""
        return self.steps[0].clock if self.steps else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Share of the steps with a guess at position ``i`` (0 = next to the root) whose guess there was accepted."""
        offered, taken = Counter[int](), Counter[int]()
        for step in self.steps:
            offered.update(range(step.depth))
            taken.update(range(step.accepted))
        return [taken[i] / offered[i] for i in sorted(offered)]

    @property
    def step_compression(self) -> float:
        """S: generated tokens per pass of the target; 1 for plain decoding."""
        return self.generated_tokens / self.target_steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the whole time, prompt included."""
        return self.generated_tokens / self.total_seconds if self.total_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "preemptions": self.preemptions,
            "cached_tokens": self.cached_tokens,
            "target_steps": self.target_steps,
            "step_compression": self.step_compression,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "compile_seconds": self.compile_seconds,
            "jumped": self.jumped,
            "moved": self.moved,
            "sources": {name: source._asdict() for name, source in self.sources.items()},
            "draft_error": self.draft_error,
            "acceptance": self.acceptance,
            "draft_seconds": self.draft_seconds,
            "target_seconds": self.target_seconds,
            "total_seconds": self.total_seconds,
            "ttft": self.ttft,
            "tokens_per_second": self.tokens_per_second,
        }
