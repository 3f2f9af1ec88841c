"""Distribution: strings of several tokens, drawn with many seeds, against the model's exact law.

For the coupled choice this follows from equality, but only as far as plain decoding itself samples rightly; a rule that
accepts guesses by chance has no other proof. The verdict depends on the seed alone (and on the guesses, where these are
accepted by chance), so it is the same each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from pronk.drafters import Proposer
from pronk.engine.request import Request
from pronk.llm import LLM
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams
from pronk.verification.chi_square import chi_square, merge_small, p_value
from pronk.verification.exact_distribution import DEPTH, DRAW, ExactDistribution
from pronk.verification.prompts import ProgressMeter, VerifySettings

__all__ = ["SIGNIFICANCE", "Distribution", "draw", "judge_counts", "strings_length"]

# A right sampler fails one verification in so many (all its tests together, by Bonferroni's bound).
SIGNIFICANCE = 1e-4

# Strings that are drawn while one request holds the prompt's cache.
_SHARING = 240


@dataclass(frozen=True)
class Distribution:
    """The test of one drafter's strings.

    Attributes:
        prompt: name of the prompt.
        samples: how many strings.
        cells: cells of the test after those of small expectation were put together.
        statistic: Pearson's.
        freedom: its degrees of freedom.
        p_value: probability of strings at least as far from the law.
        threshold: a smaller one fails.
        impossible: strings that cannot occur at all.
        drafted: guesses at the places that are counted.
        accepted: guesses there that the target confirmed.
    """

    prompt: str
    samples: int
    cells: int
    statistic: float
    freedom: int
    p_value: float
    threshold: float
    impossible: int
    drafted: int
    accepted: int

    @property
    def failed(self) -> bool:
        """Whether the strings are not from the law."""
        return self.impossible > 0 or self.p_value < self.threshold

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"failed": self.failed} | asdict(self)


def strings_length() -> int:
    """Tokens per string: those that count, and one more so that the last of them can be a guess, too."""
    return DEPTH + 1


def draw(
    llm: LLM, law: ExactDistribution, drafter: Proposer[Any], settings: VerifySettings, meter: ProgressMeter
) -> list[Request]:
    """Draw strings, each with a seed of its own; ``drafter`` has met the target."""
    drawn: list[Request] = []
    params = replace(DRAW, max_tokens=strings_length(), rule=settings.rule)
    while len(drawn) < settings.samples:
        places = range(len(drawn), min(len(drawn) + _SHARING, settings.samples))
        wanted = [replace(params, seed=derive_seed(settings.seed, place)) for place in places]
        drawn += _draw_sharing(llm, law, drafter, wanted)
        meter.add(len(wanted) * strings_length())
    return drawn


def _draw_sharing(
    llm: LLM, law: ExactDistribution, drafter: Proposer[Any], wanted: Iterable[SamplingParams]
) -> list[Request]:
    """Strings that start from the prompt's cache, which one more request keeps alive.

    So a string costs no pass over the prompt, and its first token can be a guess.
    """
    prompt = law.prompt.ids
    room = llm.config.context - len(prompt)
    holding = replace(DRAW, max_tokens=min(room, 2 * _SHARING))
    holder = llm.request_factory.request(prompt, holding, llm.get_proposer("autoregressive"))
    strings = [
        llm.request_factory.request(prompt, params, drafter, seed=params.seed or 0, parent=holder) for params in wanted
    ]
    llm.engine.add(holder)
    try:
        llm.engine.run(strings)
    finally:
        llm.engine.abort(holder)
    return strings


def judge_counts(law: ExactDistribution, drawn: Iterable[Request], threshold: float) -> Distribution:
    """Test the strings against the law."""
    requests = list(drawn)
    counts = Counter(law.cell(request.output[:DEPTH]) for request in requests)
    impossible = counts.pop(None, 0)
    observed = [float(counts[cell]) for cell in law.cells]
    expected = [p * sum(observed) for p in law.cells.values()]
    merged = merge_small(observed, expected)
    statistic, freedom = chi_square(*merged)
    return Distribution(
        law.prompt.id,
        len(requests),
        len(merged[0]),
        statistic,
        freedom,
        p_value(statistic, freedom),
        threshold,
        impossible,
        sum(request.stats.drafted for request in requests),
        sum(request.stats.accepted for request in requests),
    )
