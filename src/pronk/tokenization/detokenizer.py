"""Incremental detokenization: whole characters only, cut at the first stop string.

The result is a function of the token sequence alone, however many tokens or characters arrive at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from pronk.errors import OptionError
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "StopScanner"]

_REPLACEMENT = "\ufffd"
_CONTEXT = 5  # prompt tokens in the first window
_PATIENCE = 16  # tokens after which an incomplete character is treated as garbage


class IncrementalDecoder:
    r"""Text of a growing token sequence, at a constant cost per token.

    The text of a token depends on its neighbours: a character may span tokens, and SentencePiece drops the space at the
    very start. For every token a window is decoded again: the tokens of the last piece of text (at first, the end of
    the prompt) and all later ones. The window's text beyond the part already returned is new, except a tail of
    replacement characters, which may be an incomplete character.

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
        # Skip special tokens, which have no text.
        for token in reversed(prompt):
            if len(self._window) == _CONTEXT:
                break
            if not tokenizer.is_silent(token):
                self._window.insert(0, token)
        self._shown = tokenizer.decode(self._window)
        self._read = len(self._window)

    def push(self, token_id: int) -> str:
        """Return the text that becomes final with this token; special tokens and unassigned ids have no text."""
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
        """Return the rest of the text; an incomplete character becomes a replacement character."""
        text = self._tokenizer.decode(self._window)
        rest = text[self._start(text) :]
        self._slide(len(self._window))
        return rest

    def _start(self, text: str) -> int:
        """Return the offset of the new part in the window's text.

        A prompt may end inside a character, so that the text shown ends in a replacement character that is now gone.
        """
        return len(self._shown if text.startswith(self._shown) else self._shown.rstrip(_REPLACEMENT))

    def _slide(self, start: int) -> None:
        del self._window[:start]
        self._read = len(self._window)
        self._shown = self._tokenizer.decode(self._window)

    def _skip_garbage(self, text: str) -> str:
        """Return invalid bytes as text, so that the window does not grow without bound.

        The cut is at the last place that splits no character.
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
    """Cuts a stream of text at the first stop string; an empty one raises an OptionError.

    The stop string that is complete first wins; of those that end together, the longest. Text that may be the beginning
    of a stop string is withheld until this is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            msg = f"stop: expected non-empty strings, found {list(stops)!r}"
            raise OptionError(msg)
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is final, and the stop string once it is complete; after it, no text follows."""
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
        """Return withheld text that turned out not to be a stop string."""
        rest, self._held = "" if self._found else self._held, ""
        return rest

    def _undecided(self) -> int:
        """Return the offset of the longest tail that may begin a stop string, or the text's length."""
        longest = len(self._stops[0]) if self._stops else 0
        for at in range(max(0, len(self._held) - longest + 1), len(self._held)):
            tail = self._held[at:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return at
        return len(self._held)
