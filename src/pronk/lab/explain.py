"""Explain the decoding of a text: in each step, the calls of drafters and the accepted draft tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pronk import LLM, Completion, Drafter, SamplingParams
from pronk.base.checks import check_integer
from pronk.drafting import Regret
from pronk.serving import Decision, DecisionTrace, params_per_prompt


@dataclass(frozen=True)
class SourceShare:
    """Statistics of one drafter over the decoding of a text: calls, time and draft tokens."""

    source: str  # name of the drafter
    asked: int  # number of steps in which this drafter was asked for draft tokens
    # number of those steps in which it was asked to measure its acceptance, without an expected
    # gain
    explored: int
    seconds: float  # duration of its proposals, without calls of :meth:`Proposer.observe`
    drafted: int  # number of verified draft tokens
    accepted: int  # number of accepted draft tokens


@dataclass(frozen=True)
class Explanation:
    """A completion and its decoding steps."""

    completion: Completion
    # one record per step; the first is the prefill, without draft tokens
    steps: tuple[Decision, ...]
    shares: tuple[SourceShare, ...]  # statistics of each drafter

    @property
    def speed(self) -> float | None:
        """Speed-up over decoding without draft tokens: ``plain * tokens / seconds`` without the first step.

        ``plain`` is the median estimate of the seconds of a step without draft tokens. The speed-up
        is ``None`` without any estimate, or if the first step is the only one.
        """
        steps = self.steps[1:]
        known = [step.plain for step in self.steps if step.plain is not None]
        seconds = sum(step.seconds + step.drafting for step in steps)
        return (
            median(known) * sum(len(step.tokens) for step in steps) / seconds
            if known and steps
            else None
        )

    @property
    def summary(self) -> str:
        """One paragraph: tokens per step, speed-up, share of each drafter, and cost of drafting."""
        steps = len(self.steps)
        tokens = len(self.completion.token_ids)
        facts = [
            (
                f"{_count(tokens, 'token')} in {_count(steps, 'step')}: "
                f"{tokens / max(1, steps):.2f} "
                "tokens per step."
            )
        ]
        if self.speed is not None:
            facts.append(
                f"By measured forward-pass times this is {self.speed:.2f} times as fast as plain "
                "decoding."
            )
        facts += [_describe(share, steps) for share in self.shares]
        later = self.steps[1:]
        total = sum(step.seconds + step.drafting for step in later)
        if total:
            drafting = sum(step.drafting for step in later)
            extra = sum(max(0.0, (step.expected or 0.0) - (step.plain or 0.0)) for step in later)
            facts.append(
                f"Drafting took {drafting / total:.1%} of the time, and the rows of draft tokens "
                f"{extra / total:.0%}."
            )
        facts += _describe_regret(self.completion.stats.regret)
        num_plain = sum(not step.verified.num_draft_tokens for step in later)
        facts.append(f"{num_plain} of {len(later)} steps after the first had no draft tokens.")
        return " ".join(facts)


def explain(
    llm: LLM,
    prompt: str | list[int],
    params: SamplingParams | None = None,
    drafter: str | Drafter | None = None,
) -> Explanation:
    """Continue a prompt like :meth:`~pronk.llm.LLM.generate` and record each step.

    ``n`` must be 1.
    """
    if params is not None:
        check_integer("n", params.n, 1, 1)
    options = params_per_prompt(params, 1)
    proposer = llm.get_proposer(drafter)
    ((request,),) = llm.request_factory.create_batch([prompt], options, proposer, None)
    request.speculation.trace = DecisionTrace()
    llm.engine.run([request])
    steps = tuple(request.speculation.trace.steps)
    return Explanation(Completion.of(request), steps, tuple(_shares(steps)))


def _shares(steps: Sequence[Decision]) -> list[SourceShare]:
    counts: dict[str, Counter[str]] = {}
    # By the drafter in a token's ``origin``: the drafter that was asked, which is the same one or
    # contains it.
    called_drafters = {"": ""}
    for step in steps:
        for report in step.reports:
            called_drafters |= dict.fromkeys(
                (name for name, _ in report.tree.origin or ()), report.drafter
            )
            count = counts.setdefault(report.drafter, Counter())
            count.update({"asked": 1, "explored": int(report.reason == "learns")})
            count["nanoseconds"] += round(1e9 * report.seconds)
        for node, (name, _) in enumerate(step.verified.origin or ()):
            if name and step.verified.acceptable[node]:
                count = counts.setdefault(called_drafters.get(name, name), Counter())
                count.update({"drafted": 1, "accepted": int(node in step.path)})
    return [
        SourceShare(
            source,
            count["asked"],
            count["explored"],
            count["nanoseconds"] / 1e9,
            count["drafted"],
            count["accepted"],
        )
        for source, count in counts.items()
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _describe_regret(regret: Regret) -> list[str]:
    """Return one sentence that compares the speed with that of other choices.

    None without known costs.
    """
    if regret.against_drafter is None or regret.against_steps is None:
        return []
    best = regret.best_drafter or "plain decoding"
    times = (1 / regret.against_drafter, 1 / regret.against_steps)
    text = f"In hindsight, {best} alone would have reached {times[0]:.2f} times this speed"
    return [f"{text}, and the best choice of every step {times[1]:.2f} times."]


def _describe(share: SourceShare, steps: int) -> str:
    asked = f" proposed in {share.asked} of {steps} steps" if share.asked else ""
    tried = f" ({share.explored} to explore)" if share.explored else ""
    took = f", in {1e3 * share.seconds:.1f} ms," if share.asked else ""
    joined = " and" if share.asked else ""
    counts = f"{share.accepted} of {share.drafted} verified draft tokens accepted"
    return (
        f"{share.source}{asked}{tried}{took}{joined} had "
        f"{counts if share.drafted else 'no draft token verified'}."
    )
