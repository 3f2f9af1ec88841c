"""Trees of continuations: the compiled kernels against Python, bit for bit."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pronk.drafters.from_text._automaton import SuffixAutomaton
from pronk.drafters.from_text._growth import (
    PRIORS,
    CompiledTreeBuilder,
    PythonTreeBuilder,
    SuffixIndex,
    TreeBuilder,
    TreeLimits,
)
from pronk.kernels.suffixes import CompiledSuffixes, open_suffix_library
from pronk.sampling.params import SamplingParams
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.acceptance_stats import AcceptanceStats
from pronk.speculation.proposer import Outcome
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.tree import TokenTree

LIBRARY = open_suffix_library()


@dataclass
class Side:
    """One implementation's suffix indexes (first the request's text), acceptance rates and tree builder."""

    sources: Sequence[SuffixIndex]
    rates: AcceptanceRates
    growth: TreeBuilder


def sides(max_match: int, sources: int) -> tuple[Side, Side]:
    plain, compiled = (AcceptanceRates("suffix", PRIORS, SharedAcceptance(AcceptanceStats())) for _ in range(2))
    return (
        Side([SuffixAutomaton(max_match) for _ in range(sources)], plain, PythonTreeBuilder(plain, "suffix")),
        Side(
            [CompiledSuffixes(LIBRARY, max_match) for _ in range(sources)],
            compiled,
            CompiledTreeBuilder(LIBRARY, compiled, "suffix"),
        ),
    )


@pytest.mark.parametrize("letters", [1, 2, 5, 40, 400])
def test_both_implementations_grow_the_same_trees(letters: int) -> None:
    """The cases vary the repetitiveness of up to three texts, the limits of trees, and acceptance rates."""
    grown = learned = 0
    for seed in range(60):
        dice = random.Random(seed)
        both = sides(dice.randint(2, 20), dice.randint(1, 3))
        text, params = [dice.randrange(letters)], SamplingParams(temperature=dice.choice((0.0, 0.7)))
        for side in both:
            side.sources[0].extend(text)
        for _ in range(40):
            new = piece(dice, text, letters)
            text += new
            others = [piece(dice, text, letters) for _ in both[0].sources[1:]]
            limits = random_limits(dice)
            drafted = piece(dice, text, letters) if dice.random() < 0.2 else []
            trees = [extend_and_grow(side, new, others, [*text, *drafted], limits) for side in both]
            assert trees[0] == trees[1]
            grown += trees[0].num_draft_tokens
            path = random_path(dice, trees[0])
            for side in both:
                side.rates.learn(Outcome(None, trees[0], path, (0,) * (len(path) + 1), 0, params))
            learned += len(path)
        assert both[0].rates == both[1].rates
    assert grown > 2000
    assert learned > 200


def extend_and_grow(
    side: Side, new: Sequence[int], others: Sequence[Sequence[int]], text: Sequence[int], limits: TreeLimits
) -> TokenTree:
    """Extend the text and the other texts, and return the tree below the text."""
    side.sources[0].extend(new)
    for source, other in zip(side.sources[1:], others, strict=True):
        source.extend(other)
        if len(other) % 2:
            source.end_text()
    return side.growth.build(side.sources, text, limits)


def piece(dice: random.Random, text: Sequence[int], letters: int) -> list[int]:
    """Return new tokens, or a copy of a part of the text."""
    size = dice.randint(1, 12)
    if dice.random() < 0.5:
        return [dice.randrange(letters) for _ in range(size)]
    begin = dice.randrange(len(text))
    return [*text[begin : begin + size]]


def random_limits(dice: random.Random) -> TreeLimits:
    return TreeLimits(
        dice.choice((1, 3, 15, 128)),
        dice.choice((0, 1, 4, 60)),
        dice.choice((1, 1, 3)),
        dice.choice((0.25, 1.0, 4.0)),
        dice.choice((0.0, 0.0, 0.2)),
    )


def random_path(dice: random.Random, tree: TokenTree) -> tuple[int, ...]:
    path = tree.path(dice.randrange(len(tree)))
    assert all(tree.acceptable[node] for node in path)
    return path


def test_128_of_300_continuations_are_used() -> None:
    for first in (0, 7):
        both = sides(4, 1)
        for side in both:
            for token in range(1, 301):
                side.sources[0].extend((first, token + 1000))
            side.sources[0].extend((first, 1005, first))
        trees = [side.growth.build(side.sources, (first,), TreeLimits(128, 1, 1, 1.0, 0.0)) for side in both]
        assert trees[0] == trees[1]
        assert set(trees[0].tokens[1:]) == set(range(1001, 1129))
        assert trees[0].tokens[1] == 1005


def test_gains_change_once_the_temperature_is_known() -> None:
    """The shared acceptance statistics depend on the temperature."""
    acceptance_stats = AcceptanceStats()
    for way in PRIORS:
        for _ in range(99):
            acceptance_stats.learn("suffix", way, 1, 0.0, right=True)
            acceptance_stats.learn("suffix", way, 1, 1.0, right=False)
    both, gains = sides(4, 1), set[float]()
    for side in both:
        side.sources[0].extend((1, 2, 3, 1))
        side.rates.known.acceptance_stats = acceptance_stats
    for temperature in (None, 0.0):
        trees = [side.growth.build(side.sources, (1,), TreeLimits(1, 1, 1, 1.0, 0.0)) for side in both]
        assert trees[0] == trees[1]
        assert trees[0].gain is not None
        gains.add(trees[0].gain[1])
        if temperature is not None:
            break
        for side in both:
            empty = TokenTree((1, 9), (-1, 0), origin=(("", 0), ("suffix", 31)))
            side.rates.learn(Outcome(None, empty, (), (5,), 0, SamplingParams(temperature=0.0)))
    assert len(gains) == 2
