"""Exact distribution of the tokens that an acceptance rule emits, by enumeration of all random
outcomes.

A :class:`Source` replaces all random numbers, those of sampled draft tokens included, and tries
their values in turn. The tested code is the engine's: ``verify_tree``, ``acceptance_rule`` and the
rule itself. Each row of the logits holds the number of its node, by which the target's distribution
is looked up.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from pronk.base.arrays import Array
from pronk.sampling import verify
from pronk.sampling.acceptance import acceptance_rule
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler as PronkSampler
from pronk.sampling.tree import TokenTree
from tiny_models import context_of

VOCAB = 3
DEPTH = 3  # tokens of the compared strings

String = tuple[int, ...]
ExactDistribution = dict[String, float]


class Source:
    """A source of random numbers that enumerates all sequences of outcomes, each with its
    probability.
    """

    def __init__(self) -> None:
        # for each choice, the outcomes left to try; the last one is current
        self.plan: list[list[int]] = []
        self.place = 0
        self.weight = 1.0

    def take(self, probabilities: Sequence[float]) -> int:
        if self.place == len(self.plan):
            self.plan.append(
                [answer for answer, chance in enumerate(probabilities) if chance > 1e-15]
            )
        answer = self.plan[self.place][-1]
        self.place += 1
        self.weight *= probabilities[answer]
        return answer

    def accepts(self, _: int, chance: float) -> bool:
        assert -1e-12 <= chance <= 1 + 1e-12
        return self.take((chance, 1 - chance)) == 0

    def draw(self, p: Array) -> int:
        assert abs(float(p.sum()) - 1) < 1e-12
        return self.take(p.tolist())

    def runs(self) -> Iterator[None]:
        while True:
            self.place = 0
            self.weight = 1.0
            yield
            while self.plan and len(self.plan[-1]) == 1:
                self.plan.pop()
            if not self.plan:
                return
            self.plan[-1].pop()


class Table(dict[String, Array]):
    """A random distribution after every context; some tokens have probability 0."""

    def __init__(self, seed: int | str, vocab: int = VOCAB, zeros: float = 1 / 3) -> None:
        super().__init__()
        self.seed = seed
        self.vocab = vocab
        self.zeros = zeros

    def __missing__(self, context: String) -> Array:
        dice = random.Random(f"{self.seed} {context}")
        weights = [
            0.0 if dice.random() < self.zeros else dice.random() ** 2 for _ in range(self.vocab)
        ]
        weights[dice.randrange(self.vocab)] += 0.05
        self[context] = np.array(weights) / sum(weights)
        return self[context]

    def chance(self, tokens: String, after: String = ()) -> float:
        """Return the probability of ``tokens`` after the text ``after``."""
        result = 1.0
        for place, token in enumerate(tokens):
            result *= float(self[after + tokens[:place]][token])
        return result


class Same(Table):
    """One distribution after all contexts, so that errors add up over the steps."""

    def __init__(self, *weights: float) -> None:
        super().__init__(0, len(weights))
        self.probabilities = np.array(weights) / sum(weights)

    def __missing__(self, context: String) -> Array:
        return self.probabilities


Propose = Callable[[Source, String], TokenTree]


@dataclass(frozen=True)
class TreeSampler:
    """Sample the tokens of a tree of a given shape, siblings without replacement.

    Attributes:
        parents: shape of the tree.
        drawn: nodes that are sampled; every other node is the likeliest token without an equal
            sibling.
        q: distributions of the draft tokens.
        claimed: distributions that the tree reports; ``None``: ``q``.
    """

    parents: tuple[int, ...]
    drawn: tuple[bool, ...]
    q: Table
    claimed: Table | None = None

    @cached_property
    def depths(self) -> list[int]:
        return TokenTree(tuple(range(len(self.parents))), self.parents).depths

    def __call__(self, source: Any, text: String) -> TokenTree:
        paths = [text]
        taken = [set[int]() for _ in self.parents]
        probs: list[Array | None] = [None]
        for parent, drawn in zip(self.parents[1:], self.drawn[1:], strict=True):
            q = without(self.q[paths[parent]], taken[parent])
            token = source.take(q.tolist()) if drawn else int(q.argmax())
            claimed = (
                q if self.claimed is None else without(self.claimed[paths[parent]], taken[parent])
            )
            probs.append(claimed if drawn else None)
            taken[parent].add(token)
            paths.append((*paths[parent], token))
        return TokenTree((0, *(path[-1] for path in paths[1:])), self.parents, probs=tuple(probs))


def without(distribution: Array, tokens: set[int]) -> Array:
    """Return the distribution without some tokens; uniform over the others if no probability is
    left.
    """
    rest = distribution.copy()
    rest[list(tokens)] = 0.0
    if float(rest.sum()) <= 0.0:
        rest[:] = 1.0
        rest[list(tokens)] = 0.0
    return rest / rest.sum()


def shapes(size: int, siblings: int = VOCAB) -> Iterator[tuple[int, ...]]:
    """Yield the parents of every tree of ``size`` nodes with at most ``siblings`` children per
    node.
    """
    for parents in product(*(range(node) for node in range(1, size))):
        if all(parents.count(node) <= siblings for node in parents):
            yield (-1, *parents)


def chain_shape(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length))


class OracleSampler(PronkSampler):
    """A sampler with a :class:`Source` and a table of distributions; a row of logits names its
    node.
    """

    def __init__(
        self, rule: Any, source: Source, p: Table, text: String, paths: Sequence[String]
    ) -> None:
        super().__init__(
            SamplingParams(temperature=1.0, rule=rule), 0, TokenContext([0, *text]), p.vocab
        )
        self.source = source
        self.p = p
        self.paths = paths
        self.ordered = True

    def distribution(self, logits: Array) -> Array:
        path = self.paths[int(logits[0])]
        assert not self.ordered or path == tuple(context_of(self)[1:])
        return self.p[path]

    def rejection_sample(self, p: Array, draft_tokens: Any) -> int:
        return verify.rejection_sample(p, draft_tokens, self.source.accepts, self.source.draw)

    def block_verify(self, p: Any, chain: Any) -> tuple[int, Array]:
        return verify.block_verify(p, chain, self.source.accepts)


Rows = Callable[[Array], Array]


def step(
    rule: str, tree: TokenTree, p: Table, source: Source, text: String, rows: Rows | None = None
) -> String:
    """Return the tokens that one verification emits after ``text``; ``rows`` may permute the
    logits.
    """
    paths = [text + tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
    logits = np.arange(len(tree))[:, None]
    sampler = OracleSampler(rule, source, p, text, paths)
    if rows is not None:
        logits = rows(logits)
        sampler.ordered = False
    found = verify.verify_tree(tree, acceptance_rule(sampler, tree, logits))
    assert context_of(sampler) == [0, *text, *found.tokens]
    assert found.tokens[:-1] == tuple(tree.tokens[node] for node in found.path)
    return found.tokens


def outputs(
    rule: str, propose: Propose, p: Table, *, length: int = 1, rows: Rows | None = None
) -> ExactDistribution:
    """Return the probability of each text that steps emit until it has at least ``length``
    tokens.
    """
    distribution = defaultdict[String, float](float)
    source = Source()
    for _ in source.runs():
        text: String = ()
        while len(text) < length:
            text += step(rule, propose(source, text), p, source, text, rows)
        distribution[text] += source.weight
    assert abs(sum(distribution.values()) - 1) < 1e-9
    return distribution


def strings(distribution: ExactDistribution, p: Table, depth: int = DEPTH) -> ExactDistribution:
    """Return the distribution of the first ``depth`` tokens; plain sampling extends shorter
    outputs.
    """
    joint = defaultdict[String, float](float)
    for tokens, weight in distribution.items():
        kept = tokens[:depth]
        for rest in product(range(p.vocab), repeat=depth - len(kept)):
            joint[kept + rest] += weight * p.chance(rest, kept)
    return joint


def largest_error(distribution: ExactDistribution, p: Table, depth: int = DEPTH) -> float:
    """Return the largest difference between the probability of a string and the target's."""
    got = strings(distribution, p, depth)
    return max(
        abs(got[string] - p.chance(string)) for string in product(range(p.vocab), repeat=depth)
    )


def accepted(distribution: ExactDistribution) -> float:
    """Return the mean number of draft tokens accepted in one step."""
    return sum(weight * (len(tokens) - 1) for tokens, weight in distribution.items())
