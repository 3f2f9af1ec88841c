"""Prompt lookup: the order of matches, and the gains of their continuations."""

import random

import pytest

from drafting.helpers import Model, context, looping, step
from pronk.drafting import PromptLookup
from pronk.drafting.from_text.prompt_lookup import _PRIORS, TextIndex
from pronk.drafting.ledger import RequestLedger


def words(drafter: PromptLookup, text: list[int], **limits: int) -> list[tuple[int, ...]]:
    """Return the proposed continuations, as paths to the leaves."""
    (tree,) = drafter.propose([context(drafter.start(text), text, **limits)])
    leaves = set(range(1, len(tree))) - set(tree.parents)
    return [tuple(tree.tokens[i] for i in tree.path(leaf)) for leaf in sorted(leaves)]


def test_matches_equal_a_plain_search() -> None:
    dice = random.Random(0)
    for _ in range(300):
        text = [dice.randrange(3) for _ in range(dice.randrange(1, 40))]
        index = TextIndex((1, 2, 3))
        index.extend(text)
        want = []
        seen = set[int]()
        for size in (3, 2, 1):
            for place in range(len(text) - 1, size - 1, -1):
                if (
                    text[place - size : place] == text[-size:]
                    and len(text) >= size
                    and place not in seen
                ):
                    seen.add(place)
                    want.append((size, place))
        assert list(index.matches(text[-3:])) == want


def test_longer_matches_come_first_then_later_ones() -> None:
    text = [1, 2, 3, 7, 9, 3, 8, 9, 2, 3, 5, 9, 1, 2, 3]
    assert words(PromptLookup(min_ngram=1, max_ngram=3, num_tokens=1, num_chains=1), text) == [(7,)]
    assert words(PromptLookup(min_ngram=1, max_ngram=1, num_tokens=1, num_chains=1), text) == [(5,)]
    three = PromptLookup(min_ngram=1, max_ngram=3, num_tokens=9, num_chains=3)
    firsts = [word[0] for word in words(three, text, depth=1)]
    assert firsts == [7, 5, 8]


def test_matches_shorter_than_min_ngram_are_ignored() -> None:
    assert words(PromptLookup(min_ngram=2), [1, 2, 3, 9, 3]) == []
    assert words(PromptLookup(min_ngram=1), [1, 2, 3, 9, 3]) != []


def test_the_output_is_searched_and_loops_are_continued() -> None:
    drafter = PromptLookup(min_ngram=2, num_chains=1)
    tokens = [9, 0, 1]
    state = drafter.start(tokens)
    for _ in range(6):
        step(drafter, state, tokens, looping)
    assert tokens[:9] == [9, 0, 1, 2, 3, 4, 0, 1, 2]
    (tree,) = drafter.propose([context(state, tokens)])
    assert list(tree.tokens[1:]) == [(tokens[-1] + i) % 5 for i in range(1, 16)]


@pytest.mark.parametrize(
    ("budget", "nodes", "want"), [(5, 99, 5), (99, 4, 4), (127, 99, 99), (5, 0, 0)]
)
def test_num_tokens_and_the_engines_limit_bound_the_tree(
    budget: int, nodes: int, want: int
) -> None:
    drafter = PromptLookup(min_ngram=1, num_tokens=budget)
    text = [1, 2, 1, 2, 1]
    (tree,) = drafter.propose([context(drafter.start(text), text, depth=200, nodes=nodes)])
    assert tree.num_draft_tokens == want


def test_gains_grow_with_the_match_and_follow_the_measured_acceptance() -> None:
    drafter = PromptLookup(min_ngram=1, max_ngram=4, num_chains=1)
    text = [1, 2, 3, 4, 5, 6, 7, 9, 4, 8]
    gains = []
    for tail in ([4], [3, 4], [2, 3, 4], [1, 2, 3, 4]):
        tokens = [*text, *tail]
        (tree,) = drafter.propose([context(drafter.start(tokens), tokens)])
        assert tree.gain is not None
        assert list(tree.gain) == sorted(tree.gain, reverse=True)
        gains.append(tree.gain[1])
    assert gains == sorted(gains)
    assert gains[0] < gains[-1]
    state = drafter.start([0, 1, 2, 3, 4])
    tokens = [0, 1, 2, 3, 4]
    ledger = RequestLedger()
    rates = ledger.acceptance.rates("prompt_lookup", _PRIORS)
    for _ in range(12):
        counted_step(drafter, state, tokens, looping, ledger)
    (tree,) = drafter.propose([context(state, tokens, ledger=ledger)])
    assert tree.gain is not None
    assert tree.gain[1] > 0.85
    learned = rates.rate(12, 1)
    dice = random.Random(0)
    for _ in range(60):
        counted_step(drafter, state, tokens, lambda _: dice.randrange(3), ledger)
    assert rates.rate(6, 1) < 0.6  # matches of two tokens, now in random text
    assert rates.rate(12, 1) < learned


def counted_step(
    drafter: PromptLookup, state: TextIndex, tokens: list[int], model: Model, ledger: RequestLedger
) -> None:
    """Decode one step, and count its proposal."""
    length = len(tokens)
    tree = step(drafter, state, tokens, model, ledger=ledger)
    ledger.acceptance.propose("prompt_lookup", (), tree)
    ledger.acceptance.advance(tokens[length:])
