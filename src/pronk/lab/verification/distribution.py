"""Test of the distribution: sampled strings of several tokens against exact probabilities.

The acceptance rules ``"rejection"`` and ``"block"`` accept draft tokens at random, so only this
check tests them. The seed determines the strings: a repeated run has the same verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pronk import LLM, Proposer
from pronk.drafting import derive_seed
from pronk.lab.verification.chi_square import chi_square, merge_small, p_value
from pronk.lab.verification.exact_distribution import DRAW, NUM_TESTED_TOKENS, ExactDistribution
from pronk.lab.verification.prompts import ProgressMeter, VerifySettings
from pronk.serving import Request

# Tokens per drawn string: one more than the tested tokens, because a request's last token is never
# a draft token.
NUM_DRAWN_TOKENS = NUM_TESTED_TOKENS + 1
# Number of strings in a batch of draw(). Their requests share the KV blocks of the prompt with one
# more request, which runs as long as the batch and so keeps the blocks.
_STRINGS_PER_HOLDER = 240


@dataclass(frozen=True)
class Distribution:
    """Result of the chi-square test of the strings sampled with one drafter."""

    prompt: str  # id of the prompt
    samples: int  # number of sampled strings
    cells: int  # number of sets of strings whose frequencies are compared, rare ones merged
    statistic: float  # chi-square statistic of the cells
    freedom: int  # degrees of freedom of the statistic
    p_value: float  # probability of a statistic at least as large without a defect
    threshold: float  # the test fails if the p-value is below this
    impossible: int  # number of drawn strings whose probability is 0; the test fails unless it is 0
    drafted: int  # number of verified draft tokens
    accepted: int  # number of accepted draft tokens

    @property
    def failed(self) -> bool:
        """Whether the test found that the strings do not follow the distribution."""
        return self.impossible > 0 or self.p_value < self.threshold

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and ``failed`` as JSON values."""
        return {"failed": self.failed} | asdict(self)


def draw(
    llm: LLM,
    exact: ExactDistribution,
    proposer: Proposer[Any],
    settings: VerifySettings,
    meter: ProgressMeter,
) -> list[Request]:
    """Draw ``settings.samples`` strings after ``exact.prompt``, each with its own seed, in batches.

    The requests of a batch share the prompt's KV blocks with another request, the holder, which
    runs as long as the batch. The requests therefore need no prefill, and their first token can be
    a draft token.
    """
    prompt = exact.prompt.ids
    create = llm.request_factory.create_request
    drawn = list[Request]()
    max_holder_tokens = min(llm.config.context - len(prompt), 2 * _STRINGS_PER_HOLDER)
    holder_params = replace(DRAW, max_tokens=max_holder_tokens)
    params = replace(DRAW, max_tokens=NUM_DRAWN_TOKENS, rule=settings.rule)
    while len(drawn) < settings.samples:
        indices = range(len(drawn), min(len(drawn) + _STRINGS_PER_HOLDER, settings.samples))
        seeds = [derive_seed(settings.seed, index) for index in indices]
        holder = create(prompt, holder_params, llm.get_proposer("autoregressive"))
        strings = [
            create(prompt, replace(params, seed=seed), proposer, seed=seed, parent=holder)
            for seed in seeds
        ]
        llm.engine.add(holder)
        try:
            llm.engine.run(strings)
        finally:
            llm.engine.abort(holder)
        drawn += strings
        meter.add(len(strings) * NUM_DRAWN_TOKENS)
    return drawn


def judge_counts(
    exact: ExactDistribution, drawn: Sequence[Request], threshold: float
) -> Distribution:
    """Return the result of the test of drawn strings against the exact distribution.

    The test fails if its p-value is below ``threshold``.
    """
    counts = Counter(exact.cell(request.output[:NUM_TESTED_TOKENS]) for request in drawn)
    impossible = counts.pop(None, 0)
    observed = [float(counts[cell]) for cell in exact.cells]
    expected = [p * sum(observed) for p in exact.cells.values()]
    merged = merge_small(observed, expected)
    statistic, freedom = chi_square(*merged)
    return Distribution(
        prompt=exact.prompt.id,
        samples=len(drawn),
        cells=len(merged[0]),
        statistic=statistic,
        freedom=freedom,
        p_value=p_value(statistic, freedom),
        threshold=threshold,
        impossible=impossible,
        drafted=sum(request.stats.drafted for request in drawn),
        accepted=sum(request.stats.accepted for request in drawn),
    )
