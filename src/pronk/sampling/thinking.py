"""Thinking budget: a logits processor that ends a model's thinking after a number of tokens.

A model that thinks writes its thoughts before its answer, between two markers such as ``<think>``
and ``</think>``. Once the thoughts have as many tokens as the budget allows, the processor allows
only the tokens of the end marker. A message, whose tokens are forced as well, may precede the
marker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from pronk.base.arrays import Array
from pronk.text.stream import prefix_at_end
from pronk.text.thinking import Symbols, ThinkingMarkers


class _State(NamedTuple):
    """State of the budget after a token of the context.

    Attributes:
        phase: before thoughts, within thoughts, or in text after which no thoughts can follow.
        tail: last symbols of the text: a proper prefix of the marker that may come next, or empty.
        num_thoughts: number of tokens of all thoughts so far, at most the budget.
        num_forced: number of tokens within the present thoughts since the budget was used up.
    """

    phase: Literal["before", "thinking", "after"]
    tail: Symbols
    num_thoughts: int
    num_forced: int


class ThinkingBudget:
    """Logits processor that forces the end of thoughts once a text has enough tokens of thoughts.

    The processor saves its state after every token, so that a rollback is a return to an earlier
    state.

    Args:
        budget: maximum number of tokens of thoughts.
        markers: the model's markers before and after thoughts.
        prompt: token ids of the prompt.
        output: token ids generated so far.
        message: token ids that are forced before the end marker.
    """

    def __init__(
        self,
        budget: int,
        markers: ThinkingMarkers,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        message: Sequence[int] = (),
    ) -> None:
        self._budget = budget
        self._markers = markers
        self._forced = (*message, *markers.forced)
        self._states = [_State("thinking" if markers.opened_by(prompt) else "before", "", 0, 0)]
        for token in output:
            self.advance(token)

    @property
    def forced_token(self) -> int | None:
        """Next token of message and end marker if the budget is used up within thoughts.

        Otherwise ``None``.
        """
        state = self._states[-1]
        if state.phase != "thinking" or state.num_thoughts < self._budget:
            return None
        # More tokens are forced than message and marker have only if a draft token within them was
        # banned. Logits after such a draft token are never used, so any token of the marker will
        # do.
        return self._forced[min(state.num_forced, len(self._forced) - 1)]

    def mask(self, logits: Array) -> Array:
        """Return logits ``[vocab]`` that ban all tokens but the forced one beyond the budget.

        Banned tokens have ``-inf``. Within the budget, the result is ``logits`` itself.
        """
        token = self.forced_token
        if token is None:
            return logits
        masked = np.full_like(logits, -math.inf)
        masked[token] = logits[token]
        return masked

    def advance(self, token: int) -> None:
        """Append ``token`` to the context, and update the state of the budget."""
        state = self._states[-1]
        # Within one token, at most one marker is recognized: text after it is not searched.
        seen = "" if state.phase == "after" else state.tail + self._markers.symbols(token)
        if state.phase == "thinking":
            state = self._thinking(state, seen)
        elif state.phase == "before":
            state = self._before(state, seen)
        self._states.append(state)

    def _thinking(self, state: _State, seen: Symbols) -> _State:
        """Return the state after a token within thoughts.

        ``seen`` is ``state.tail`` followed by the symbols of the token.
        """
        count = state.num_thoughts
        forced = state.num_forced
        if count == self._budget:
            forced += 1
        else:
            count += 1
        if self._markers.end in seen:
            return _State("before" if self._markers.repeats else "after", "", count, 0)
        return _State("thinking", prefix_at_end(seen, self._markers.end), count, forced)

    def _before(self, state: _State, seen: Symbols) -> _State:
        """Return the state after a token outside thoughts.

        ``seen`` is ``state.tail`` followed by the symbols of the token.
        """
        begin = self._markers.begin
        count = state.num_thoughts
        if self._markers.repeats:
            if begin in seen:
                return _State("thinking", "", count, 0)
            return _State("before", prefix_at_end(seen, begin), count, 0)
        start = seen.lstrip()
        if start.startswith(begin):
            return _State("thinking", "", count, 0)
        if begin.startswith(start):
            return _State("before", start, count, 0)
        return _State("after", "", count, 0)

    def rollback(self, count: int) -> None:
        """Remove the last ``count`` tokens from the context, with their states."""
        del self._states[len(self._states) - count :]
