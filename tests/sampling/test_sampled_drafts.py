"""Rejection and block rule with sampled draft tokens: the exact distribution of outputs."""

import math
import random
from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from exact_distributions import (
    DEPTH,
    VOCAB,
    Rows,
    Source,
    String,
    Table,
    TreeSampler,
    accepted,
    chain_shape,
    largest_error,
    outputs,
    shapes,
)
from pronk.base.arrays import Array
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import block_verify, rejection_sample

RULES = ("rejection", "block")
EXACT = 1e-12


def sampler(
    parents: tuple[int, ...],
    seed: int,
    drawn: float = 1.0,
    zeros: float = 1 / 3,
    vocab: int = VOCAB,
) -> TreeSampler:
    """Return a tree sampler whose nodes are sampled with probability ``drawn``, and point masses
    otherwise.
    """
    dice = random.Random(f"{parents} {seed}")
    return TreeSampler(
        parents, tuple(dice.random() < drawn for _ in parents), Table(f"q{seed}", vocab, zeros)
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_small_tree(rule: str, size: int) -> None:
    """Sampled nodes, point masses and both, with and without impossible tokens; two of these cases
    for size 5.
    """
    kinds = [*product((0.0, 0.5, 1.0), (0.0, 1 / 3))]
    for seed, parents in enumerate(shapes(size)):
        for drawn, zeros in kinds if size < 5 else (kinds[seed % 6], kinds[(seed + 3) % 6]):
            p = Table(seed, zeros=zeros)
            assert largest_error(outputs(rule, sampler(parents, seed, drawn, zeros), p), p) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_tree_of_six_nodes(rule: str) -> None:
    for seed, parents in enumerate(shapes(6)):
        p = Table(seed, zeros=0.2)
        assert largest_error(outputs(rule, sampler(parents, seed, 0.7, 0.2), p), p) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_four_siblings(rule: str) -> None:
    p = Table("wide", 4, 0.0)
    star = (-1, 0, 0, 0, 0)
    for drawn in (0.5, 1.0):
        assert largest_error(outputs(rule, sampler(star, 1, drawn, 0.0, 4), p), p, 2) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parents", [(-1, 0), (-1, 0, 1), (-1, 0, 0), (-1, 0, 1, 0)], ids=str)
def test_several_steps(rule: str, parents: tuple[int, ...]) -> None:
    """Strings of several steps with new draft tokens in each step."""
    length = 2 if len(parents) > 3 else 3
    for seed, drawn in product(range(2), (0.5, 1.0)):
        p = Table(seed)
        distribution = outputs(rule, sampler(parents, seed, drawn), p, length=length)
        assert largest_error(distribution, p, length) < EXACT


class AdaptiveShape:
    """A shape that depends on sampled tokens: a chain that ends after token 0, then a sibling of
    its first node.
    """

    def __init__(self, seed: int) -> None:
        self.q = Table(f"h{seed}", zeros=0.2)

    def __call__(self, source: Source, text: String) -> TokenTree:
        tokens = [0]
        parents = [-1]
        probs = list[Array | None]([None])
        path = text
        while len(tokens) < 4 and (len(tokens) == 1 or tokens[-1] != 0):
            q = self.q[path]
            tokens.append(source.take(q.tolist()))
            parents.append(len(tokens) - 2)
            probs.append(q)
            path = (*path, tokens[-1])
        if len(tokens) < 4:
            q = self.q[text].copy()
            q[tokens[1]] = 0.0
            q = q / q.sum() if float(q.sum()) > 0 else np.full(VOCAB, 0.5)
            q[tokens[1]] = 0.0
            tokens.append(source.take(q.tolist()))
            parents.append(0)
            probs.append(q)
        return TokenTree(tuple(tokens), tuple(parents), probs=tuple(probs))


@pytest.mark.parametrize("rule", RULES)
def test_sampled_tokens_may_decide_the_shape(rule: str) -> None:
    for seed in range(3):
        p = Table(seed, zeros=0.2)
        assert largest_error(outputs(rule, AdaptiveShape(seed), p), p) < EXACT


class Filtered:
    """Sample two children of the root, and keep only tokens 0 and 1; if ``honest``, as point
    masses.
    """

    def __init__(self, seed: int, *, honest: bool) -> None:
        self.sampler = sampler((-1, 0, 0), seed, zeros=0.0)
        self.honest = honest

    def __call__(self, source: Source, text: String) -> TokenTree:
        tree = self.sampler(source, text)
        kept = tree.keep([node for node in range(3) if tree.tokens[node] < 2])
        return TokenTree(kept.tokens, kept.parents) if self.honest else kept


@pytest.mark.parametrize("rule", RULES)
def test_sampled_tokens_must_not_decide_which_nodes_are_kept(rule: str) -> None:
    p = Table(2, zeros=0.0)
    assert largest_error(outputs(rule, Filtered(1, honest=False), p), p) > 0.01
    assert largest_error(outputs(rule, Filtered(1, honest=True), p), p) < EXACT


def tokenwise_chance(p: Table, q: Table, chain: String) -> float:
    return math.prod(
        min(1.0, float(p[chain[:i]][x] / q[chain[:i]][x])) for i, x in enumerate(chain)
    )


def block_chance(p: Table, q: Table, chain: String) -> float:
    w = 1.0
    for i, x in enumerate(chain):
        w = min(1.0, w * float(p[chain[:i]][x] / q[chain[:i]][x]))
    return w


def test_accepted_tokens_of_chains() -> None:
    """The counts equal the formulas; the block rule never accepts fewer tokens than the rejection
    rule.
    """
    more = 0
    for seed in range(12):
        p = Table(seed)
        q = Table(f"q{seed}")
        got = {}
        for rule, chance in (("rejection", tokenwise_chance), ("block", block_chance)):
            chains = [
                c
                for length in (1, 2, 3)
                for c in product(range(VOCAB), repeat=length)
                if q.chance(c) > 0
            ]
            want = sum(q.chance(chain) * chance(p, q, chain) for chain in chains)
            got[rule] = accepted(outputs(rule, sampler(chain_shape(3), seed), p))
            assert got[rule] == pytest.approx(want, abs=1e-6)
        assert got["block"] >= got["rejection"] - EXACT
        more += got["block"] > got["rejection"] + 0.01
    assert more >= 6


def test_both_rules_are_equal_for_point_masses() -> None:
    for seed in range(4):
        p = Table(seed)
        draft_tokens = sampler(chain_shape(3), seed, drawn=0.0)
        one, other = (outputs(rule, draft_tokens, p) for rule in RULES)
        assert dict(one) == pytest.approx(dict(other), abs=EXACT)


def test_accepted_tokens_of_trees() -> None:
    """The block rule accepts more tokens on average, but not in every tree."""
    gains = []
    for seed, parents in enumerate([*shapes(4), (-1, 0, 1, 0, 1), (-1, 0, 1, 2, 0)]):
        p = Table(seed, zeros=0.1)
        one, other = (
            accepted(outputs(rule, sampler(parents, seed, zeros=0.1), p)) for rule in RULES
        )
        gains.append(other - one)
    assert sum(gains) > 0.02
    assert min(gains) > -0.02


def paper_block(p: Table, tree: TokenTree, source: Source) -> String:
    """Algorithm 2 of Sun et al. 2024, line by line, for a chain."""
    xs = tree.tokens[1:]
    qs = [q for q in (tree.probs or ())[1:] if q is not None]
    gamma = len(xs)
    tau = 0
    w = 1.0
    weights = [1.0]
    for i in range(1, gamma + 1):
        w = min(w * float(p[xs[: i - 1]][xs[i - 1]]) / float(qs[i - 1][xs[i - 1]]), 1.0)
        weights.append(w)
        if i == gamma:
            h = w
        else:
            excess = float(
                sum(
                    max(w * float(a) - float(b), 0.0) for a, b in zip(p[xs[:i]], qs[i], strict=True)
                )
            )
            h = excess / (excess + 1 - w) if excess + 1 - w > 0 else 1.0
        if source.take((h, 1 - h)) == 0:
            tau = i
    rest = p[xs[:tau]]
    if tau < gamma:
        rest = np.maximum(weights[tau] * rest - qs[tau], 0.0)
        rest = rest / rest.sum()
    return (*xs[:tau], source.take(rest.tolist()))


def test_block_rule_on_a_chain_is_algorithm_2() -> None:
    for seed, length in product(range(4), (1, 2, 3)):
        p = Table(seed)
        draft_tokens = sampler(chain_shape(length), seed)
        want = defaultdict[String, float](float)
        source = Source()
        for _ in source.runs():
            output = paper_block(p, draft_tokens(source, ()), source)
            want[output] += source.weight
        got = outputs("block", draft_tokens, p)
        possible, expected = ({k: v for k, v in each.items() if v > EXACT} for each in (got, want))
        assert possible == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("rule", RULES)
def test_draft_tokens_from_the_distribution_of_the_target_are_accepted(rule: str) -> None:
    for parents, depth in ((chain_shape(3), 4), ((-1, 0, 0, 1), 2)):
        p = Table(5)
        distribution = outputs(rule, TreeSampler(parents, (True,) * 4, p), p)
        assert all(
            len(tokens) >= depth for tokens, weight in distribution.items() if weight > EXACT
        )
        assert largest_error(distribution, p) < EXACT


# Planted defects.


def next_row(logits: Array) -> Array:
    return np.concatenate((logits[1:], logits[-1:]))


def previous_row(logits: Array) -> Array:
    return np.concatenate((logits[:1], logits[:-1]))


@pytest.mark.parametrize("rows", [next_row, previous_row])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parents", [(-1, 0), (-1, 0, 1), (-1, 0, 0), (-1, 0, 1, 0)], ids=str)
def test_rows_of_other_nodes_are_detected(rule: str, parents: tuple[int, ...], rows: Rows) -> None:
    for seed in range(2):
        p = Table(seed, zeros=0.1)
        assert largest_error(outputs(rule, sampler(parents, seed), p, rows=rows), p) > 0.01


def hotter(q: Table) -> Table:
    """Return the distributions at another temperature."""
    other = Table(q.seed, q.vocab, q.zeros)
    for context, distribution in q.items():
        other[context] = distribution**0.7 / (distribution**0.7).sum()
    return other


def of_the_next_node(q: Table) -> Table:
    other = Table(q.seed, q.vocab, q.zeros)
    for context in list(q):
        other[context] = q[(*context, 0)]
    return other


@pytest.mark.parametrize(
    "wrong", [hotter, of_the_next_node, lambda q: Table("other", q.vocab, 0.0)]
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parents", [(-1, 0), (-1, 0, 1), (-1, 0, 0), (-1, 0, 1, 0)], ids=str)
def test_wrong_draft_distributions_are_detected(
    rule: str, parents: tuple[int, ...], wrong: object
) -> None:
    p = Table("p", zeros=0.0)
    q = Table("q", zeros=0.0)
    for context in (c for length in range(DEPTH) for c in product(range(VOCAB), repeat=length)):
        assert q[context] is not None
    claimed = wrong(q)  # type: ignore[operator]
    assert (
        largest_error(outputs(rule, TreeSampler(parents, (True,) * len(parents), q), p), p) < EXACT
    )
    assert (
        largest_error(outputs(rule, TreeSampler(parents, (True,) * len(parents), q, claimed), p), p)
        > 0.005
    )


def with_replacement(source: Source, text: String) -> TokenTree:
    """Report the first sibling's distribution for the second, which in fact excludes the first
    token.
    """
    honest = TreeSampler((-1, 0, 0), (True,) * 3, Table("r0", zeros=0.0))(source, text)
    return TokenTree(
        honest.tokens,
        honest.parents,
        probs=(None, honest.draft_sample(1)[1], honest.draft_sample(1)[1]),
    )


@pytest.mark.parametrize("rule", RULES)
def test_siblings_with_one_distribution_are_detected(rule: str) -> None:
    p = Table("s", zeros=0.0)
    assert largest_error(outputs(rule, with_replacement, p), p) > 0.005


@pytest.mark.parametrize("left", [0.0, 1e-320, 1e-17])
def test_rejections_by_rounding_draw_from_a_distribution(left: float) -> None:
    """For p = q a rejection occurs by rounding only; the remaining weights are then tiny."""
    p = np.array([0.5, 0.5, 0.0])
    q = p - np.array([0.0, left, 0.0])
    drawn: list[Array] = []
    rejection_sample(p, [(0, q), (1, q)], lambda *_: False, lambda rest: drawn.append(rest) or 0)  # type: ignore[func-returns-value]
    _, rest = block_verify(lambda _: p, [(0, q), (1, q)], lambda *_: False)
    for distribution in (*drawn, rest):
        assert float(distribution.sum()) == pytest.approx(1.0, abs=1e-12)
        assert bool((distribution >= 0).all())
    assert p.tolist() == [0.5, 0.5, 0.0]


def test_a_draft_token_of_probability_0_is_a_point_mass() -> None:
    p = np.array([0.25, 0.75])
    q = np.array([0.0, 1.0])
    for draft in ((0, q), (0, None)):
        chances: list[float] = []
        drawn: list[list[float]] = []
        refuse = lambda _, c, to=chances: bool(to.append(c))  # noqa: E731
        rejection_sample(p, [draft], refuse, lambda rest, to=drawn: to.append(rest.tolist()) or 0)
        count, rest = block_verify(lambda _: p, [draft], refuse)
        assert chances == [0.25, 0.25]
        assert (count, rest.tolist(), drawn) == (0, [0.0, 1.0], [[0.0, 1.0]])


@pytest.mark.parametrize(
    ("chain", "accepted", "depths"), [((0, 1, 0), 1, 2), ((0, 0), 2, 3), ((), 0, 1)]
)
def test_block_rule_computes_no_needless_distribution(
    chain: tuple[int, ...], accepted: int, depths: int
) -> None:
    """No distribution below an impossible draft token; one after the last draft token, for the
    bonus token.
    """
    sure = np.array([1.0, 0.0])
    computed: list[int] = []

    def distribution(i: int) -> Array:
        computed.append(i)
        return sure

    count, rest = block_verify(
        distribution, [(token, None) for token in chain], lambda _, chance: chance > 0.5
    )
    assert (count, computed) == (accepted, [*range(depths)])
    assert rest is sure or accepted < len(chain)
