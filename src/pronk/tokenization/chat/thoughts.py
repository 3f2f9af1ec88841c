"""Streaming parser that separates the thoughts at the beginning of an answer from the rest."""

from __future__ import annotations

from dataclasses import dataclass

from pronk.tokenization.chat.dialects import ReasoningFormat
from pronk.tokenization.chat.symbols import TokenSymbols, plain_text

__all__ = ["Thought", "ThoughtReader", "prefix_at_end"]


@dataclass(frozen=True)
class Thought:
    """Streamed part of a model's thoughts."""

    text: str


class ThoughtReader:
    r"""Streaming parser that splits the symbols of one answer into thoughts and the symbols after them.

    Line breaks after the begin marker and around the end marker are dropped: ``<think>\na\n</think>\n\nb`` is the
    thought ``a`` and the text ``b``. Thoughts are recognized at the beginning of an answer only.

    Args:
        reasoning: format of the model's thoughts; ``None`` if it has none.
        symbols: symbols of the model's tokens.
        opened: whether the prompt ends with the begin marker.
    """

    def __init__(self, reasoning: ReasoningFormat | None, symbols: TokenSymbols, *, opened: bool) -> None:
        self._begin = symbols.of_text(reasoning.begin) if reasoning else ""
        self._end = symbols.of_text(reasoning.end) if reasoning else ""
        self.in_thought = bool(reasoning) and opened
        self._may_begin = bool(reasoning) and not opened
        self._space: list[str] = []  # white space at the beginning of the answer
        self._held = ""  # symbols that may be the beginning of a marker
        self._at_start = opened  # whether the thoughts, or the text after them, have only line breaks so far
        self._num_lines = 0  # number of line breaks at the end of the thoughts that are not emitted yet

    def push(self, symbols: str) -> list[Thought | str]:
        """Parse the next symbols; return parts that later symbols cannot change."""
        if self._may_begin:
            if not self._held:
                stripped = symbols.lstrip()
                self._space.append(symbols[: len(symbols) - len(stripped)])
                symbols = stripped
            start = self._held + symbols
            if self._begin.startswith(start) and start != self._begin:
                self._held = start
                return []
            self._may_begin, self._held, self.in_thought = False, "", start.startswith(self._begin)
            self._at_start = self.in_thought
            symbols = start.removeprefix(self._begin) if self.in_thought else "".join([*self._space, start])
        return self._think(symbols) if self.in_thought else self._after(symbols)

    def flush(self) -> list[Thought | str]:
        """End the answer; return what was held back."""
        held, self._held = self._held, ""
        if self.in_thought:
            return self._emit(held)
        return ["".join([*self._space, held])] if self._may_begin and (held or any(self._space)) else []

    def _think(self, symbols: str) -> list[Thought | str]:
        thought, end, rest = (self._held + symbols).partition(self._end)
        if end:
            self._held, thoughts = "", self._emit(thought)
            self.in_thought, self._at_start = False, True
            return [*thoughts, *self._after(rest)]
        self._held = prefix_at_end(thought, self._end)
        return self._emit(thought.removesuffix(self._held))

    def _emit(self, symbols: str) -> list[Thought | str]:
        """Return thoughts without the line breaks at their beginning and end."""
        text = plain_text(symbols)
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        stripped = text.rstrip("\n")
        lines, self._num_lines = self._num_lines, len(text) - len(stripped)
        if not stripped:
            self._num_lines += lines
            return []
        return [Thought("\n" * lines + stripped)]

    def _after(self, symbols: str) -> list[Thought | str]:
        if self._at_start:
            symbols = symbols.lstrip("\n")
            self._at_start = not symbols
        return [symbols] if symbols else []


def prefix_at_end(text: str, marker: str) -> str:
    """Return the longest proper prefix of ``marker`` at the end of ``text``."""
    return next((marker[:size] for size in range(len(marker) - 1, 0, -1) if text.endswith(marker[:size])), "")
