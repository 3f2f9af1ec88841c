"""The exact law of what a rule of acceptance emits, by following every outcome of every draw with its probability.

Nothing is random here: a source of numbers is put in whose answers are tried one after the other. It draws the guesses
as well, where they are drawn. The code that is followed is the one that the engine runs: the walk, the choices by the
request's rule, and the rule itself; the logits' rows are the numbers of the nodes, by which the model is looked up.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from pronk.sampling import verify
from pronk.sampling.acceptance import acceptance_rule
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler as PronkSampler
from pronk.speculation.tree import TokenTree
from tiny_models import context_of

VOCAB = 3
DEPTH = 3  # of the strings whose law is compared

String = tuple[int, ...]
ExactDistribution = dict[String, float]


class Source:
    """Answers of a random source, one sequence after the other until all have occurred, each with its probability."""

    def __init__(self) -> None:
        self.plan: list[list[int]] = []  # at each place the answers that are left, the last one first
        self.place = 0
        self.weight = 1.0

    def take(self, probabilities: Sequence[float]) -> int:
        if self.place == len(self.plan):
            self.plan.append([answer for answer, chance in enumerate(probabilities) if chance > 1e-15])
        answer = self.plan[self.place][-1]
        self.place += 1
        self.weight *= probabilities[answer]
        return answer

    def accepts(self, _: int, chance: float) -> bool:
        assert -1e-12 <= chance <= 1 + 1e-12
        return self.take((chance, 1 - chance)) == 0

    def draw(self, p: Tensor) -> int:
        assert abs(float(p.sum()) - 1) < 1e-12
        return self.take(p.tolist())

    def runs(self) -> Iterator[None]:
        while True:
            self.place, self.weight = 0, 1.0
            yield
            while self.plan and len(self.plan[-1]) == 1:
                self.plan.pop()
            if not self.plan:
                return
            self.plan[-1].pop()


class Table(dict[String, Tensor]):
    """A distribution after every context, in which some tokens are impossible."""

    def __init__(self, seed: int | str, vocab: int = VOCAB, zeros: float = 1 / 3) -> None:
        super().__init__()
        self.seed, self.vocab, self.zeros = seed, vocab, zeros

    def __missing__(self, context: String) -> Tensor:
        dice = random.Random(f"{self.seed} {context}")
        weights = [0.0 if dice.random() < self.zeros else dice.random() ** 2 for _ in range(self.vocab)]
        weights[dice.randrange(self.vocab)] += 0.05
        self[context] = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        return self[context]

    def chance(self, tokens: String, after: String = ()) -> float:
        """Of ``tokens`` after the text ``after``."""
        result = 1.0
        for place, token in enumerate(tokens):
            result *= float(self[after + tokens[:place]][token])
        return result


class Same(Table):
    """One distribution, whatever the context: what is wrong adds up over the steps."""

    def __init__(self, *weights: float) -> None:
        super().__init__(0, len(weights))
        self.law = torch.tensor(weights, dtype=torch.float64) / sum(weights)

    def __missing__(self, context: String) -> Tensor:
        return self.law


Propose = Callable[[Source, String], TokenTree]


@dataclass(frozen=True)
class TreeSampler:
    """Draws a tree of one shape from its own distributions: siblings without replacement.

    Attributes:
        parents: the shape.
        drawn: which nodes are drawn at random; the others are the likeliest token that no sibling has.
        q: the distributions.
        claimed: what the tree says that they were; ``q`` if it tells the truth.
    """

    parents: tuple[int, ...]
    drawn: tuple[bool, ...]
    q: Table
    claimed: Table | None = None

    @cached_property
    def depths(self) -> list[int]:
        return TokenTree(tuple(range(len(self.parents))), self.parents).depths

    def __call__(self, source: Any, text: String) -> TokenTree:
        paths, taken = [text], [set[int]() for _ in self.parents]
        probs: list[Tensor | None] = [None]
        for parent, drawn in zip(self.parents[1:], self.drawn[1:], strict=True):
            law = without(self.q[paths[parent]], taken[parent])
            token = source.take(law.tolist()) if drawn else int(law.argmax())
            said = law if self.claimed is None else without(self.claimed[paths[parent]], taken[parent])
            probs.append(said if drawn else None)
            taken[parent].add(token)
            paths.append((*paths[parent], token))
        return TokenTree((0, *(path[-1] for path in paths[1:])), self.parents, probs=tuple(probs))


def without(law: Tensor, tokens: set[int]) -> Tensor:
    """``law`` given that it is none of ``tokens``; where that leaves nothing, all others alike."""
    rest = law.clone()
    rest[list(tokens)] = 0.0
    if float(rest.sum()) <= 0.0:
        rest[:] = 1.0
        rest[list(tokens)] = 0.0
    return rest / rest.sum()


def shapes(size: int, siblings: int = VOCAB) -> Iterator[tuple[int, ...]]:
    """The parents of every tree of ``size`` nodes with at most so many children anywhere."""
    for parents in product(*(range(node) for node in range(1, size))):
        if all(parents.count(node) <= siblings for node in parents):
            yield (-1, *parents)


def chain_shape(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length))


class OracleSampler(PronkSampler):
    """Takes its numbers from a source and its distributions from a table, by the node that the logits' row names."""

    def __init__(self, rule: Any, source: Source, p: Table, text: String, paths: Sequence[String]) -> None:
        super().__init__(SamplingParams(temperature=1.0, rule=rule), 0, [0, *text], p.vocab)
        self.source, self.p, self.paths, self.ordered = source, p, paths, True

    def distribution(self, logits: Tensor) -> Tensor:
        path = self.paths[int(logits)]
        assert not self.ordered or path == tuple(context_of(self)[1:])
        return self.p[path]

    def rejection_sample(self, p: Tensor, draft_tokens: Any) -> int:
        return verify.rejection_sample(p, draft_tokens, self.source.accepts, self.source.draw)

    def block_verify(self, p: Any, chain: Any) -> tuple[int, Tensor]:
        return verify.block_verify(p, chain, self.source.accepts)


