"""The rules with the numbers that requests have: the law of strings over seeds, and numbers that are used twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import pronk.sampling.sampler
from chi_square import p_value_of
from laws import Same, String, Table, without
from pronk.sampling.acceptance import acceptance_rule
from pronk.sampling.logits_processors import Penalties
from pronk.sampling.noise import draft_noise, gumbel_noise, rejection_noise, rejection_uniform, trial_seed
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.verify import verify_tree
from pronk.speculation.tree import TokenTree
from tiny_models import context_of

RULES = ("rejection", "block")
SAMPLED = {rule: SamplingParams(temperature=1.0, rule=rule) for rule in RULES}
PROMPT = [0, 1, 2, 1]
Noise = Callable[[int, int, int, Tensor], Tensor]


@dataclass(frozen=True)
class WorkerSettings:
    """A target, a draft model, the shape of its trees, and how many tokens of a text are compared."""

    p: Table
    q: Table
    parents: tuple[int, ...]
    length: int

    @property
    def vocab(self) -> int:
        return self.p.vocab

    @cached_property
    def logits(self) -> Logarithms:
        """What the target says after each text."""
        return Logarithms(self.p)

    def drafted(self, text: String, siblings: frozenset[int]) -> tuple[Tensor, Tensor]:
        """The law of a guess that none of its siblings is, and its logarithm."""
        if (text, siblings) not in self.known:
            q = without(self.q[text], set(siblings))
            self.known[text, siblings] = q, q.log()
        return self.known[text, siblings]

    @cached_property
    def known(self) -> dict[tuple[String, frozenset[int]], tuple[Tensor, Tensor]]:
        return {}


class Logarithms(dict[String, Tensor]):
    """Of a table's distributions."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def __missing__(self, text: String) -> Tensor:
        self[text] = self.table[text].log()
        return self[text]


# A chain of three, with a sibling at each of the first two places.
BROAD = WorkerSettings(Table("target", 3, 0.0), Table("draft", 3, 0.0), (-1, 0, 1, 2, 0, 1), 3)
# Draft models that are far too sure of one token.
TWO = WorkerSettings(Same(1, 1), Same(9, 1), (-1, 0, 1, 2), 3)
CHAIN = WorkerSettings(Same(1, 1, 1), Same(16, 3, 1), (-1, 0, 1), 3)
PAIR = WorkerSettings(Same(1, 1, 1), Same(16, 3, 1), (-1, 0, 0), 1)
SETTINGS = (BROAD, TWO, CHAIN, PAIR)


def by_root(seed: int, root: int, place: int, keys: Tensor) -> Tensor:
    """Noise for the draw of a node at a place: another one at each step."""
    return draft_noise(seed, root, place, keys)


def by_place(seed: int, _: int, place: int, keys: Tensor) -> Tensor:
    return draft_noise(seed, 0, place, keys)


def as_the_last_draw(seed: int, _: int, place: int, keys: Tensor) -> Tensor:
    """The noise by which the rules draw what is left."""
    return rejection_noise(trial_seed(seed, PROMPT), place, keys)


def drafted(seed: int, text: String, setting: WorkerSettings, noise: Noise = by_root) -> TokenTree:
    root = len(PROMPT) + len(text) - 1
    tokens, paths, probs = [0], [text], list[Tensor | None]([None])
    for node, parent in enumerate(setting.parents[1:], 1):
        siblings = frozenset(tokens[other] for other in range(1, node) if setting.parents[other] == parent)
        q, logarithms = setting.drafted(paths[parent], siblings)
        # Numbers of its own for every branch at a place: those of the first child are the tokens'.
        keys = torch.arange(setting.vocab) + (1000 * node if node != parent + 1 else 0)
        tokens.append(int((logarithms + noise(seed, root, len(PROMPT) + len(paths[parent]), keys)).argmax()))
        probs.append(q)
        paths.append((*paths[parent], tokens[-1]))
    return TokenTree(tuple(tokens), setting.parents, probs=tuple(probs))


def text_of(rule: Any, seed: int, setting: WorkerSettings, noise: Noise) -> String:
    """The tokens of as many steps as it takes."""
    text: String = ()
    sampler = Sampler(SAMPLED[rule], seed, PROMPT, setting.vocab)
    while len(text) < setting.length:
        tree = drafted(seed, text, setting, noise)
        paths = [text + tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
        logits = torch.stack([setting.logits[path] for path in paths])
        text += verify_tree(tree, acceptance_rule(sampler, tree, logits)).tokens
        assert context_of(sampler) == [*PROMPT, *text]
    return text[: setting.length]


def significance(rule: str, setting: WorkerSettings, noise: Noise = by_root, seeds: int = 1500) -> float:
    cells = product(range(setting.vocab), repeat=setting.length)
    texts = [text_of(rule, seed, setting, noise) for seed in range(seeds)]
    return p_value_of(texts, {cell: setting.p.chance(cell) for cell in cells})


@pytest.mark.usefixtures("quickly_drawn")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "setting",
    [BROAD, pytest.param(TWO, marks=pytest.mark.slow), CHAIN, PAIR],
    ids=["broad", "two", "chain", "pair"],
)
def test_strings_over_seeds(rule: str, setting: WorkerSettings) -> None:
    assert significance(rule, setting, seeds=1000) > 1e-3


