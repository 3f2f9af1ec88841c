"""A guide over token ids given by a table, as a slow reference in tests of the engine."""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from pronk.base.arrays import Array
from pronk.drafting import Proposer
from pronk.drafting.combined.grammar import GrammarProposer
from pronk.text.guide import Guide

# The guide of requests that follow the table below.
TOY = Guide(regex="a table of tokens")

# State s allows, by s % 7: 0 and 1 a single token; 2 two tokens; 3 and 4 many tokens; 5 and 6 all
# and the end.
_STATES = 287
_KINDS = 7
_FORCED = 3


@cache
def allowed(state: int, vocab: int, stop_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that the guide allows in a state.

    Depending on the state, these are one token, two tokens, about two thirds of all tokens, or all
    tokens with the stop tokens.
    """
    others = [token for token in range(vocab) if token not in stop_token_ids]
    kind = state % _KINDS
    if kind < _FORCED - 1:
        return frozenset({others[(20 + state) % len(others)]})
    if kind == _FORCED - 1:
        return frozenset({others[(40 + state) % len(others)], others[(43 + state) % len(others)]})
    if kind < _KINDS - 2:
        return frozenset(token for token in others if (token + state) % 3)
    return frozenset(others) | stop_token_ids


def after(state: int, token: int) -> int:
    """Return the state after a token.

    A state with one or two allowed tokens is followed by the next number, so that such states come
    to an end.
    """
    if state % _KINDS < _FORCED:
        return state + 1
    return (state * 31 + token * 7 + 1) % _STATES


class ToyFollower:
    """Logits processor that bans the tokens outside :func:`allowed`.

    It replaces :class:`pronk.sampling.logits_processors.GuideProcessor`.
    """

    def __init__(self, vocab: int, stop_token_ids: Iterable[int] = ()) -> None:
        self.vocab = vocab
        self.stop_token_ids = frozenset(stop_token_ids)
        # the state before each token; None after an end or a forbidden token
        self.states: list[int | None] = [0]

    def mask(self, logits: Array) -> Array:
        state = self.states[-1]
        if state is None:
            return logits
        masked = np.full_like(logits, -math.inf)
        for token in allowed(state, self.vocab, self.stop_token_ids):
            masked[token] = logits[token]
        return masked

    def advance(self, token: int) -> None:
        state = self.states[-1]
        fine = (
            state is not None
            and token in allowed(state, self.vocab, self.stop_token_ids) - self.stop_token_ids
        )
        self.states.append(after(state or 0, token) if fine else None)

    def rollback(self, count: int) -> None:
        assert count < len(self.states)
        del self.states[len(self.states) - count :]

    def allows(self, token: int) -> bool:
        state = self.states[-1]
        return state is None or token in allowed(state, self.vocab, self.stop_token_ids)

    def forced(self) -> list[int]:
        state = self.states[-1]
        found = list[int]()
        while state is not None and state % _KINDS < _FORCED:
            found.append(min(allowed(state, self.vocab, self.stop_token_ids)))
            state = after(state, found[-1])
        return found


def fits(output: Sequence[int], vocab: int, stop_token_ids: Iterable[int] = ()) -> bool:
    """Return whether the guide allows an output, which need not be complete."""
    state = 0
    stops = frozenset(stop_token_ids)
    for place, token in enumerate(output):
        if token not in allowed(state, vocab, stops):
            return False
        if token in stops:
            return place == len(output) - 1
        state = after(state, token)
    return True


_wrapped: WeakValueDictionary[int, GrammarProposer] = WeakValueDictionary()


def with_forced(proposer: Proposer[Any]) -> Proposer[Any]:
    """Return a proposer that proposes forced tokens first; the same object for equal arguments."""
    if isinstance(proposer, GrammarProposer):
        return proposer
    found = _wrapped.get(id(proposer))
    if found is None:
        found = _wrapped[id(proposer)] = GrammarProposer(proposer)
    return found
