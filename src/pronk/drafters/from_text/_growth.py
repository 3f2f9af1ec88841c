"""The tree builder of the drafter ``suffix``: it adds continuations of matches, largest gain first.

A *match* is a suffix of the request's text that also occurs earlier in the text or in a stored output. Tokens that
follow the match there are its *continuations*; they become draft tokens.

Two implementations have bit-identical results: Python in this module, and C++ in ``kernels/csrc/suffix.cpp``, which is
ten times as fast.
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
from pronk.kernels.library import KernelsError
from pronk.kernels.suffixes import NUM_BUCKETS, CompiledSuffixes, NativeTreeBuilder, open_suffix_library
from pronk.speculation.acceptance_stats import SourceRates
from pronk.speculation.tree import TokenTree
from pronk.speculation.trie import Frontier, Trie

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

# Acceptance rates are measured by *kind* of draft token: match in the text or in the store, class of the match length
# (1, 2 or 3, 4 to 7, 8 or more tokens), and class of the token's share: how often the token follows the match, divided
# by 1 + the number of occurrences of all continuations. These are the bounds between the classes.
_LENGTH_BOUNDS = (2, 4, 8)
_SHARE_BOUNDS = (0.25, 0.5, 0.75)

# Acceptance rates assumed before any measurement, for matches in the request's text and in the store: a row per class
# of length, a column per class of share. Measured on the second halves of Python modules and of other held-out texts.
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

# Maximum number of candidates taken from the queue, divided by the maximum number of nodes. It is more than 1 because
# several indexes may propose the same node, so that a candidate adds none.
_MAX_CANDIDATES_PER_NODE = 2


def _kind_of(*, stored: bool, length: int, share: float) -> int:
    """Return a draft token's kind, a key of :data:`PRIORS`: 16 · stored + 4 · length class + share class."""
    return 16 * stored + 4 * bisect(_LENGTH_BOUNDS, length) + bisect(_SHARE_BOUNDS, share)


