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
from pronk.kernels.suffixes import NUM_BUCKETS, CompiledSuffixes, NativeTreeBuilder, open_suffix_library
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.tree import TokenTree

__all__ = [
    "PRIORS",
    "CompiledTreeBuilder",
    "PythonTreeBuilder",
    "SuffixIndex",
    "TreeBuilder",
    "TreeLimits",
    "make_suffix_index",
    "make_tree_builder",
]

# Kinds of draft tokens, each with an acceptance rate: pairs of classes of the match length in tokens and of the token's
# share of the match's occurrences. Each number is the lower bound of a class; the first class lies below all of them.
_LENGTHS = (2, 4, 8)
_SHARES = (0.25, 0.5, 0.75)

# Prior acceptance rates, measured on the second halves of Python modules and of other held-out texts: a row per class
# of length, a column per class of share, for matches in the request's text and in the store.
_TEXT_PRIORS = (
    (0.05, 0.12, 0.31, 0.70),
    (0.05, 0.17, 0.52, 0.87),
    (0.07, 0.20, 0.67, 0.93),
    (0.06, 0.22, 0.82, 0.96),
)
_STORE_PRIORS = (
    (0.01, 0.05, 0.08, 0.16),
    (0.02, 0.05, 0.15, 0.51),
    (0.02, 0.06, 0.32, 0.55),
    (0.05, 0.10, 0.67, 0.70),
)
PRIORS = dict(enumerate(prior for table in (_TEXT_PRIORS, _STORE_PRIORS) for row in table for prior in row))

# Maximum number of candidates examined per node of the tree: sources that share a candidate examine it repeatedly.
_MAX_CANDIDATES_PER_NODE = 2


def _kind_of(*, stored: bool, length: int, share: float) -> int:
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
        max_nodes: maximum number of draft tokens.
        max_depth: maximum depth in tokens.
        min_match: minimum match length in tokens.
        depth_factor: maximum depth as a multiple of the match length; at least depth 1.
        min_gain: minimum gain of a node.
    """

    max_nodes: int
    max_depth: int
    min_match: int
    depth_factor: float
    min_gain: float


class TreeBuilder(Protocol):
    """Builder of one request's trees."""

    def build(self, sources: Sequence[Any], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
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


def make_suffix_index(max_match: int) -> SuffixIndex:
    """Return an empty index for matches of up to ``max_match`` tokens."""
    library = _library()
    return SuffixAutomaton(max_match) if library is None else CompiledSuffixes(library, max_match)


def make_tree_builder(rates: AcceptanceRates, source: str) -> TreeBuilder:
    """Return the tree builder of a request with these rates; ``source`` is the name in nodes' origins."""
    library = _library()
    return PythonTreeBuilder(rates, source) if library is None else CompiledTreeBuilder(library, rates, source)


class CompiledTreeBuilder:
    """Tree builder in the compiled kernels."""

    def __init__(self, library: Any, rates: AcceptanceRates, source: str) -> None:
        self._rates, self._temperature = rates, rates.known.temperature
        self._builder = NativeTreeBuilder(library, rates.weight, rates.prior)
        self._origins = [(source, kind) for kind in range(NUM_BUCKETS)]

    def build(self, sources: Sequence[CompiledSuffixes], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """Implement :meth:`TreeBuilder.build`."""
        rates, builder, origins = self._rates, self._builder, self._origins
        if rates.known.temperature != self._temperature:
            self._temperature = rates.known.temperature
            builder.clear_priors()
        builder.set_counts(rates.offered, rates.taken)
        tail = tokens[-sources[0].max_match :]
        found = builder.build(sources, tail, **limits._asdict())
        origin = (("", 0), *[origins[kind] for kind in found.buckets[1:]])
        return TokenTree(tuple(found.tokens), tuple(found.parents), gain=tuple(found.gains), origin=origin)


class _MatchedNode(NamedTuple):
    """A node of the tree, and the automaton state of its path in a source.

    ``depth`` is the maximum depth of draft tokens from the same match.
    """

    node: int
    source: int
    state: int
    length: int
    depth: int


class _Candidate(NamedTuple):
    matched: _MatchedNode
    continuation: Continuation
    kind: int


@dataclass
class PythonTreeBuilder:
    """Tree builder in Python."""

    rates: AcceptanceRates
    source: str

    def build(self, sources: Sequence[SuffixAutomaton], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """Implement :meth:`TreeBuilder.build`."""
        tree = _Tree(Trie(tokens[-1]), self.rates, limits, sources, self.source)
        for number, source in enumerate(sources):
            state, length = source.match(tokens)
            known: set[int] = set()
            while length >= limits.min_match and len(known) < limits.max_nodes:
                depth = min(limits.max_depth, max(1, int(limits.depth_factor * length)))
                tree.push_continuations(_MatchedNode(0, number, state, length, depth), known)
                state, length = source.shorter(state)
        return tree.build()


@dataclass
class _Tree:
    trie: Trie
    rates: AcceptanceRates
    limits: TreeLimits
    sources: Sequence[SuffixAutomaton]
    name: str
    frontier: Frontier[_Candidate] = field(default_factory=Frontier)

    def push_continuations(self, matched: _MatchedNode, known: set[int]) -> None:
        """Push the continuations of a matched node that are not in ``known``, and add them to ``known``."""
        if self.trie.depths[matched.node] >= matched.depth or matched.length < self.limits.min_match:
            return
        parent_gain, depth = self.trie.gains[matched.node], self.trie.depths[matched.node] + 1
        following = self.sources[matched.source].continuations(matched.state)
        total = 1 + sum([each.num_occurrences for each in following])
        # nlargest is stable: of equal counts the newest comes first.
        likeliest = (
            nlargest(self.limits.max_nodes, following, key=attrgetter("num_occurrences"))
            if len(following) > 1
            else following
        )
        for each in likeliest:
            if each.token not in known:
                known.add(each.token)
                kind = _kind_of(stored=matched.source > 0, length=matched.length, share=each.num_occurrences / total)
                gain = parent_gain * self.rates.rate(kind, depth)
                if gain >= self.limits.min_gain:
                    self.frontier.push(gain, _Candidate(matched, each, kind))

    def build(self) -> TokenTree:
        """Return the tree of the candidates of largest gain."""
        max_nodes = self.limits.max_nodes
        attempts = _MAX_CANDIDATES_PER_NODE * max_nodes
        while self.frontier and len(self.trie) <= max_nodes and attempts:
            attempts -= 1
            gain, (matched, continuation, kind) = self.frontier.pop()
            node = self.trie.add(matched.node, continuation.token, gain, (self.name, kind))
            state, length = self.sources[matched.source].follow(continuation, matched.length)
            self.push_continuations(_MatchedNode(node, matched.source, state, length, matched.depth), set())
        return self.trie.tree(max_nodes)
