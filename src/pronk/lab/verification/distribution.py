"""Test of the distribution: sampled strings of several tokens against exact probabilities.

The acceptance rules ``"rejection"`` and ``"block"`` accept draft tokens at random, so only this
check tests them. The seed determines the strings: a repeated run has the same verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pronk import LLM, Proposer, SamplingParams
from pronk.drafting import derive_seed
from pronk.lab.verification.plain_decoding import rounding, score_next
from pronk.lab.verification.prompts import NamedPrompt, ProgressMeter, VerifySettings
from pronk.serving import Request

# Options with which the tested strings are sampled. With a small top_k, both acceptance and
# rejection are frequent.
DRAW = SamplingParams(temperature=1.0, top_k=4, ignore_eos=True)

NUM_TESTED_TOKENS = 3  # length of a string in tokens
# Number of letters at a position: the likeliest tokens, which cells tell apart. All other tokens
# are OTHER. There are 15 cells (see ExactDistribution): 1 + 2 + 4 end with OTHER, 8 have 3 letters.
LETTERS = 2
OTHER = -1  # last element of a cell: any token but the two likeliest, with any tokens after it

# Parts of the extended prompt … X abcd X efgh X ijkl X mnop X, see `choose_extended`.
_REPEATED = 12  # tokens in X, the end of the original prompt
_ROUNDS = 4  # number of continuations (abcd, efgh …), each followed by X
_CONTINUED = 3  # tokens in bcd: sampled after the first token a, which _extend chooses
# A prompt with a cell of at least this probability is skipped: nearly all strings would be equal.
_CERTAIN = 0.95

Cell = tuple[int, ...]


@dataclass(frozen=True)
class ExactDistribution:
    """Probabilities of the strings that :data:`DRAW` samples after a prompt.

    A cell is a set of strings: ``(a, b, c)``, ``(a, b, OTHER)``, ``(a, OTHER)`` or ``(OTHER,)``.
    Each letter is one of the two likeliest tokens after the tokens before it.
    """

    prompt: NamedPrompt
    cells: dict[Cell, float]  # probability of each cell, a set of strings
    # For each prefix of 0 to 2 letters: the tokens that DRAW can sample after it.
    possible: dict[Cell, frozenset[int]]
    # How well strings reveal a wrong temperature: the expected variance of the scaled logits,
    # summed over positions. This is the Fisher information about the inverse temperature, 0 for a
    # certain or a uniform distribution.
    information: float = 0.0

    @classmethod
    def after(cls, llm: LLM, prompt: NamedPrompt) -> ExactDistribution:
        """Compute the distribution of strings after ``prompt`` from logits, without the sampler.

        A token's probability is softmax(logits / temperature) over the ``top_k`` largest logits, in
        double precision. If ``llm`` is not exact, tokens that rounding may put among the ``top_k``
        count as possible, too.
        """
        cells: dict[Cell, float] = {}
        possible: dict[Cell, frozenset[int]] = {}
        information = 0.0
        prefixes: dict[Cell, float] = {(): 1.0}
        for _ in range(NUM_TESTED_TOKENS):
            scored = score_next(llm, prompt.ids, list(prefixes), DRAW)
            longer: dict[Cell, float] = {}
            for (prefix, mass), recorder in zip(prefixes.items(), scored, strict=True):
                logits = recorder.logits.astype(np.float64)
                likely = np.argsort(-logits, kind="stable")[: DRAW.top_k]
                scaled = logits[likely] / DRAW.temperature
                probs = np.exp(scaled - scaled[0])
                probs /= probs.sum()
                information += mass * float(probs @ (scaled - probs @ scaled) ** 2)
                letter_probs = probs[:LETTERS].tolist()
                # Rounding may raise the token's logit and lower the smallest of the top k: twice
                # the error of one logit.
                slack = 0.0 if llm.exact else 2 * rounding(llm, float(np.abs(logits).max()))
                reachable = np.flatnonzero(logits >= logits[likely[-1]] - slack)
                possible[prefix] = frozenset(reachable.tolist())
                letters = likely[:LETTERS].tolist()
                for token, prob in zip(letters, letter_probs, strict=True):
                    longer[*prefix, token] = mass * prob
                cells[*prefix, OTHER] = mass * (1.0 - sum(letter_probs))
            prefixes = longer
        return cls(prompt, cells | prefixes, possible, information)

    def cell(self, string: Sequence[int]) -> Cell | None:
        """Return the cell of a string of ``NUM_TESTED_TOKENS`` tokens; ``None``: probability 0."""
        cell: Cell = ()
        for token in string:
            if token not in self.possible[cell]:
                return None
            if (*cell, token) not in self.possible and (*cell, token) not in self.cells:
                return *cell, OTHER
            cell = (*cell, token)
        return cell


def choose_extended(llm: LLM, prompts: Sequence[NamedPrompt]) -> ExactDistribution | None:
    """Extend all prompts, and return the distribution after the most informative one.

    ``None`` if no prompt can be extended, or if after each of them the strings are nearly certain.

    A prompt ``… X`` becomes ``… X abcd X efgh X ijkl X mnop X``. Each continuation of ``X`` begins
    with another of the likeliest tokens and goes on with tokens sampled by plain decoding. Drafters
    that copy from the text can therefore propose most tokens with which a string begins.
    """
    extended = (_extend(llm, prompt) for prompt in prompts)
    candidates = [ExactDistribution.after(llm, prompt) for prompt in extended if prompt is not None]
    uncertain = [exact for exact in candidates if max(exact.cells.values()) < _CERTAIN]
    return max(uncertain, key=lambda exact: exact.information, default=None)


def _extend(llm: LLM, prompt: NamedPrompt) -> NamedPrompt | None:
    repeated = prompt.ids[-_REPEATED:]
    text = list(prompt.ids)
    used = set[int]()
    for round_ in range(_ROUNDS):
        if len(text) + _CONTINUED + 1 + len(repeated) + NUM_TESTED_TOKENS + 1 > llm.config.context:
            break
        (recorder,) = score_next(llm, text, [[]], DRAW)
        likely = np.argsort(-recorder.logits, kind="stable")[:_ROUNDS].tolist()
        first = next((token for token in likely if token not in used), likely[0])
        used.add(first)
        params = SamplingParams(**DRAW.to_dict() | {"max_tokens": _CONTINUED, "seed": round_})
        done = llm.generate([*text, first], params, drafter="autoregressive")
        text += [first, *done.token_ids, *repeated]
    if len(text) + NUM_TESTED_TOKENS + 1 > llm.config.context:
        return None
    return NamedPrompt(prompt.id, text)


# Tokens per drawn string: one more than the tested tokens, because a request's last token is never
# a draft token.
NUM_DRAWN_TOKENS = NUM_TESTED_TOKENS + 1
# Number of strings in a batch of draw(). Their requests share the KV blocks of the prompt with one
# more request, which runs as long as the batch and so keeps the blocks.
_STRINGS_PER_HOLDER = 240

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


def merge_small(
    observed: Sequence[float], expected: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Merge cells, smallest expected count first, until each expects at least :data:`MIN_EXPECTED`.

    Returns the observed and the expected count of each merged cell. All cells become one if the
    total is too small.
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
    """Return Pearson's chi-square statistic and its degrees of freedom.

    The statistic is ``Σ (observed - expected)² / expected``, the degrees of freedom are the number
    of cells - 1. Expected counts must be above 0.
    """
    statistic = sum(
        (count - mean) ** 2 / mean for count, mean in zip(observed, expected, strict=True)
    )
    return statistic, len(observed) - 1


def p_value(statistic: float, freedom: int) -> float:
    """Return the probability of a statistic at least this large by chance; 1 if ``freedom`` is 0.

    This is the regularized upper incomplete gamma function ``Q(freedom / 2, x)`` with ``x =
    statistic / 2`` (SciPy, which has this function, is not a run-time dependency)::

        Q(0, x) = 0
        Q(1/2, x) = erfc(sqrt(x))
        Q(a + 1, x) = Q(a, x) + x^a e^-x / gamma(a + 1)
    """
    if freedom < 1 or statistic <= 0.0:
        return 1.0
    x = statistic / 2
    odd = freedom % 2
    terms: list[float] = []
    for i in range(freedom // 2):
        a = i + odd / 2
        terms.append(math.exp(a * math.log(x) - x - math.lgamma(a + 1.0)))
    return min(1.0, odd * math.erfc(math.sqrt(x)) + math.fsum(terms))
