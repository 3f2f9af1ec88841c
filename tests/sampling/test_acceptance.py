"""Acceptance rules with requests' own random numbers: distribution of strings over seeds, and
reused random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pytest

import pronk.sampling.sampler
from chi_square import p_value_of
from exact_distributions import Same, String, Table, without
from pronk.base.arrays import Array
from pronk.sampling.acceptance import acceptance_rule
from pronk.sampling.logits_processors import Penalties, TokenContext
from pronk.sampling.noise import (
    draft_noise,
    gumbel_noise,
    rejection_noise,
    rejection_uniform,
    trial_seed,
)
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import verify_tree
from tiny_models import context_of

RULES = ("rejection", "block")
SAMPLED = {rule: SamplingParams(temperature=1.0, rule=rule) for rule in RULES}
PROMPT = [0, 1, 2, 1]
Noise = Callable[[int, int, int, Array], Array]


@dataclass(frozen=True)
class Setting:
    """A target ``p``, a draft model ``q``, the shape of its trees, and the number of compared
    tokens.
    """

    p: Table
    q: Table
    parents: tuple[int, ...]
    length: int

    @property
    def vocab(self) -> int:
        return self.p.vocab

    @cached_property
    def logits(self) -> Logarithms:
        return Logarithms(self.p)

    def drafted(self, text: String, siblings: frozenset[int]) -> tuple[Array, Array]:
        """Return ``q`` after ``text`` without the tokens of earlier siblings, and its logarithm."""
        if (text, siblings) not in self.known:
            q = without(self.q[text], set(siblings))
            self.known[text, siblings] = q, logarithms(q)
        return self.known[text, siblings]

    @cached_property
    def known(self) -> dict[tuple[String, frozenset[int]], tuple[Array, Array]]:
        return {}


def logarithms(q: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(q)


class Logarithms(dict[String, Array]):
    """Cached log-probabilities of a table, by the text before the token."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def __missing__(self, text: String) -> Array:
        self[text] = logarithms(self.table[text])
        return self[text]


# A chain of three with a sibling at depths 1 and 2.
BROAD = Setting(Table("target", 3, 0.0), Table("draft", 3, 0.0), (-1, 0, 1, 2, 0, 1), 3)
# Pairs (p, q) in which q gives one token far too much probability.
TWO = Setting(Same(1, 1), Same(9, 1), (-1, 0, 1, 2), 3)
CHAIN = Setting(Same(1, 1, 1), Same(16, 3, 1), (-1, 0, 1), 3)
PAIR = Setting(Same(1, 1, 1), Same(16, 3, 1), (-1, 0, 0), 1)
SETTINGS = {"broad": BROAD, "two": TWO, "chain": CHAIN, "pair": PAIR}


def same_in_every_step(seed: int, _: int, place: int, keys: Array) -> Array:
    return draft_noise(seed, 0, place, keys)


def noise_after_a_rejection(seed: int, _: int, place: int, keys: Array) -> Array:
    return rejection_noise(trial_seed(seed, PROMPT), place, keys)


def drafted(seed: int, text: String, setting: Setting, noise: Noise = draft_noise) -> TokenTree:
    root = len(PROMPT) + len(text) - 1
    tokens = [0]
    paths = [text]
    probs = list[Array | None]([None])
    for node, parent in enumerate(setting.parents[1:], 1):
        siblings = frozenset(
            tokens[other] for other in range(1, node) if setting.parents[other] == parent
        )
        q, log_q = setting.drafted(paths[parent], siblings)
        # Noise keys: the token id for a first child; other children have keys of their own, so
        # noise is not reused.
        keys = np.arange(setting.vocab) + (1000 * node if node != parent + 1 else 0)
        tokens.append(
            int((log_q + noise(seed, root, len(PROMPT) + len(paths[parent]), keys)).argmax())
        )
        probs.append(q)
        paths.append((*paths[parent], tokens[-1]))
    return TokenTree(tuple(tokens), setting.parents, probs=tuple(probs))