Rows = Callable[[Tensor], Tensor]


def step(rule: str, tree: TokenTree, p: Table, source: Source, text: String, rows: Rows | None = None) -> String:
    """The tokens of one walk below ``text``; ``rows`` may put the logits in disorder."""
    paths = [text + tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
    logits = torch.arange(len(tree)).view(-1, 1)
    sampler = OracleSampler(rule, source, p, text, paths)
    if rows is not None:
        logits, sampler.ordered = rows(logits), False
    found = verify.verify_tree(tree, acceptance_rule(sampler, tree, logits))
    assert context_of(sampler) == [0, *text, *found.tokens]
    assert found.tokens[:-1] == tuple(tree.tokens[node] for node in found.path)
    return found.tokens


def outputs(rule: str, propose: Propose, p: Table, *, length: int = 1, rows: Rows | None = None) -> ExactDistribution:
    """The probability of each text that steps emit until it has ``length`` tokens or more."""
    law, source = defaultdict[String, float](float), Source()
    for _ in source.runs():
        text: String = ()
        while len(text) < length:
            text += step(rule, propose(source, text), p, source, text, rows)
        law[text] += source.weight
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


def strings(law: ExactDistribution, p: Table, depth: int = DEPTH) -> ExactDistribution:
    """The law of the first tokens of a text, of which steps gave the beginning and plain sampling the rest."""
    joint = defaultdict[String, float](float)
    for tokens, weight in law.items():
        kept = tokens[:depth]
        for rest in product(range(p.vocab), repeat=depth - len(kept)):
            joint[kept + rest] += weight * p.chance(rest, kept)
    return joint


def wrong_by(law: ExactDistribution, p: Table, depth: int = DEPTH) -> float:
    """How far the probability of a string is from the target's."""
    got = strings(law, p, depth)
    return max(abs(got[string] - p.chance(string)) for string in product(range(p.vocab), repeat=depth))


def accepted(law: ExactDistribution) -> float:
    """Guesses that are accepted in one step, on average."""
    return sum(weight * (len(tokens) - 1) for tokens, weight in law.items())