class SuffixIndex(Protocol):
    """An index of all substrings of texts: ``SuffixAutomaton`` in Python, ``CompiledSuffixes`` in C++."""

    max_match: int

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens added."""

    def extend(self, tokens: Sequence[int], /) -> None:
        """Append tokens to the current text."""

    def end_text(self) -> None:
        """End the current text: the next token begins another one."""

    @property
    def nbytes(self) -> int:
        """Return the memory of the index in bytes."""


class TreeLimits(NamedTuple):
    """Limits of a tree, and of the matches that the tree is built from."""

    max_nodes: int  # maximum number of draft tokens
    max_depth: int  # maximum number of draft tokens on a path
    min_match: int  # minimum match length in tokens
    depth_factor: float  # maximum depth divided by the match length; depth 1 is always allowed
    min_gain: float  # minimum gain of a node (probability that it and all its ancestors are accepted), 0..1


class TreeBuilder(Protocol):
    """Builder of one request's trees: ``PythonTreeBuilder`` or ``CompiledTreeBuilder``."""

    rates: SourceRates  # acceptance rates, from which the gains follow

    def build(self, indexes: Sequence[Any], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """Return a tree of continuations of the text's longest matches, chosen by gain.

        Args:
            indexes: index of the request's text, then the indexes of earlier outputs; all of the same class.
            tokens: the request's text, possibly followed by another drafter's draft tokens; the last token is the root.
                ``indexes[0]`` has the text only.
            limits: limits of the tree.
        """


@cache
def _library() -> Any:
    """Return the shared library of the compiled suffix automaton, or ``None`` if it is not installed."""
    try:
        return open_suffix_library()
    except KernelsError:
        return None


def make_suffix_index(max_match: int) -> SuffixIndex:
    """Return an empty index for matches of up to ``max_match`` tokens."""
    library = _library()
    return SuffixAutomaton(max_match) if library is None else CompiledSuffixes(library, max_match)


def make_tree_builder(rates: SourceRates, drafter: str) -> TreeBuilder:
    """Return the tree builder of a request; ``drafter`` is the drafter name in the origins of the nodes."""
    library = _library()
    return PythonTreeBuilder(rates, drafter) if library is None else CompiledTreeBuilder(library, rates, drafter)


class CompiledTreeBuilder:
    """Tree builder in C++ (``kernels/csrc/suffix.cpp``)."""

    def __init__(self, library: Any, rates: SourceRates, drafter: str) -> None:
        self.rates = rates
        self._builder = NativeTreeBuilder(library, rates.prior, rates.PRIOR_WEIGHT)
        self._origins = [(drafter, kind) for kind in range(NUM_BUCKETS)]

    def build(self, indexes: Sequence[CompiledSuffixes], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """Implement :meth:`TreeBuilder.build`."""
        builder, origins = self._builder, self._origins
        builder.set_counts(self.rates.offered, self.rates.taken)
        tail = tokens[-indexes[0].max_match :]
        tree = builder.build(
            indexes,
            tail,
            max_nodes=limits.max_nodes,
            max_depth=limits.max_depth,
            min_match=limits.min_match,
            depth_factor=limits.depth_factor,
            min_gain=limits.min_gain,
        )
        if len(tree.tokens) == 1:
            return TokenTree((tail[-1],), (-1,), gain=(1.0,), origin=(("", 0),))
        origin = (("", 0), *[origins[kind] for kind in tree.buckets[1:]])  # the C++ name of a kind is bucket
        return TokenTree(tuple(tree.tokens), tuple(tree.parents), gain=tuple(tree.gains), origin=origin)


class _MatchedNode(NamedTuple):
    """A node of the tree, and a match of the text up to it; the match's continuations may become children."""

    node: int  # index of the node in the trie
    index_number: int  # index into ``indexes`` of the suffix index that has the match
    state: int  # state of the match in the automaton
    length: int  # number of tokens of the match
    # Maximum depth of the nodes below: ``depth_factor`` times the length of the match from which this branch grows, at
    # least 1 and at most ``limits.max_depth``.
    max_depth: int


class _Candidate(NamedTuple):
    """A possible child of ``parent``; ``kind`` (a key of :data:`PRIORS`) selects its acceptance rate."""

    parent: _MatchedNode
    continuation: Continuation
    kind: int


@dataclass
class PythonTreeBuilder:
    """Tree builder in Python."""

    rates: SourceRates
    drafter: str

    def build(self, indexes: Sequence[SuffixAutomaton], tokens: Sequence[int], limits: TreeLimits) -> TokenTree:
        """Implement :meth:`TreeBuilder.build`."""
        growth = _TreeGrowth(Trie(tokens[-1]), self.rates, limits, indexes, self.drafter)
        for number, automaton in enumerate(indexes):
            state, length = automaton.match(tokens)
            seen_tokens: set[int] = set()  # tokens after longer matches; shorter matches skip them
            while length >= limits.min_match and len(seen_tokens) < limits.max_nodes:
                max_depth = min(limits.max_depth, max(1, int(limits.depth_factor * length)))
                growth.push_continuations(_MatchedNode(0, number, state, length, max_depth), seen_tokens)
                state, length = automaton.follow_link(state)
        return growth.build()


@dataclass
class _TreeGrowth:
    """A tree under construction, and the queue of candidates for its next node."""

    trie: Trie
    rates: SourceRates
    limits: TreeLimits
    indexes: Sequence[SuffixAutomaton]
    drafter: str
    candidates: Frontier[_Candidate] = field(default_factory=Frontier)

    def push_continuations(self, parent: _MatchedNode, seen_tokens: set[int]) -> None:
        """Queue a match's continuations without the tokens in ``seen_tokens``; add the new tokens to it."""
        if self.trie.depths[parent.node] >= parent.max_depth or parent.length < self.limits.min_match:
            return
        parent_gain, depth = self.trie.gains[parent.node], self.trie.depths[parent.node] + 1
        continuations = self.indexes[parent.index_number].continuations(parent.state)
        # + 1: the continuation of a match that occurs only once gets the share 1/2, not 1.
        total = 1 + sum([continuation.num_occurrences for continuation in continuations])
        if len(continuations) > 1:  # nlargest is stable: of equal counts the newest comes first
            continuations = nlargest(self.limits.max_nodes, continuations, key=attrgetter("num_occurrences"))
        for continuation in continuations:
            if continuation.token not in seen_tokens:
                seen_tokens.add(continuation.token)
                share = continuation.num_occurrences / total
                kind = _kind_of(stored=parent.index_number > 0, length=parent.length, share=share)
                gain = parent_gain * self.rates.rate(kind, depth)
                if gain >= self.limits.min_gain:
                    self.candidates.push(gain, _Candidate(parent, continuation, kind))

    def build(self) -> TokenTree:
        """Add the candidates of largest gain, and return the tree."""
        max_nodes = self.limits.max_nodes
        attempts = _MAX_CANDIDATES_PER_NODE * max_nodes
        while self.candidates and len(self.trie) <= max_nodes and attempts:
            attempts -= 1
            gain, (parent, continuation, kind) = self.candidates.pop()
            node = self.trie.add(parent.node, continuation.token, gain, (self.drafter, kind))
            state, length = self.indexes[parent.index_number].follow(continuation, parent.length)
            self.push_continuations(_MatchedNode(node, parent.index_number, state, length, parent.max_depth), set())
        return self.trie.tree(max_nodes)
