"""Words of streamed text at the edge of a terminal."""

import random

import pytest
from rich.cells import cell_len
from rich.style import Style

from pronk.cli.wrap import WordWrap

WIDTH = 10
PLAIN = Style()


def wrapped(*pieces: str) -> str:
    wrap = WordWrap()
    parts = [part for piece in pieces for part in wrap.push(piece, PLAIN, WIDTH)]
    return "".join(text for text, _ in [*parts, *wrap.flush(WIDTH)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three", "one two\nthree"),
        ("0123456789 a", "0123456789\na"),
        ("a 0123456789ABC d", "a\n0123456789ABC\nd"),
        ("    x = 1\n    y", "    x = 1\n    y"),
        ("ab\n\ncd ", "ab\n\ncd "),
        ("你好你好你好", "你好你好你\n好"),
    ],
)
def test_lines_break_between_words(text: str, expected: str) -> None:
    assert wrapped(text) == expected


def test_the_pieces_of_a_stream_do_not_matter() -> None:
    numbers = random.Random(7)
    for _ in range(200):
        text = "".join(numbers.choices("abcdef  \n你", k=60))
        pieces = list[str]()
        rest = text
        while rest:
            size = numbers.randint(1, 6)
            pieces.append(rest[:size])
            rest = rest[size:]
        shown = wrapped(*pieces)
        assert shown == wrapped(text)
        assert "".join(shown.split()) == "".join(text.split())
        for line in shown.split("\n"):
            assert cell_len(line) <= WIDTH or " " not in line.strip()


def test_a_word_of_two_colours_is_held_as_a_whole() -> None:
    wrap = WordWrap()
    green = Style(color="green")
    assert list(wrap.push("aaaa bb", PLAIN, WIDTH)) == [("aaaa", PLAIN)]
    assert list(wrap.push("bbbb c", green, WIDTH)) == [
        ("\n", PLAIN),
        ("bb", PLAIN),
        ("bbbb", green),
    ]
