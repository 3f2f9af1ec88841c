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

MAX_MESSAGE = 300  # maximum characters of llguidance's text in an error message
_EXPECTED = "expected a grammar that can be followed to the end"

# Maximum number of saved copies of the matcher per request, each at an earlier point of the text
# (see ``GrammarProcessor.rollback``). A matcher takes up to 150 bytes per token of its text.
_MAX_KEPT = 16

T = TypeVar("T")


class GrammarProcessor:
    """Logits processor that masks the tokens which a guide's grammar forbids after the context.

    The context may contain a stop token or a forbidden token as a draft token, and further draft
    tokens after it. There, logits are not masked, because no token sampled from them becomes
    output.

    llguidance's own rollback is not used: afterwards its masks may be wrong. Instead, the processor
    saves copies of its matcher at earlier points of the text, and :meth:`rollback` continues from
    the nearest copy.

    Args:
        matcher: llguidance's matcher at the beginning of the text; the processor copies it.
        stop_token_ids: tokens that are allowed at the end of a complete text.
        text: token ids that the request has already generated; the processor begins after them.
        one_end: which stop tokens are allowed where the grammar allows only the end of the text:
            all of them if False, and only the one with the smallest id if True. True is for
            requests to which :meth:`forced` tokens are appended without the model.
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
        # context tokens that the matcher has consumed, from the beginning
        self._consumed: list[int] = []
        # Number of context tokens at the end that the matcher has not consumed: the first stop
        # token or forbidden token, and all tokens after it.
        self._num_unconsumed = 0
        # Saved copies of the matcher, each with the number of tokens that it has consumed,
        # ascending.
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
        """Append ``token`` to the context; it may be a draft token that the guide forbids."""
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
        # If the matcher failed at a token that stays in the context, the grammar has reached its
        # work limit there. Keep the failed matcher, so that mask() raises the error.
        if consumed or (self._matcher.is_error() and not self._num_unconsumed):
            self._restore()

    def allows(self, token: int) -> bool:
        """Return whether the guide allows ``token`` next.

        After a stop token or a forbidden token in the context, any token counts as allowed.
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

        The list is empty if the grammar allows several characters next. If the text must end, the
        list has the stop token with the smallest id. Trailing tokens that could merge with later
        text are left out. :meth:`mask` allows no other token at these positions, not even those of
        another tokenization of the same text; only other stop tokens are allowed at the end.
        """
        if self._num_unconsumed:
            return []
        if self._matcher.is_stopped():
            return [min(self._stop_token_ids)] if self._matcher.is_accepting() else []
        return self._result_or_restore(self._matcher.compute_ff_tokens()) or []

    def _allowed_ends(self) -> Collection[int]:
        """Return the stop tokens that the guide allows next; none unless the text may end here."""
        if not self._matcher.is_accepting():
            return ()
        if self._one_end and self._matcher.is_stopped():
            return (min(self._stop_token_ids),)
        return self._stop_token_ids

    def _result_or_restore(self, result: T) -> T | None:
        """Return the ``result`` of a call of the matcher if the call succeeded.

        After a failed call, replace the matcher by a working one and return ``None``.
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
            # Save a copy at this point: where a draft tree branches, every further branch rolls
            # back to the same text.
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
        # characters of their names, such as ``<|im_end|>``.
        allowed[[*self._stop_token_ids]] = False
        allowed[[*self._allowed_ends()]] = True
        first = int(allowed.argmax())
        is_possible = bool(allowed[first])
        # Some grammars require a character that occurs in no token. llguidance's mask then skips
        # the character and allows the tokens after it, but llguidance rejects these tokens.
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
