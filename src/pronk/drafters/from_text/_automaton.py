"""A suffix automaton: an index of a text's substrings and of the tokens that follow them, with counts.

Strings are sequences of tokens. A *state* stands for all strings that end at the same positions of the text; each of
them is a suffix of the longest one. The *link* of a state leads to the state of the longest suffix that ends at more
positions. An *edge* leads from a state by a token to the state of the extended strings. For the text ``a b a b c`` ::

    root ─ a ─ b ─ a ─ b ─ c        strings        ends after token    count    continuations
                                    b, ab          2, 4                2        a (1), c (1)
    links: bab, abab → b, ab        bab, abab      4                   1        c (1)

The construction is that of Blumer et al. (1985), one token at a time, for several texts in one automaton. A repeated
text adds no states. Counts cover strings of at most ``max_match + 1`` tokens and are exact after every token: the
automaton tracks the state of the longest such suffix of the text, and links lead from it to all shorter suffixes.

Memory: a text of n tokens has fewer than 2n states of 17 bytes and 3n edges of 12 bytes, so at most 70 bytes per token.
Each edge of a state with more than 8 edges takes up to 120 bytes more. Measured bytes per token: 90 for source code and
prose, 150 for random ids below 4,096, 70 for random ids below 2, 30 for a repeated phrase. Adding a token takes 2 to
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

# Maximum number of edges that are searched one by one. A state with more edges has a dictionary from tokens to edges.
_MAX_LIST_EDGES = 8

# Maximum number of continuations that a lookup returns, to limit its time. Of more continuations, the newest are left
# out, because a frequent continuation usually occurs early in the text.
_MAX_CONTINUATIONS = 128


class Continuation(NamedTuple):
    """A token that follows a string; ``state`` and ``num_occurrences`` are those of string plus token."""

    token: int
    state: int
    num_occurrences: int


@dataclass
class SuffixAutomaton:
    """A suffix automaton of one or more texts.

    A *place* ``(state, length)`` identifies a string: of the state's strings, the one of ``length`` tokens. Place
    ``(0, 0)`` is the empty string; state 0 is the root.
    """

    max_match: int  # maximum length in tokens of strings to look up, at least 1
    num_tokens: int = 0  # number of tokens added so far
    # Arrays with one entry per state: length of its longest string, state that its link leads to (-1 for the root),
    # number of occurrences, index of its newest edge (-1 for none), and number of edges (9 means 9 or more).
    _length: array[int] = field(default_factory=lambda: array("i", [0]), repr=False)
    _link: array[int] = field(default_factory=lambda: array("i", [-1]), repr=False)
    _count: array[int] = field(default_factory=lambda: array("i", [0]), repr=False)
    _newest_edge: array[int] = field(default_factory=lambda: array("i", [-1]), repr=False)
    _num_edges: array[int] = field(default_factory=lambda: array("B", [0]), repr=False)
    # Arrays with one entry per edge: token, state that the edge leads to, and index of the same state's next older edge
    # (-1 for none).
    _edge_token: array[int] = field(default_factory=lambda: array("i"), repr=False)
    _edge_target: array[int] = field(default_factory=lambda: array("i"), repr=False)
    _older_edge: array[int] = field(default_factory=lambda: array("i"), repr=False)
    # For each state with more than _MAX_LIST_EDGES edges: a dictionary from tokens to edge indices, oldest edge first.
    _edge_dicts: dict[int, dict[int, int]] = field(default_factory=dict, repr=False)
    _text_state: int = field(default=0, repr=False)  # state of the whole current text
    # Place of the longest suffix of the current text whose occurrences are counted: at most ``max_match + 1`` tokens.
    _counted_state: int = field(default=0, repr=False)
    _counted_length: int = field(default=0, repr=False)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append token ids to the current text; takes amortized O(``max_match``) time per token."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        state, edge = self._text_state, self._find_edge(self._text_state, token)
        if edge >= 0:  # an earlier text contains the current text plus the token
            self._text_state = self._state_after(state, edge)
        else:
            self._text_state = self._add_state(self._length[state] + 1, 0, 0)
            while state >= 0 and (edge := self._find_edge(state, token)) < 0:
                self._add_edge(state, token, self._text_state)
                state = self._link[state]
            if state >= 0:
                self._link[self._text_state] = self._state_after(state, edge)
        self.num_tokens += 1
        self._count_suffixes(token)

    def end_text(self) -> None:
        """End the current text: the next token begins another text, and no string spans two texts."""
        self._text_state = self._counted_state = self._counted_length = 0

    def match(self, tail: Sequence[int]) -> tuple[int, int]:
        """Return the place of ``tail``'s longest suffix with continuations, at most ``max_match`` tokens."""
        state = length = 0
        for token in tail[-self.max_match :]:
            while (edge := self._find_edge(state, token)) < 0 and state:
                state = self._link[state]
                length = self._length[state]
            if edge >= 0:
                state = self._edge_target[edge]
                length += 1
        return self._shorten_to_continue(state, length)

    def follow(self, continuation: Continuation, length: int) -> tuple[int, int]:
        """Return the place of a matched string of ``length`` tokens plus a token that continues it.

        The resulting string is cut at its front to ``max_match`` tokens, and further until it has continuations.
        """
        length = min(length + 1, self.max_match)
        return self._shorten_to_continue(self._state_of_suffix(continuation.state, length), length)

    def follow_link(self, state: int) -> tuple[int, int]:
        """Return the place of the longest string of the state that the link leads to; root: ``(0, 0)``."""
        link = max(self._link[state], 0)
        return link, self._length[link]

    def continuations(self, state: int) -> list[Continuation]:
        """Return the continuations of a state, at most 128, in descending order of their first occurrence.

        Of more continuations, those that first occurred earliest are kept.
        Counts are exact for the places that :meth:`match`, :meth:`follow` and :meth:`follow_link` return.
        """
        if self._num_edges[state] > _MAX_LIST_EDGES:
            edges = list(islice(self._edge_dicts[state].values(), _MAX_CONTINUATIONS))[::-1]
        else:
            edges = self._edge_list(state)
        token, target, count = self._edge_token, self._edge_target, self._count
        return [Continuation(token[edge], target[edge], count[target[edge]]) for edge in edges]

    @property
    def nbytes(self) -> int:
        """Return the automaton's memory in bytes."""
        state_arrays = (self._length, self._link, self._count, self._newest_edge, self._num_edges)
        edge_arrays = (self._edge_token, self._edge_target, self._older_edge)
        item_size = 2 * getsizeof(1 << 20)  # bytes of a key and a value, two objects of class int
        dict_sizes = sum(getsizeof(edges) + item_size * len(edges) for edges in self._edge_dicts.values())
        return sum(map(getsizeof, (*state_arrays, *edge_arrays))) + getsizeof(self._edge_dicts) + dict_sizes

    def _find_edge(self, state: int, token: int) -> int:
        """Return the index of the edge from ``state`` by ``token``, or -1 if there is none."""
        if self._num_edges[state] > _MAX_LIST_EDGES:
            return self._edge_dicts[state].get(token, -1)
        edge, tokens, older_edge = self._newest_edge[state], self._edge_token, self._older_edge
        while edge >= 0 and tokens[edge] != token:
            edge = older_edge[edge]
        return edge

    def _edge_list(self, state: int) -> list[int]:
        """Return the indices of the edges of ``state``, the newest first."""
        edges, edge = [], self._newest_edge[state]
        while edge >= 0:
            edges.append(edge)
            edge = self._older_edge[edge]
        return edges

    def _add_state(self, length: int, link: int, count: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        self._newest_edge.append(-1)
        self._num_edges.append(0)
        return len(self._length) - 1

    def _add_edge(self, state: int, token: int, target: int) -> None:
        edge = len(self._edge_token)
        self._edge_token.append(token)
        self._edge_target.append(target)
        self._older_edge.append(self._newest_edge[state])
        self._newest_edge[state] = edge
        num_edges = self._num_edges[state]
        if num_edges > _MAX_LIST_EDGES:
            self._edge_dicts[state][token] = edge
            return
        self._num_edges[state] = num_edges + 1
        if num_edges == _MAX_LIST_EDGES:
            self._edge_dicts[state] = {self._edge_token[edge]: edge for edge in reversed(self._edge_list(state))}

    def _state_after(self, state: int, edge: int) -> int:
        """Return the state whose longest string is that of ``state`` plus the edge's token.

        If the edge leads to a state with a longer string, split off a new state, the clone, with the shorter strings.
        """
        target, length = self._edge_target[edge], self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._add_state(length, self._link[target], self._count[target])
        for target_edge in reversed(self._edge_list(target)):
            self._add_edge(clone, self._edge_token[target_edge], self._edge_target[target_edge])
        self._link[target] = clone
        token = self._edge_token[edge]
        while edge >= 0 and self._edge_target[edge] == target:
            self._edge_target[edge] = clone
            state = self._link[state]
            edge = self._find_edge(state, token) if state >= 0 else -1
        return clone

    def _state_of_suffix(self, state: int, length: int) -> int:
        """Return the state of the last ``length`` tokens of a string of ``state``: ``state`` or its link's."""
        link = self._link[state]
        return link if link >= 0 and self._length[link] >= length else state

    def _shorten_to_continue(self, state: int, length: int) -> tuple[int, int]:
        """Return the place of the longest suffix with continuations of the string at ``(state, length)``."""
        while state and not self._num_edges[state]:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def _count_suffixes(self, token: int) -> None:
        """Count the text's suffixes of up to ``max_match + 1`` tokens after ``token`` was appended."""
        # ``_state_after`` may have moved the shorter strings of ``_counted_state``, and with them the counted suffix,
        # to a clone. Then the link of ``_counted_state`` leads to the clone.
        previous = self._state_of_suffix(self._counted_state, self._counted_length)
        self._counted_length = min(self._counted_length + 1, self.max_match + 1)
        state = self._state_of_suffix(self._edge_target[self._find_edge(previous, token)], self._counted_length)
        self._counted_state = state
        while state > 0:
            self._count[state] += 1
            state = self._link[state]
