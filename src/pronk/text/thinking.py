"""Markers between which a model writes its thoughts, such as ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Text of tokens in which a lone surrogate stands for each special token. No decoded text contains
# this character, so a marker that is a special token differs from the same marker in ordinary text.
Symbols = str
# Number of tokens at the end of a prompt that are searched for the begin marker.
_PROMPT_TAIL = 16


@dataclass(frozen=True)
class ThinkingMarkers:
    """Markers before and after a model's thoughts.

    Attributes:
        begin: marker before thoughts.
        end: marker after thoughts.
        forced: token ids of the end marker, for ending thoughts by force.
        symbols: function from a token id to the symbols of that token.
        repeats: whether thoughts may begin anywhere; otherwise, only at the beginning of a text.
    """

    begin: Symbols
    end: Symbols
    forced: tuple[int, ...]
    symbols: Callable[[int], Symbols]
    repeats: bool = False

    def opened_by(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the begin marker, apart from white space.

        The tokens generated after such a prompt are thoughts.
        """
        return self._tail(prompt).endswith(self.begin)

    def closed_by(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the end marker, apart from white space.

        The header of the answer then has empty thoughts, and no thoughts follow.
        """
        return not self.repeats and self._tail(prompt).endswith(self.end)

    def _tail(self, prompt: Sequence[int]) -> Symbols:
        return "".join(map(self.symbols, prompt[-_PROMPT_TAIL:])).rstrip()
