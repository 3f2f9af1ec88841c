"""The rules that accept guesses by chance, where these are drawn from distributions of their own: the exact law."""

import random
from collections import defaultdict
from itertools import product

import pytest
import torch
from torch import Tensor

from laws import (
    DEPTH,
    VOCAB,
    Rows,
    Source,
    String,
    Table,
    TreeSampler,
    accepted,
    chain_shape,
    outputs,
    shapes,
    wrong_by,
)
from pronk.sampling.verify import block_verify, rejection_sample
from pronk.speculation.tree import TokenTree

RULES = ("rejection", "block")
EXACT = 1e-12


def sampler(
    parents: tuple[int, ...], seed: int, drawn: float = 1.0, zeros: float = 1 / 3, vocab: int = VOCAB
) -> TreeSampler:
    """Each node is drawn at random with probability ``drawn``, or else a point mass."""
    dice = random.Random(f"{parents} {seed}")
    return TreeSampler(parents, tuple(dice.random() < drawn for _ in parents), Table(f"q{seed}", vocab, zeros))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_small_tree(rule: str, size: int) -> None:
    """With guesses that are drawn, that are point masses, and both; where all tokens are possible and where not.

    The largest trees take turns with these.
    """
    kinds = [*product((0.0, 0.5, 1.0), (0.0, 1 / 3))]
    for seed, parents in enumerate(shapes(size)):
        for drawn, zeros in kinds if size < 5 else (kinds[seed % 6], kinds[(seed + 3) % 6]):
            p = Table(seed, zeros=zeros)
            assert wrong_by(outputs(rule, sampler(parents, seed, drawn, zeros), p), p) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_tree_of_six_nodes(rule: str) -> None:
    for seed, parents in enumerate(shapes(6)):
        p = Table(seed, zeros=0.2)
        assert wrong_by(outputs(rule, sampler(parents, seed, 0.7, 0.2), p), p) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_four_siblings(rule: str) -> None:
    p, star = Table("wide", 4, 0.0), (-1, 0, 0, 0, 0)
    for drawn in (0.5, 1.0):
        assert wrong_by(outputs(rule, sampler(star, 1, drawn, 0.0, 4), p), p, 2) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parents", [(-1, 0), (-1, 0, 1), (-1, 0, 0), (-1, 0, 1, 0)], ids=str)
def test_several_steps(rule: str, parents: tuple[int, ...]) -> None:
    """Each with fresh guesses: the law of strings that two and three steps emit."""
    for seed, drawn in product(range(2), (0.5, 1.0)):
        p = Table(seed)
        law = outputs(rule, sampler(parents, seed, drawn), p, length=2 if len(parents) > 3 else 3)
        assert wrong_by(law, p, 2 if len(parents) > 3 else 3) < EXACT


class Hesitant:
    """A shape that depends on what was drawn: a chain that stops after token 0, and siblings where it stopped early."""

    def __init__(self, seed: int) -> None:
        self.q = Table(f"h{seed}", zeros=0.2)

    def __call__(self, source: Source, text: String) -> TokenTree:
        tokens, parents, probs = [0], [-1], list[Tensor | None]([None])
        path = text
        while len(tokens) < 4 and (len(tokens) == 1 or tokens[-1] != 0):
            q = self.q[path]
            tokens.append(source.take(q.tolist()))
            parents.append(len(tokens) - 2)
            probs.append(q)
            path = (*path, tokens[-1])
        if len(tokens) < 4:  # the chain ended early: another child of the root
            q = self.q[text].clone()
            q[tokens[1]] = 0.0
            q = q / q.sum() if float(q.sum()) > 0 else torch.full((VOCAB,), 0.5, dtype=torch.float64)
            q[tokens[1]] = 0.0
            tokens.append(source.take(q.tolist()))
            parents.append(0)
            probs.append(q)
        return TokenTree(tuple(tokens), tuple(parents), probs=tuple(probs))


@pytest.mark.parametrize("rule", RULES)
def test_what_was_drawn_may_decide_what_is_drawn_next(rule: str) -> None:
    for seed in range(3):
        p = Table(seed, zeros=0.2)
        assert wrong_by(outputs(rule, Hesitant(seed), p), p) < EXACT


class Picky:
    """Draws two guesses below the root and keeps those that are token 0 or 1, with their distributions."""

    def __init__(self, seed: int, *, honest: bool) -> None:
        self.sampler, self.honest = sampler((-1, 0, 0), seed, zeros=0.0), honest

    def __call__(self, source: Source, text: String) -> TokenTree:
        tree = self.sampler(source, text)
        kept = tree.keep([node for node in range(3) if tree.tokens[node] < 2])
        return TokenTree(kept.tokens, kept.parents) if self.honest else kept


