"""Test of the distribution: sampled strings of several tokens against the model's exact distribution.

Under the acceptance rule ``"coupled"``, the test of equality implies this one if plain decoding samples correctly.
Other rules accept draft tokens at random, and this is the only test of them. The verdict depends on the seed alone
(under other rules, also on the draft tokens), so it is reproducible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pronk.drafters import Proposer
from pronk.engine.request import Request
from pronk.llm import LLM
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams
from pronk.verification.chi_square import chi_square, merge_small, p_value
from pronk.verification.exact_distribution import DRAW, NUM_TESTED_TOKENS, ExactDistribution
from pronk.verification.prompts import ProgressMeter, VerifySettings

__all__ = ["NUM_DRAWN_TOKENS", "SIGNIFICANCE", "Distribution", "draw", "judge_counts"]

# Probability that a correct sampler fails a verification (all tests together, by Bonferroni's bound).
SIGNIFICANCE = 1e-4

NUM_DRAWN_TOKENS = NUM_TESTED_TOKENS + 1  # one token more than is tested: a request's last token is never a draft token
_STRINGS_PER_HOLDER = 240  # strings that are drawn while one request holds the prompt's KV cache


@dataclass(frozen=True)
class Distribution:
    """Result of the chi-square test of one drafter's strings."""

    prompt: str
    samples: int
    cells: int  # after merging small expectations
    statistic: float
    freedom: int
    p_value: float
    threshold: float  # a smaller p-value fails
    impossible: int  # strings whose probability is 0; any of them fails
    drafted: int
    accepted: int

    @property
    def failed(self) -> bool:
        """Whether the strings do not follow the distribution."""
        return self.impossible > 0 or self.p_value < self.threshold

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"failed": self.failed} | asdict(self)


def draw(
    llm: LLM, exact: ExactDistribution, drafter: Proposer[Any], settings: VerifySettings, meter: ProgressMeter
) -> list[Request]:
    """Draw strings, each with its own seed; ``drafter`` is bound to the target model."""
    drawn: list[Request] = []
    params = replace(DRAW, max_tokens=NUM_DRAWN_TOKENS, rule=settings.rule)
    while len(drawn) < settings.samples:
        places = range(len(drawn), min(len(drawn) + _STRINGS_PER_HOLDER, settings.samples))
        wanted = [replace(params, seed=derive_seed(settings.seed, place)) for place in places]
        drawn += _draw_sharing(llm, exact, drafter, wanted)
        meter.add(len(wanted) * NUM_DRAWN_TOKENS)
    return drawn


def _draw_sharing(
    llm: LLM, exact: ExactDistribution, drafter: Proposer[Any], wanted: Iterable[SamplingParams]
) -> list[Request]:
    """Draw strings that reuse the prompt's KV cache, which another request (``holder``) keeps in memory.

    A string then needs no prefill, and its first token can be a draft token.
    """
    prompt = exact.prompt.ids
    limit = llm.config.context - len(prompt)
    holding = replace(DRAW, max_tokens=min(limit, 2 * _STRINGS_PER_HOLDER))
    holder = llm.request_factory.create_request(prompt, holding, llm.get_proposer("autoregressive"))
    strings = [
        llm.request_factory.create_request(prompt, params, drafter, seed=params.seed or 0, parent=holder)
        for params in wanted
    ]
    llm.engine.add(holder)
    try:
        llm.engine.run(strings)
    finally:
        llm.engine.abort(holder)
    return strings


def judge_counts(exact: ExactDistribution, drawn: Sequence[Request], threshold: float) -> Distribution:
    """Test the strings against the distribution."""
    counts = Counter(exact.cell(request.output[:NUM_TESTED_TOKENS]) for request in drawn)
    impossible = counts.pop(None, 0)
    observed = [float(counts[cell]) for cell in exact.cells]
    expected = [p * sum(observed) for p in exact.cells.values()]
    merged = merge_small(observed, expected)
    statistic, freedom = chi_square(*merged)
    return Distribution(
        exact.prompt.id,
        len(drawn),
        len(merged[0]),
        statistic,
        freedom,
        p_value(statistic, freedom),
        threshold,
        impossible,
        sum(request.stats.drafted for request in drawn),
        sum(request.stats.accepted for request in drawn),
    )
