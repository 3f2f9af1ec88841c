"""Exclusion of texts that share a run of 13 words with an evaluation prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pronk.files.json_lines import read_json_lines

__all__ = ["RUN", "Exclusion"]

RUN = 13  # a text is excluded if it shares this number of successive words
# Words in a group. Any 13 successive words of a document contain 7 that start at a multiple of 7 in the document. It is
# therefore enough to look up these groups of 7, at a seventh of the cost.
_GROUP = (RUN + 1) // 2
_WORD = re.compile(r"\w+")


class Exclusion:
    """Filter for texts that share 13 successive words with ``texts``; case and punctuation do not count."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._groups: set[str] = set()
        self._runs: set[str] = set()
        for text in texts:
            words = _words(text)
            if len(words) < RUN:
                continue
            self._groups.update(_join(words, i, _GROUP) for i in range(len(words) - _GROUP + 1))
            self._runs.update(_join(words, i, RUN) for i in range(len(words) - RUN + 1))

    @classmethod
    def from_files(cls, files: Iterable[Path]) -> Exclusion:
        """Return a filter with every string in the JSONL files: prompts, references, solutions and tests."""
        return cls(text for file in files for _, row in read_json_lines(file) for text in _strings(row))

    def __call__(self, text: str) -> bool:
        """Return whether ``text`` shares a run of 13 words with the excluded texts."""
        if not self._runs:
            return False
        words = _words(text)
        for i in range(0, len(words) - _GROUP + 1, _GROUP):
            if _join(words, i, _GROUP) in self._groups:
                first, last = max(0, i - (RUN - _GROUP)), min(i, len(words) - RUN)
                if any(_join(words, j, RUN) in self._runs for j in range(first, last + 1)):
                    return True
        return False


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _join(words: list[str], start: int, count: int) -> str:
    return " ".join(words[start : start + count])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
