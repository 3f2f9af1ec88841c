"""The tree of what followed the longest ends of a text: grown from its likeliest end on.

The same is done twice, to the last bit of a gain: in Python here, and by the compiled kernels, ten times as fast, where
there are some (``kernels/csrc/suffix.cpp``).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import nlargest
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from pronk.drafters.from_text._automaton import Continuation, SuffixAutomaton
from pronk.drafters.shared.trie import Frontier, Trie
from pronk.kernels.library import KernelsError
from pronk.kernels.suffixes import NUM_WAYS, CompiledSuffixes, CompiledTreeGrower, open_suffix_library
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.tree import TokenTree

__all__ = ["PRIORS", "CompiledGrowth", "SuffixIndex", "TreeGrower", "TreeGrowth", "TreeLimits", "growth", "strings"]

# Kinds of guesses: a match of at least so many tokens, of whose occurrences at least such a share went on like this.
_LENGTHS = (2, 4, 8)
_SHARES = (0.25, 0.5, 0.75)

# What is believed before a request has seen anything: how often they were right in the second halves of Python modules
# and of other held-out texts. A row per length of the match, a column per share.
_TEXT = (
    (0.05, 0.12, 0.31, 0.70),
    (0.05, 0.17, 0.52, 0.87),
    (0.07, 0.20, 0.67, 0.93),
    (0.06, 0.22, 0.82, 0.96),
)
_STORE = (
    (0.01, 0.05, 0.08, 0.16),
    (0.02, 0.05, 0.15, 0.51),
    (0.02, 0.06, 0.32, 0.55),
    (0.05, 0.10, 0.67, 0.70),
)
PRIORS = dict(enumerate(prior for table in (_TEXT, _STORE) for row in table for prior in row))

# A guess that several sources share is looked at more than once, which takes time; at most so often per row.
_LOOKS = 2


def _way(*, stored: bool, length: int, share: float) -> int:
    """The kind of a guess: a number below 32."""
    return 16 * stored + 4 * bisect(_LENGTHS, length) + bisect(_SHARES, share)


class SuffixIndex(Protocol):
    """An index of texts by their suffixes: :class:`SuffixAutomaton`, or the compiled ``CompiledSuffixes``."""

    max_match: int

    @property
    def num_tokens(self) -> int:
        """Tokens that they were extended by."""

    def extend(self, tokens: Sequence[int], /) -> None:
        """The text goes on."""

    def end_text(self) -> None:
        """The next token begins another text."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held."""


class TreeLimits(NamedTuple):
    """What a tree may be.

    Attributes:
        width: most guesses.
        max_depth: most guesses above one another.
        min_match: shortest match that counts.
        depth_factor: a match supports guesses to so many times its length; at least one.
        least: guesses of a smaller gain do not count.
    """

    width: int
    max_depth: int
    min_match: int
    depth_factor: float
    least: float


