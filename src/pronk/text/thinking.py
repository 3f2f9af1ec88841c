"""Markers between which a model writes its thoughts, such as ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# text of tokens in which one character, which no decoded text contains, stands for each special
# token
Symbols = str
_PROMPT_TAIL = 16  # tokens at the end of a prompt in which an open begin marker is searched


@dataclass(frozen=True)
class ThinkingMarkers:
    """Markers of a model's thinking; ``symbols`` returns the symbols of a token."""

    begin: Symbols
    end: Symbols
    forced: tuple[int, ...]  # tokens of the end marker
    symbols: Callable[[int], Symbols]
    # whether thoughts may begin anywhere; otherwise only at the beginning of a text
    repeats: bool = False

    def opened_by(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the begin marker, so that the first generated token is a thought."""
        return "".join(map(self.symbols, prompt[-_PROMPT_TAIL:])).rstrip().endswith(self.begin)
