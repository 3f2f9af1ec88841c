"""What a draft model chooses in the target's place: the target's choice, how sure it is, and the law of its draws."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quick_noise
from chi_square import p_value
from pronk.kernels.library import Kernels, candidates
from pronk.sampling.noise import gumbel_noise, rejection_noise, rejection_uniform
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import DraftToken, Sampler
from sampling.test_sampler import VOCAB, sampler

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 1e-5},
    "top_k": {"temperature": 1.3, "top_k": 4},
    "top_p": {"temperature": 1.2, "top_p": 0.6},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    "bias": {"temperature": 0.9, "logit_bias": {2: 4.0, 8: -100.0}},
    "bans": {"bad_words": ["given as tokens"], "min_tokens": 9},
    "all": {
        "temperature": 1.0,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.3,
        "logit_bias": {2: 1.0},
        "bad_words": ["given as tokens"],
        "min_tokens": 5,
    },
}
BY = pytest.mark.parametrize("by", [None, *candidates()], ids=lambda by: "torch" if by is None else by.name)
SAMPLING = [name for name in OPTIONS if OPTIONS[name].get("temperature", 0) > 0]


def random_logits(seed: int, *, missing: float = 0.0) -> Tensor:
    """Logits of a model, some of which it does not have."""
    dice = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(VOCAB, generator=dice)
    return logits.masked_fill(torch.rand(VOCAB, generator=dice) < missing, -math.inf)


def made(found: DraftToken | None) -> DraftToken:
    assert found is not None
    return found


@BY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_under_the_coupled_rule_it_is_the_target_s_choice(options: str, dtype: torch.dtype, by: Kernels | None) -> None:
    one = sampler(seed=5, kernels=by, **OPTIONS[options])
    for seed in range(80):
        logits = random_logits(seed, missing=0.3 * (seed % 2)).to(dtype)
        before = logits.clone()
        guess = made(one.draft_token(logits, root=seed % 7))
        assert guess.token == one.choose(logits.clamp(min=-1e20))
        assert guess.q is None
        assert torch.equal(logits, before)
        assert len(one.context) == 2 + seed
        one.advance((guess.token, 6, 9)[seed % 3])


def test_neither_root_nor_draw_matters_where_nothing_is_drawn() -> None:
    one = sampler(temperature=0.9, seed=3)
    draft_tokens = [
        made(one.draft_token(random_logits(1), root, draw=draw)) for root in (0, 1, 9) for draw in (True, False)
    ]
    assert len({(guess.token, guess.confidence) for guess in draft_tokens}) == 1


def test_confidence_is_the_probability_of_the_likeliest_token() -> None:
    logits = torch.tensor([0.5, 0.2, 0.3]).log()
    guess = made(sampler(vocab=3).draft_token(logits, 0))
    assert (guess.token, guess.confidence) == (0, pytest.approx(0.5))
    assert guess.ranked(2) == [(0, pytest.approx(0.5)), (2, pytest.approx(0.3))]
    assert [token for token, _ in guess.ranked(9)] == [0, 2, 1]
    banned = made(sampler(vocab=3, logit_bias={0: -100.0}).draft_token(logits, 0))
    assert (banned.token, banned.confidence) == (2, pytest.approx(0.6))


def test_with_noise_it_is_its_share_of_the_noisy_scores() -> None:
    probs = torch.tensor([0.5, 0.2, 0.3])
    guess = made(sampler(vocab=3, temperature=0.5, seed=4).draft_token(probs.log(), 0))
    weights = (2 * probs.log().double() + gumbel_noise(4, 2, torch.arange(3))).exp()
    order = weights.argsort(descending=True).tolist()
    shares = (weights / weights.sum())[order].tolist()
    assert guess.ranked(3) == [(token, pytest.approx(share)) for token, share in zip(order, shares, strict=True)]
    assert (guess.token, guess.confidence) == (order[0], pytest.approx(shares[0]))


@pytest.mark.parametrize("options", SAMPLING)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_where_guesses_are_drawn_q_is_the_law_of_the_draft(options: str, rule: str) -> None:
    one = sampler(rule=rule, **OPTIONS[options])
    for seed in range(20):
        logits = random_logits(seed, missing=0.3)
        drawn = made(one.draft_token(logits, 1))
        assert drawn.q is not None
        assert torch.allclose(drawn.q, one.distribution(logits), rtol=1e-12, atol=0.0)
        assert drawn.q[logits == -math.inf].sum() == 0
        assert drawn.q[drawn.token] > 0
        assert drawn.confidence == pytest.approx(float(drawn.q.max()))  # whatever was drawn
        likeliest = made(one.draft_token(logits, 1, draw=False))
        assert likeliest.q is None
        assert likeliest.token == int(drawn.q.argmax())
        assert likeliest.confidence == drawn.confidence
        assert likeliest.ranked(5) == drawn.ranked(5)
        assert all(share == pytest.approx(float(drawn.q[token])) for token, share in likeliest.ranked(5))
        one.advance(drawn.token)


def draws(count: int, **options: Any) -> list[int]:
    """Guesses with as many seeds, at the same place of the same text."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    params = SamplingParams(**{"temperature": 1.0, "rule": "rejection", **options})
    return [made(Sampler(params, seed, (1, 2), 4).draft_token(logits, 1)).token for seed in range(count)]


