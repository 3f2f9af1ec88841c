"""Explanation of a decoded text: for each step, the calls of drafters and the accepted tokens."""

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
class DrafterShare:
    """Statistics of one drafter over the decoding of a text: calls, time and draft tokens."""

    drafter: str  # name of the drafter
    asked: int  # number of steps in which this drafter was asked for draft tokens
    # Number of steps in which the drafter was asked only to measure its acceptance rate, without an
    # expected gain.
    learned: int
    seconds: float  # duration of the proposals, without calls of :meth:`Proposer.observe`
    drafted: int  # number of verified draft tokens
    accepted: int  # number of accepted draft tokens


@dataclass(frozen=True)
class Explanation:
    """A completion and its decoding steps."""

    completion: Completion
    # One record per step; the first is the prefill, without draft tokens.
    steps: tuple[Decision, ...]
    shares: tuple[DrafterShare, ...]  # calls, time and draft tokens of each drafter

    @property
    def speed(self) -> float | None:
        """Speed-up over plain decoding, the first step (prefill) left out.

        The speed-up is ``plain * tokens / seconds``, where ``plain`` is the median estimate of the
        seconds of a step without draft tokens. It is ``None`` without any estimate, or if the first
        step is the only one.
        """
        steps = self.steps[1:]
        known = [step.plain for step in self.steps if step.plain is not None]
        if not known or not steps:
            return None
        tokens = sum(len(step.tokens) for step in steps)
        seconds = sum(step.seconds + step.drafting for step in steps)
        return median(known) * tokens / seconds

    @property
    def summary(self) -> str:
        """One paragraph: tokens per step, speed-up, share of each drafter, and cost of drafting."""
        steps = len(self.steps)
        tokens = len(self.completion.token_ids)
        per_step = tokens / max(1, steps)
        counts = f"{_count(tokens, 'token')} in {_count(steps, 'step')}"
        facts = [f"{counts}: {per_step:.2f} tokens per step."]
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
    """Continue a prompt like :meth:`~pronk.llm.LLM.generate`, and record each step.

    ``params.n`` must be 1; another value raises OptionError.
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


def _shares(steps: Sequence[Decision]) -> list[DrafterShare]:
    counts: dict[str, Counter[str]] = {}
    # The drafter that was asked, for each name in the ``origin`` of tokens: such a name may be that
    # of a part of a composite drafter.
    called_drafters = {"": ""}
    for step in steps:
        for report in step.reports:
            for name, _ in report.tree.origin or ():
                called_drafters[name] = report.drafter
            count = counts.setdefault(report.drafter, Counter())
            count.update({"asked": 1, "learned": int(report.reason == "learns")})
            count["nanoseconds"] += round(1e9 * report.seconds)
        for node, (name, _) in enumerate(step.verified.origin or ()):
            if name and step.verified.acceptable[node]:
                count = counts.setdefault(called_drafters.get(name, name), Counter())
                count.update({"drafted": 1, "accepted": int(node in step.path)})
    shares: list[DrafterShare] = []
    for drafter, count in counts.items():
        share = DrafterShare(
            drafter,
            asked=count["asked"],
            learned=count["learned"],
            seconds=count["nanoseconds"] / 1e9,
            drafted=count["drafted"],
            accepted=count["accepted"],
        )
        shares.append(share)
    return shares


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _describe_regret(regret: Regret) -> list[str]:
    """Return a list with one sentence that compares the speed with other choices of drafters.

    The list is empty if the costs of forward passes are not known.
    """
    if regret.against_drafter is None or regret.against_steps is None:
        return []
    best = regret.best_drafter or "plain decoding"
    alone = f"{best} alone would have reached {1 / regret.against_drafter:.2f} times this speed"
    every_step = f"the best choice of every step {1 / regret.against_steps:.2f} times"
    return [f"In hindsight, {alone}, and {every_step}."]


def _describe(share: DrafterShare, steps: int) -> str:
    """Return a sentence about a drafter: proposals, time, verified and accepted draft tokens."""
    result = "had no draft token verified"
    if share.drafted:
        result = f"had {share.accepted} of {share.drafted} verified draft tokens accepted"
    learned = f" ({share.learned} to learn)" if share.learned else ""
    if not share.asked:
        return f"{share.drafter}{learned} {result}."
    asked = f"proposed in {share.asked} of {steps} steps{learned}"
    return f"{share.drafter} {asked}, in {1e3 * share.seconds:.1f} ms, and {result}."
