"""Fenced blocks of the documentation: snippets of Python, and shell commands.

A block runs in the tests unless a comment directly above it says why not: ``<!-- not run: needs a
GPU -->``.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SHELL = ("sh", "bash")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int  # number of the first line of the text, from 1
    language: str
    text: str
    reason: str  # why the block is not run; empty if it is run

    @property
    def place(self) -> str:
        """The page and the line, for messages and names of tests."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page that name a language."""
    content = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(content):
        line = content.count("\n", 0, found.start("text")) + 1
        yield Block(page, line, found["language"], found["text"], found["reason"] or "")