class TreeGrower(Protocol):
    """Grows one request's trees."""

    def grow(self, sources: Sequence[Any], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """What followed the longest ends of a text, likeliest first.

        Args:
            sources: the text's own strings, then those of earlier outputs; all of one kind.
            tokens: the text; its end, which is the root, may not be among the strings yet.
            limits: of the tree.
        """


@cache
def _library() -> Any:
    """Return the compiled suffix automaton, or ``None`` if it is not installed."""
    try:
        return open_suffix_library()
    except KernelsError:
        return None


def strings(max_match: int) -> SuffixIndex:
    """Nothing yet, for matches of up to ``max_match`` tokens."""
    library = _library()
    return SuffixAutomaton(max_match) if library is None else CompiledSuffixes(library, max_match)


def growth(rates: AcceptanceRates, source: str) -> TreeGrower:
    """What grows the trees of a request with these rates; its nodes' origins name ``source``."""
    library = _library()
    return TreeGrowth(rates, source) if library is None else CompiledGrowth(library, rates, source)


class CompiledGrowth:
    """Growing by the kernels."""

    def __init__(self, library: Any, rates: AcceptanceRates, source: str) -> None:
        """A request with these rates."""
        self._rates, self._temperature = rates, rates.known.temperature
        self._sprouter = CompiledTreeGrower(library, rates.weight, rates.prior)
        self._origins = [(source, way) for way in range(NUM_WAYS)]

    def grow(self, sources: Sequence[CompiledSuffixes], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """What followed the longest ends of a text, likeliest first."""
        rates, sprouter, origins = self._rates, self._sprouter, self._origins
        if rates.known.temperature != self._temperature:
            self._temperature = rates.known.temperature
            sprouter.forget()
        sprouter.learn(rates.offered, rates.taken)
        tail = tokens[-sources[0].max_match :]
        found = sprouter.grow(sources, tail, **limits._asdict())
        origin = (("", 0), *[origins[way] for way in found.ways[1:]])
        return TokenTree(tuple(found.tokens), tuple(found.parents), gain=tuple(found.gains), origin=origin)


class _Place(NamedTuple):
    """A node of the tree, and where a source knows the text above it: what follows there may be guessed.

    ``depth`` is how deep guesses may go that began with the same match.
    """

    node: int
    source: int
    state: int
    length: int
    depth: int


class _Candidate(NamedTuple):
    """A token that may follow a place, and the kind of guess that it is."""

    place: _Place
    found: Continuation
    way: int


@dataclass
class TreeGrowth:
    """Growing in Python.

    Attributes:
        rates: acceptance by the kind of guess.
        source: the name in nodes' origins.
    """

    rates: AcceptanceRates
    source: str

    def grow(self, sources: Sequence[SuffixAutomaton], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """What followed the longest ends of a text, likeliest first."""
        tree = _Tree(Trie(tokens[-1]), self.rates, limits, sources, self.source)
        for number, source in enumerate(sources):
            state, length = source.match(tokens)
            known: set[int] = set()
            while length >= limits.min_match and len(known) < limits.width:
                depth = min(limits.max_depth, max(1, int(limits.depth_factor * length)))
                tree.offer(_Place(0, number, state, length, depth), known)
                state, length = source.shorter(state)
        return tree.grow()


@dataclass
class _Tree:
    """A tree that grows, and the guesses to come."""

    trie: Trie
    rates: AcceptanceRates
    limits: TreeLimits
    sources: Sequence[SuffixAutomaton]
    name: str
    frontier: Frontier[_Candidate] = field(default_factory=Frontier)

    def offer(self, place: _Place, known: set[int]) -> None:
        """What follows a place, but for ``known``, which grows: what longer matches know already."""
        if self.trie.depths[place.node] >= place.depth or place.length < self.limits.min_match:
            return
        above, depth = self.trie.gains[place.node], self.trie.depths[place.node] + 1
        following = self.sources[place.source].continuations(place.state)
        total = 1 + sum([each.times for each in following])
        # Among equals the newest comes first.
        most = nlargest(self.limits.width, following, key=attrgetter("times")) if len(following) > 1 else following
        for each in most:
            if each.token not in known:
                known.add(each.token)
                way = _way(stored=place.source > 0, length=place.length, share=each.times / total)
                gain = above * self.rates.rate(way, depth)
                if gain >= self.limits.least:
                    self.frontier.offer(gain, _Candidate(place, each, way))

    def grow(self) -> TokenTree:
        """The tree of the likeliest guesses."""
        width = self.limits.width
        looks = _LOOKS * width
        while self.frontier and len(self.trie) <= width and looks:
            looks -= 1
            gain, (place, found, way) = self.frontier.take()
            node = self.trie.add(place.node, found.token, gain, (self.name, way))
            state, length = self.sources[place.source].follow(found, place.length)
            self.offer(_Place(node, place.source, state, length, place.depth), set())
        return self.trie.tree(width)
