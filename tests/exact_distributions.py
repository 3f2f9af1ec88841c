"""Exact distribution of the tokens that an acceptance rule emits.

All outcomes of the random choices are enumerated: a :class:`Source` replaces the random numbers of
draft tokens and of verification, and tries all outcomes in turn. The tested code is that of the
engine: ``verify_tree``, ``acceptance_rule`` and the rule itself. Each row of the logits holds the
number of its node, by which the target's distribution is looked up.
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
    """Replacement of random numbers that enumerates all sequences of outcomes.

    Attributes:
        plan: for each choice of the current sequence, the outcomes left to try; the last one is
            the current outcome.
        place: number of choices made so far in the current sequence.
        weight: probability of the current sequence.
    """

    def __init__(self) -> None:
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
    """The same distribution after every context, so that errors add up over the steps."""

    def __init__(self, *weights: float) -> None:
        super().__init__(0, len(weights))
        self.probabilities = np.array(weights) / sum(weights)

    def __missing__(self, context: String) -> Array:
        return self.probabilities


Propose = Callable[[Source, String], TokenTree]


@dataclass(frozen=True)
class TreeSampler:
    """Sampler of draft trees of a given shape; siblings are sampled without replacement.

    Attributes:
        parents: shape of the tree.
        drawn: for each node, whether its token is sampled. Every other node has the likeliest token
            that no sibling has.
        q: distributions from which the draft tokens are sampled.
        claimed: distributions that the tree reports to the acceptance rule; ``None``: ``q``.
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
    """Return a distribution without some tokens.

    It is uniform over the other tokens if these have the probability 0.
    """
    rest = distribution.copy()
    rest[list(tokens)] = 0.0
    if float(rest.sum()) <= 0.0:
        rest[:] = 1.0
        rest[list(tokens)] = 0.0
    return rest / rest.sum()


def shapes(size: int, siblings: int = VOCAB) -> Iterator[tuple[int, ...]]:
    """Yield the shapes (parents) of all trees of ``size`` nodes.

    A node has at most ``siblings`` children.
    """
    for parents in product(*(range(node) for node in range(1, size))):
        if all(parents.count(node) <= siblings for node in parents):
            yield (-1, *parents)


def chain_shape(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length))


class OracleSampler(PronkSampler):
    """A sampler whose random choices are those of a :class:`Source`.

    Its distributions are those of a table; a row of logits is the number of a node.
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
    """Return the tokens that the verification of a tree emits after ``text``.

    ``rows`` is a function that may permute the rows of the logits, as a planted fault.
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
    """Return the probability of each text that steps emit.

    A step is a verification; steps end when the text has at least ``length`` tokens.
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
    """Return the distribution of the first ``depth`` tokens of outputs.

    Shorter outputs are extended by plain sampling from the target's distributions ``p``.
    """
    joint = defaultdict[String, float](float)
    for tokens, weight in distribution.items():
        kept = tokens[:depth]
        for rest in product(range(p.vocab), repeat=depth - len(kept)):
            joint[kept + rest] += weight * p.chance(rest, kept)
    return joint


def largest_error(distribution: ExactDistribution, p: Table, depth: int = DEPTH) -> float:
    """Return the largest error of the probability of a string, compared with plain sampling."""
    got = strings(distribution, p, depth)
    return max(
        abs(got[string] - p.chance(string)) for string in product(range(p.vocab), repeat=depth)
    )


def accepted(distribution: ExactDistribution) -> float:
    """Return the mean number of draft tokens accepted in one step."""
    return sum(weight * (len(tokens) - 1) for tokens, weight in distribution.items())
