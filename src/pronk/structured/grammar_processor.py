"""Logits processor of a guide: parses the text with the guide's grammar, and masks forbidden tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from pronk.arrays import Array
from pronk.errors import GuideError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MESSAGE = 300  # maximum characters of an error message of llguidance
_EXPECTED = "expected a grammar that can be followed to the end"

T = TypeVar("T")


class GrammarProcessor:
    """Logits processor of a guide: mask the tokens that the grammar forbids in the current context.

    Draft tokens may include a stop token or a forbidden token and tokens after it. Logits after such a token are not
    masked, because no token sampled from them becomes output.

    ``matcher`` is at the beginning of the text, and is copied. ``stop_token_ids`` are allowed if the text is complete.
    The context begins with the token ids ``text``.
    """

    def __init__(self, matcher: LLMatcher, stop_token_ids: Sequence[int], text: Sequence[int] = ()) -> None:
        self._start, self._matcher = matcher, matcher.deep_copy()
        self._stop_token_ids = frozenset(stop_token_ids)
        self._consumed: list[int] = []  # context tokens that the matcher has consumed
        # Number of context tokens that it has not consumed: the first stop or forbidden token, and all later tokens.
        self._num_unconsumed = 0
        self._computed = False  # whether a mask or forced tokens were computed since the last rollback
        for token in text:
            self.advance(token)

    def mask(self, logits: Array) -> Array:
        """Return the logits with ``-inf`` for forbidden tokens.

        Raises ``GuideError`` if the grammar exceeds its work limit at this point of the text, or requires a character
        for which the tokenizer has no token.
        """
        if self._num_unconsumed and not self._matcher.is_error():
            return logits
        return np.where(self.allowed_tokens()[: len(logits)], logits, -np.inf)

    def advance(self, token: int) -> None:
        """Append ``token`` to the context."""
        if not self._num_unconsumed and token not in self._stop_token_ids and self._matcher.try_consume_tokens([token]):
            self._consumed.append(token)
        else:
            self._num_unconsumed += 1

    def rollback(self, count: int) -> None:
        """Remove the last ``count`` tokens from the context."""
        unconsumed = min(count, self._num_unconsumed)
        self._num_unconsumed -= unconsumed
        consumed = count - unconsumed
        del self._consumed[len(self._consumed) - consumed :]
        if self._matcher.is_error() or (consumed and not self._matcher.rollback(consumed)):
            self._restart()
        elif consumed and self._computed:
            # llguidance has stored the mask and forced tokens of the longer text. Computing a mask replaces both.
            self._matcher.compute_bitmask()
            self._computed = False
            if self._matcher.is_error():
                self._restart()

    def allows(self, token: int) -> bool:
        """Return whether ``token`` is allowed next; always True after a stop token or a forbidden token."""
        if self._num_unconsumed:
            return True
        if token in self._stop_token_ids:
            return self._matcher.is_accepting()
        if forced := self.forced():
            return token == forced[0]
        return bool(self._result_or_restart(self._matcher.validate_tokens([token])))

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer encodes their text; ``[]`` if none must.

        If the text must end, this is the stop token with the smallest id. Trailing tokens that could merge with later
        text are left out. :meth:`mask` allows no other token at these positions, not even those of another tokenization
        of the same text; only other stop tokens are allowed at the end.
        """
        if self._num_unconsumed:
            return []
        if self._matcher.is_stopped():
            return [min(self._stop_token_ids)] if self._matcher.is_accepting() else []
        self._computed = True
        return self._result_or_restart(self._matcher.compute_ff_tokens()) or []

    def _result_or_restart(self, result: T) -> T | None:
        """Return the ``result`` of a matcher call; if the call failed, restart the matcher, return ``None``."""
        if not self._matcher.is_error():
            return result
        self._restart()
        return None

    def _restart(self) -> None:
        """Replace a failed matcher, which stays failed, by a new one that has consumed the same tokens."""
        self._matcher = self._start.deep_copy()
        self._matcher.try_consume_tokens(self._consumed)

    def allowed_tokens(self) -> NDArray[np.bool_]:
        """Return whether each token is allowed next; the errors are those of :meth:`mask`."""
        self._computed = True
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            msg = f"guide: {_EXPECTED}, found: {error_message(self._matcher)}; make it simpler"
            raise GuideError(msg)
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
        # Before the end of the text, forbid stop tokens even where the grammar allows the characters of their names.
        allowed[[*self._stop_token_ids]] = self._matcher.is_accepting()
        first = int(allowed.argmax())
        # If no token has a character that the grammar requires, llguidance silently skips that character in its mask,
        # but rejects the token that the mask allows.
        if not allowed[first] or (first not in self._stop_token_ids and not self._matcher.validate_tokens([first])):
            msg = f"guide: {_EXPECTED}, found a required character that the tokenizer has no token for"
            raise GuideError(msg)
        return allowed


def error_message(matcher: LLMatcher) -> str:
    """Return the matcher's error message as one line of limited length."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:MAX_MESSAGE]
