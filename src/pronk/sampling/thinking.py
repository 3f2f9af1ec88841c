"""Thinking budget: a logits processor that ends a model's thinking after a number of tokens.

A model that thinks writes its thoughts before its answer, between two markers such as ``<think>``
and ``</think>``. Once the thoughts have as many tokens as the budget allows, the processor allows
only the tokens of the end marker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from pronk.base.arrays import Array
from pronk.text.thinking import Symbols, ThinkingMarkers


class _State(NamedTuple):
    """State after a token of the context."""

    # before thoughts; in them; or in text that has no more thoughts
    phase: Literal["before", "thinking", "after"]
    # last symbols: a proper prefix of the marker that is expected next, perhaps empty
    tail: Symbols
    num_thoughts: int  # number of tokens of all thoughts so far, at most the budget
    num_forced: int  # number of tokens of these thoughts beyond the budget


class ThinkingBudget:
    """Allow only the end marker once a text has ``budget`` tokens of thoughts.

    The state is a function of the tokens so far. The states of all generated tokens are kept for
    rollbacks. ``output`` are the tokens generated before.
    """

    def __init__(
        self,
        budget: int,
        markers: ThinkingMarkers,
        prompt: Sequence[int],
        output: Sequence[int] = (),
    ) -> None:
        self._budget = budget
        self._markers = markers
        self._states = [_State("thinking" if markers.opened_by(prompt) else "before", "", 0, 0)]
        for token in output:
            self.advance(token)

    @property
    def forced_token(self) -> int | None:
        """Next token of the end marker if the budget is used up within thoughts.

        Otherwise ``None``.
        """
        state = self._states[-1]
        if state.phase != "thinking" or state.num_thoughts < self._budget:
            return None
        forced = self._markers.forced
        # After all forced tokens, the context has a draft token that was banned: its logits are
        # never used.
        return forced[min(state.num_forced, len(forced) - 1)]

    def mask(self, logits: Array) -> Array:
        """Return the logits.

        Beyond the budget, ``-inf`` for all tokens but the next one of the end marker.
        """
        token = self.forced_token
        if token is None:
            return logits
        masked = np.full_like(logits, -math.inf)
        masked[token] = logits[token]
        return masked

    def advance(self, token: int) -> None:
        """Append ``token`` to the context."""
        phase, tail, count, forced = self._states[-1]
        # A token completes at most one marker: the symbols after the marker within the token are
        # not searched.
        seen = "" if phase == "after" else tail + self._markers.symbols(token)
        if phase == "thinking":
            count, forced = (count, forced + 1) if count == self._budget else (count + 1, forced)
            if self._markers.end in seen:
                self._states.append(
                    _State("before" if self._markers.repeats else "after", "", count, 0)
                )
            else:
                self._states.append(
                    _State(phase, _prefix_at_end(seen, self._markers.end), count, forced)
                )
        elif phase == "before":
            self._states.append(self._before(seen, count))
        else:
            self._states.append(self._states[-1])

    def _before(self, seen: Symbols, count: int) -> _State:
        """Return the state after the symbols ``seen`` outside of thoughts."""
        begin = self._markers.begin
        if self._markers.repeats:
            found = begin in seen
            tail = _prefix_at_end(seen, begin)
            return _State("thinking" if found else "before", "" if found else tail, count, 0)
        start = seen.lstrip()
        if start.startswith(begin):
            return _State("thinking", "", count, 0)
        return (
            _State("before", start, count, 0)
            if begin.startswith(start)
            else _State("after", "", count, 0)
        )

    def rollback(self, count: int) -> None:
        """Remove the last ``count`` tokens from the context."""
        del self._states[len(self._states) - count :]


def _prefix_at_end(text: Symbols, marker: Symbols) -> Symbols:
    """Return the longest proper prefix of ``marker`` at the end of ``text``."""
    return next(
        (marker[:size] for size in range(len(marker) - 1, 0, -1) if text.endswith(marker[:size])),
        "",
    )
