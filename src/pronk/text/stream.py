"""Conversion of a request's tokens to text: whole characters only, cut at the first stop string.

The complete text depends on the token sequence alone: one token at a time or several per step give
the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from pronk.base.errors import OptionError, refuse

if TYPE_CHECKING:
    from pronk.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# Number of tokens at the prompt's end that are decoded together with the first output tokens,
# because the text of a token depends on its neighbours.
_CONTEXT = 5
_MORE_BYTES = 3  # number of bytes after the first byte of the longest character in UTF-8
# Number of tokens after which bytes that form no whole character count as invalid.
_PATIENCE = 16


class IncrementalDecoder:
    r"""Decoder of a growing token sequence, at a constant cost per token.

    The text of a token depends on its neighbours: a character may span tokens, and SentencePiece
    drops the space at the very start. Each new token is therefore decoded in a window: the tokens
    of the text returned last (at first, the end of the prompt) and all later tokens. The new text
    is the window's text without the part already returned, and without replacement characters at
    the end, which may be an incomplete character. In a byte-level vocabulary, a token of whole
    characters after whole characters needs no window: its text does not depend on its neighbours.

    Byte-level tokens ``F0 9F``, ``99``, ``82``, ``!`` after a prompt ``ab``::

        window          its text    returned
        ab F0 9F        ab\ufffd
        ab F0 9F 99     ab\ufffd
        ab F0 9F 99 82  ab🙂        🙂
        F0 9F 99 82 !   🙂!         !
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, shows_names: bool = False
    ) -> None:
        """Prepare to decode the tokens that follow ``prompt``.

        Args:
            tokenizer: tokenizer of the sequence.
            prompt: token ids before the decoded tokens.
            shows_names: whether the text of a special token is its name (``<|im_end|>``);
                otherwise, special tokens have no text.
        """
        self._tokenizer = tokenizer
        self._shows_names = shows_names
        self._window = self._end_of_prompt(prompt)
        # Text that was returned already, at the beginning of the window's text.
        self._returned = self._decode(self._window)
        # Number of tokens at the beginning of the window whose whole text was returned.
        self._num_done = len(self._window)

    def push(self, token_id: int) -> str:
        """Return the text that becomes final with this token.

        The result is empty for an unassigned id, inside a character of several tokens, and for a
        special token unless the decoder shows names.
        """
        own = self._text_of(token_id)
        if own is None:
            return ""
        ends_whole = not self._returned.endswith(_REPLACEMENT)
        is_all_returned = self._num_done == len(self._window) and ends_whole
        if is_all_returned and self._tokenizer.joins_texts and _REPLACEMENT not in own:
            self._window = [token_id]
            self._num_done = 1
            self._returned = own
            return own
        self._window.append(token_id)
        text = self._decode(self._window)
        final = text.rstrip(_REPLACEMENT)
        new = final[self._start(text) :]
        if final == text:
            self._slide(self._num_done)
        else:
            if new:
                self._returned = final
            if len(self._window) - self._num_done > _PATIENCE:
                new += self._skip_invalid_bytes(text)
        return new

    def flush(self) -> str:
        """Return the rest of the text; an incomplete character becomes U+FFFD."""
        text = self._decode(self._window)
        rest = text[self._start(text) :]
        self._slide(len(self._window))
        return rest

    def _end_of_prompt(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt that have a text.

        They are ``_CONTEXT`` tokens, or up to three more if the window would begin inside a
        character. Its bytes would otherwise look like those of a character at the prompt's end.
        """
        with_text = (token for token in reversed(prompt) if self._text_of(token) is not None)
        tokens = [*islice(with_text, _CONTEXT + _MORE_BYTES)][::-1]
        for size in range(_CONTEXT, len(tokens)):
            window = tokens[-size:]
            if not self._decode(window).startswith(_REPLACEMENT):
                return window
        return tokens

    def _text_of(self, token_id: int) -> str | None:
        """Return the text of one token alone; ``None`` for a token without text."""
        text = self._tokenizer.token_text(token_id)
        if text is None and self._shows_names:
            return self._tokenizer.token_name(token_id) or None
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=not self._shows_names)

    def _start(self, text: str) -> int:
        """Return the offset in ``text``, the text of the window, at which the new part begins.

        If the prompt ends inside a character, ``_returned`` ends with U+FFFD where ``text`` may
        have the whole character.
        """
        if text.startswith(self._returned):
            return len(self._returned)
        return len(self._returned.rstrip(_REPLACEMENT))

    def _slide(self, start: int) -> None:
        del self._window[:start]
        self._num_done = len(self._window)
        self._returned = self._decode(self._window)

    def _skip_invalid_bytes(self, text: str) -> str:
        """Drop tokens from the window's start, up to the last boundary that splits no character.

        Otherwise, the window would grow without bound in a text of invalid bytes.

        Returns:
            The new text before the cut; empty if every boundary splits a character.
        """
        for cut in range(len(self._window) - 1, self._num_done, -1):
            before = self._decode(self._window[:cut])
            if before + self._decode(self._window[cut:]) == text:
                new = before[self._start(text) :]
                del self._window[:cut]
                self._num_done = 0
                self._returned = ""
                return new
        return ""


def prefix_at_end(text: str, marker: str) -> str:
    """Return the longest proper prefix of ``marker`` with which ``text`` ends; ``""`` if none."""
    # A stop string may have 4,000 characters, but ``text`` is often that of one token.
    largest = min(len(marker) - 1, len(text))
    for size in range(largest, 0, -1):
        if text.endswith(marker[:size]):
            return marker[:size]
    return ""


class StopScanner:
    """Cuts a stream of text at the first stop string.

    The stop string that is complete first counts; of several that end at the same character, the
    longest. Text is withheld as long as it may be the beginning of a stop string. An empty stop
    string raises an OptionError.

    Stop strings may contain names of special tokens, such as ``<|im_end|>``. These tokens have no
    text, so the scanner searches a *scanned text*, in which their names stand between the texts of
    the other tokens. The output lacks these names. A name counts as a whole: a stop string does not
    begin or end inside a name, so ``<`` does not stop at ``<|im_end|>``.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            refuse("stop", f"expected non-empty strings, found {list(stops)!r}", OptionError)
        self._stops = [*stops]
        # End of the scanned text, which may be the beginning of a stop string; the text before it
        # was returned.
        self._held = ""
        # Begin and end of each name of a special token in ``_held``, in characters. The begin of a
        # name whose first characters were returned is negative.
        self._names: list[tuple[int, int]] = []
        self._stop: str | None = None  # the first stop string that is complete

    def push(self, text: str) -> tuple[str, str | None]:
        """Scan a further piece of the text.

        Returns:
            The text that no stop string can cut off any more, and the stop string found or
            ``None``.
        """
        return self._scan(text) if self._stops else (text, None)

    def push_name(self, name: str) -> tuple[str, str | None]:
        """Scan the name of a special token, which stop strings may contain and the output lacks.

        The result is that of :meth:`push`.
        """
        if self._stops:
            self._names.append((len(self._held), len(self._held) + len(name)))
            return self._scan(name)
        return "", None

    def flush(self) -> str:
        """End the stream, and return the withheld text, at most the beginning of a stop string."""
        return "" if self._stop else self._take(len(self._held))

    def _scan(self, text: str) -> tuple[str, str | None]:
        """Append a text to the scanned text.

        Return the output that becomes final, and the stop string that is complete, or ``None``.
        """
        if self._stop is not None:
            return "", self._stop
        self._held += text
        found = list[tuple[int, int, str]]()  # end, begin and text of each stop string found
        for stop in self._stops:
            at = self._find(stop)
            if at is not None:
                found.append((at + len(stop), at, stop))
        if found:
            _, cut, self._stop = min(found)
        else:
            beginnings = [prefix_at_end(self._held, stop) for stop in self._stops]
            withheld = max(map(len, beginnings), default=0)
            cut = len(self._held) - withheld
        return self._take(cut), self._stop

    def _find(self, stop: str) -> int | None:
        """Return the first offset of the stop string ``stop`` in the withheld text, or ``None``.

        Offsets at which the stop string would begin or end within the name of a special token do
        not count.
        """
        at = self._held.find(stop)
        while at >= 0 and (self._splits_name(at) or self._splits_name(at + len(stop))):
            at = self._held.find(stop, at + 1)
        return None if at < 0 else at

    def _splits_name(self, at: int) -> bool:
        return any(begin < at < end for begin, end in self._names)

    def _take(self, cut: int) -> str:
        """Remove the first ``cut`` characters of the scanned text.

        Return them without the names of special tokens, which the output lacks.
        """
        parts = list[str]()
        start = 0
        for begin, end in self._names:
            parts.append(self._held[start : min(max(begin, 0), cut)])
            start = min(end, cut)
        parts.append(self._held[start:cut])
        self._held = self._held[cut:]
        self._names = [(begin - cut, end - cut) for begin, end in self._names if end > cut]
        return "".join(parts)


class TextStream:
    """Text of one request from its tokens, up to the first stop string.

    The search for stop strings begins at token number ``min_tokens``, so that the text has at least
    ``min_tokens`` tokens. Parsers of answers need all text before a special token once that token
    has arrived. Text before a special token is therefore withheld only if both together may begin a
    stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._scanner = StopScanner(stops)
        self._unscanned = max(0, min_tokens - 1)

    def push(self, token: int, *, is_end: bool = False) -> tuple[str, str | None]:
        """Return the text that becomes final with a token, and the stop string found or ``None``.

        ``is_end``: whether the token ends the text, as an end-of-text token does. The output then
        lacks the token's text, as it lacks names of special tokens.
        """
        text = self._decoder.flush() if is_end else self._decoder.push(token)
        if self._unscanned:
            self._unscanned -= 1
            return text, None
        own = self._tokenizer.token_text(token)
        final, stop = self._scanner.push(text)
        if stop is None and (is_end or own is None):
            before_name, stop = self._scanner.push_name(own or self._tokenizer.token_name(token))
            final += before_name
        return final, stop

    def flush(self) -> tuple[str, str | None]:
        """Return the rest of the text, and the stop string found in it or ``None``."""
        text, stop = self._scanner.push(self._decoder.flush())
        return text + self._scanner.flush(), stop
