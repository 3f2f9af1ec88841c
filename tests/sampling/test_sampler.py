"""The sampler's choice: against plain processors and transformers', and the distribution of
samples.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from chi_square import p_value
from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, DType
from pronk.kernels.library import Kernels, candidates
from pronk.sampling.logits_processors import BadWords, BannedTokens, Penalties, TokenContext
from pronk.sampling.noise import gumbel_noise
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import NotFiniteError, Sampler
from pronk.sampling.truncation import likeliest, truncate
from quick_noise import noise_over
from softmax import softmax
from tiny_models import context_of

VOCAB = 40
ENDS = (3, 17)
BAD_WORDS = ((5,), (6, 7), (6, 6, 8), (9, 9))


def sampler(
    prompt: Sequence[int] = (1, 2),
    seed: int = 0,
    vocab: int = VOCAB,
    kernels: Kernels | None = None,
    **options: Any,
) -> Sampler:
    bad = BAD_WORDS if options.get("bad_words") else ()
    return Sampler(
        SamplingParams(**options),
        seed,
        TokenContext(prompt),
        vocab,
        banned=BannedTokens(ENDS, bad),
        kernels=kernels,
    )


def random_logits(dice: np.random.Generator | int) -> Array:
    return 3 * np.random.default_rng(dice).standard_normal(VOCAB, np.float32)


def scores_of(logits: Array, made: Sampler) -> list[float]:
    """Apply plain processors token by token, in the exact order; -inf for excluded tokens."""
    p = made.params
    text = context_of(made)
    place = made.context.num_prompt
    prompt = text[:place]
    output = text[place:]
    scores = [float(value) for value in logits]
    for token in range(len(scores)):
        if token in prompt or token in output:
            scores[token] *= (
                p.repetition_penalty if scores[token] <= 0 else 1 / p.repetition_penalty
            )
        scores[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty * (
            token in output
        )
        scores[token] += (p.logit_bias or {}).get(token, 0.0)
    for word in next((each.words for each in made.processors if isinstance(each, BadWords)), []):
        if context_of(made)[len(made.context) - len(word) + 1 :] == word[:-1]:
            scores[word[-1]] = -math.inf
    if len(output) < p.min_tokens:
        for end in ENDS:
            scores[end] = -math.inf
    if p.greedy:
        return scores
    return truncated([score / p.temperature for score in scores], p)


def truncated(scores: list[float], p: SamplingParams) -> list[float]:
    """Apply top-k, top-p and min-p."""
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p < 1:
        weights = [math.exp(scores[token] - scores[order[0]]) for token in order]
        before = [sum(weights[:i]) / sum(weights) for i in range(len(order))]
        order = [token for token, share in zip(order, before, strict=True) if share < p.top_p]
    if p.min_p > 0:
        order = [token for token in order if math.exp(scores[token] - scores[order[0]]) >= p.min_p]
    return [score if token in order else -math.inf for token, score in enumerate(scores)]


def slow_choice(logits: Array, made: Sampler) -> int:
    scores = np.array(scores_of(logits, made))
    if made.params.greedy:
        return int(scores.argmax())
    return int(
        (scores + gumbel_noise(made.seed, len(made.context), np.arange(len(scores)))).argmax()
    )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 2.5, "top_k": 1},
    {"temperature": 2.5, "top_k": 5},
    {"temperature": 1.0, "top_k": VOCAB},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 1.3, "top_p": 0.5},
    {"temperature": 1.3, "top_p": 0.01},
    {"temperature": 1.3, "top_p": 0.999},
    {"temperature": 1.3, "min_p": 0.2},
    {"temperature": 1.3, "min_p": 1.0},
    {"temperature": 1.8, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4},
    {"presence_penalty": 1.9},
    {"presence_penalty": -1.9},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -0.8},
    {"logit_bias": {4: 5.0, 11: -100.0, 0: 3.0}},
    {"logit_bias": {4: 2.0}, "temperature": 0.8},
    {"min_tokens": 6, "logit_bias": {3: 20.0, 17: 20.0}},
    {"bad_words": ["b"], "logit_bias": {5: 9.0, 6: 9.0, 7: 8.0, 8: 7.0, 9: 9.0}},
    {
        "temperature": 1.5,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {6: 3.0, 9: 3.0, 3: 3.0},
        "min_tokens": 5,
        "bad_words": ["b"],
    },
]


BY = pytest.mark.parametrize(
    "by", [None, *candidates()], ids=lambda by: "numpy" if by is None else by.name
)
# All instruction sets for options that the kernels handle themselves, otherwise one.
CHOICES = [
    pytest.param(options, by, id=f"{options}-{'numpy' if by is None else by.name}")
    for options in OPTIONS
    for by in (None, *candidates()[: 1 if set(options) - {"temperature"} else None])
]


@pytest.mark.parametrize(("options", "by"), CHOICES)
def test_choice_equals_the_slow_one(options: dict[str, Any], by: Kernels | None) -> None:
    dice = np.random.default_rng(1)
    seen = Counter[int]()
    for seed in range(6):
        made = sampler([1, 2, 9, 6, 30 + seed], seed, kernels=by, max_tokens=50, **options)
        for _ in range(12):
            logits = random_logits(dice)
            before = logits.copy()
            token = made.choose(logits)
            assert token == slow_choice(logits, made)
            assert np.array_equal(logits, before)
            made.advance(token)
            seen[token] += 1
    assert len(seen) > 1


def test_a_choice_among_many_tokens_depends_on_all_of_their_noise() -> None:
    """Whether one token towers above the rest, or their noise decides, and with equal logits."""
    dice = np.random.default_rng(4)
    num_by_noise = 0
    for number in range(90):
        vocab_size = int(dice.integers(1, 6000))
        spread = (0.0, 0.05, 1.0, 5.0, 30.0)[number % 5]
        temperature = (0.1, 0.7, 1.0, 3.0)[number % 4]
        logits = np.round(spread * dice.standard_normal(vocab_size), 1).astype(np.float32)
        scaled = logits / np.float32(temperature)
        noise = gumbel_noise(number, 1, np.arange(vocab_size))
        wanted = int((scaled.astype(np.float64) + noise).argmax())
        num_by_noise += wanted != int(logits.argmax())
        params = SamplingParams(temperature=temperature)
        for kernels in candidates():
            made = Sampler(params, number, TokenContext([3]), vocab_size, kernels=kernels)
            assert made.choose(logits) == wanted
    assert 30 < num_by_noise < 80


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rollback_undoes_advance(options: dict[str, Any]) -> None:
    dice = random.Random(2)
    numbers = np.random.default_rng(2)
    made, fresh = (sampler([1, 2, 6, 9], 7, max_tokens=50, **options) for _ in range(2))
    for _ in range(30):
        draft_tokens = [
            dice.choice((1, 4, 5, 6, 6, 7, 8, 9, 9, 3)) for _ in range(dice.randrange(5))
        ]
        for token in draft_tokens:
            made.advance(token)
        assert made.context.num_generated == fresh.context.num_generated + len(draft_tokens)
        made.rollback(len(draft_tokens))
        made.rollback(0)
        logits = random_logits(numbers)
        token = fresh.choose(logits)
        assert made.choose(logits) == token
        for one in (made, fresh):
            one.advance(token)
        assert context_of(made) == context_of(fresh)
        for one, other in zip(made.processors, fresh.processors, strict=True):
            if isinstance(one, Penalties) and isinstance(other, Penalties):
                assert np.array_equal(one.counts, other.counts)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[7], OPTIONS[-1]], ids=str)
def test_logits_of_any_dtype(options: dict[str, Any], dtype: DType) -> None:
    made = sampler(max_tokens=50, **options)
    for seed in range(20):
        logits = random_logits(seed).astype(dtype)
        assert made.choose(logits) == made.choose(logits.astype(FLOAT32))


@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e-46, 1e-38, 1e-20])
@pytest.mark.parametrize("option", ["top_p", "min_p", "temperature"])
def test_the_smallest_values_do_not_underflow(option: str, value: float) -> None:
    """A tiny temperature or top-p is greedy; a tiny min-p keeps all tokens."""
    options = {"temperature": 1.0, option: value}
    for seed in range(20):
        logits = 10 * random_logits(seed)
        made = sampler(seed=seed, **options)
        plain = sampler(seed=seed, temperature=1.0)
        assert made.choose(logits) == (
            plain.choose(logits) if option == "min_p" else int(logits.argmax())
        )


@BY
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_logits_that_are_not_finite_are_refused(number: float, by: Kernels | None) -> None:
    for options in (
        {},
        {"temperature": 1.0},
        {"temperature": 0.5, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 9.0, "top_k": 5},
        {"logit_bias": {3: 1.0}},
    ):
        for place in (0, 7, VOCAB - 1):
            logits = np.zeros(VOCAB, np.float32)
            logits[place] = number
            with pytest.raises(NotFiniteError):
                sampler(kernels=by, **options).choose(logits)


# Number of choices, of thousands computed as one array, that are checked with a Sampler for each
# seed.
ALONE = 150


def chosen_by(places: Sequence[tuple[int, int]], logits: Array, made: Sampler) -> Array:
    """Return the token chosen for each (seed, position) from the distribution of the sampler
    ``made``.
    """
    with np.errstate(divide="ignore"):
        return (np.log(made.distribution(logits)) + noise_over(places, len(logits))).argmax(1)


def choices(logits: Array, seeds: range, **options: Any) -> Array:
    """Return the token chosen for each seed."""
    vocab = len(logits)
    chosen = chosen_by([(seed, 2) for seed in seeds], logits, sampler(vocab=vocab, **options))
    alone = [sampler(seed=seed, vocab=vocab, **options).choose(logits) for seed in seeds[:ALONE]]
    assert chosen[:ALONE].tolist() == alone
    return chosen


def draws(logits: Array, count: int, **options: Any) -> Array:
    """Return how many of ``count`` seeds choose each token."""
    return np.bincount(choices(logits, range(count), **options), minlength=len(logits))


LOGITS = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 1.2], np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.2},
        {"temperature": 1.0, "logit_bias": {6: 3.0}, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_the_distribution_is_the_processed_softmax(options: dict[str, Any]) -> None:
    exact = softmax(scores_of(LOGITS, sampler(vocab=8, **options)))
    assert p_value(draws(LOGITS, 4000, **options), exact) > 1e-4


def test_another_temperature_is_detected() -> None:
    counts = draws(LOGITS, 4000, temperature=1.2)
    assert p_value(counts, softmax(LOGITS)) < 1e-4


def test_the_distribution_over_positions_of_one_seed() -> None:
    made = sampler(seed=99, vocab=8, temperature=1.0)
    chosen = chosen_by([(99, 2 + i) for i in range(4000)], LOGITS, made)
    for token in chosen[:ALONE].tolist():
        assert made.choose(LOGITS) == token
        made.advance(token)
    assert p_value(np.bincount(chosen, minlength=8), softmax(LOGITS)) > 1e-4


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 1.4, "top_p": 0.9}], ids=str
)
def test_two_tokens_in_a_row(options: dict[str, Any]) -> None:
    """Joint frequencies equal those of a Markov chain: two choices depend on each other by the
    logits alone.
    """
    table = 1.2 * np.random.default_rng(3).standard_normal((5, 5), np.float32)
    counts = np.zeros((5, 5))
    made = sampler([0], vocab=5, **options)
    firsts = chosen_by([(seed, 1) for seed in range(6000)], table[0], made)
    seconds = np.empty_like(firsts)
    for first in range(5):
        made.advance(first)
        seeds = np.flatnonzero(firsts == first)
        seconds[seeds] = chosen_by([(seed, 2) for seed in seeds.tolist()], table[first], made)
        made.rollback(1)
    for seed in range(ALONE):
        alone = sampler([0], seed, 5, **options)
        for token in (int(firsts[seed]), int(seconds[seed])):
            assert alone.choose(table[context_of(alone)[-1]]) == token
            alone.advance(token)
    np.add.at(counts, (firsts, seconds), 1)
    rows = np.stack([softmax(scores_of(row, sampler(vocab=5, **options))) for row in table])
    exact = rows[0][:, None] * rows
    likely = exact > 1e-3  # the chi-square test needs several draws per cell
    assert float(exact[likely].sum()) > 0.98
    lumped = [np.append(cells[likely], cells[~likely].sum()) for cells in (counts, exact)]
    assert (
        p_value(*(lumped if lumped[1][-1] * 6000 >= 5 else (counts[likely], exact[likely]))) > 1e-4
    )


def test_two_seeds_choose_independently() -> None:
    pairs = np.zeros((8, 8))
    one, other = (
        choices(LOGITS, range(start, start + 6000), temperature=2.0) for start in (0, 100_000)
    )
    np.add.at(pairs, (one, other), 1)
    exact = softmax(LOGITS / 2)
    assert p_value(pairs, exact[:, None] * exact[None]) > 1e-4


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("TemperatureLogitsWarper", (0.6,), {"temperature": 0.6}),
        ("TopKLogitsWarper", (7,), {"temperature": 1.0, "top_k": 7}),
        ("TopPLogitsWarper", (0.8,), {"temperature": 1.0, "top_p": 0.8}),
        ("TopPLogitsWarper", (0.3,), {"temperature": 1.0, "top_p": 0.3}),
        ("MinPLogitsWarper", (0.15,), {"temperature": 1.0, "min_p": 0.15}),
        ("RepetitionPenaltyLogitsProcessor", (1.4,), {"repetition_penalty": 1.4}),
        ("RepetitionPenaltyLogitsProcessor", (0.6,), {"repetition_penalty": 0.6}),
        ("NoBadWordsLogitsProcessor", ([list(word) for word in BAD_WORDS],), {"bad_words": ["b"]}),
        (
            "SequenceBiasLogitsProcessor",
            ({(4,): 3.0, (8,): -2.0},),
            {"logit_bias": {4: 3.0, 8: -2.0}},
        ),
    ],
)
def test_scores_equal_those_of_transformers(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    import torch
    import transformers

    processor = getattr(transformers, name)(*arguments)
    for seed in range(5):
        context = [6, 6, 9, seed, 2, *([6, 6] if seed % 2 else [9])]
        made = sampler(context, **options)
        logits = random_logits(seed)
        theirs = processor(torch.tensor([context]), torch.from_numpy(logits[None].copy()))[
            0
        ].numpy()
        ours = np.full(VOCAB, -math.inf, np.float32)
        if made.params.greedy:
            ours = made._process(logits)
        else:
            scores, ids = truncate(logits / made.params.temperature, made.params)
            ours[ids] = scores
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("vocab", "top_p"), [(600, 0.9), (600, 0.9999), (5000, 0.5), (5000, 0.99), (5000, 0.999999)]
)
def test_top_p_of_a_large_vocabulary(vocab: int, top_p: float) -> None:
    """Sorting the likeliest tokens only gives the result of sorting all, for flat and peaked
    logits.
    """
    for spread in (0.0, 0.1, 1.0, 4.0):
        logits = np.float32(spread) * np.random.default_rng(5).standard_normal(vocab, np.float32)
        made = sampler(vocab=vocab, temperature=1.0, top_p=top_p)
        scores, ids = truncate(logits, made.params)
        order = np.argsort(-logits, kind="stable")
        probs = softmax(logits[order])
        want = int((probs.cumsum() - probs < top_p).sum())
        assert abs(len(ids) - want) <= 1 + want // 100  # float32 and float64 sums differ
        assert np.array_equal(ids, np.sort(order[: len(ids)]))
        assert np.array_equal(scores, logits[ids])


@pytest.mark.parametrize("levels", [1, 3, 50, 10**6])
def test_likeliest_tokens_equal_a_full_sort(levels: int) -> None:
    """Of equal scores, the smallest ids come first; ``-inf`` is the lowest score."""
    scores = np.random.default_rng(levels).integers(levels, size=1000).astype(np.float32)
    scores[10:30] = -math.inf
    order = np.argsort(-scores, kind="stable")
    for count in (0, 1, 2, 500, 979, 980, 981, 999, 1000, 1001):
        assert np.array_equal(likeliest(scores, count), order[:count])
