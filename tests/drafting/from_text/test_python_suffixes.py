"""The suffix index in Python against brute force: all strings are counted again after every
token.
"""

import random
from collections.abc import Sequence

import pytest

from pronk.drafting.from_text._growth import PythonSuffixes

# For each string, the counts of the tokens after it, in the order of their first occurrence.
Following = dict[tuple[int, ...], dict[int, int]]


def count(texts: Sequence[Sequence[int]], max_match: int) -> Following:
    """Count the continuations of all strings up to a length."""
    found: Following = {}
    for text in texts:
        for end, token in enumerate(text):
            for size in range(min(max_match, end) + 1):
                after = found.setdefault(tuple(text[end - size : end]), {})
                after[token] = after.get(token, 0) + 1
    return found


def longest(counts: Following, tail: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the longest suffix of ``tail`` with a continuation."""
    ends = [tuple(tail[-size:]) for size in range(min(most, len(tail)), 0, -1)]
    return next((end for end in ends if end in counts), ())


def check_all(index: PythonSuffixes, texts: Sequence[Sequence[int]], tail: Sequence[int]) -> None:
    """Check the longest match of ``tail``, and its continuations and those of all shorter
    matches.
    """
    counts = count(texts, index.max_match)
    want = longest(counts, tail, index.max_match)
    assert index.longest_match(tail) == [*want]
    for start in range(len(want)):
        assert index.continuations([*want[start:]]) == list(counts[want[start:]].items())[::-1]


@pytest.mark.parametrize("letters", [1, 2, 3, 30])
def test_matches_and_counts_equal_brute_force(letters: int) -> None:
    matched = 0
    for seed in range(100):
        dice = random.Random(seed)
        texts = [list[int]()]
        index = PythonSuffixes(dice.randint(1, 5))
        for _ in range(dice.randint(1, 40)):
            if dice.random() < 0.1:
                texts.append([])
                index.end_text()
            texts[-1].append(dice.randrange(letters))
            index.extend(texts[-1][-1:])
            tail = [dice.randrange(letters) for _ in range(6)]
            check_all(index, texts, dice.choice((tail, texts[-1], texts[0])))
            matched += len(index.longest_match(tail))
    assert matched > 300


def test_128_continuations_are_listed_and_all_are_found() -> None:
    """The continuations that occurred first are listed; ``longest_match`` also finds those that are
    not listed.
    """
    index = PythonSuffixes(4)
    for token in range(1, 301):
        index.extend((0, token))
    assert index.longest_match([0]) == [0]
    assert [token for token, _ in index.continuations([0])] == list(range(128, 0, -1))
    for token in range(1, 300):
        assert index.longest_match([0, token]) == [0, token]
