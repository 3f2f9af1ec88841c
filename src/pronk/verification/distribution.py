"""Test of the distribution: sampled strings of several tokens against the model's exact distribution.

Acceptance rules other than ``"coupled"`` accept draft tokens at random, and this is the only test of them. The seed
determines the strings, so a run can be repeated with the same verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pronk.drafters import Proposer
from pronk.engine.request import Request
from pronk.llm import LLM
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams
from pronk.verification.exact_distribution import DRAW, NUM_TESTED_TOKENS, ExactDistribution
from pronk.verification.prompts import ProgressMeter, VerifySettings

# Maximum probability that a correct sampler fails a verification. Each of its n tests gets 1 / n of it (Bonferroni).
SIGNIFICANCE = 1e-4

# Tokens per drawn string. A request's last token is never a draft token, so one more than the tested tokens is drawn.
NUM_DRAWN_TOKENS = NUM_TESTED_TOKENS + 1
_STRINGS_PER_HOLDER = 240  # number of strings whose requests share the KV blocks of one `holder` request

# Minimum expected count of a cell; with fewer, the chi-square approximation is poor (Cochran 1954).
MIN_EXPECTED = 5.0


@dataclass(frozen=True)
class Distribution:
    """Result of the chi-square test of the strings sampled with one drafter."""

    prompt: str
    samples: int
    cells: int  # number of cells after `merge_small`
    statistic: float
    freedom: int
    p_value: float
    threshold: float  # the test fails if the p-value is below this
    impossible: int  # number of drawn strings whose probability is 0; the test fails unless it is 0
    drafted: int
    accepted: int

    @property
    def failed(self) -> bool:
        """Whether the test found that the strings do not follow the distribution."""
        return self.impossible > 0 or self.p_value < self.threshold

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and ``failed`` as JSON values."""
        return {"failed": self.failed} | asdict(self)


def draw(
    llm: LLM, exact: ExactDistribution, proposer: Proposer[Any], settings: VerifySettings, meter: ProgressMeter
) -> list[Request]:
    """Draw ``settings.samples`` strings after ``exact.prompt``, each with its own seed, in batches."""
    drawn: list[Request] = []
    params = replace(DRAW, max_tokens=NUM_DRAWN_TOKENS, rule=settings.rule)
    while len(drawn) < settings.samples:
        indices = range(len(drawn), min(len(drawn) + _STRINGS_PER_HOLDER, settings.samples))
        string_params = [replace(params, seed=derive_seed(settings.seed, index)) for index in indices]
        drawn += _draw_sharing(llm, exact, proposer, string_params)
        meter.add(len(string_params) * NUM_DRAWN_TOKENS)
    return drawn


def _draw_sharing(
    llm: LLM, exact: ExactDistribution, proposer: Proposer[Any], string_params: Iterable[SamplingParams]
) -> list[Request]:
    """Draw one string per element of ``string_params`` while another request holds the prompt's KV blocks.

    The requests of the strings share these blocks: they need no prefill, and their first token can be a draft token.
    """
    prompt = exact.prompt.ids
    limit = llm.config.context - len(prompt)
    holder_params = replace(DRAW, max_tokens=min(limit, 2 * _STRINGS_PER_HOLDER))
    holder = llm.request_factory.create_request(prompt, holder_params, llm.get_proposer("autoregressive"))
    strings = [
        llm.request_factory.create_request(prompt, params, proposer, seed=params.seed or 0, parent=holder)
        for params in string_params
    ]
    llm.engine.add(holder)
    try:
        llm.engine.run(strings)
    finally:
        llm.engine.abort(holder)
    return strings


def judge_counts(exact: ExactDistribution, drawn: Sequence[Request], threshold: float) -> Distribution:
    """Test the drawn strings against the exact distribution; a p-value below ``threshold`` fails."""
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


def merge_small(observed: Sequence[float], expected: Sequence[float]) -> tuple[list[float], list[float]]:
    """Merge cells, smallest expected count first, until each expects at least :data:`MIN_EXPECTED`.

    Return the observed and the expected count of each merged cell; all cells become one if the total is too small.
    """
    merged: list[list[float]] = []
    merging = [0.0, 0.0]  # sums of observed and expected counts of the cells merged so far
    for mean, count in sorted(zip(expected, observed, strict=True)):
        merging = [merging[0] + count, merging[1] + mean]
        if merging[1] >= MIN_EXPECTED:
            merged.append(merging)
            merging = [0.0, 0.0]
    if merging != [0.0, 0.0]:
        last = merged.pop() if merged else [0.0, 0.0]
        merged.append([last[0] + merging[0], last[1] + merging[1]])
    return [count for count, _ in merged], [mean for _, mean in merged]


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """Return Pearson's chi-square statistic and its degrees of freedom; expected counts must be above 0."""
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(observed, expected, strict=True))
    return statistic, len(observed) - 1


def p_value(statistic: float, freedom: int) -> float:
    """Return the probability of a statistic at least this large by chance; 1 if ``freedom`` is 0.

    This is the regularized upper incomplete gamma function Q(freedom / 2, x) with x = statistic / 2, by Q(1/2, x) =
    erfc(sqrt(x)), Q(0, x) = 0 and Q(a + 1, x) = Q(a, x) + x^a e^-x / gamma(a + 1). SciPy, which has this function, is
    not a run-time dependency.
    """
    if freedom < 1 or statistic <= 0.0:
        return 1.0
    x, odd = statistic / 2, freedom % 2
    terms = (math.exp(a * math.log(x) - x - math.lgamma(a + 1.0)) for a in (i + odd / 2 for i in range(freedom // 2)))
    return min(1.0, odd * math.erfc(math.sqrt(x)) + math.fsum(terms))