def text_of(rule: Any, seed: int, setting: Setting, noise: Noise) -> String:
    """Return the first ``setting.length`` tokens of a text."""
    text: String = ()
    sampler = Sampler(SAMPLED[rule], seed, TokenContext(PROMPT), setting.vocab)
    while len(text) < setting.length:
        tree = drafted(seed, text, setting, noise)
        paths = [text + tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
        logits = np.stack([setting.logits[path] for path in paths])
        text += verify_tree(tree, acceptance_rule(sampler, tree, logits)).tokens
        assert context_of(sampler) == [*PROMPT, *text]
    return text[: setting.length]


def significance(
    rule: str, setting: Setting, noise: Noise = draft_noise, seeds: int = 1500
) -> float:
    cells = product(range(setting.vocab), repeat=setting.length)
    texts = [text_of(rule, seed, setting, noise) for seed in range(seeds)]
    return p_value_of(texts, {cell: setting.p.chance(cell) for cell in cells})


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("setting", "seeds"),
    [
        *(
            pytest.param(name, 1000, marks=pytest.mark.slow if name == "two" else ())
            for name in SETTINGS
        ),
        *(pytest.param(name, 20_000, marks=pytest.mark.slow) for name in SETTINGS),
    ],
)
def test_strings_have_the_distribution_of_the_model(rule: str, setting: str, seeds: int) -> None:
    assert significance(rule, SETTINGS[setting], seeds=seeds) > 1e-3


@pytest.mark.parametrize(
    ("setting", "seeds", "wrong"),
    [
        # A trial that failed in one step fails again in the next step.
        (TWO, 3000, lambda seed, place, i: rejection_uniform(seed, place + i, 99)),
        # The second child reuses the number of the first child's rejection.
        (PAIR, 1500, lambda seed, place, i: rejection_uniform(seed, place, i - 1)),
    ],
    ids=["numbers of places", "numbers of single trials"],
)
def test_block_rule_needs_random_numbers_of_its_own(
    setting: Setting,
    seeds: int,
    wrong: Callable[[int, int, int], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pronk.sampling.sampler, "block_uniform", wrong)
    assert significance("block", setting, seeds=seeds) < 1e-6


def test_draft_tokens_need_other_noise_than_the_rule() -> None:
    assert (
        significance("block", replace(CHAIN, parents=(-1, 0, 1, 2)), noise_after_a_rejection) < 1e-6
    )


def test_each_step_needs_new_draft_noise() -> None:
    """The number of accepted tokens depends on the whole chain, so rejected tokens must not be
    drafted again.
    """
    assert significance("block", CHAIN, same_in_every_step, 3000) < 1e-6


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_greedy_is_the_argmax(rule: Any) -> None:
    dice = np.random.default_rng(0)
    for options in ({}, {"repetition_penalty": 1.5}, {"logit_bias": {3: 1.0}}):
        sampler, other = (
            Sampler(SamplingParams(rule=rule, **options), 0, TokenContext([1, 2]), 8)
            for _ in range(2)
        )
        logits = dice.standard_normal((4, 8), np.float32)
        tokens = [0]
        for row in logits[:3]:
            tokens.append(other.choose(row))
            other.advance(tokens[-1])
        tokens[3] = (tokens[3] + 1) % 8
        probs = [None, *dice.random((3, 8))]
        tree = TokenTree.chain(tokens, probs=probs)
        found = verify_tree(tree, acceptance_rule(sampler, tree, logits))
        assert found.path == (1, 2)
        assert context_of(sampler) == context_of(other)


def test_coupled_rule_ignores_draft_distributions() -> None:
    scores = np.log(BROAD.p[()])
    for seed in range(50):
        sampler = Sampler(SamplingParams(temperature=1.0), seed, TokenContext(PROMPT), BROAD.vocab)
        tree = drafted(seed, (), BROAD)
        found = verify_tree(tree, acceptance_rule(sampler, tree, np.stack([scores] * len(tree))))
        for place, token in enumerate(found.tokens, len(PROMPT)):
            assert token == int((scores + gumbel_noise(seed, place, np.arange(3))).argmax())


@pytest.mark.parametrize("rule", RULES)
def test_penalties_at_a_node_count_its_ancestors_only(rule: Any) -> None:
    options = {"temperature": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.3}
    for seed in range(30):
        sampler = Sampler(
            SamplingParams(rule=rule, **options), seed, TokenContext(PROMPT), BROAD.vocab
        )
        seen = []
        tree = drafted(seed, (), BROAD)
        original = sampler.distribution

        def noted(
            row: Array, original: Any = original, sampler: Sampler = sampler, seen: list = seen
        ) -> Array:
            (penalties,) = sampler.processors
            assert isinstance(penalties, Penalties)
            assert penalties.counts.tolist() == [
                context_of(sampler)[len(PROMPT) :].count(token) for token in range(3)
            ]
            seen.append((int(row[0]), tuple(context_of(sampler)[len(PROMPT) :])))
            return original(row)

        sampler.distribution = noted  # type: ignore[method-assign]
        logits = np.arange(len(tree), dtype=np.float32)[:, None].repeat(3, 1)
        verify_tree(tree, acceptance_rule(sampler, tree, logits))
        assert seen
        for node, text in seen:
            assert text == tuple(tree.tokens[i] for i in tree.path(node))
