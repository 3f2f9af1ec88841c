"""Draft tokens from a draft model's logits: the target's choice, its confidence, and the
distribution of samples.
"""

import math
from typing import Any

import numpy as np
import pytest

from chi_square import p_value
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.kernels.library import Kernels
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.noise import gumbel_noise, rejection_noise, rejection_uniform
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import DraftToken, Sampler
from sampling.test_sampler import BY, VOCAB, sampler
from sampling.test_sampler import OPTIONS as SAMPLER_OPTIONS

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
    "all": SAMPLER_OPTIONS[-1],
}


def random_logits(seed: int, *, missing: float = 0.0) -> Array:
    """Return random logits, a share ``missing`` of which is -inf."""
    dice = np.random.default_rng(seed)
    logits = 3 * dice.standard_normal(VOCAB, np.float32)
    logits[dice.random(VOCAB) < missing] = -math.inf
    return logits


def draft_token(by: Sampler, logits: Array, root: int, *, draw: bool = True) -> DraftToken:
    found = by.draft_token(logits, root, draw=draw)
    assert found is not None
    return found


@BY
@pytest.mark.parametrize("options", OPTIONS)
def test_a_draft_vocabulary_is_like_all_tokens_without_the_others(
    options: str, by: Kernels | None
) -> None:
    one, other = (sampler(seed=5, kernels=by, **OPTIONS[options]) for _ in range(2))
    for seed in range(40):
        ids = np.random.default_rng(seed).permutation(VOCAB)[: VOCAB - 2].astype(np.int32)
        logits = random_logits(seed)[ids]
        whole = np.full(VOCAB, -math.inf, np.float32)
        whole[ids] = logits
        found = one.draft_token(logits, 3, ids=ids)
        wanted = other.draft_token(whole, 3)
        assert found is not None
        assert wanted is not None
        assert found.token == wanted.token
        assert found.confidence == pytest.approx(wanted.confidence, rel=1e-6)
        assert [token for token, _ in found.top_tokens(3)] == [
            token for token, _ in wanted.top_tokens(3)
        ]
        for each in (one, other):
            each.advance(found.token)


@pytest.mark.few(37)
@BY
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_coupled_rule_drafts_the_choice_of_the_target(
    options: str, dtype: DType, by: Kernels | None
) -> None:
    one = sampler(seed=5, kernels=by, **OPTIONS[options])
    for seed in range(80):
        logits = random_logits(seed, missing=0.3 * (seed % 2)).astype(dtype)
        before = logits.copy()
        draft = draft_token(one, logits, root=seed % 7)
        assert draft.token == one.choose(np.maximum(logits.astype(FLOAT32), -1e20))
        assert draft.q is None
        assert np.array_equal(logits, before)
        assert len(one.context) == 2 + seed
        one.advance((draft.token, 6, 9)[seed % 3])


def test_coupled_rule_ignores_root_and_draw() -> None:
    one = sampler(temperature=0.9, seed=3)
    drafts = [
        draft_token(one, random_logits(1), root, draw=draw)
        for root in (0, 1, 9)
        for draw in (True, False)
    ]
    assert len({(draft.token, draft.confidence) for draft in drafts}) == 1


def test_confidence_is_the_probability_of_the_likeliest_token() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.3], np.float32))
    draft = draft_token(sampler(vocab=3), logits, 0)
    assert (draft.token, draft.confidence) == (0, pytest.approx(0.5))
    assert draft.top_tokens(2) == [(0, pytest.approx(0.5)), (2, pytest.approx(0.3))]
    assert [token for token, _ in draft.top_tokens(9)] == [0, 2, 1]
    banned = draft_token(sampler(vocab=3, logit_bias={0: -100.0}), logits, 0)
    assert (banned.token, banned.confidence) == (2, pytest.approx(0.6))


def test_confidence_includes_the_noise_of_the_coupled_rule() -> None:
    log_probs = np.log(np.array([0.5, 0.2, 0.3], np.float32))
    draft = draft_token(sampler(vocab=3, temperature=0.5, seed=4), log_probs, 0)
    weights = np.exp(2 * log_probs + gumbel_noise(4, 2, np.arange(3)))
    order = np.argsort(-weights).tolist()
    shares = (weights / weights.sum())[order].tolist()
    assert draft.top_tokens(3) == [
        (token, pytest.approx(share)) for token, share in zip(order, shares, strict=True)
    ]
    assert (draft.token, draft.confidence) == (order[0], pytest.approx(shares[0]))


