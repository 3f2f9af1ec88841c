"""Trees of continuations: the compiled kernels against Python, bit for bit."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pronk.drafting.acceptance_stats import AcceptanceStats, DrafterRates, RequestAcceptance
from pronk.drafting.from_text._growth import (
    PRIORS,
    CompiledTreeBuilder,
    PythonSuffixes,
    PythonTreeBuilder,
    SuffixIndex,
    TreeBuilder,
    TreeLimits,
)
from pronk.kernels.suffixes import CompiledSuffixes, open_suffix_library
from pronk.sampling.tree import TokenTree

LIBRARY = open_suffix_library()


@dataclass
class Side:
    """One implementation's suffix indexes (first the request's text), acceptance rates and tree
    builder.
    """

    sources: Sequence[SuffixIndex]
    acceptance: RequestAcceptance
    growth: TreeBuilder

    @property
    def rates(self) -> DrafterRates:
        return self.acceptance.rates("suffix", PRIORS)


def sides(
    max_match: int, sources: int, temperature: float = 0.0, stats: AcceptanceStats | None = None
) -> tuple[Side, Side]:
    plain, compiled = (RequestAcceptance(stats or AcceptanceStats(), temperature) for _ in range(2))
    return (
        Side(
            [PythonSuffixes(max_match) for _ in range(sources)],
            plain,
            PythonTreeBuilder(plain.rates("suffix", PRIORS), "suffix"),
        ),
        Side(
            [CompiledSuffixes(LIBRARY, max_match) for _ in range(sources)],
            compiled,
            CompiledTreeBuilder(LIBRARY, compiled.rates("suffix", PRIORS), "suffix"),
        ),
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("letters", [1, 2, 5, 40, 400])
def test_both_implementations_grow_the_same_trees(letters: int) -> None:
    """The cases vary the repetitiveness of up to three texts, the limits of trees, and acceptance
    rates.
    """
    grown = learned = 0
    for seed in range(30):
        dice = random.Random(seed)
        both = sides(dice.randint(2, 20), dice.randint(1, 3), dice.choice((0.0, 0.7)))
        text = [dice.randrange(letters)]
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
                side.acceptance.propose("suffix", (), trees[0])
                side.acceptance.advance([*(trees[0].tokens[node] for node in path), letters])
            learned += len(path)
        assert both[0].rates.reached == both[1].rates.reached
        assert both[0].rates.accepted == both[1].rates.accepted
    assert grown > 1000
    assert learned > 100


def extend_and_grow(
    side: Side,
    new: Sequence[int],
    others: Sequence[Sequence[int]],
    text: Sequence[int],
    limits: TreeLimits,
) -> TokenTree:
    """Extend the text and the other texts, and return the tree below the text."""
    for source, other in zip(side.sources[1:], others, strict=True):
        source.extend(other)
        if len(other) % 2:
            source.end_text()
    return side.growth.build(side.sources, text, limits, appended=new)


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
        trees = [
            side.growth.build(side.sources, (first,), TreeLimits(128, 1, 1, 1.0, 0.0))
            for side in both
        ]
        assert trees[0] == trees[1]
        assert set(trees[0].tokens[1:]) == set(range(1001, 1129))
        assert trees[0].tokens[1] == 1005


def test_gains_depend_on_the_temperature() -> None:
    """The acceptance statistics of all requests are counted by temperature."""
    stats = AcceptanceStats()
    gains = list[float]()
    for way in PRIORS:
        for _ in range(99):
            stats.learn("suffix", way, 1, 0.0, accepted=True)
            stats.learn("suffix", way, 1, 1.0, accepted=False)
    for temperature in (0.0, 1.0):
        both = sides(4, 1, temperature, stats)
        for side in both:
            side.sources[0].extend((1, 2, 3, 1))
        trees = [
            side.growth.build(side.sources, (1,), TreeLimits(1, 1, 1, 1.0, 0.0)) for side in both
        ]
        assert trees[0] == trees[1]
        assert trees[0].gain is not None
        gains.append(trees[0].gain[1])
    assert gains[0] > 0.8
    assert gains[1] < 0.2
