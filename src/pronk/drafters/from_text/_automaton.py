"""A suffix automaton that grows with its text: what follows the last few tokens, and how often.

A *state* stands for all strings that end at the same places of the text; they are suffixes of its longest one, and the
suffix *link* leads to the state of the longest suffix that ends at more places. For the text ``a b a b c`` ::

    root ─ a ─ b ─ a ─ b ─ c        strings        ends after token    count    continuations
                                    b, ab          2, 4                2        a (1), c (1)
    links: bab, abab → b, ab        bab, abab      4                   1        c (1)

The construction is that of Blumer et al. (1985), one token at a time, for several texts in one automaton: a text that
was seen before adds no states. Counts are kept for short strings alone, which makes them exact at every moment:
the state of the longest suffix that is short enough is at hand, and the links above it lead to all shorter ones.

Memory: a text of n tokens has fewer than 2 n states of 17 bytes and 3 n edges of 12 bytes, so at most 70 bytes a
token, and up to 120 more per edge of a state with many continuations. Measured, bytes a token: source code and prose
90, random ids out of 4,096 150, random letters out of two 70, one token or one phrase repeated 30. A token takes 2 to
4 µs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from sys import getsizeof
from typing import NamedTuple

__all__ = ["Continuation", "SuffixAutomaton"]

# A state with more edges than this finds them by a dictionary instead of walking a list.
_NARROW = 8

# No more continuations of a state are looked at: what follows a common token often, followed it early.
_MAX_CONTINUATIONS = 128


class Continuation(NamedTuple):
    """A token that follows a string, the state of both together, and how often that occurs."""

    token: int
    state: int
    times: int


@dataclass
class SuffixAutomaton:
    """The strings of some texts, their counts and what follows them.

    A place in it is a pair ``(state, length)``: the string of that length among those of the state. State 0 with length
    0 is the empty string.

    Attributes:
        max_match: longest string whose continuations are asked for, at least 1 token; counts are exact up to one more.
        num_tokens: tokens it was extended by.
    """

    max_match: int
    num_tokens: int = 0
    # One entry per state; state 0 is the root. The edges of a state are a list, the newest first.
    _length: array[int] = field(default_factory=lambda: array("i", [0]), repr=False)
    _link: array[int] = field(default_factory=lambda: array("i", [-1]), repr=False)
    _count: array[int] = field(default_factory=lambda: array("i", [0]), repr=False)
    _edges: array[int] = field(default_factory=lambda: array("i", [-1]), repr=False)
    _degree: array[int] = field(default_factory=lambda: array("B", [0]), repr=False)
    # One entry per edge.
    _token: array[int] = field(default_factory=lambda: array("i"), repr=False)
    _target: array[int] = field(default_factory=lambda: array("i"), repr=False)
    _next: array[int] = field(default_factory=lambda: array("i"), repr=False)
    # State to its edges by token, oldest first, for states that have many.
    _wide: dict[int, dict[int, int]] = field(default_factory=dict, repr=False)
    # The whole text so far, and the place of its longest suffix that is counted.
    _last: int = field(default=0, repr=False)
    _short: int = field(default=0, repr=False)
    _short_length: int = field(default=0, repr=False)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on. For each token amortized constant time, plus ``max_match`` steps.

        Args:
            tokens: ids, each at least 0.
        """
        for token in tokens:
            self._extend(token)

    def _extend(self, token: int) -> None:
        state, edge = self._last, self._find(self._last, token)
        if edge >= 0:
            self._last = self._exactly(state, edge)
        else:
            self._last = self._add_state(self._length[state] + 1, 0, 0)
            while state >= 0 and (edge := self._find(state, token)) < 0:
                self._add_edge(state, token, self._last)
                state = self._link[state]
            if state >= 0:
                self._link[self._last] = self._exactly(state, edge)
        self.num_tokens += 1
        self._count_suffixes(token)

    def end_text(self) -> None:
        """The next token begins another text: no string goes across."""
        self._last = self._short = self._short_length = 0

    def match(self, tail: Sequence[int]) -> tuple[int, int]:
        """The place of the longest suffix of ``tail`` that occurs with a continuation, at most ``max_match`` long."""
        state = length = 0
        for token in tail[-self.max_match :]:
            while (edge := self._find(state, token)) < 0 and state:
                state = self._link[state]
                length = self._length[state]
            if edge >= 0:
                state = self._target[edge]
                length += 1
        return self._continued(state, length)

    def follow(self, found: Continuation, length: int) -> tuple[int, int]:
        """The place after a continuation of a string of this length, or of its longest suffix that goes on."""
        length = min(length + 1, self.max_match)
        return self._continued(self._state_of(found.state, length), length)

    def shorter(self, state: int) -> tuple[int, int]:
        """The longest suffix that ends at more places; for the root, the root."""
        link = max(self._link[state], 0)
        return link, self._length[link]

    def continuations(self, state: int) -> list[Continuation]:
        """What follows the strings of a state, the newest first; of a large number, the 128 that are known longest.

        The counts are exact for a place that :meth:`match` or :meth:`follow` gave, and for the empty string.
        """
        if self._degree[state] > _NARROW:
            edges = list(islice(self._wide[state].values(), _MAX_CONTINUATIONS))[::-1]
        else:
            edges = self._list(state)
        token, target, count = self._token, self._target, self._count
        return [Continuation(token[edge], target[edge], count[target[edge]]) for edge in edges]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the automaton holds."""
        arrays = (
            self._length,
            self._link,
            self._count,
            self._edges,
            self._degree,
            self._token,
            self._target,
            self._next,
        )
        wide = sum(getsizeof(edges) + 2 * getsizeof(1 << 20) * len(edges) for edges in self._wide.values())
        return sum(getsizeof(each) for each in arrays) + getsizeof(self._wide) + wide

    def _find(self, state: int, token: int) -> int:
        """The edge that leaves ``state`` with ``token``, or -1."""
        if self._degree[state] > _NARROW:
            return self._wide[state].get(token, -1)
        edge, tokens, following = self._edges[state], self._token, self._next
        while edge >= 0 and tokens[edge] != token:
            edge = following[edge]
        return edge

    def _list(self, state: int) -> list[int]:
        """All edges of a state, newest first."""
        edges, edge = [], self._edges[state]
        while edge >= 0:
            edges.append(edge)
            edge = self._next[edge]
        return edges

    def _add_state(self, length: int, link: int, count: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        self._edges.append(-1)
        self._degree.append(0)
        return len(self._length) - 1

    def _add_edge(self, state: int, token: int, target: int) -> None:
        edge = len(self._token)
        self._token.append(token)
        self._target.append(target)
        self._next.append(self._edges[state])
        self._edges[state] = edge
        degree = self._degree[state]
        if degree > _NARROW:
            self._wide[state][token] = edge
            return
        self._degree[state] = degree + 1
        if degree == _NARROW:
            self._wide[state] = {self._token[edge]: edge for edge in reversed(self._list(state))}

    def _exactly(self, state: int, edge: int) -> int:
        """The state whose longest string is that of ``state`` and the edge's token; split off if it has to be."""
        target, length = self._target[edge], self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._add_state(length, self._link[target], self._count[target])
        for each in reversed(self._list(target)):
            self._add_edge(clone, self._token[each], self._target[each])
        self._link[target] = clone
        token = self._token[edge]
        while edge >= 0 and self._target[edge] == target:
            self._target[edge] = clone
            state = self._link[state]
            edge = self._find(state, token) if state >= 0 else -1
        return clone

    def _state_of(self, state: int, length: int) -> int:
        """Where the suffix of this length is: in the state of a string one token longer, or behind its link."""
        link = self._link[state]
        return link if link >= 0 and self._length[link] >= length else state

    def _continued(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix that has a continuation."""
        while state and not self._degree[state]:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def _count_suffixes(self, token: int) -> None:
        """Count the strings that end with ``token``, the text's last."""
        # The state may have been split since it was found.
        before = self._state_of(self._short, self._short_length)
        self._short_length = min(self._short_length + 1, self.max_match + 1)
        state = self._state_of(self._target[self._find(before, token)], self._short_length)
        self._short = state
        while state > 0:
            self._count[state] += 1
            state = self._link[state]
