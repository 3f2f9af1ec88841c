"""From a stream of token ids to a stream of text: whole characters only, and nothing of a stop string.

Both classes are functions of the token sequence alone. How many tokens or characters arrive at a time does not
change what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

from pronk.errors import OptionError
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "StopScanner"]

_REPLACEMENT = "\ufffd"
_CONTEXT = 5
_PATIENCE = 16


class IncrementalDecoder:
    """Text of a growing token sequence, at a cost per token that does not grow with it.

    What a token reads as depends on its neighbours: a character may span tokens, and SentencePiece drops the space
    at the very start. So a window of tokens is decoded again for every token: those of the last piece of text (at
    first, the end of the prompt), and those since. Its text beyond what was already handed out is new, except
    a tail of replacement characters, which may be a character whose bytes have not all come.

    Byte-level tokens ``F0 9F``, ``99``, ``82``, ``!`` after a prompt ``ab``::

        window          its text    returned
        ab F0 9F        ab\ufffd
        ab F0 9F 99     ab\ufffd
        ab F0 9F 99 82  ab🙂        🙂
        F0 9F 99 82 !   🙂!         !
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        # Special tokens at the end of a prompt read as nothing, so look behind them.
        for token in reversed(prompt):
            if len(self._window) == _CONTEXT:
                break
            if not tokenizer.is_silent(token):
                self._window.insert(0, token)
        self._shown = tokenizer.decode(self._window)
        self._read = len(self._window)

    def push(self, token_id: int) -> str:
        """The text that has become final with this token; special tokens and unassigned ids read as nothing."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        final = text.rstrip(_REPLACEMENT)
        new = final[self._start(text) :]
        if final == text:
            self._slide(self._read)
        else:
            if new:
                self._shown = final
            if len(self._window) - self._read > _PATIENCE:
                new += self._skip_garbage(text)
        return new

    def flush(self) -> str:
        """What is left at the end of the sequence; an unfinished character reads as a replacement character."""
        text = self._tokenizer.decode(self._window)
        rest = text[self._start(text) :]
        self._slide(len(self._window))
        return rest

    def _start(self, text: str) -> int:
        """Where the new part of the window's text begins.

        A prompt may end inside a character; what was shown then ends in a replacement that the full text lacks.
        """
        return len(self._shown if text.startswith(self._shown) else self._shown.rstrip(_REPLACEMENT))

    def _slide(self, start: int) -> None:
        del self._window[:start]
        self._read = len(self._window)
        self._shown = self._tokenizer.decode(self._window)

    def _skip_garbage(self, text: str) -> str:
        """Give up waiting for a character to be finished, at the last place where none is cut.

        Without this, the window would grow for as long as a model emits bytes that are no text.
        """
        for cut in range(len(self._window) - 1, self._read, -1):
            settled = self._tokenizer.decode(self._window[:cut])
            if settled + self._tokenizer.decode(self._window[cut:]) == text:
                new = settled[self._start(text) :]
                del self._window[:cut]
                self._read, self._shown = 0, ""
                return new
        return ""


class StopScanner:
    """Cuts a stream of text at the first stop string.

    The stop string that is complete first wins, and of those that end together the longest; so nothing has to be read
    after it. Text that may turn out to be the beginning of one is withheld until it is decided.

    Raises:
        OptionError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            msg = f"stop: expected non-empty strings, found {list(stops)!r}"
            raise OptionError(msg)
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string once it is complete; after that, nothing more is safe."""
        if self._found is not None:
            return "", self._found
        self._held += text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            _, cut, self._found = min(matches)
        else:
            cut = self._undecided()
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, self._found

    def flush(self) -> str:
        """What was withheld and is no stop string after all."""
        rest, self._held = "" if self._found else self._held, ""
        return rest

    def _undecided(self) -> int:
        """Where the end of the text may be the beginning of a stop string; its length if it is none."""
        longest = len(self._stops[0]) if self._stops else 0
        for at in range(max(0, len(self._held) - longest + 1), len(self._held)):
            tail = self._held[at:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return at
        return len(self._held)
