"""Logits processor of a guide: parse the text, and mask the tokens that the guide forbids."""

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

# Maximum number of matchers of earlier texts per request. A matcher takes up to 150 bytes per token
# of its text.
_MAX_KEPT = 16

T = TypeVar("T")


class GrammarProcessor:
    """Logits processor that masks the tokens which a guide's grammar forbids after the context.

    Draft tokens may include a stop token or a forbidden token, and tokens after such a token.
    Logits after such a token are not masked, because no token sampled from them becomes output.

    After llguidance's own rollback, masks may be those of another text. Therefore matchers of
    earlier texts are kept instead, and :meth:`rollback` copies the nearest one.

    Args:
        matcher: llguidance's matcher at the beginning of the text; the processor copies it.
        stop_token_ids: tokens that are allowed at the end of a complete text.
        text: token ids at the beginning of the context.
        one_end: whether only the stop token of the smallest id may end a text that must end. This
            is for requests to which :meth:`forced` tokens are appended without the model.
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
        # Number of later context tokens, which the matcher has not consumed: the first stop or
        # forbidden token, and all tokens after it.
        self._num_unconsumed = 0
        # Matchers of earlier texts, each with the number of tokens of its text, ascending.
        self._kept: list[tuple[int, LLMatcher]] = []
        for token in text:
            self.advance(token)

    def mask(self, logits: Array) -> Array:
        """Return logits ``[vocab]`` with ``-inf`` for forbidden tokens.

        Raises:
            GuideError: the grammar exceeds its work limit at this point of the text, or requires a
                character for which the tokenizer has no token.
        """
        if self._num_unconsumed and not self._matcher.is_error():
            return logits
        return np.where(self.allowed_tokens()[: len(logits)], logits, -np.inf)

    def advance(self, token: int) -> None:
        """Append ``token`` to the context."""
        may_consume = not self._num_unconsumed and token not in self._stop_token_ids
        if may_consume and self._matcher.try_consume_tokens([token]):
            self._consumed.append(token)
        else:
            self._num_unconsumed += 1

    def rollback(self, count: int) -> None:
        """Remove the last ``count`` tokens from the context."""
        unconsumed = min(count, self._num_unconsumed)
        self._num_unconsumed -= unconsumed
        consumed = count - unconsumed
        del self._consumed[len(self._consumed) - consumed :]
        # A matcher that failed at a token which is still in the context has reached its work limit
        # there. It stays, so that mask() raises the error.
        if consumed or (self._matcher.is_error() and not self._num_unconsumed):
            self._restore()

    def allows(self, token: int) -> bool:
        """Return whether ``token`` is allowed next.

        Any token is allowed after a stop token or a forbidden token.
        """
        if self._num_unconsumed:
            return True
        if token in self._stop_token_ids:
            return token in self._allowed_ends()
        forced = self.forced()
        if forced:
            return token == forced[0]
        return bool(self._result_or_restore(self._matcher.validate_tokens([token])))

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer encodes their text.

        The list is empty if the grammar leaves a choice. If the text must end, the list has the
        stop token with the smallest id. Trailing tokens that could merge with later text are left
        out. :meth:`mask` allows no other token at these positions, not even those of another
        tokenization of the same text; only other stop tokens are allowed at the end.
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
        """Return the ``result`` of a call of the matcher.

        After a failed call, restore the matcher and return ``None``.
        """
        if not self._matcher.is_error():
            return result
        self._restore()
        return None

    def _restore(self) -> None:
        """Replace the matcher by one that has consumed exactly the tokens ``_consumed``.

        The present matcher has failed, or has consumed tokens that were rolled back.
        """
        size = len(self._consumed)
        while self._kept and self._kept[-1][0] > size:
            self._kept.pop()
        nearest = self._kept[-1] if self._kept else (0, self._start)
        position, matcher = nearest
        self._matcher = matcher.deep_copy()
        self._matcher.try_consume_tokens(self._consumed[position:])
        if position < size and not self._matcher.is_error():
            # Later rollbacks return to the same text, as a draft tree branches there.
            self._kept.append((size, self._matcher.deep_copy()))
            del self._kept[:-_MAX_KEPT]

    def allowed_tokens(self) -> NDArray[np.bool_]:
        """Return for each token whether it is allowed next; the errors are those of :meth:`mask`.

        The result may have more entries than the vocabulary has tokens.
        """
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
        is_possible = bool(allowed[first])
        # If no token has a character that the grammar requires, llguidance silently skips that
        # character in its mask, but rejects the token that the mask allows.
        if is_possible and first not in self._stop_token_ids:
            is_possible = bool(self._matcher.validate_tokens([first]))
        if not is_possible:
            msg = (
                f"guide: {_EXPECTED}, found a required character that the tokenizer has no token "
                "for"
            )
            raise GuideError(msg)
        return allowed


def error_message(matcher: LLMatcher) -> str:
    """Return the matcher's error message as one line of limited length."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:MAX_MESSAGE]
