"""Translation of ECMA-262's regular expressions, compared with Python's ``re`` on random
expressions.
"""

import random
import re
import warnings
from collections.abc import Iterator

import pytest

from pronk.text.json_schema.patterns import other_than, to_rust
from schema_corpus import matcher, matches

ATOMS = [
    "a", "b", "c", ".", "\\d", "\\w", "\\s", "\\W", "\\S", "\\D", "[ab]", "[^a]", "[a-c]", "[\\d-]", "[\\w.]", "[^\\s]",
    "x", "\\.", "\\-", "-", "(?:ab)", "(b|c)", "(a|)", "\\n", "[\\n]", "é", "\\u00e9", "[^\\W]", "&&", "~", "#",
    "[a&&b]", "[[]", "\\x41", "[+--]", '[^"]', "[^\\\\]", '"',
]  # fmt: skip
QUANTIFIERS = ["", "", "", "", "*", "+", "?", "{2}", "{1,}", "{0,2}", "*?", "+?", "{1,2}?"]
TEXTS = [
    "", "a", "b", "ab", "ba", "abc", "aab", "-", "1", "a1", " ", "\n", "x", "é", "A", "ab c", "aa", "bb", "&", "&&",
    "~", "#", "[", "a.b", "+", ",", "a\nb", "5-", "ac", "ca", "cab", '"', "\\", 'a"', "\\b",
]  # fmt: skip


def random_patterns(count: int) -> Iterator[str]:
    dice = random.Random(0)

    def sequence() -> str:
        return "".join(
            dice.choice(ATOMS) + dice.choice(QUANTIFIERS) for _ in range(dice.randint(1, 3))
        )

    for _ in range(count):
        begin = dice.choice(["", "^", "(^", "^("])
        end = dice.choice([")", "$)", f"|{sequence()})"]) if "(" in begin else ""
        more = f"|{dice.choice(['', '^'])}{sequence()}" if dice.random() < 0.3 else ""
        yield f"{begin}{sequence()}{end}{more}{dice.choice(['', '$'])}"


def test_patterns_match_what_they_match_in_python() -> None:
    for pattern in random_patterns(500):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            expected = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
        follower = matcher({"type": "string", "pattern": to_rust(pattern)})
        wrong = [text for text in TEXTS if matches(follower, text) != bool(expected.search(text))]
        assert wrong == [], pattern


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\p{L}+$", ["é", "a"], ["1"]),
        (r"^\p{Script=Greek}$", ["α"], ["a"]),
        (r"^\P{L}$", ["1"], ["a"]),
        (r"^[\p{Lu}_]$", ["É", "_"], ["é"]),
        (r"^\cA$", ["\x01"], ["A"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\u{1F600}$", ["😀"], ["u"]),
        (r"^\ud83d\ude00$", ["😀"], ["u"]),
        (r"^(?<year>[0-9]{4})$", ["2024"], ["24"]),
        (r"^a{,2}$", ["a{,2}"], ["aa"]),
        (r"^{a}]$", ["{a}]"], ["a"]),
        (r"^[^]$", ["a", "\n", '"'], ["ab"]),
        (r"^\s$", ["\u2028", "\ufeff", "\xa0", "\t"], ["\x85", "a"]),
        (r"^\d$", ["1"], ["٣"]),
        (r"^[\x00-\x1f]$", ["\n", "\x03"], ['"', "\\", " "]),
        (r"^\/\-\_\@$", ["/-_@"], ["\\"]),
    ],
)
def test_syntax_of_ecma_262(pattern: str, good: list[str], bad: list[str]) -> None:
    follower = matcher({"type": "string", "pattern": to_rust(pattern)})
    assert [text for text in good if not matches(follower, text)] == []
    assert [text for text in bad if matches(follower, text)] == []


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?i)a", "(?i:a)", r"(a)\1", r"\k<a>", r"\ba", r"a\B", "(", ")", "[",
        "[a", "a**", "*", "^*", "(*)", "a|*", "[z-a]", r"[\d-z]", "a{3,1}", "\\", r"\A", r"\Z", r"\p", r"\pL", r"\c1",
        r"\ud800", r"\u{110000}", "[a-", "[\\",
    ],
)  # fmt: skip
def test_patterns_without_a_translation(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^[a-z]"):
        to_rust(pattern)


@pytest.mark.parametrize(
    "names",
    [
        ["a"],
        ["a", "ab"],
        ["", "x"],
        ["a", "b", "aa"],
        ['q"t', "größe", "x\ny", "]", "^-", "\\"],
        ["😀"],
    ],
)
def test_other_names(names: list[str]) -> None:
    follower = matcher({"type": "string", "pattern": other_than(names)})
    longer = [f"{name}z" for name in names]
    shorter = [name[:-1] for name in names]
    for text in {*names, *TEXTS, *longer, *shorter}:
        assert matches(follower, text) == (text not in names), text