@pytest.mark.parametrize("rule", RULES)
def test_what_was_drawn_must_not_decide_what_is_kept(rule: str) -> None:
    """Unless all guesses are taken for point masses."""
    p = Table(2, zeros=0.0)
    assert wrong_by(outputs(rule, Picky(1, honest=False), p), p) > 0.01
    assert wrong_by(outputs(rule, Picky(1, honest=True), p), p) < EXACT


def tokenwise_chance(p: Table, q: Table, chain: String) -> float:
    return float(torch.tensor([min(1.0, float(p[chain[:i]][x] / q[chain[:i]][x])) for i, x in enumerate(chain)]).prod())


def block_chance(p: Table, q: Table, chain: String) -> float:
    w = 1.0
    for i, x in enumerate(chain):
        w = min(1.0, w * float(p[chain[:i]][x] / q[chain[:i]][x]))
    return w


def test_accepted_tokens_of_chains() -> None:
    """As many as the formulas say; block never fewer than one after the other, and more in most cases."""
    more = 0
    for seed in range(12):
        p, q, got = Table(seed), Table(f"q{seed}"), {}
        for rule, chance in (("rejection", tokenwise_chance), ("block", block_chance)):
            chains = [c for length in (1, 2, 3) for c in product(range(VOCAB), repeat=length) if q.chance(c) > 0]
            want = sum(q.chance(chain) * chance(p, q, chain) for chain in chains)
            got[rule] = accepted(outputs(rule, sampler(chain_shape(3), seed), p))
            assert got[rule] == pytest.approx(want, abs=1e-6)
        assert got["block"] >= got["rejection"] - EXACT
        more += got["block"] > got["rejection"] + 0.01
    assert more >= 6


def test_point_masses_gain_nothing_by_the_block() -> None:
    for seed in range(4):
        p, draft_tokens = Table(seed), sampler(chain_shape(3), seed, drawn=0.0)
        laws = [outputs(rule, draft_tokens, p) for rule in RULES]
        assert dict(laws[0]) == pytest.approx(dict(laws[1]), abs=EXACT)


def test_accepted_tokens_of_trees() -> None:
    """Not proven, and not always so, but on the whole more."""
    gains = []
    for seed, parents in enumerate([*shapes(4), (-1, 0, 1, 0, 1), (-1, 0, 1, 2, 0)]):
        p = Table(seed, zeros=0.1)
        one, other = (accepted(outputs(rule, sampler(parents, seed, zeros=0.1), p)) for rule in RULES)
        gains.append(other - one)
    assert sum(gains) > 0.02
    assert min(gains) > -0.02


def paper_block(p: Table, tree: TokenTree, source: Source) -> String:
    """Algorithm 2 of Sun et al. 2024, line by line, for a chain."""
    xs, qs = tree.tokens[1:], [q for q in (tree.probs or ())[1:] if q is not None]
    gamma, tau, w, weights = len(xs), 0, 1.0, [1.0]
    for i in range(1, gamma + 1):
        w = min(w * float(p[xs[: i - 1]][xs[i - 1]]) / float(qs[i - 1][xs[i - 1]]), 1.0)
        weights.append(w)
        if i == gamma:
            h = w
        else:
            excess = float(sum(max(w * float(a) - float(b), 0.0) for a, b in zip(p[xs[:i]], qs[i], strict=True)))
            h = excess / (excess + 1 - w) if excess + 1 - w > 0 else 1.0
        if source.take((h, 1 - h)) == 0:
            tau = i
    law = p[xs[:tau]]
    if tau < gamma:
        law = torch.clamp(weights[tau] * law - qs[tau], min=0.0)
        law = law / law.sum()
    return (*xs[:tau], source.take(law.tolist()))


def test_on_a_chain_it_is_the_papers_algorithm() -> None:
    for seed, length in product(range(4), (1, 2, 3)):
        p, draft_tokens = Table(seed), sampler(chain_shape(length), seed)
        want, source = defaultdict[String, float](float), Source()
        for _ in source.runs():
            output = paper_block(p, draft_tokens(source, ()), source)
            want[output] += source.weight
        got = outputs("block", draft_tokens, p)
        assert {k: v for k, v in got.items() if v > EXACT} == pytest.approx(
            {k: v for k, v in want.items() if v > EXACT}, abs=EXACT
        )


@pytest.mark.parametrize("rule", RULES)
def test_a_perfect_drafter_is_always_right(rule: str) -> None:
    for parents in (chain_shape(3), (-1, 0, 0, 1)):
        p = Table(5)
        law = outputs(rule, TreeSampler(parents, (True,) * 4, p), p)
        depth = 4 if parents == chain_shape(3) else 2
        assert all(len(tokens) >= depth for tokens, weight in law.items() if weight > EXACT)
        assert wrong_by(law, p) < EXACT


# Planted defects. Each must be found by the same comparison.


def off_by_one(logits: Tensor) -> Tensor:
    """A guess is compared with the logits after it: each node's row is that of its successor."""
    return torch.cat((logits[1:], logits[-1:]))


