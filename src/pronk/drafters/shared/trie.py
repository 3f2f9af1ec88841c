"""Candidate continuations merged into one tree, the likeliest nodes first."""

from __future__ import annotations

from collections.abc import Container
from heapq import heappop, heappush, nsmallest
from typing import Generic, TypeVar

from pronk.speculation.tree import Origin, TokenTree

__all__ = ["Frontier", "Trie"]

DraftToken = TypeVar("DraftToken")


class Frontier(Generic[DraftToken]):
    """Guesses that a tree may grow by: the largest gain comes out first, among equals what was offered first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, DraftToken]] = []
        self._offered = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def offer(self, gain: float, guess: DraftToken) -> None:
        """A guess and its gain."""
        # The number decides between equals, so that guesses are never compared.
        self._offered += 1
        heappush(self._heap, (-gain, self._offered, guess))

    def best(self, count: int) -> list[DraftToken]:
        """The likeliest guesses, which stay."""
        return [guess for _, _, guess in nsmallest(count, self._heap)]

    def take(self) -> tuple[float, DraftToken]:
        """The likeliest guess, with its gain."""
        loss, _, guess = heappop(self._heap)
        return -loss, guess


class Trie:
    """Grows a tree of guesses in any order; :meth:`tree` keeps the best and lays them out.

    ::

        add(0, cat, .5)  add(1, sat, .3)  add(0, dog, .4)      0 ┬ cat .5 ─ sat .3
                                                                 └ dog .4
    """

    def __init__(self, root: int) -> None:
        """``root`` is the token that the guesses follow; it is node 0."""
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.gains = [1.0]
        self.origins: list[Origin] = [("", 0)]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, gain: float, origin: Origin) -> int:
        """The child of node ``parent`` that carries ``token``, new or known; the larger gain and its origin stay.

        A child's gain is at most its parent's.
        """
        gain = min(gain, self.gains[parent])
        node = self._children[parent].get(token)
        if node is None:
            node = self._children[parent][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.gains.append(gain)
            self.origins.append(origin)
            self._children.append({})
        elif gain > self.gains[node]:
            self.gains[node], self.origins[node] = gain, origin
        return node

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that carries ``token``."""
        return self._children[node].get(token)

    def forks(self, node: int, token: int) -> bool:
        """Whether ``token`` would be a second child of ``node``."""
        return bool(self._children[node]) and token not in self._children[node]

    def merge(self, tree: TokenTree, origin: Origin = ("", 0)) -> None:
        """Add the acceptable nodes of a tree below the same root.

        Where it has no gains, a guess is believed to be right half the time; ``origin`` is for trees without their own.
        """
        here = {0: 0}
        for node in range(1, len(tree)):
            if tree.acceptable[node]:
                gain = self.gains[here[tree.parents[node]]] / 2 if tree.gain is None else tree.gain[node]
                found = origin if tree.origin is None else tree.origin[node]
                here[node] = self.add(here[tree.parents[node]], tree.tokens[node], gain, found)

    def tree(self, max_nodes: int) -> TokenTree:
        """At most ``max_nodes`` guesses, those of largest gain; from every node on, the likeliest child comes first.

        The main chain is therefore the greedy path, and among equals what was added first wins.
        """
        kept: Container[int] = range(len(self.tokens))
        if len(self.tokens) - 1 > max_nodes:
            ranked = sorted(range(1, len(self.tokens)), key=lambda node: -self.gains[node])
            kept = {0, *ranked[: max(0, max_nodes)]}
        order: list[int] = []
        stack = [0]
        while stack:
            node = stack.pop()
            order.append(node)
            children = [child for child in self._children[node].values() if child in kept]
            if len(children) > 1:
                children.sort(key=lambda child: (self.gains[child], -child))
            stack.extend(children)
        place = {-1: -1} | {node: number for number, node in enumerate(order)}
        return TokenTree(
            tuple(self.tokens[node] for node in order),
            tuple(place[self.parents[node]] for node in order),
            gain=tuple(self.gains[node] for node in order),
            origin=tuple(self.origins[node] for node in order),
        )
