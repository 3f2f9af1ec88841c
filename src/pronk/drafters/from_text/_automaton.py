"""A suffix automaton that grows with its text: continuations of any suffix, with counts.

A *state* stands for all strings that end at the same positions of the text; they are suffixes of the longest of them.
The suffix *link* leads to the state of the longest suffix that ends at more positions. For the text ``a b a b c`` ::

    root ─ a ─ b ─ a ─ b ─ c        strings        ends after token    count    continuations
                                    b, ab          2, 4                2        a (1), c (1)
    links: bab, abab → b, ab        bab, abab      4                   1        c (1)

The construction is that of Blumer et al. (1985), one token at a time, for several texts in one automaton. A repeated
text adds no states. Only strings of at most ``max_match + 1`` tokens are counted, which keeps the counts exact at every
moment: the automaton tracks the state of the longest such suffix of the text, and its links lead to all shorter ones.

Memory: a text of n tokens has fewer than 2 n states of 17 bytes and 3 n edges of 12 bytes, so at most 70 bytes per
token, and up to 120 more per edge of a state with many continuations. Measured bytes per token: source code and prose
90, random ids out of 4,096 150, random letters out of two 70, one token or phrase repeated 30. Adding a token takes 2
to 4 µs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from sys import getsizeof
from typing import NamedTuple

__all__ = ["Continuation", "SuffixAutomaton"]

# Maximum number of edges in a list; a state with more edges has a dictionary.
_MAX_LIST_EDGES = 8

# Maximum number of continuations per lookup: frequent continuations of a common token occur early in the text.
_MAX_CONTINUATIONS = 128


class Continuation(NamedTuple):
    """A token after a string, the state of the extended string, and its number of occurrences."""

    token: int
    state: int
    num_occurrences: int


@dataclass
class SuffixAutomaton:
    """An index of the substrings of texts, with counts and continuations.

    A *place* is a pair ``(state, length)``: the string of that length among those of the state. State 0 with length 0
    is the empty string.

    Attributes:
        max_match: maximum length of strings to look up, at least 1 token; counts are exact for up to one token more.
        num_tokens: number of tokens added.
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
    # State to its edges by token, oldest first, for states with more than _NARROW edges.
    _edge_dicts: dict[int, dict[int, int]] = field(default_factory=dict, repr=False)
    # State of the whole text, and place of its longest counted suffix.
    _last: int = field(default=0, repr=False)
    _short: int = field(default=0, repr=False)
    _short_length: int = field(default=0, repr=False)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, ids of at least 0, to the text; amortized O(``max_match``) time per token."""
        for token in tokens:
            self._extend(token)

    def _extend(self, token: int) -> None:
        state, edge = self._last, self._find(self._last, token)
        if edge >= 0:
            self._last = self._state_after(state, edge)
        else:
            self._last = self._add_state(self._length[state] + 1, 0, 0)
            while state >= 0 and (edge := self._find(state, token)) < 0:
                self._add_edge(state, token, self._last)
                state = self._link[state]
            if state >= 0:
                self._link[self._last] = self._state_after(state, edge)
        self.num_tokens += 1
        self._count_suffixes(token)

    def end_text(self) -> None:
        """End the text: the next token begins another, and no string spans both."""
        self._last = self._short = self._short_length = 0

    def match(self, tail: Sequence[int]) -> tuple[int, int]:
        """Return the place of the longest suffix of ``tail``, up to ``max_match``, that has a continuation."""
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
        """Return the place of a string of ``length`` plus ``found``, or of its longest suffix that continues."""
        length = min(length + 1, self.max_match)
        return self._continued(self._state_of(found.state, length), length)

    def shorter(self, state: int) -> tuple[int, int]:
        """Return the place of the longest suffix that ends at more positions; for the root, the root."""
        link = max(self._link[state], 0)
        return link, self._length[link]

    def continuations(self, state: int) -> list[Continuation]:
        """Return the continuations of a state, newest first; if there are more than 128, the oldest 128.

        The counts are exact for places from :meth:`match` or :meth:`follow`, and for the empty string.
        """
        if self._degree[state] > _MAX_LIST_EDGES:
            edges = list(islice(self._edge_dicts[state].values(), _MAX_CONTINUATIONS))[::-1]
        else:
            edges = self._edge_list(state)
        token, target, count = self._token, self._target, self._count
        return [Continuation(token[edge], target[edge], count[target[edge]]) for edge in edges]

    @property
    def nbytes(self) -> int:
        """Return the automaton's memory in bytes."""
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
        wide = sum(getsizeof(edges) + 2 * getsizeof(1 << 20) * len(edges) for edges in self._edge_dicts.values())
        return sum(getsizeof(each) for each in arrays) + getsizeof(self._edge_dicts) + wide

    def _find(self, state: int, token: int) -> int:
        """Return the edge of ``state`` with ``token``, or -1."""
        if self._degree[state] > _MAX_LIST_EDGES:
            return self._edge_dicts[state].get(token, -1)
        edge, tokens, following = self._edges[state], self._token, self._next
        while edge >= 0 and tokens[edge] != token:
            edge = following[edge]
        return edge

    def _edge_list(self, state: int) -> list[int]:
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
        if degree > _MAX_LIST_EDGES:
            self._edge_dicts[state][token] = edge
            return
        self._degree[state] = degree + 1
        if degree == _MAX_LIST_EDGES:
            self._edge_dicts[state] = {self._token[edge]: edge for edge in reversed(self._edge_list(state))}

    def _state_after(self, state: int, edge: int) -> int:
        """Return the state whose longest string is that of ``state`` plus the edge's token; may split one off."""
        target, length = self._target[edge], self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._add_state(length, self._link[target], self._count[target])
        for each in reversed(self._edge_list(target)):
            self._add_edge(clone, self._token[each], self._target[each])
        self._link[target] = clone
        token = self._token[edge]
        while edge >= 0 and self._target[edge] == target:
            self._target[edge] = clone
            state = self._link[state]
            edge = self._find(state, token) if state >= 0 else -1
        return clone

    def _state_of(self, state: int, length: int) -> int:
        """Return the state of the suffix of ``length``: ``state``, which may hold one token more, or its link."""
        link = self._link[state]
        return link if link >= 0 and self._length[link] >= length else state

    def _continued(self, state: int, length: int) -> tuple[int, int]:
        """Return the place of the longest suffix that has a continuation."""
        while state and not self._degree[state]:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def _count_suffixes(self, token: int) -> None:
        """Increment the counts of all strings that end with ``token``, the text's last."""
        # The stored state may have been split since.
        before = self._state_of(self._short, self._short_length)
        self._short_length = min(self._short_length + 1, self.max_match + 1)
        state = self._state_of(self._target[self._find(before, token)], self._short_length)
        self._short = state
        while state > 0:
            self._count[state] += 1
            state = self._link[state]
