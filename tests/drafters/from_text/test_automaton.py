"""The suffix automaton against brute force: all strings are counted again after every token."""

import random
from collections.abc import Sequence

import pytest

from pronk.drafters.from_text._automaton import SuffixAutomaton

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


def check_place(automaton: SuffixAutomaton, place: tuple[int, int], want: Sequence[int], counts: Following) -> None:
    state, length = place
    assert length == len(want)
    found = [(each.token, each.num_occurrences) for each in automaton.continuations(state)]
    assert found == list(counts[tuple(want)].items())[::-1]


def check_all(automaton: SuffixAutomaton, texts: Sequence[Sequence[int]], tail: Sequence[int]) -> None:
    """Check the longest match of ``tail``, all shorter matches, and the match after each continuation."""
    most = automaton.max_match
    counts = count(texts, most)
    want = longest(counts, tail, most)
    place = automaton.match(tail)
    check_place(automaton, place, want, counts)
    for each in automaton.continuations(place[0]):
        further = longest(counts, [*want, each.token], most)
        check_place(automaton, automaton.follow(each, len(want)), further, counts)
    while place[1]:
        state, length = automaton.follow_link(place[0])
        # The skipped lengths have the same continuations, equally often.
        for size in range(length + 1, place[1]):
            assert counts[want[-size:]] == counts[want]
        place, want = (state, length), want[len(want) - length :]
        check_place(automaton, place, want, counts)


@pytest.mark.parametrize("letters", [1, 2, 3, 30])
def test_matches_and_counts_equal_brute_force(letters: int) -> None:
    matched = 0
    for seed in range(300):
        dice = random.Random(seed)
        texts, automaton = [list[int]()], SuffixAutomaton(dice.randint(1, 5))
        for _ in range(dice.randint(1, 40)):
            if dice.random() < 0.1:
                texts.append([])
                automaton.end_text()
            texts[-1].append(dice.randrange(letters))
            automaton.extend(texts[-1][-1:])
            tail = [dice.randrange(letters) for _ in range(6)]
            check_all(automaton, texts, dice.choice((tail, texts[-1], texts[0])))
            matched += automaton.match(tail)[1]
    assert matched > 1000


@pytest.mark.parametrize("letters", [1, 2, 500])
def test_a_known_text_takes_no_memory(letters: int) -> None:
    dice = random.Random(letters)
    text = [dice.randrange(letters) for _ in range(500)]
    automaton = SuffixAutomaton(6)
    sizes = []
    for _ in range(3):
        automaton.extend(text)
        automaton.end_text()
        sizes.append(automaton.nbytes)
    assert sizes[0] == sizes[1] == sizes[2]
    assert sum(each.num_occurrences for each in automaton.continuations(0)) == 1500 or letters == 500


@pytest.mark.parametrize(("letters", "most"), [(1, 35), (2, 75), (8, 65), (4096, 200)])
def test_memory_per_token(letters: int, most: int) -> None:
    dice = random.Random(letters)
    automaton = SuffixAutomaton(16)
    automaton.extend(dice.randrange(letters) for _ in range(8192))
    assert 20 < automaton.nbytes / automaton.num_tokens < most


def test_128_continuations_are_listed_and_all_are_found() -> None:
    """A state lists the continuations that occurred first; ``match`` also finds those that are not listed."""
    automaton = SuffixAutomaton(4)
    for token in range(1, 301):
        automaton.extend((0, token))
    state, length = automaton.match([0])
    assert length == 1
    assert [each.token for each in automaton.continuations(state)] == list(range(128, 0, -1))
    for token in range(1, 300):
        assert automaton.match([0, token])[1] == 2


def test_equal_texts_make_equal_automata() -> None:
    assert grown("abcabd", max_match=4) == grown("abcabd", max_match=4)
    assert grown("abcabd", max_match=4) != grown("abcabc", max_match=4)


def codes(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def grown(text: str, max_match: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(max_match)
    automaton.extend(codes(text))
    return automaton