def one_too_early(logits: Tensor) -> Tensor:
    return torch.cat((logits[:1], logits[:-1]))


@pytest.mark.parametrize("rows", [off_by_one, one_too_early])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parents", [(-1, 0), (-1, 0, 1), (-1, 0, 0), (-1, 0, 1, 0)], ids=str)
def test_rows_that_belong_to_other_nodes_are_found(rule: str, parents: tuple[int, ...], rows: Rows) -> None:
    for seed in range(2):
        p = Table(seed, zeros=0.1)
        assert wrong_by(outputs(rule, sampler(parents, seed), p, rows=rows), p) > 0.01


def hotter(q: Table) -> Table:
    """The same distributions at another temperature."""
    other = Table(q.seed, q.vocab, q.zeros)
    for context, law in q.items():
        other[context] = law**0.7 / (law**0.7).sum()
    return other


def of_the_next_node(q: Table) -> Table:
    other = Table(q.seed, q.vocab, q.zeros)
    for context in list(q):
        other[context] = q[(*context, 0)]
    return other


@pytest.mark.parametrize("wrong", [hotter, of_the_next_node, lambda q: Table("other", q.vocab, 0.0)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parents", [(-1, 0), (-1, 0, 1), (-1, 0, 0), (-1, 0, 1, 0)], ids=str)
def test_guesses_of_another_law_than_they_claim_are_found(rule: str, parents: tuple[int, ...], wrong: object) -> None:
    p, q = Table("p", zeros=0.0), Table("q", zeros=0.0)
    for context in (c for length in range(DEPTH) for c in product(range(VOCAB), repeat=length)):
        assert q[context] is not None
    claimed = wrong(q)  # type: ignore[operator]
    assert wrong_by(outputs(rule, TreeSampler(parents, (True,) * len(parents), q), p), p) < EXACT
    assert wrong_by(outputs(rule, TreeSampler(parents, (True,) * len(parents), q, claimed), p), p) > 0.005


def with_replacement(source: Source, text: String) -> TokenTree:
    """The second sibling claims the distribution of the first, which it cannot have."""
    honest = TreeSampler((-1, 0, 0), (True,) * 3, Table("r0", zeros=0.0))(source, text)
    return TokenTree(honest.tokens, honest.parents, probs=(None, honest.draft_sample(1)[1], honest.draft_sample(1)[1]))


@pytest.mark.parametrize("rule", RULES)
def test_siblings_that_claim_one_law_are_found(rule: str) -> None:
    p = Table("s", zeros=0.0)
    assert wrong_by(outputs(rule, with_replacement, p), p) > 0.005


@pytest.mark.parametrize("left", [0.0, 1e-320, 1e-17])
def test_rounding_leaves_a_distribution(left: float) -> None:
    """Where p is q nothing is rejected; if rounding has it otherwise, what is drawn from is a distribution."""
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    q = p - torch.tensor([0.0, left, 0.0], dtype=torch.float64)
    drawn: list[Tensor] = []
    rejection_sample(p, [(0, q), (1, q)], lambda *_: False, lambda rest: drawn.append(rest) or 0)  # type: ignore[func-returns-value]
    _, rest = block_verify(lambda _: p, [(0, q), (1, q)], lambda *_: False)
    for law in (*drawn, rest):
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-12)
        assert bool((law >= 0).all())
    assert p.tolist() == [0.5, 0.5, 0.0]


def test_a_guess_that_its_law_does_not_have_is_a_point_mass() -> None:
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    q = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for guess in ((0, q), (0, None)):
        chances: list[float] = []
        drawn: list[list[float]] = []
        refuse = lambda _, c, to=chances: bool(to.append(c))  # noqa: E731
        rejection_sample(p, [guess], refuse, lambda rest, to=drawn: to.append(rest.tolist()) or 0)
        count, rest = block_verify(lambda _: p, [guess], refuse)
        assert chances == [0.25, 0.25]
        assert (count, rest.tolist(), drawn) == (0, [0.0, 1.0], [[0.0, 1.0]])


def test_block_asks_for_no_law_in_vain() -> None:
    """Below an impossible guess nothing can be accepted; the law after the last one is for the bonus token."""
    sure = torch.tensor([1.0, 0.0], dtype=torch.float64)
    asked: list[int] = []

    def law(i: int) -> Tensor:
        asked.append(i)
        return sure

    assert block_verify(law, [(0, None), (1, None), (0, None)], lambda _, c: c > 0.5)[0] == 1
    assert asked == [0, 1]
    asked.clear()
    assert block_verify(law, [(0, None), (0, None)], lambda _, c: c > 0.5)[0] == 2
    assert asked == [0, 1, 2]
    asked.clear()
    assert block_verify(law, [], lambda *_: False)[1] is sure
    assert asked == [0]
