"""The alignment of an output with its prediction, after insertions, deletions and replacements."""

import random
from collections.abc import Sequence

import pytest

from pronk.drafting.shared.alignment import Alignment, Place

TEXT = "the cat sat on the mat, and the dog lay in the sun"


def ids(text: str) -> list[int]:
    return [*map(ord, text)]


def align(prediction: str, output: str) -> Alignment:
    alignment = Alignment(ids(prediction))
    alignment.extend(ids(output))
    return alignment


def rest(prediction: str, output: str) -> str:
    """Return the part of the prediction after the place that the output has reached."""
    position = align(prediction, output).places()[0].position
    return prediction[position:]


def test_an_output_without_edits_goes_on_with_the_next_token() -> None:
    for length in range(len(TEXT)):
        (place,) = align(TEXT, TEXT[:length]).places()
        assert place == Place(length, min(length, 16))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("Sure: the cat", " sat on the mat, and the dog lay in the sun"),
        ("the cat quietly sat", " on the mat, and the dog lay in the sun"),
        ("the sat", " on the mat, and the dog lay in the sun"),
        ("the cat sat on the rug, and", " the dog lay in the sun"),
        # the nearest match ahead, not the first one
        ("the cat sat on the mat; the", " dog lay in the sun"),
        # the longest match, although it lies behind
        ("the cat sat on the mat, and the cat", " sat on the mat, and the dog lay in the sun"),
    ],
    ids=["preface", "insertion", "deletion", "replacement", "nearest", "repeated"],
)
def test_the_place_is_found_again_after_an_edit(output: str, expected: str) -> None:
    assert rest(TEXT, output) == expected


def test_an_insertion_leaves_a_second_place_where_it_began() -> None:
    """The letter n occurs again in "and", but it may also end an insertion."""
    places = align(TEXT, "the cat sat on!!n").places()
    assert [TEXT[place.position :][:8] for place in places] == ["d the do", " the mat"]
    assert [place.match for place in places] == [1, 0]


def test_tokens_of_the_prediction_are_counted_once_and_only_in_reliable_matches() -> None:
    assert align(TEXT, TEXT).num_found == len(TEXT)
    assert align(TEXT, TEXT + TEXT).num_found == len(TEXT)
    assert align(TEXT, "the cat").num_found == len("the cat")
    assert align("abcdef", "abXdef").num_found == len("abdef")
    assert align("abcdef", "fXdXb").num_found == 0
    assert align("", "abc").num_found == 0
    assert align("a", "a").num_found == 1


def test_tokens_one_by_one_or_together_give_the_same_places() -> None:
    dice = random.Random(0)
    for _ in range(100):
        prediction = [dice.randrange(4) for _ in range(dice.randrange(40))]
        output = [dice.randrange(4) for _ in range(40)]
        together = Alignment(prediction)
        together.extend(output)
        one_by_one = Alignment(prediction)
        for token in output:
            one_by_one.extend([token])
        assert one_by_one.places() == together.places()
        assert one_by_one.num_found == together.num_found
        check_places(prediction, output, together)


def check_places(prediction: Sequence[int], output: Sequence[int], alignment: Alignment) -> None:
    """Check the match of each place against the two texts."""
    for position, match in alignment.places():
        assert 0 <= position <= len(prediction)
        assert [*prediction[position - match : position]] == [*output[len(output) - match :]]
        assert match <= 16


def test_draft_tokens_after_the_output_do_not_change_its_alignment() -> None:
    alignment = align(TEXT, "the cat")
    longer = alignment.after(ids(" sat"))
    assert longer.places() == align(TEXT, "the cat sat").places()
    assert longer.num_found == len("the cat sat")
    assert alignment.places() == align(TEXT, "the cat").places()
    assert alignment.num_found == len("the cat")


def test_thousands_of_equal_tokens_are_compared_near_the_anchor_alone() -> None:
    """All places match equally; the nearest one ahead is found among them."""
    prediction = [*range(10, 20), *[1] * 5000]
    alignment = Alignment(prediction)
    alignment.extend([10, 11, 1])
    assert alignment.places() == [Place(11, 1), Place(2, 0)]
