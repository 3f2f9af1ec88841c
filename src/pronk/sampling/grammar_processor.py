"""Logits processor of a guide: parses the text with the guide's grammar, and masks forbidden tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array
from pronk.base.errors import GuideError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MESSAGE = 300  # maximum characters of an error message of llguidance
_EXPECTED = "expected a grammar that can be followed to the end"

# maximum number of matchers of earlier texts per request; each has up to 150 bytes per token
_MAX_KEPT = 16

T = TypeVar("T")


class GrammarProcessor:
    """Logits processor of a guide: mask the tokens that the grammar forbids in the current context.

    Draft tokens may include a stop token or a forbidden token and tokens after it. Logits after
    such a token are not masked, because no token sampled from them becomes output.

    llguidance's own rollback is not used: after it, masks may be those of another text. Matchers of
    earlier texts are kept instead, and :meth:`rollback` copies the nearest one.

    ``matcher`` is at the beginning of the text, and is copied. ``stop_token_ids`` are allowed if
    the text is complete. The context begins with the token ids ``text``. ``one_end``: whether a
    text that must end ends with the stop token of the smallest id, as where :meth:`forced` tokens
    are appended without the model.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        stop_token_ids: Sequence[int],
        text: Sequence[int] = (),
        *,
        one_end: bool = False,
    ) -> None:
        self._start = matcher
        self._matcher = matcher.deep_copy()
        self._stop_token_ids = frozenset(stop_token_ids)
        self._one_end = one_end
        self._consumed: list[int] = []  # context tokens that the matcher has consumed
        # Number of context tokens that it has not consumed: the first stop or forbidden token, and
        # all later tokens.
        self._num_unconsumed = 0
        # numbers of consumed tokens, ascending, and matchers of that text
        self._kept: list[tuple[int, LLMatcher]] = []
        for token in text:
            self.advance(token)

    def mask(self, logits: Array) -> Array:
        """Return the logits with ``-inf`` for forbidden tokens.

        Raises ``GuideError`` if the grammar exceeds its work limit at this point of the text, or
        requires a character for which the tokenizer has no token.
        """
        if self._num_unconsumed and not self._matcher.is_error():
            return logits
        return np.where(self.allowed_tokens()[: len(logits)], logits, -np.inf)

    def advance(self, token: int) -> None:
        """Append ``token`` to the context."""
        if (
            not self._num_unconsumed
            and token not in self._stop_token_ids
            and self._matcher.try_consume_tokens([token])
        ):
            self._consumed.append(token)
        else:
            self._num_unconsumed += 1

    def rollback(self, count: int) -> None:
        """Remove the last ``count`` tokens from the context."""
        unconsumed = min(count, self._num_unconsumed)
        self._num_unconsumed -= unconsumed
        consumed = count - unconsumed
        del self._consumed[len(self._consumed) - consumed :]
        # A matcher that failed at a token which is still in the context has reached a limit there:
        # mask() raises.
        if consumed or (self._matcher.is_error() and not self._num_unconsumed):
            self._restore()

    def allows(self, token: int) -> bool:
        """Return whether ``token`` is allowed next.

        Always True after a stop token or a forbidden token.
        """
        if self._num_unconsumed:
            return True
        if token in self._stop_token_ids:
            return token in self._allowed_ends()
        if forced := self.forced():
            return token == forced[0]
        return bool(self._result_or_restore(self._matcher.validate_tokens([token])))

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer encodes their text.

        ``[]`` if none must.

        If the text must end, this is the stop token with the smallest id. Trailing tokens that
        could merge with later text are left out. :meth:`mask` allows no other token at these
        positions, not even those of another tokenization of the same text; only other stop tokens
        are allowed at the end.
        """
        if self._num_unconsumed:
            return []
        if self._matcher.is_stopped():
            return [min(self._stop_token_ids)] if self._matcher.is_accepting() else []
        return self._result_or_restore(self._matcher.compute_ff_tokens()) or []

    def _allowed_ends(self) -> Collection[int]:
        """Return the stop tokens that may come next."""
        if not self._matcher.is_accepting():
            return ()
        if self._one_end and self._matcher.is_stopped():
            return (min(self._stop_token_ids),)
        return self._stop_token_ids

    def _result_or_restore(self, result: T) -> T | None:
        """Return the ``result`` of a matcher call.

        If the call failed, restore the matcher, return ``None``.
        """
        if not self._matcher.is_error():
            return result
        self._restore()
        return None

    def _restore(self) -> None:
        """Replace the matcher, which has failed or is ahead, by one that has consumed ``_consumed``."""
        size = len(self._consumed)
        while self._kept and self._kept[-1][0] > size:
            self._kept.pop()
        position, matcher = self._kept[-1] if self._kept else (0, self._start)
        self._matcher = matcher.deep_copy()
        self._matcher.try_consume_tokens(self._consumed[position:])
        if position < size and not self._matcher.is_error():
            # The branches of a token tree return to the same texts.
            self._kept.append((size, self._matcher.deep_copy()))
            del self._kept[:-_MAX_KEPT]

    def allowed_tokens(self) -> NDArray[np.bool_]:
        """Return whether each token is allowed next; the errors are those of :meth:`mask`."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            msg = f"guide: {_EXPECTED}, found: {error_message(self._matcher)}; make it simpler"
            raise GuideError(msg)
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
        # Before the end of the text, forbid stop tokens even where the grammar allows the
        # characters of their names.
        allowed[[*self._stop_token_ids]] = False
        allowed[[*self._allowed_ends()]] = True
        first = int(allowed.argmax())
        # If no token has a character that the grammar requires, llguidance silently skips that
        # character in its mask, but rejects the token that the mask allows.
        if not allowed[first] or (
            first not in self._stop_token_ids and not self._matcher.validate_tokens([first])
        ):
            msg = (
                f"guide: {_EXPECTED}, found a required character that the tokenizer has no token "
                "for"
            )
            raise GuideError(msg)
        return allowed


def error_message(matcher: LLMatcher) -> str:
    """Return the matcher's error message as one line of limited length."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:MAX_MESSAGE]
