"""Where a text stands in its grammar, and which tokens may come next."""

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

__all__ = ["GrammarProcessor", "said"]

_SHOWN = 300  # characters of what llguidance says
_STUCK = "expected a grammar that can be followed to the end"

T = TypeVar("T")


class GrammarProcessor:
    """The processor of a guide: a mask over the vocabulary, at the true context of whatever node is looked at.

    Beyond the end of the text, and behind a token that the grammar forbids, nothing is masked: drafters try such
    tokens, and the walk goes on behind an end if the tree does, but what is chosen there never counts. Where following
    took too much work there is no mask either, but an error.

    Args:
        matcher: llguidance's, at the beginning; it is copied.
        stop_token_ids: token ids that end the text, wherever the grammar has one.
    """

    def __init__(self, matcher: LLMatcher, stop_token_ids: Sequence[int]) -> None:
        self._start, self._matcher = matcher, matcher.deep_copy()
        self._ends = frozenset(stop_token_ids)
        self._within: list[int] = []  # tokens that the grammar has taken
        self._beyond = 0  # and that came after the last one that it could take
        self._looked = False  # whether more than the taking of tokens was asked of the matcher since it was taken back

    def mask(self, logits: Tensor) -> Tensor:
        """The logits of tokens that may come next; ``-inf`` for the others.

        Raises:
            GuideError: the grammar takes more work than is allowed, at this point of the text, or demands a character
                that the tokenizer has no token for.
        """
        if self._beyond and not self._matcher.is_error():
            return logits
        return torch.where(torch.from_numpy(self._allowed()[: len(logits)]), logits, -torch.inf)

    def check(self) -> None:
        """Whether a text can begin at all; errors are those of :meth:`mask`."""
        self._allowed()

    def advance(self, token: int) -> None:
        """``token`` follows."""
        if not self._beyond and token not in self._ends and self._matcher.try_consume_tokens([token]):
            self._within.append(token)
        else:
            self._beyond += 1

    def rollback(self, count: int) -> None:
        """The last ``count`` tokens are taken back."""
        outside = min(count, self._beyond)
        self._beyond -= outside
        inside = count - outside
        del self._within[len(self._within) - inside :]
        if self._matcher.is_error() or (inside and not self._matcher.rollback(inside)):
            self._restart()
        elif inside and self._looked:
            # What was worked out for a branch stays, and would be taken for the next one's, unless it is worked out
            # anew where they part.
            self._matcher.compute_bitmask()
            self._looked = False
            if self._matcher.is_error():
                self._restart()

    def legal(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        if self._beyond:
            return True
        if token in self._ends:
            return self._matcher.is_accepting()
        if forced := self.forced():
            return token == forced[0]
        return bool(self._sound(self._matcher.validate_tokens([token])))

    def forced(self) -> list[int]:
        """The text that must come next, as the tokenizer writes it behind what is there; an end, where only one may.

        The last tokens of that text are left out if they might be others with what follows it. A text has more than
        one spelling; where no other text may come, the mask leaves this one alone, so that each token is the only one
        that may be chosen, but for an end, of which a model may have several.
        """
        if self._beyond:
            return []
        if self._matcher.is_stopped():
            return [min(self._ends)] if self._matcher.is_accepting() else []
        self._looked = True
        return self._sound(self._matcher.compute_ff_tokens()) or []

    def _sound(self, found: T) -> T | None:
        """What the matcher has found, if it has not failed over it: what is only asked for leaves no trace."""
        if not self._matcher.is_error():
            return found
        self._restart()
        return None

    def _restart(self) -> None:
        """After an error, of a text that may never come, a matcher stays as it is: so make another."""
        self._matcher = self._start.deep_copy()
        self._matcher.try_consume_tokens(self._within)

    def _allowed(self) -> NDArray[np.bool_]:
        """One flag for each token."""
        self._looked = True
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            msg = f"guide: {_STUCK}, found: {said(self._matcher)}; make it simpler"
            raise GuideError(msg)
        may = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
        may[[*self._ends]] = self._matcher.is_accepting()  # an end may also spell text, which it would cut off
        first = int(may.argmax())
        # Text that is forced is spelled by the tokenizer, which passes over characters that it does not have.
        if not may[first] or (first not in self._ends and not self._matcher.validate_tokens([first])):
            msg = f"guide: {_STUCK}, found one that demands a character that the tokenizer has no token for"
            raise GuideError(msg)
        return may


def said(matcher: LLMatcher) -> str:
    """What a matcher complains of, in one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:_SHOWN]