@pytest.mark.parametrize(
    "options", [name for name in OPTIONS if OPTIONS[name].get("temperature", 0) > 0]
)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_draft_token_reports_its_distribution(options: str, rule: str) -> None:
    one = sampler(rule=rule, **OPTIONS[options])
    for seed in range(20):
        logits = random_logits(seed, missing=0.3)
        drawn = draft_token(one, logits, 1)
        assert drawn.q is not None
        assert np.allclose(drawn.q, one.distribution(logits), rtol=1e-12, atol=0.0)
        assert drawn.q[logits == -math.inf].sum() == 0
        assert drawn.q[drawn.token] > 0
        assert drawn.confidence == pytest.approx(float(drawn.q.max()))
        likeliest = draft_token(one, logits, 1, draw=False)
        assert likeliest.q is None
        assert likeliest.token == int(drawn.q.argmax())
        assert likeliest.confidence == drawn.confidence
        assert likeliest.top_tokens(5) == drawn.top_tokens(5)
        assert all(
            share == pytest.approx(float(drawn.q[token]))
            for token, share in likeliest.top_tokens(5)
        )
        one.advance(drawn.token)


def draws(count: int, **options: Any) -> list[int]:
    """Return draft tokens of ``count`` seeds at the same position of the same text."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    params = SamplingParams(**{"temperature": 1.0, "rule": "rejection", **options})
    return [
        draft_token(Sampler(params, seed, TokenContext((1, 2)), 4), logits, 1).token
        for seed in range(count)
    ]


@pytest.mark.parametrize(
    ("options", "q"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"rule": "block"}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [0.16, 0.09, 0.04, 0.01]),
        ({"top_k": 2}, [4.0, 3.0, 0.0, 0.0]),
        ({"logit_bias": {0: -100.0}}, [0.0, 3.0, 2.0, 1.0]),
    ],
    ids=str,
)
def test_draft_tokens_have_the_distribution_q(options: dict[str, Any], q: list[float]) -> None:
    assert p_value(np.bincount(draws(3000, **options), minlength=4), q) > 1e-3


def test_samples_are_independent() -> None:
    """A draft token is independent of the next position, of another step and of the target's own
    random numbers.
    """
    q = np.array([0.5, 0.3, 0.2], np.float32)
    ids = np.arange(3)
    log_q = np.log(q)
    pairs = {
        name: np.zeros((3, 3))
        for name in ("positions", "steps", "target after a rejection", "coupled target")
    }
    pairs["trial"] = np.zeros((3, 4))
    for seed in range(3000):
        one = sampler(vocab=3, temperature=1.0, seed=seed, rule="rejection")
        first, other = (draft_token(one, log_q, root).token for root in (1, 0))
        pairs["steps"][first, other] += 1
        pairs["trial"][first, int(4 * rejection_uniform(seed, 2, 0))] += 1
        rejection = rejection_noise(seed, 2, ids)
        coupled = gumbel_noise(seed, 2, ids)
        pairs["target after a rejection"][first, int((log_q + rejection).argmax())] += 1
        pairs["coupled target"][first, int((log_q + coupled).argmax())] += 1
        one.advance(first)
        pairs["positions"][first, draft_token(one, log_q, 1).token] += 1
    for name, counts in pairs.items():
        second = np.full(4, 0.25) if name == "trial" else q
        assert p_value(counts, q[:, None] * second) > 1e-3, name


def test_the_same_step_gives_the_same_draft_token() -> None:
    one = sampler(temperature=1.5, seed=3, rule="rejection")
    tokens = {draft_token(one, random_logits(2), 1).token for _ in range(5)}
    assert len(tokens) == 1
    assert len({draft_token(one, random_logits(2), root).token for root in range(40)}) > 3


RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0},
    "rejection": {"temperature": 1.0, "rule": "rejection"},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_no_draft_token_from_bad_logits_or_banned_tokens(rule: dict[str, Any]) -> None:
    for bad in (math.inf, math.nan):
        logits = random_logits(0)
        logits[7] = bad
        assert sampler(**rule).draft_token(logits, 0) is None
    nothing = np.full(VOCAB, -math.inf, np.float32)
    assert sampler(**rule).draft_token(nothing, 0) is None
    only = nothing.copy()
    only[[5, 17]] = 1.0
    banning = sampler(bad_words=["given as tokens"], min_tokens=2, **rule)
    assert banning.draft_token(only, 0) is None
    assert banning.draft_token(only, 0, draw=False) is None
    only[8] = -50.0
    assert draft_token(banning, only, 0).token == 8


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_outside_the_draft_vocabulary_are_never_drafted(
    options: str, rule: dict[str, Any]
) -> None:
    both = {**OPTIONS[options], **rule, "logit_bias": dict.fromkeys(range(0, VOCAB, 3), 100.0)}
    for seed in range(25):
        one = sampler(seed=seed, **both)
        logits = random_logits(seed, missing=0.7)
        if bool(
            (
                logits[[token for token in range(VOCAB) if token not in (3, 5, 17)]] == -math.inf
            ).all()
        ):
            continue
        draft = draft_token(one, logits, 1)
        assert logits[draft.token] > -math.inf
        assert 0 < draft.confidence <= 1 + 1e-12
        ranked = draft.top_tokens(VOCAB)
        assert ranked[0][0] == (draft.token if draft.q is None else int(draft.q.argmax()))
        assert all(logits[token] > -math.inf for token, _ in ranked)
        shares = [share for _, share in ranked]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1.0)
