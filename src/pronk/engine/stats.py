"""Statistics of a request: counts, times, acceptance of draft tokens, decisions by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pronk.base.errors import PronkError
from pronk.drafting.ledger import ProposalReport
from pronk.drafting.proposer import Outcome
from pronk.drafting.regret import Regret
from pronk.drafting.shared.alignment import Alignment
from pronk.drafting.step_costs import StepCosts
from pronk.sampling.tree import TokenTree

_NUM_BINS = 10  # number of bins in ``Stats.gain_stats``
_JSON_KEYS = (
    "prompt_tokens generated_tokens preemptions cached_tokens disk_tokens target_steps "
    "step_compression drafted "
    "accepted compile_seconds predicted_tokens found_tokens jumped moved sources draft_error "
    "acceptance draft_seconds "
    "target_seconds total_seconds "
    "ttft tokens_per_second"
).split()


class StepStats(NamedTuple):
    """Counts of one decoding step of a request, and the request's times up to the end of the step.

    The duration of a step is its ``clock`` minus that of the step before. The first step includes
    the prefill.

    Attributes:
        rows: number of rows in the forward pass.
        drafted: number of verified draft tokens.
        depth: largest depth of a draft token in the verified tree.
        accepted: number of accepted draft tokens.
        tokens: number of tokens that the step added to the text.
        draft_clock: ``Stats.draft_seconds`` at the end of the step.
        target_clock: ``Stats.target_seconds`` at the end of the step.
        clock: seconds from ``Engine.add`` to the end of the step.
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
    """Draft tokens of one drafter: how many were verified, and how many of these accepted.

    Attributes:
        drafted: number of verified draft tokens.
        accepted: number of accepted draft tokens.
    """

    drafted: int
    accepted: int


class GainStats(NamedTuple):
    """Counts of draft tokens whose acceptance was predicted with similar probability.

    It is one bin of ``Stats.gain_stats``, a calibration curve of the predictions.

    Attributes:
        draft_tokens: number of draft tokens.
        sum_predicted: sum of their predicted acceptance probabilities.
        accepted: number of accepted draft tokens.
    """

    draft_tokens: int
    sum_predicted: float
    accepted: int


