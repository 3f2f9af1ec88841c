"""Words of streamed text that do not break at the edge of a terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.style import Style

_TAB = 8  # most columns that a tab takes
_PARTS = re.compile(r"\s|\S+")


class WordWrap:
    """Breaks a growing text between words, so that a line fits ``width`` columns.

    The last word is held until a space or the end of the text follows. Characters that take two
    columns, such as Chinese ones, are words of their own. A word longer than a line is not broken
    here; the terminal breaks the word.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word: list[tuple[str, Style]] = []

    def push(self, text: str, style: Style, width: int) -> Iterator[tuple[str, Style]]:
        """Yield the parts of the text that can be printed, with line breaks between words."""
        for part in _PARTS.findall(text):
            if part == "\n":
                yield from self.flush(width)
                yield part, style
                self._column = 0
            elif part.isspace():
                yield from self.flush(width)
                self._hold(part, style)
            elif cell_len(part) == len(part):
                self._hold(part, style)
            else:
                yield from self._wide(part, style, width)

    def flush(self, width: int) -> Iterator[tuple[str, Style]]:
        """Yield the word that is held with the space before it.

        If the rest of the line is too short, a line break replaces the space.
        """
        word = self._word
        self._word = []
        length = sum(map(_columns, word))
        if word and self._column and self._column + length > width:
            text, style = word[0]
            word = [(text.lstrip(), style), *word[1:]]
            length = sum(map(_columns, word))
            self._column = 0
            yield "\n", style
        yield from word
        self._column += length

    def _hold(self, part: str, style: Style) -> None:
        """Append a part to the word."""
        if self._word and self._word[-1][1] == style:
            part = self._word.pop()[0] + part
        self._word.append((part, style))

    def _wide(self, part: str, style: Style, width: int) -> Iterator[tuple[str, Style]]:
        """Yield the words of a part that has characters of two columns."""
        for letter in part:
            is_wide = cell_len(letter) > 1
            if is_wide:
                yield from self.flush(width)
            self._hold(letter, style)
            if is_wide:
                yield from self.flush(width)


def _columns(part: tuple[str, Style]) -> int:
    return cell_len(part[0].replace("\t", " " * _TAB))
