"""Why a text took the steps that it took: who was asked for guesses, what was kept of them, and what came of it."""

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
    """What one source of guesses did for a text.

    Attributes:
        source: its name.
        asked: steps that it was asked in; 0 where nobody chose among sources.
        explored: of these, those that were to learn whether it pays.
        seconds: that asking took, and not what it takes to hear what became of its guesses.
        drafted: guesses of its that were computed.
        accepted: of those.
    """

    source: str
    asked: int
    explored: int
    seconds: float
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Explanation:
    """A text, and the steps that it took.

    Attributes:
        completion: the text.
        steps: the first one has the whole prompt before it, and no guesses.
        shares: of the sources.
    """

    completion: Completion
    steps: tuple[Decision, ...]
    shares: tuple[SourceShare, ...]

    @property
    def plain(self) -> float | None:
        """Seconds that a step without guesses is believed to take; ``None`` where nothing was measured."""
        known = [step.plain for step in self.steps if step.plain is not None]
        return median(known) if known else None

    @property
    def speed(self) -> float | None:
        """How many times as fast as plain decoding the text came after its first token, by what passes cost here."""
        steps, plain = self.steps[1:], self.plain
        seconds = sum(step.seconds + step.asking for step in steps)
        return None if plain is None or not steps else plain * sum(len(step.tokens) for step in steps) / seconds

    @property
    def summary(self) -> str:
        """A paragraph."""
        steps, tokens = len(self.steps), len(self.completion.token_ids)
        said = [f"{_count(tokens, 'token')} in {_count(steps, 'step')}: {tokens / max(1, steps):.2f} tokens a step."]
        if self.speed is not None:
            said.append(f"By what passes cost here that is {self.speed:.2f} times as fast as one a step would be.")
        said += [_share(share, steps) for share in self.shares]
        later = self.steps[1:]
        whole = sum(step.seconds + step.asking for step in later)
        if whole:
            asking, rows = sum(step.asking for step in later), [step.expected or 0.0 for step in later]
            more = sum(max(0.0, each - (step.plain or 0.0)) for each, step in zip(rows, later, strict=True))
            said.append(
                f"Of the time, {asking / whole:.1%} went into guessing, and {more / whole:.0%} into their rows."
            )
        bare = sum(not step.kept.num_draft_tokens for step in later)
        said.append(f"{bare} of {len(later)} steps after the first were plain.")
        return " ".join(said)


def explain(
    llm: LLM, prompt: str | list[int], params: SamplingParams | None = None, drafter: str | Drafter | None = None
) -> Explanation:
    """Continue a prompt, and keep what was decided on the way.

    The text is that of :meth:`~pronk.llm.LLM.generate`.

    Args:
        llm: the model.
        prompt: a text or token ids.
        params: options, of one sample.
        drafter: who guesses, if not the one given at loading.

    Raises:
        OptionError: options that do not fit the model, or several samples. Others are those of
            :meth:`~pronk.llm.LLM.generate`.
    """
    if params is not None:
        check_integer("n", params.n, 1, 1)
    (request,) = llm.request_factory.samples(
        llm.request_factory.ids(prompt), params or SamplingParams(), llm.get_proposer(drafter)
    )
    request.decision_trace = DecisionTrace()
    llm.engine.run([request])
    steps = tuple(request.decision_trace.steps)
    return Explanation(Completion.of(request), steps, tuple(_shares(steps)))


def _shares(steps: Sequence[Decision]) -> list[SourceShare]:
    """Of every source that was asked, or whose guesses were computed."""
    counts: dict[str, Counter[str]] = {}
    owners = {"": ""}  # whose guesses have which name: a part of a source has one of its own
    for step in steps:
        for each in step.source_reports:
            owners |= dict.fromkeys((name for name, _ in each.tree.origin or ()), each.source)
            found = counts.setdefault(each.source, Counter())
            found.update({"asked": 1, "explored": each.why == "explores"})
            found["nanoseconds"] += round(1e9 * each.seconds)
        for node, (name, _) in enumerate(step.kept.origin or ()):
            if name and step.kept.acceptable[node]:
                found = counts.setdefault(owners.get(name, name), Counter())
                found.update({"drafted": 1, "accepted": node in step.path})
    return [
        SourceShare(
            source, each["asked"], each["explored"], each["nanoseconds"] / 1e9, each["drafted"], each["accepted"]
        )
        for source, each in counts.items()
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _share(share: SourceShare, steps: int) -> str:
    asked = f" was asked in {share.asked} of {steps} steps" if share.asked else ""
    tried = f" ({share.explored} to explore)" if share.explored else ""
    took = f", in {1e3 * share.seconds:.1f} ms," if share.asked else ""
    joined = " and" if share.asked else ""
    return f"{share.source}{asked}{tried}{took}{joined} had {share.accepted} of {share.drafted} guesses accepted."
