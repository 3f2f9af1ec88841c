"""Acceptance rules with point-mass draft tokens: the exact distribution of outputs, and the random
numbers.

Sampled draft tokens are in ``test_sampled_drafts.py``.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

import pronk.sampling.sampler
import pronk.sampling.verify
from chi_square import p_value
from exact_distributions import (
    VOCAB,
    ExactDistribution,
    Source,
    String,
    Table,
    largest_error,
    outputs,
)
from pronk.base.arrays import Array
from pronk.base.errors import OptionError
from pronk.sampling.logits_processors import BannedTokens, TokenContext
from pronk.sampling.noise import (
    block_uniform,
    draft_noise,
    gumbel_noise,
    rejection_noise,
    rejection_uniform,
)
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import DraftSample, TokenTree
from pronk.sampling.verify import rejection_sample
from sampling.test_sampler import LOGITS, OPTIONS, random_logits, scores_of
from softmax import softmax


def trees(size: int) -> Iterator[TokenTree]:
    """Yield every tree over the vocabulary, with the children of a node in every order."""
    for parents in product(*(range(node) for node in range(1, size))):
        for tokens in product(range(VOCAB), repeat=size - 1):
            if len(set(zip(parents, tokens, strict=True))) == size - 1:
                yield TokenTree((0, *tokens), (-1, *parents))


def distribution_of(tree: TokenTree, table: Table, rule: str = "rejection") -> ExactDistribution:
    return outputs(rule, lambda *_: tree, table)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_small_tree_keeps_the_distribution(size: int, rule: str) -> None:
    every = list(trees(size))
    chosen = every if size < 5 else random.Random(0).sample(every, 300)
    tables = [Table(seed) for seed in range(4)]
    for count, tree in enumerate(chosen):
        assert (
            largest_error(distribution_of(tree, tables[count % 4], rule), tables[count % 4]) < 1e-12
        )


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_nodes_that_may_not_be_accepted_are_not_tried(rule: str) -> None:
    tree = TokenTree(
        (0, 1, 1, 2, 0, 2), (-1, 0, 0, 0, 0, 2), (True, False, True, False, True, True)
    )
    for seed in range(4):
        table = Table(seed)
        assert largest_error(distribution_of(tree, table, rule), table) < 1e-12
        assert distribution_of(tree, table, rule) == distribution_of(
            tree.keep([2, 4, 5]), table, rule
        )


def without_norm(p: Array, draft_tokens: Sequence[DraftSample], accepts: Any, draw: Any) -> int:
    p = p.copy()
    for j, (x, _) in enumerate(draft_tokens):
        if accepts(j, float(p[x])):
            return x
        p[x] = 0.0
    return draw(p / p.sum()) if bool(p.any()) else 0


def without_removal(p: Array, draft_tokens: Sequence[DraftSample], accepts: Any, draw: Any) -> int:
    for j, (x, _) in enumerate(draft_tokens):
        if accepts(j, float(p[x])):
            return x
    return draw(p)


def first_is_right(p: Array, draft_tokens: Sequence[DraftSample], accepts: Any, draw: Any) -> int:
    """Draw once; return the first draft token if any draft token was drawn."""
    token = draw(p)
    return draft_tokens[0][0] if token in [x for x, _ in draft_tokens] else token


@pytest.mark.parametrize("wrong", [without_norm, without_removal, first_is_right])
def test_wrong_rules_are_detected(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pronk.sampling.verify, "rejection_sample", wrong)
    assert max(largest_error(distribution_of(tree, Table(1)), Table(1)) for tree in trees(3)) > 0.02


def algorithm_4(grams: Sequence[String], table: Table, source: Source) -> String:
    """Run algorithm 4 of the lookahead paper, a loop over disjoint n-grams, line by line."""
    v = list(grams)
    o = list[int]()
    for i in range(len(grams[0])):
        p = table[tuple(o)].copy()
        for j, gram in enumerate(v):
            s = gram[i]
            if source.accepts(j, float(p[s])):
                o.append(s)
                v = [other for other in v[j:] if other[i] == s]
                break
            p[s] = 0.0
            p = p / p.sum()
        else:
            return (*o, source.draw(p))
    return (*o, source.draw(table[tuple(o)]))


def test_a_trie_of_ngrams_gives_the_distribution_of_algorithm_4() -> None:
    dice = random.Random(3)
    lengths = set[int]()
    for seed in range(40):
        table = Table(seed)
        grams = [tuple(dice.choices(range(VOCAB), k=3)) for _ in range(3)]
        nodes: dict[String, int] = {(): 0}
        tokens = [0]
        parents = [-1]
        for gram in grams:
            for end in range(1, 4):
                if gram[:end] not in nodes:
                    nodes[gram[:end]] = len(tokens)
                    tokens.append(gram[end - 1])
                    parents.append(nodes[gram[: end - 1]])
        want = defaultdict[String, float](float)
        source = Source()
        for _ in source.runs():
            output = algorithm_4(grams, table, source)
            want[output] += source.weight
        got = distribution_of(TokenTree(tuple(tokens), tuple(parents)), table)
        assert dict(got) == pytest.approx(dict(want), rel=0, abs=1e-12)
        lengths |= {len(output) for output in got}
    assert lengths == {1, 2, 3, 4}


def points(*tokens: int) -> list[DraftSample]:
    return [(token, None) for token in tokens]


def test_certain_and_impossible_tokens() -> None:
    p = np.array([0.0, 1.0, 0.0])
    for u in (0.0, 1 - 2**-53):
        accepts = lambda _, chance, u=u: u < chance  # noqa: E731
        assert rejection_sample(p, points(0, 2, 1), accepts, lambda _: pytest.fail("drew")) == 1
        assert rejection_sample(p, points(0, 0, 2), accepts, lambda rest: int(rest.argmax())) == 1
    assert p.tolist() == [0.0, 1.0, 0.0]
    # A tiny remaining probability is normalized to a distribution.
    p = np.array([1e-300, 1.0, 3e-300])
    drawn: list[Array] = []
    rejection_sample(p, points(1), lambda *_: False, lambda rest: drawn.append(rest) or 0)  # type: ignore[func-returns-value]
    np.testing.assert_allclose(drawn[0], [0.25, 0.0, 0.75], rtol=1e-12)


def sampler(seed: int, vocab: int = 8, **options: Any) -> Sampler:
    return Sampler(
        SamplingParams(rule="rejection", **options),
        seed,
        TokenContext([1, 2]),
        vocab,
        banned=BannedTokens((3, 17)),
    )


@pytest.mark.parametrize(
    "options", [option for option in OPTIONS if option.get("temperature")], ids=str
)
def test_distribution_is_the_processed_softmax(options: dict[str, Any]) -> None:
    dice = np.random.default_rng(1)
    made = sampler(0, 40, max_tokens=50, **options)
    for token in (6, 4, 9, 6):
        logits = random_logits(dice)
        before = logits.copy()
        want = softmax(scores_of(logits, made))
        np.testing.assert_allclose(made.distribution(logits), want, rtol=1e-5, atol=1e-7)
        assert np.array_equal(logits, before)
        made.advance(token)


@pytest.mark.parametrize("draft_tokens", [(), (6, 1), (1, 0, 7, 3, 2, 4, 5, 6)], ids=str)
@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 1.4, "top_p": 0.9}], ids=str
)
def test_draws_over_seeds(draft_tokens: tuple[int, ...], options: dict[str, Any]) -> None:
    exact = sampler(0, **options).distribution(LOGITS)
    chosen = [
        sampler(seed, **options).rejection_sample(exact, points(*draft_tokens))
        for seed in range(2000)
    ]
    assert p_value(np.bincount(chosen, minlength=8), exact) > 1e-4


def significance_with_coupled_drafts() -> float:
    """Return the p-value of the outputs if draft tokens are sampled with the noise of the coupled
    rule.
    """
    counts = np.zeros(8)
    exact = softmax(LOGITS)
    for seed in range(3000):
        draft = int((0.7 * LOGITS[::-1] + gumbel_noise(seed, 2, np.arange(8))).argmax())
        counts[sampler(seed, temperature=1.0).rejection_sample(exact, points(draft))] += 1
    return p_value(counts, exact)


def test_rejection_noise_differs_from_coupled_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert significance_with_coupled_drafts() > 1e-4
    monkeypatch.setattr(pronk.sampling.sampler, "rejection_noise", gumbel_noise)
    monkeypatch.setattr(pronk.sampling.sampler, "trial_seed", lambda seed, _: seed)
    assert significance_with_coupled_drafts() < 1e-6


@pytest.mark.parametrize("shared", ["trials", "trial and draw"])
def test_reused_random_numbers_are_detected(monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    if shared == "trials":
        monkeypatch.setattr(
            pronk.sampling.sampler,
            "rejection_uniform",
            lambda s, place, _: rejection_uniform(s, place, 0),
        )
    else:

        def inverse(p: Array, draft_tokens: Sequence[DraftSample], accepts: Any, _: Any) -> int:
            """Draw from the remaining distribution with the random number of the last trial, found
            by bisection.
            """
            used: list[int] = []

            def tried(j: int, chance: float) -> bool:
                used.append(j)
                return accepts(j, chance)

            def draw(rest: Array) -> int:
                low = 0.0
                high = 1.0
                for _ in range(40):
                    mid = (low + high) / 2
                    low, high = (low, mid) if accepts(used[-1], mid) else (mid, high)
                return int(np.argmax(rest.cumsum() > low))

            return rejection_sample(p, draft_tokens, tried, draw)

        monkeypatch.setattr(pronk.sampling.sampler, "rejection_sample", inverse)
    exact = softmax(LOGITS)
    chosen = [
        sampler(seed, temperature=1.0).rejection_sample(exact, points(1, 0)) for seed in range(1500)
    ]
    assert p_value(np.bincount(chosen, minlength=8), exact) < 1e-6


def test_uniform_numbers() -> None:
    """Numbers of trials are reproducible, uniform in [0, 1), and independent of each other and of
    all noise.
    """
    trials = [[rejection_uniform(5, place, trial) for trial in range(4)] for place in range(2000)]
    values = np.array(trials).ravel()
    assert trials[0] == [rejection_uniform(5, 0, trial) for trial in range(4)]
    assert bool((values >= 0).all())
    assert bool((values < 1).all())
    assert len(np.unique(values)) > 7990
    assert p_value(np.histogram(values, 50, (0.0, 1.0))[0], np.ones(50)) > 1e-4
    ids = np.arange(3)
    draws = [rejection_noise(5, place, ids) for place in range(2000)]
    draft_tokens = [gumbel_noise(5, place, ids) for place in range(2000)]
    chains = [[block_uniform(5, place, i) for i in range(1, 4)] for place in range(2000)]
    drafts = [draft_noise(5, place - 1, place, ids) for place in range(2000)]
    every = np.concatenate((trials, draws, draft_tokens, chains, drafts), 1)
    correlations = np.corrcoef(every.T) - np.eye(16)
    assert float(np.abs(correlations).max()) * 2000**0.5 < 4.5
    for seed, place, trial in ((0, 0, 0), (2**63 - 1, 2**31, 127)):
        assert 0 <= rejection_uniform(seed, place, trial) < 1


def test_random_numbers_are_the_same_in_every_release() -> None:
    got = [
        rejection_uniform(1, 5, 0),
        rejection_uniform(1, 5, 1),
        rejection_uniform(7, 123, 0),
        block_uniform(1, 5, 1),
    ]
    assert got == pytest.approx(
        [0.138236753997, 0.719373297950, 0.366973556788, 0.848945010133], abs=1e-11
    )
    assert rejection_noise(1, 5, np.array([0, 70_000])).tolist() == pytest.approx(
        [-1.056932047332, 2.701661860240], abs=1e-10
    )


def test_option_rule() -> None:
    assert SamplingParams().rule == "coupled"
    assert SamplingParams(rule="rejection").to_dict()["rule"] == "rejection"
    assert not SamplingParams(rule="rejection").rejects
    assert SamplingParams(rule="rejection", temperature=0.1).rejects
    assert SamplingParams(rule="block", temperature=0.1).rejects
    assert not SamplingParams(rule="block").rejects
    assert not SamplingParams(temperature=0.1).rejects
    for wrong in ("Rejection", "", None, 1, ["coupled"]):
        with pytest.raises(
            OptionError, match="rule: expected one of coupled, rejection, block, found"
        ):
            SamplingParams(rule=wrong)  # type: ignore[arg-type]