@dataclass
class Stats:
    """Counts of tokens and steps of one request, and durations in seconds.

    Attributes:
        prompt_tokens: number of tokens of the prompt.
        generated_tokens: number of tokens of the output.
        preemptions: number of times that the request lost its KV blocks and was recomputed.
        cached_tokens: number of tokens found in the prefix cache, at the start and after each
            preemption.
        disk_tokens: number of ``cached_tokens`` that were read from the prompt cache on disk.
        compile_seconds: seconds of compiling the guide's grammar; a cached grammar was compiled for
            an earlier request.
        predicted_tokens: number of tokens of the request's prediction
            (``SamplingParams.prediction``); 0 without one.
        found_tokens: number of these tokens that the output has in the order of the prediction,
            apart from passages that were moved (:mod:`pronk.drafting.shared.alignment`). It is
            set at the end of the request, and depends on the two texts alone.
        jumped: number of tokens that the guide forced without a forward pass.
        moved: number of KV rows that were moved because the accepted path was not the first path of
            the tree.
        draft_seconds: seconds of drafters in the steps of this request. They are those of all
            requests of a step, not this request's part.
        target_seconds: seconds of the forward passes with this request, and of the choices of
            tokens in them. They are those of all requests of a pass, not this request's part.
        total_seconds: seconds from ``Engine.add`` to the end of the request.
        steps: one entry per forward pass that generated tokens; the first is the last chunk of the
            prefill.
        sources: for each drafter, its numbers of verified and accepted draft tokens. The key is the
            name in ``TokenTree.origin``: of a composite drafter, that of the part.
        gain_stats: predicted and actual acceptance of draft tokens whose parents were accepted. Bin
            i has the draft tokens of predicted probability i / 10 to (i + 1) / 10.
        regret: seconds that other choices of drafters would have saved.
        draft_error: exception of the drafter, if the request continued without it.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    disk_tokens: int = 0
    compile_seconds: float = 0.0
    predicted_tokens: int = 0
    found_tokens: int = 0
    jumped: int = 0
    moved: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    total_seconds: float = 0.0
    steps: list[StepStats] = field(default_factory=list, repr=False)
    sources: dict[str, SourceStats] = field(default_factory=dict)
    gain_stats: list[GainStats] = field(
        default_factory=lambda: [GainStats(0, 0.0, 0)] * _NUM_BINS, repr=False
    )
    regret: Regret = field(default_factory=Regret, repr=False)
    draft_error: str | None = None

    def count_sources(self, draft_tokens: Iterable[tuple[str, bool]]) -> None:
        """Count verified draft tokens by drafter; each is a pair ``(drafter name, accepted)``."""
        for name, accepted in draft_tokens:
            drafted, taken = self.sources.get(name, SourceStats(0, 0))
            self.sources[name] = SourceStats(drafted + 1, taken + accepted)

    def count_gains(self, draft_tokens: Iterable[tuple[float, bool]]) -> None:
        """Compare the predicted acceptance of verified draft tokens with what happened.

        Each draft token is a pair: the predicted probability that it is accepted if its parent is,
        and whether it was accepted. Only draft tokens with accepted parents are given.
        """
        for predicted, accepted in draft_tokens:
            index = min(int(_NUM_BINS * predicted), _NUM_BINS - 1)
            count, sum_predicted, sum_accepted = self.gain_stats[index]
            self.gain_stats[index] = GainStats(
                count + 1, sum_predicted + predicted, sum_accepted + accepted
            )

    def count_prediction(self, prediction: Sequence[int], output: Sequence[int]) -> None:
        """Count the tokens of a request's prediction, and those of them that its output has."""
        alignment = Alignment(prediction)
        alignment.extend(output)
        self.predicted_tokens = len(prediction)
        self.found_tokens = alignment.num_found

    def check_proposer(self) -> None:
        """Raise ``PronkError`` if the drafter failed during the request.

        For benchmarks: from then on the request was decoded without draft tokens.
        """
        if self.draft_error is not None:
            error = " ".join(self.draft_error.split())
            msg = (
                f"drafter: expected no exception, found {error}; nothing was measured, "
                "fix the drafter"
            )
            raise PronkError(msg)

    @property
    def target_steps(self) -> int:
        """Number of decoding steps."""
        return len(self.steps)

    @property
    def drafted(self) -> int:
        """Number of verified draft tokens."""
        return sum(step.drafted for step in self.steps)

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return sum(step.accepted for step in self.steps)

    @property
    def ttft(self) -> float:
        """Time to first token in seconds; 0 before the first token."""
        return self.steps[0].clock if self.steps else 0.0

    @property
    def acceptance(self) -> list[float]:
        """For each depth from 1: accepted draft tokens / steps with draft tokens of that depth."""
        offered = Counter[int]()
        taken = Counter[int]()
        for step in self.steps:
            offered.update(range(step.depth))
            taken.update(range(step.accepted))
        return [taken[i] / offered[i] for i in sorted(offered)]

    @property
    def step_compression(self) -> float:
        """S: generated tokens per forward pass of the target; 1 for plain decoding."""
        return self.generated_tokens / self.target_steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens / ``total_seconds``, which includes waiting and prefill."""
        return self.generated_tokens / self.total_seconds if self.total_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        values = {name: getattr(self, name) for name in _JSON_KEYS}
        sources = {name: source._asdict() for name, source in self.sources.items()}
        return values | {"sources": sources, "regret": self.regret.to_dict()}


@dataclass(frozen=True)
class Decision:
    """Draft tokens of one step that were proposed, verified and accepted, with expected times.

    Attributes:
        reports: one report per drafter that has proposed; with ``auto`` there can be several.
        proposed: tree of all drafters' draft tokens.
        verified: ``proposed`` without the draft tokens that were dropped before verification.
        path: accepted nodes of ``verified``, without the root.
        tokens: ids of the tokens that the step added to the text.
        plain: estimated seconds of a step without draft tokens, one request's part:
            ``costs.at(n) / n``, if ``n`` requests decode and a forward pass over ``rows`` rows
            takes ``costs.at(rows)`` seconds. ``None`` if the costs are unknown.
        expected: the same of a step with the verified tree: ``costs.at(n * len(verified)) / n``.
        drafting: measured seconds of drafters, this request's part.
        seconds: measured seconds of the step for all its requests, without the time of drafters.
        allowance: ``Ledger.allowance``: seconds that drafting may still cost the engine.
    """

    reports: tuple[ProposalReport, ...]
    proposed: TokenTree
    verified: TokenTree
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    plain: float | None
    expected: float | None
    drafting: float
    seconds: float
    allowance: float

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of proposed, verified and accepted draft tokens, in this order."""
        proposed = sum(self.proposed.acceptable) - 1
        verified = sum(self.verified.acceptable) - 1
        return proposed, verified, len(self.path)

    @property
    def gain(self) -> float:
        """Expected number of committed tokens: the bonus token plus the gains of the tree."""
        gain = self.verified.gain
        return 1.0 + (0.0 if gain is None else sum(gain[1:]))

    @property
    def value(self) -> float | None:
        """``gain * plain / expected``: estimated speed-up over a step without draft tokens."""
        return (
            None
            if self.plain is None or not self.expected
            else self.gain * self.plain / self.expected
        )


@dataclass
class DecisionTrace:
    """Record of the drafting decisions of one request, one per decoding step.

    Only requests that :mod:`pronk.lab.explain` runs have a trace; it shows why each draft token was
    proposed or dropped.

    Attributes:
        steps: one decision per decoding step so far.
        proposed: tree that was proposed in the current step.
        draft_seconds: seconds of drafters in the current step so far, this request's part.
    """

    steps: list[Decision] = field(default_factory=list)
    proposed: TokenTree | None = None
    draft_seconds: float = 0.0

    def record_step(
        self,
        outcome: Outcome[Any],
        costs: StepCosts | None,
        seconds: float,
        allowance: float,
    ) -> None:
        """Record the current step, after its verification.

        The step took ``seconds`` without the time of drafters; ``costs`` and ``allowance`` are
        those of the ledger.
        """
        verified = outcome.tree
        self.steps.append(
            Decision(
                tuple(outcome.ledger.reports),
                self.proposed or verified,
                verified,
                outcome.path,
                outcome.committed,
                None if costs is None else costs.pass_seconds(0),
                None if costs is None else costs.pass_seconds(verified.num_draft_tokens),
                self.draft_seconds,
                seconds,
                allowance,
            )
        )
        self.proposed = None
        self.draft_seconds = 0.0
