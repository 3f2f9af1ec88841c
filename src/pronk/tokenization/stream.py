"""The text of a request: whole characters, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from pronk.tokenization.detokenizer import IncrementalDecoder, StopScanner
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Detokenization and stop strings of one request.

    Stop strings are searched from token number ``min_tokens`` on, so the text has at least ``min_tokens`` tokens. No
    stop string contains a special token: parsers of answers need the text before a special token before that token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str], min_tokens: int = 0) -> None:
        self._special_ids = tokenizer.special_ids
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._scanner = StopScanner(stops)
        self._unscanned = max(0, min_tokens - 1)

    def push(self, token: int) -> tuple[str, str | None]:
        """Return the text that becomes final, and the stop string that it completes, if any."""
        text = self._decoder.push(token)
        if self._unscanned:
            self._unscanned -= 1
            return text, None
        if token in self._special_ids:
            return self._scanner.flush(), None
        return self._scanner.push(text)

    def flush(self) -> tuple[str, str | None]:
        """Return the rest of the text, and the stop string that it completes, if any."""
        text, stop = self._scanner.push(self._decoder.flush())
        return text + self._scanner.flush(), stop
