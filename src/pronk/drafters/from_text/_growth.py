"""Growing the tree of a suffix drafter: continuations of a text's longest matches, best first.

There are two implementations with bit-identical results: Python here, and the compiled kernels, ten times as fast
(``kernels/csrc/suffix.cpp``).
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

# Kinds of draft tokens, each with an acceptance rate: pairs of classes of the match length in tokens and of the token's
# share of the match's occurrences. Each number is the lower bound of a class; the first class lies below all of them.
_LENGTHS = (2, 4, 8)
_SHARES = (0.25, 0.5, 0.75)

# Prior acceptance rates, measured on the second halves of Python modules and of other held-out texts: a row per class
# of length, a column per class of share, for matches in the request's text and in the store.
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

# Maximum number of candidates examined per node of the tree: sources that share a candidate examine it repeatedly.
_MAX_CANDIDATES_PER_NODE = 2


def _way(*, stored: bool, length: int, share: float) -> int:
    return 16 * stored + 4 * bisect(_LENGTHS, length) + bisect(_SHARES, share)


class SuffixIndex(Protocol):
    """An index of texts by their suffixes: :class:`SuffixAutomaton`, or the compiled ``CompiledSuffixes``."""

    max_match: int

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens added."""

    def extend(self, tokens: Sequence[int], /) -> None:
        """Append tokens to the text."""

    def end_text(self) -> None:
        """End the text: the next token begins another."""

    @property
    def nbytes(self) -> int:
        """Return the memory of the index in bytes."""


class TreeLimits(NamedTuple):
    """Limits of a tree.

    Attributes:
        width: maximum number of draft tokens.
        max_depth: maximum depth in tokens.
        min_match: minimum match length in tokens.
        depth_factor: maximum depth as a multiple of the match length; at least depth 1.
        least: minimum gain of a node.
    """

    width: int
    max_depth: int
    min_match: int
    depth_factor: float
    least: float


class TreeGrower(Protocol):
    """Builder of one request's trees."""

    def grow(self, sources: Sequence[Any], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """Return the tree of continuations of a text's longest matches, of largest gain first.

        Args:
            sources: index of the text, then those of earlier outputs; all of the same class.
            tokens: text; its last token is the root, and its end may be missing in the indexes.
            limits: limits of the tree.
        """


@cache
def _library() -> Any:
    """Return the compiled suffix automaton, or ``None`` if it is not installed."""
    try:
        return open_suffix_library()
    except KernelsError:
        return None


def strings(max_match: int) -> SuffixIndex:
    """Return an empty index for matches of up to ``max_match`` tokens."""
    library = _library()
    return SuffixAutomaton(max_match) if library is None else CompiledSuffixes(library, max_match)


def growth(rates: AcceptanceRates, source: str) -> TreeGrower:
    """Return the tree builder of a request with these rates; ``source`` is the name in nodes' origins."""
    library = _library()
    return TreeGrowth(rates, source) if library is None else CompiledGrowth(library, rates, source)


class CompiledGrowth:
    """Tree builder in the compiled kernels."""

    def __init__(self, library: Any, rates: AcceptanceRates, source: str) -> None:
        self._rates, self._temperature = rates, rates.known.temperature
        self._grower = CompiledTreeGrower(library, rates.weight, rates.prior)
        self._origins = [(source, kind) for kind in range(NUM_WAYS)]

    def grow(self, sources: Sequence[CompiledSuffixes], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """Implement :meth:`TreeGrower.grow`."""
        rates, grower, origins = self._rates, self._grower, self._origins
        if rates.known.temperature != self._temperature:
            self._temperature = rates.known.temperature
            grower.forget()
        grower.learn(rates.offered, rates.taken)
        tail = tokens[-sources[0].max_match :]
        found = grower.grow(sources, tail, **limits._asdict())
        origin = (("", 0), *[origins[kind] for kind in found.ways[1:]])
        return TokenTree(tuple(found.tokens), tuple(found.parents), gain=tuple(found.gains), origin=origin)


class _Place(NamedTuple):
    """A node of the tree and the place of its path in a source, whose continuations are candidates.

    ``depth`` is the maximum depth of draft tokens from the same match.
    """

    node: int
    source: int
    state: int
    length: int
    depth: int


class _Candidate(NamedTuple):
    place: _Place
    found: Continuation
    kind: int


@dataclass
class TreeGrowth:
    """Tree builder in Python."""

    rates: AcceptanceRates
    source: str

    def grow(self, sources: Sequence[SuffixAutomaton], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """Implement :meth:`TreeGrower.grow`."""
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
    trie: Trie
    rates: AcceptanceRates
    limits: TreeLimits
    sources: Sequence[SuffixAutomaton]
    name: str
    frontier: Frontier[_Candidate] = field(default_factory=Frontier)

    def offer(self, place: _Place, known: set[int]) -> None:
        """Add a place's continuations to the frontier and to ``known``; skip those of longer matches in it."""
        if self.trie.depths[place.node] >= place.depth or place.length < self.limits.min_match:
            return
        above, depth = self.trie.gains[place.node], self.trie.depths[place.node] + 1
        following = self.sources[place.source].continuations(place.state)
        total = 1 + sum([each.times for each in following])
        # nlargest is stable: of equal counts the newest comes first.
        most = nlargest(self.limits.width, following, key=attrgetter("times")) if len(following) > 1 else following
        for each in most:
            if each.token not in known:
                known.add(each.token)
                kind = _way(stored=place.source > 0, length=place.length, share=each.times / total)
                gain = above * self.rates.rate(kind, depth)
                if gain >= self.limits.least:
                    self.frontier.offer(gain, _Candidate(place, each, kind))

    def grow(self) -> TokenTree:
        """Return the tree of the candidates of largest gain."""
        width = self.limits.width
        looks = _MAX_CANDIDATES_PER_NODE * width
        while self.frontier and len(self.trie) <= width and looks:
            looks -= 1
            gain, (place, found, kind) = self.frontier.take()
            node = self.trie.add(place.node, found.token, gain, (self.name, kind))
            state, length = self.sources[place.source].follow(found, place.length)
            self.offer(_Place(node, place.source, state, length, place.depth), set())
        return self.trie.tree(width)