@pytest.mark.usefixtures("quickly_drawn")
@pytest.mark.parametrize(
    ("options", "law"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"rule": "block"}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [0.16, 0.09, 0.04, 0.01]),
        ({"top_k": 2}, [4.0, 3.0, 0.0, 0.0]),
        ({"logit_bias": {0: -100.0}}, [0.0, 3.0, 2.0, 1.0]),
    ],
    ids=str,
)
def test_draws_have_the_law_q(options: dict[str, Any], law: list[float]) -> None:
    assert p_value(np.bincount(draws(3000, **options), minlength=4).tolist(), law) > 1e-3


@pytest.mark.usefixtures("quickly_drawn")
def test_draws_of_different_places_and_steps_are_independent() -> None:
    """Of two positions in a step, and of two steps (roots) at the same position: all pairs occur by their products."""
    law = torch.tensor([0.5, 0.3, 0.2])
    pairs = {"positions": torch.zeros(3, 3), "roots": torch.zeros(3, 3), "trial": torch.zeros(3, 4)}
    for seed in range(3000):
        one = sampler(vocab=3, temperature=1.0, seed=seed, rule="rejection")
        first, other = (made(one.draft_token(law.log(), root)).token for root in (1, 0))
        pairs["roots"][first, other] += 1
        pairs["trial"][first, int(4 * rejection_uniform(seed, 2, 0))] += 1
        one.advance(first)
        pairs["positions"][first, made(one.draft_token(law.log(), 1)).token] += 1
    for name, counts in pairs.items():
        second = torch.full((4,), 0.25) if name == "trial" else law
        assert p_value(counts, law[:, None] * second) > 1e-3, name


@pytest.mark.usefixtures("quickly_drawn")
def test_draws_are_independent_of_the_target_s_own() -> None:
    """Neither its draw after a rejection nor the coupled rule's noise says what was guessed."""
    law = torch.tensor([0.5, 0.3, 0.2])
    ids = torch.arange(3)
    counts = [torch.zeros(3, 3), torch.zeros(3, 3)]
    for seed in range(3000):
        token = made(sampler(vocab=3, temperature=1.0, seed=seed, rule="rejection").draft_token(law.log(), 1)).token
        for table, noise in zip(
            counts, (rejection_noise(seed, 2, ids), quick_noise.gumbel_noise(seed, 2, ids)), strict=True
        ):
            table[token, int((law.log().double() + noise).argmax())] += 1
    for table in counts:
        assert p_value(table, law[:, None] * law) > 1e-3


def test_the_same_step_gives_the_same_draw() -> None:
    one = sampler(temperature=1.5, seed=3, rule="rejection")
    tokens = {made(one.draft_token(random_logits(2), 1)).token for _ in range(5)}
    assert len(tokens) == 1
    assert len({made(one.draft_token(random_logits(2), root)).token for root in range(40)}) > 3


RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0},
    "rejection": {"temperature": 1.0, "rule": "rejection"},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_there_is_no_guess_without_a_token_or_with_numbers_that_overflow(rule: dict[str, Any]) -> None:
    for bad in (math.inf, math.nan):
        assert sampler(**rule).draft_token(random_logits(0).index_fill(0, torch.tensor([7]), bad), 0) is None
    nothing = torch.full((VOCAB,), -math.inf)
    assert sampler(**rule).draft_token(nothing, 0) is None
    only = nothing.index_fill(0, torch.tensor([5, 17]), 1.0)
    banning = sampler(bad_words=["given as tokens"], min_tokens=2, **rule)
    assert banning.draft_token(only, 0) is None  # of the draft's tokens; the target has others
    assert banning.draft_token(only, 0, draw=False) is None
    assert made(banning.draft_token(only.index_fill(0, torch.tensor([8]), -50.0), 0)).token == 8


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_that_the_draft_lacks_are_never_guessed(options: str, rule: dict[str, Any]) -> None:
    both = {**OPTIONS[options], **rule, "logit_bias": dict.fromkeys(range(0, VOCAB, 3), 100.0)}
    for seed in range(25):
        one, logits = sampler(seed=seed, **both), random_logits(seed, missing=0.7)
        if bool((logits[[token for token in range(VOCAB) if token not in (3, 5, 17)]] == -math.inf).all()):
            continue
        guess = made(one.draft_token(logits, 1))
        assert logits[guess.token] > -math.inf
        assert 0 < guess.confidence <= 1 + 1e-12
        ranked = guess.ranked(VOCAB)
        assert ranked[0][0] == (guess.token if guess.q is None else int(guess.q.argmax()))
        assert all(logits[token] > -math.inf for token, _ in ranked)
        shares = [share for _, share in ranked]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1.0)
