"""A request's text: whole characters, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from pronk.detokenizer import IncrementalDecoder, StopScanner
from pronk.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """A :class:`~pronk.engine.request.TextOutput`: a function of the token sequence, however it arrives."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._scanner = StopScanner(stops)

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that has become final, and the stop string that was completed, if any."""
        return self._scanner.push(self._decoder.push(token))

    def flush(self) -> tuple[str, str | None]:
        """What was still held back, and the stop string in it, if any."""
        text, stop = self._scanner.push(self._decoder.flush())
        if stop is None:
            rest, stop = self._scanner.flush()
            text += rest
        return text, stop
