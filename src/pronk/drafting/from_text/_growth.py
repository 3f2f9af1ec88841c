"""Suffix indexes and the tree builder of ``suffix``: continuations of matches, largest gain first.

A *match* is a suffix of the request's text that also occurs earlier in the text or in a stored
output. Tokens that follow the match there are its *continuations*; they become draft tokens.

Two implementations have bit-identical results: C++ in ``kernels/csrc/suffix.cpp``, and Python in
this module, which is slower and serves where no kernels are installed.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import nlargest
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from pronk.drafting.acceptance_stats import DrafterRates
from pronk.drafting.trie import Frontier, Trie
from pronk.kernels.library import KernelsError
from pronk.kernels.suffixes import (
    NUM_BUCKETS,
    CompiledSuffixes,
    NativeTreeBuilder,
    TreeLimits,
    open_suffix_library,
)
from pronk.sampling.tree import TokenTree

# Acceptance rates are measured by *kind* of draft token: match in the text or in the store, class
# of the match length (1, 2 or 3, 4 to 7, 8 or more tokens), and class of the token's share: how
# often the token follows the match, divided by 1 + the number of occurrences of all continuations.
# These are the bounds between the classes.
_LENGTH_BOUNDS = (2, 4, 8)
_SHARE_BOUNDS = (0.25, 0.5, 0.75)

# Acceptance rates assumed before any measurement, for matches in the request's text and in the
# store: a row per class of length, a column per class of share. Measured on the second halves of
# Python modules and of other held-out texts.
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
PRIORS = dict(
    enumerate(prior for table in (_TEXT_PRIORS, _STORE_PRIORS) for row in table for prior in row)
)

# Maximum number of candidates taken from the queue, divided by the maximum number of nodes. It is
# more than 1 because several indexes may propose the same node, so that a candidate adds none.
_MAX_CANDIDATES_PER_NODE = 2

# Maximum number of continuations of a match. If there are more, those that first occurred latest
# are left out, because a frequent continuation usually occurs early in the text.
_MAX_CONTINUATIONS = 128

_END = -1  # stands for the end of a text in ``PythonSuffixes``; no token has this id


@cache
def find_suffix_library() -> Any:
    """Return the library of the compiled suffix automaton; ``None`` if it is not installed."""
    try:
        return open_suffix_library()
    except KernelsError:
        return None


class CompiledTreeBuilder:
    """Builder of the draft trees of one request, in C++ (``kernels/csrc/suffix.cpp``)."""

    def __init__(self, library: Any, rates: DrafterRates, drafter: str) -> None:
        self.rates = rates
        self._builder = NativeTreeBuilder(library, rates.prior, rates.PRIOR_WEIGHT)
        self._origins = [(drafter, kind) for kind in range(NUM_BUCKETS)]

    def build(
        self,
        indexes: Sequence[Any],
        tokens: Sequence[int],
        limits: TreeLimits,
        appended: Sequence[int] = (),
    ) -> TokenTree:
        """Return the same tree as :meth:`PythonTreeBuilder.build`, by one call of the library.

        ``indexes`` are :class:`CompiledSuffixes`.
        """
        self._builder.set_counts(self.rates.reached, self.rates.accepted)
        tail = tokens[-indexes[0].max_match :]
        tree = self._builder.build(indexes, tail, limits, appended)
        if len(tree.tokens) == 1:
            return TokenTree((tail[-1],), (-1,), gain=(1.0,), origin=(("", 0),))
        # a kind of draft token is called bucket in C++
        origin = (("", 0), *[self._origins[kind] for kind in tree.buckets[1:]])
        return TokenTree(
            tuple(tree.tokens), tuple(tree.parents), gain=tuple(tree.gains), origin=origin
        )


@dataclass
class PythonSuffixes:
    """Suffix index in Python: a string is looked up at the places where its last token occurs."""

    max_match: int  # maximum length in tokens of strings to look up, at least 1
    num_tokens: int = 0
    # all texts, with ``_END`` between them
    _tokens: list[int] = field(default_factory=list, repr=False)
    # for each token, the positions after its occurrences
    _ends: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @property
    def num_known(self) -> int:
        """Number of appended tokens."""
        return self.num_tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """Append token ids to the current text."""
        for token in tokens:
            self._tokens.append(token)
            self._ends.setdefault(token, []).append(len(self._tokens))
            self.num_tokens += 1

    def end_text(self) -> None:
        """End the current text: no string spans two texts."""
        self._tokens.append(_END)

    def longest_match(self, tail: Sequence[int]) -> list[int]:
        """Return the longest suffix of ``tail`` that has continuations.

        It has at most ``max_match`` tokens.
        """
        strings = (
            list(tail[start:]) for start in range(max(0, len(tail) - self.max_match), len(tail))
        )
        return next((string for string in strings if self.continuations(string)), [])

    def continuations(self, string: list[int]) -> list[tuple[int, int]]:
        """Return pairs of a token and its number of occurrences after ``string``.

        The token whose first occurrence is the latest comes first.
        """
        tokens = self._tokens
        size = len(string)
        ends = [end for end in self._ends.get(string[-1], ()) if tokens[end - size : end] == string]
        counts = Counter(tokens[end] for end in ends if end < len(tokens) and tokens[end] != _END)
        return [*islice(counts.items(), _MAX_CONTINUATIONS)][::-1]


class _Candidate(NamedTuple):
    """A possible child of the node ``parent``: a token that follows a match in an index.

    ``number`` is that of the index, and ``string`` the match.
    """

    parent: int
    number: int
    string: list[int]
    token: int
    kind: int  # a key of :data:`PRIORS`, which selects the acceptance rate
    # Maximum depth of the nodes below: ``depth_factor`` times the length of the match from which
    # this branch grows, at least 1 and at most ``limits.max_depth``.
    max_depth: int


@dataclass
class PythonTreeBuilder:
    """Builder of the draft trees of one request, in Python."""

    rates: DrafterRates
    drafter: str

    def build(
        self,
        indexes: Sequence[Any],
        tokens: Sequence[int],
        limits: TreeLimits,
        appended: Sequence[int] = (),
    ) -> TokenTree:
        """Return a tree of continuations of the text's longest matches, chosen by gain.

        ``indexes`` are :class:`PythonSuffixes`: that of the request's text, to which the tokens
        ``appended`` are appended first, then those of earlier outputs. ``tokens`` may end with
        another drafter's draft tokens, which the indexes lack; the last token is the root.
        """
        indexes[0].extend(appended)
        trie = Trie(tokens[-1])
        candidates = Frontier[_Candidate]()

        def push(
            parent: int, number: int, string: list[int], max_depth: int, seen_tokens: set[int]
        ) -> None:
            """Queue a match's continuations that are not in ``seen_tokens``, and add them to it."""
            depth = trie.depths[parent] + 1
            if depth > max_depth or len(string) < limits.min_match:
                return
            continuations = indexes[number].continuations(string)
            # + 1: the continuation of a match that occurs only once gets the share 1/2, not 1.
            total = 1 + sum(count for _, count in continuations)
            # nlargest is stable: of equal counts the newest comes first
            for token, count in nlargest(limits.max_nodes, continuations, key=itemgetter(1)):
                if token not in seen_tokens:
                    seen_tokens.add(token)
                    kind = 16 * (number > 0) + 4 * bisect(_LENGTH_BOUNDS, len(string))
                    kind += bisect(_SHARE_BOUNDS, count / total)
                    gain = trie.gains[parent] * self.rates.rate(kind, depth)
                    if gain >= limits.min_gain:
                        candidates.push(
                            gain, _Candidate(parent, number, string, token, kind, max_depth)
                        )

        for number, index in enumerate(indexes):
            string = index.longest_match(tokens)
            seen_tokens = set[int]()
            while len(string) >= limits.min_match and len(seen_tokens) < limits.max_nodes:
                max_depth = min(limits.max_depth, max(1, int(limits.depth_factor * len(string))))
                # a shorter match adds only tokens that follow no longer match
                push(0, number, string, max_depth, seen_tokens)
                string = string[1:]
        for _ in range(_MAX_CANDIDATES_PER_NODE * limits.max_nodes):
            if not candidates or len(trie) > limits.max_nodes:
                break
            gain, (parent, number, string, token, kind, max_depth) = candidates.pop()
            node = trie.add(parent, token, gain, (self.drafter, kind))
            push(node, number, indexes[number].longest_match([*string, token]), max_depth, set())
        return trie.tree(limits.max_nodes)


# An index of all substrings of texts, and the builder of one request's trees: in Python or in C++.
SuffixIndex = PythonSuffixes | CompiledSuffixes
TreeBuilder = PythonTreeBuilder | CompiledTreeBuilder


def make_suffix_index(max_match: int) -> SuffixIndex:
    """Return an empty index for matches of up to ``max_match`` tokens."""
    library = find_suffix_library()
    return PythonSuffixes(max_match) if library is None else CompiledSuffixes(library, max_match)


def make_tree_builder(rates: DrafterRates, drafter: str) -> TreeBuilder:
    """Return the tree builder of a request.

    ``drafter`` is the name that the nodes get as their origin.
    """
    library = find_suffix_library()
    return (
        PythonTreeBuilder(rates, drafter)
        if library is None
        else CompiledTreeBuilder(library, rates, drafter)
    )
