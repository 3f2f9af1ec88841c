"""Explain the decoding of a text: in each step, the drafters that proposed and the accepted tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pronk.checks import check_integer
from pronk.drafters import Drafter
from pronk.engine.decision_trace import Decision, DecisionTrace
from pronk.llm import LLM
from pronk.outputs import Completion
from pronk.sampling.params import SamplingParams

__all__ = ["Explanation", "SourceShare", "explain"]


@dataclass(frozen=True)
class SourceShare:
    """Statistics of one drafter over the decoding of a text."""

    source: str  # name of the drafter
    asked: int  # number of steps with a proposal; 0 unless ``auto`` selects the drafters
    explored: int  # number of these steps with no expected gain, only to measure acceptance
    seconds: float  # time to make the proposals, without :meth:`Proposer.observe`
    drafted: int  # number of verified draft tokens
    accepted: int  # number of accepted draft tokens


@dataclass(frozen=True)
class Explanation:
    """A completion and its decoding steps."""

    completion: Completion
    steps: tuple[Decision, ...]  # the first step gives the first token after the prompt, without draft tokens
    shares: tuple[SourceShare, ...]  # one per drafter

    @property
    def plain(self) -> float | None:
        """Estimated seconds of a step without draft tokens (median); ``None`` before durations were measured."""
        known = [step.plain for step in self.steps if step.plain is not None]
        return median(known) if known else None

    @property
    def speed(self) -> float | None:
        """Estimated speed-up over decoding without drafts, after the first step; ``None`` if unknown."""
        steps, plain = self.steps[1:], self.plain
        seconds = sum(step.seconds + step.asking for step in steps)
        return None if plain is None or not steps else plain * sum(len(step.tokens) for step in steps) / seconds

    @property
    def summary(self) -> str:
        """The statistics in words, as one paragraph."""
        steps, tokens = len(self.steps), len(self.completion.token_ids)
        said = [f"{_count(tokens, 'token')} in {_count(steps, 'step')}: {tokens / max(1, steps):.2f} tokens per step."]
        if self.speed is not None:
            said.append(f"By measured forward-pass times this is {self.speed:.2f} times as fast as plain decoding.")
        said += [_share(share, steps) for share in self.shares]
        later = self.steps[1:]
        whole = sum(step.seconds + step.asking for step in later)
        if whole:
            asking, rows = sum(step.asking for step in later), [step.expected or 0.0 for step in later]
            more = sum(max(0.0, each - (step.plain or 0.0)) for each, step in zip(rows, later, strict=True))
            said.append(
                f"Drafting took {asking / whole:.1%} of the time, and the rows of draft tokens {more / whole:.0%}."
            )
        bare = sum(not step.kept.num_draft_tokens for step in later)
        said.append(f"{bare} of {len(later)} steps after the first had no draft tokens.")
        return " ".join(said)


def explain(
    llm: LLM, prompt: str | list[int], params: SamplingParams | None = None, drafter: str | Drafter | None = None
) -> Explanation:
    """Continue a prompt like :meth:`~pronk.llm.LLM.generate` and record the speculation decisions.

    Raises:
        OptionError: ``n`` is above 1; other errors are those of :meth:`~pronk.llm.LLM.generate`.
    """
    if params is not None:
        check_integer("n", params.n, 1, 1)
    (request,) = llm.request_factory.create_samples(
        llm.request_factory.encode_prompt(prompt), params or SamplingParams(), llm.get_proposer(drafter)
    )
    request.decision_trace = DecisionTrace()
    llm.engine.run([request])
    steps = tuple(request.decision_trace.steps)
    return Explanation(Completion.of(request), steps, tuple(_shares(steps)))


def _shares(steps: Sequence[Decision]) -> list[SourceShare]:
    counts: dict[str, Counter[str]] = {}
    owners = {"": ""}  # reported drafter by origin of a token; a combined drafter's tokens name an inner drafter
    for step in steps:
        for each in step.source_reports:
            owners |= dict.fromkeys((name for name, _ in each.tree.origin or ()), each.source)
            found = counts.setdefault(each.source, Counter())
            found.update({"asked": 1, "explored": int(each.reason == "explores")})
            found["nanoseconds"] += round(1e9 * each.seconds)
        for node, (name, _) in enumerate(step.kept.origin or ()):
            if name and step.kept.acceptable[node]:
                found = counts.setdefault(owners.get(name, name), Counter())
                found.update({"drafted": 1, "accepted": int(node in step.path)})
    return [
        SourceShare(
            source, each["asked"], each["explored"], each["nanoseconds"] / 1e9, each["drafted"], each["accepted"]
        )
        for source, each in counts.items()
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _share(share: SourceShare, steps: int) -> str:
    asked = f" proposed in {share.asked} of {steps} steps" if share.asked else ""
    tried = f" ({share.explored} to explore)" if share.explored else ""
    took = f", in {1e3 * share.seconds:.1f} ms," if share.asked else ""
    joined = " and" if share.asked else ""
    return f"{share.source}{asked}{tried}{took}{joined} had {share.accepted} of {share.drafted} draft tokens accepted."
