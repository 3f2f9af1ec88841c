"""The checklist at the end of ``docs/papers.md`` has a line for each name of ``papers.txt``."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
LIST = Path(__file__).parent / "papers.txt"
SCRIPTS = ROOT / "benchmarks"
# Numbers that the texts give their equations, figures and so on, by the title of the checklist.
NUMBERED = {
    "Lookahead decoding": {
        "equation": range(1, 10),
        "figure": range(1, 9),
        "table": range(1, 7),
        "algorithm": range(1, 5),
    },
    "Kangaroo": {
        "equation": range(1, 5),
        "figure": range(1, 4),
        "table": range(1, 3),
        "definition": range(1, 2),
    },
    "Mistral 7B": {"figure": range(1, 7), "table": range(1, 6)},
    "GLIDE with a CAPE": {
        "figure": range(1, 10),
        "table": range(1, 9),
        "algorithm": range(1, 3),
    },
    "Multi-token prediction": {
        "equation": range(1, 4),
        "figure": range(1, 10),
        "figure S": range(10, 18),
        "table": range(1, 2),
        "table S": range(2, 15),
        "definition L.": range(1, 3),
        "lemma L.": range(3, 4),
    },
    "How to make LLMs go fast": {},
}


def listed_names() -> dict[str, list[str]]:
    """Return the names of ``papers.txt`` by title."""
    found = dict[str, list[str]]()
    names = list[str]()
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if title := re.fullmatch(r"\[(.+)\]", line):
            names = found.setdefault(title[1], [])
        elif line and not line.startswith("#"):
            names.append(line)
    return found


def checklist(page: str) -> dict[str, dict[str, str]]:
    """Return the last cell of each line of the checklist, by title and name.

    Raises:
        ValueError: two lines have the same name, or a heading has another number of entries.
    """
    found = dict[str, dict[str, str]]()
    _, _, text = page.partition("\n## Checklist")
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        heading, _, lines = part.partition("\n")
        title, _, count = heading.removesuffix(" entries").rpartition(": ")
        rows = re.findall(r"^\| (.+) \| (.*) \| (.+) \|$", lines, flags=re.MULTILINE)[1:]
        cells = {name: last for name, _, last in rows if name != "---"}
        if len(cells) != int(count):
            msg = f"{title}: expected {count} names, found {len(cells)}"
            raise ValueError(msg)
        found[title] = cells
    return found


def differences(page: str) -> list[str]:
    """Return the names that the page or the list lacks, or that have another place."""
    found = checklist(page)
    wanted = listed_names()
    if [*found] != [*wanted]:
        return [f"expected the titles {[*wanted]}, found {[*found]}"]
    return [
        f"{title}: {name}"
        for title, names in wanted.items()
        for name in sorted(set(names) ^ set(found[title]))
    ]


def test_every_name_has_a_line() -> None:
    assert differences(PAGE.read_text(encoding="utf-8")) == []
    names = listed_names()
    assert sum(len(each) for each in names.values()) > 190
    assert all(len(each) == len(set(each)) for each in names.values())


def test_missing_and_renamed_lines_are_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("| figure S12 | "))
    with pytest.raises(ValueError, match="Multi-token prediction: expected 60 names, found 59"):
        differences(page.replace(f"{line}\n", ""))
    renamed = page.replace("| figure S12 | ", "| figure S122 | ")
    assert differences(renamed) == [
        "Multi-token prediction: figure S12",
        "Multi-token prediction: figure S122",
    ]


@pytest.mark.parametrize("title", NUMBERED)
def test_no_number_of_a_text_is_missing_from_the_list(title: str) -> None:
    names = listed_names()[title]
    for kind, numbers in NUMBERED[title].items():
        pattern = rf"{kind}{'' if kind[-1] in 'S.' else ' '}(\d+)[ab]?(?:,.*)?"
        found = {int(match[1]) for name in names if (match := re.fullmatch(pattern, name))}
        assert found == set(numbers), kind


def unfounded(cells: dict[str, str]) -> list[str]:
    """Return the names whose line has neither a link, nor a reason, nor another name."""
    found = list[str]()
    for name, cell in cells.items():
        others = [other for other in cells if other != name]
        words = re.search(r"(?:figures?|table|appendix|section) [A-Z.]*\d+", cell)
        refers = any(cell.removeprefix("as ").startswith(other.split(",")[0]) for other in others)
        has_reason = cell.startswith("not repeated: ") or cell.endswith("without a figure")
        if "](" not in cell and not has_reason and not refers and not words:
            found.append(name)
    return found


def test_every_line_has_a_link_or_a_reason() -> None:
    found = checklist(PAGE.read_text(encoding="utf-8"))
    assert {title: unfounded(cells) for title, cells in found.items() if unfounded(cells)} == {}
    assert unfounded({"figure 1": "yes", "table 1": "as figure 1"}) == ["figure 1"]


def test_named_tests_exist() -> None:
    """A test that a line names stands in the file of the link before it."""
    page = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\), `(test_\w+)`", page)
    assert len(named) > 30
    missing = [
        (file, name)
        for file, name in named
        if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def inline_commands(page: str) -> list[str]:
    """Return the commands in the page's sentences and tables that begin with a script."""
    return re.findall(r"`(?:python )?([\w/]+\.py(?: [^`]*)?)`", page)


def unknown_words(command: str) -> list[str]:
    """Return the script, parts and options of a command that do not exist.

    The parts are the words before the first option, besides models. A script lists its parts in its
    docstring.
    """
    name, *words = shlex.split(command)
    script = ROOT / name if "/" in name else SCRIPTS / "papers" / name
    if not script.is_file():
        return [name]
    source = script.read_text(encoding="utf-8")
    shared = (SCRIPTS / "policy.py", SCRIPTS / "papers" / "measuring.py")
    sources = source + "".join(each.read_text(encoding="utf-8") for each in shared)
    options = [word for word in words if word.startswith("--")]
    before = words[: words.index(options[0])] if options else words
    parts = [word for word in before if re.fullmatch(r"[a-z][a-z_0-9]*", word)]
    unknown = [part for part in parts if not re.search(rf"^ {{4}}{part} +\w", source, re.MULTILINE)]
    return unknown + [option for option in options if f'"{option}"' not in sources]


def test_parts_and_options_of_inline_commands_exist() -> None:
    commands = inline_commands(PAGE.read_text(encoding="utf-8"))
    assert len(commands) > 40
    assert {each: unknown_words(each) for each in commands if unknown_words(each)} == {}


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        ("lookahead.py MODEL table9 --draft DRAFT", ["table9"]),
        ("counts.py MODEL main --per-suit 20", ["--per-suit"]),
        ("benchmarks/papers/kangaroos.py MODEL", ["benchmarks/papers/kangaroos.py"]),
    ],
)
def test_unknown_words_are_found(command: str, unknown: list[str]) -> None:
    assert unknown_words(command) == unknown
