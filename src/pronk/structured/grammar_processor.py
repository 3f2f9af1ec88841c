"""Logits processor of a guide: the position of a text in its grammar, and the allowed next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.errors import GuideError

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarProcessor", "error_message"]

_MAX_MESSAGE = 300  # characters of llguidance's error message
_EXPECTED = "expected a grammar that can be followed to the end"

T = TypeVar("T")


class GrammarProcessor:
    """Logits processor of a guide: mask the vocabulary at the current context.

    Nothing is masked beyond the end of the text or behind a forbidden token. Drafters try such tokens, and the walk may
    continue behind a stop token, but tokens there are never part of the output. If the grammar exceeds its work limit,
    :meth:`mask` raises.

    Args:
        matcher: llguidance matcher at the beginning of the text; copied.
        stop_token_ids: token ids that end the text where the grammar accepts.
    """

    def __init__(self, matcher: LLMatcher, stop_token_ids: Sequence[int]) -> None:
        self._start, self._matcher = matcher, matcher.deep_copy()
        self._stop_token_ids = frozenset(stop_token_ids)
        self._consumed: list[int] = []  # tokens that the matcher has consumed
        self._unconsumed = 0  # number of later tokens, which it has not consumed
        self._computed = False  # whether the matcher has computed a mask or forced tokens since the last rollback

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits with ``-inf`` for forbidden tokens.

        Raises:
            GuideError: the grammar exceeds its work limit at this point of the text, or requires a character for which
                the tokenizer has no token.
        """
        if self._unconsumed and not self._matcher.is_error():
            return logits
        return torch.where(torch.from_numpy(self._allowed()[: len(logits)]), logits, -torch.inf)

    def check(self) -> None:
        """Check that a text can begin; errors are those of :meth:`mask`."""
        self._allowed()

    def advance(self, token: int) -> None:
        """Append ``token`` to the context."""
        if not self._unconsumed and token not in self._stop_token_ids and self._matcher.try_consume_tokens([token]):
            self._consumed.append(token)
        else:
            self._unconsumed += 1

    def rollback(self, count: int) -> None:
        """Remove the last ``count`` tokens from the context."""
        unconsumed = min(count, self._unconsumed)
        self._unconsumed -= unconsumed
        consumed = count - unconsumed
        del self._consumed[len(self._consumed) - consumed :]
        if self._matcher.is_error() or (consumed and not self._matcher.rollback(consumed)):
            self._restart()
        elif consumed and self._computed:
            # The matcher keeps results cached for the abandoned branch and would reuse them for the next branch.
            # Recompute them at the fork.
            self._matcher.compute_bitmask()
            self._computed = False
            if self._matcher.is_error():
                self._restart()

    def allows(self, token: int) -> bool:
        """Return whether ``token`` is allowed next."""
        if self._unconsumed:
            return True
        if token in self._stop_token_ids:
            return self._matcher.is_accepting()
        if forced := self.forced():
            return token == forced[0]
        return bool(self._result_or_restart(self._matcher.validate_tokens([token])))

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer writes them.

        If only the end is allowed, this is one stop token. Trailing tokens that could merge with later text are left
        out. A text has several tokenizations. The mask allows only this one for forced text, so each returned token is
        the only allowed one, except that a model may have several stop tokens.
        """
        if self._unconsumed:
            return []
        if self._matcher.is_stopped():
            return [min(self._stop_token_ids)] if self._matcher.is_accepting() else []
        self._computed = True
        return self._result_or_restart(self._matcher.compute_ff_tokens()) or []

    def _result_or_restart(self, result: T) -> T | None:
        """Return ``result``; if the query made the matcher fail, restart it and return ``None``."""
        if not self._matcher.is_error():
            return result
        self._restart()
        return None

    def _restart(self) -> None:
        """Replace a matcher that has failed: llguidance does not recover from an error."""
        self._matcher = self._start.deep_copy()
        self._matcher.try_consume_tokens(self._consumed)

    def _allowed(self) -> NDArray[np.bool_]:
        self._computed = True
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            msg = f"guide: {_EXPECTED}, found: {error_message(self._matcher)}; make it simpler"
            raise GuideError(msg)
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
        # A stop token's spelling may also be allowed as text, but choosing it would end the output.
        allowed[[*self._stop_token_ids]] = self._matcher.is_accepting()
        first = int(allowed.argmax())
        # llguidance tokenizes forced text and silently skips characters without a token.
        if not allowed[first] or (first not in self._stop_token_ids and not self._matcher.validate_tokens([first])):
            msg = f"guide: {_EXPECTED}, found a required character that the tokenizer has no token for"
            raise GuideError(msg)
        return allowed


def error_message(matcher: LLMatcher) -> str:
    """Return a matcher's error message in one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:_MAX_MESSAGE]