@pytest.mark.usefixtures("quickly_drawn")
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", SETTINGS, ids=["broad", "two", "chain", "pair"])
def test_strings_over_many_seeds(rule: str, setting: WorkerSettings) -> None:
    assert significance(rule, setting, seeds=20_000) > 1e-3


@pytest.mark.usefixtures("quickly_drawn")
def test_a_chains_numbers_are_not_those_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that failed in the step before would fail again."""
    monkeypatch.setattr(
        pronk.sampling.sampler, "block_uniform", lambda seed, place, i: rejection_uniform(seed, place + i, 99)
    )
    assert significance("block", TWO, seeds=3000) < 1e-6


@pytest.mark.usefixtures("quickly_drawn")
def test_a_chains_numbers_are_not_those_of_single_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second child is tried where the first one has just failed."""
    monkeypatch.setattr(
        pronk.sampling.sampler, "block_uniform", lambda seed, place, i: rejection_uniform(seed, place, i - 1)
    )
    assert significance("block", PAIR) < 1e-6


@pytest.mark.usefixtures("quickly_drawn")
def test_guesses_are_not_drawn_with_the_rules_own_noise() -> None:
    assert significance("block", replace(CHAIN, parents=(-1, 0, 1, 2)), as_the_last_draw) < 1e-6


@pytest.mark.usefixtures("quickly_drawn")
def test_a_chain_is_drawn_anew_in_every_step() -> None:
    """How many guesses are accepted depends on all of the chain, so the rejected ones must not come again."""
    assert significance("block", CHAIN, by_place, 3000) < 1e-6


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_greedy_is_the_argmax(rule: Any) -> None:
    dice = torch.Generator().manual_seed(0)
    for options in ({}, {"repetition_penalty": 1.5}, {"logit_bias": {3: 1.0}}):
        sampler, other = (Sampler(SamplingParams(rule=rule, **options), 0, [1, 2], 8) for _ in range(2))
        logits = torch.randn(4, 8, generator=dice)
        tokens = [0]
        for row in logits[:3]:
            tokens.append(other.choose(row))
            other.advance(tokens[-1])
        tokens[3] = (tokens[3] + 1) % 8
        probs = [None, *torch.rand(3, 8, generator=dice, dtype=torch.float64)]
        tree = TokenTree.chain(tokens, probs=probs)
        found = verify_tree(tree, acceptance_rule(sampler, tree, logits))
        assert found.path == (1, 2)
        assert context_of(sampler) == context_of(other)


def test_coupled_ignores_what_guesses_were_drawn_from() -> None:
    law = BROAD.p[()]
    for seed in range(50):
        sampler = Sampler(SamplingParams(temperature=1.0), seed, PROMPT, BROAD.vocab)
        tree = drafted(seed, (), BROAD)
        found = verify_tree(tree, acceptance_rule(sampler, tree, torch.stack([law.log()] * len(tree))))
        for place, token in enumerate(found.tokens, len(PROMPT)):
            assert token == int((law.log() + gumbel_noise(seed, place, torch.arange(3))).argmax())


@pytest.mark.parametrize("rule", RULES)
def test_each_node_has_the_law_of_its_own_context(rule: Any) -> None:
    """Options that depend on the text so far see the guesses above a node, and nothing of those that were rejected."""
    options = {"temperature": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.3}
    for seed in range(30):
        sampler, seen = Sampler(SamplingParams(rule=rule, **options), seed, PROMPT, BROAD.vocab), []
        tree = drafted(seed, (), BROAD)
        original = sampler.distribution

        def noted(row: Tensor, original: Any = original, sampler: Sampler = sampler, seen: list = seen) -> Tensor:
            (penalties,) = sampler.processors
            assert isinstance(penalties, Penalties)
            assert penalties.counts.tolist() == [context_of(sampler)[len(PROMPT) :].count(token) for token in range(3)]
            seen.append((int(row[0]), tuple(context_of(sampler)[len(PROMPT) :])))
            return original(row)

        sampler.distribution = noted  # type: ignore[method-assign]
        logits = torch.arange(len(tree)).view(-1, 1).expand(-1, 3).float()
        verify_tree(tree, acceptance_rule(sampler, tree, logits))
        assert seen
        for node, text in seen:
            assert text == tuple(tree.tokens[i] for i in tree.path(node))
