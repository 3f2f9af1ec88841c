"""Trie that merges candidate continuations of a text into one token tree of the likeliest nodes.

The *gain* of a node is the estimated probability that the target accepts it and all nodes above it.
"""

from __future__ import annotations

from collections.abc import Container
from heapq import heappop, heappush, nsmallest
from typing import Generic, TypeVar

from pronk.sampling.tree import Origin, TokenTree

Candidate = TypeVar("Candidate")


class Frontier(Generic[Candidate]):
    """Priority queue of candidates: the highest priority first, then the earliest inserted."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Candidate]] = []
        self._num_pushed = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, priority: float, candidate: Candidate) -> None:
        """Insert a candidate; ``priority`` estimates the probability that it is accepted."""
        # The counter breaks ties, so that candidates are never compared.
        self._num_pushed += 1
        heappush(self._heap, (-priority, self._num_pushed, candidate))

    def peek(self, count: int) -> list[Candidate]:
        """Return the ``count`` best candidates without removing them."""
        return [candidate for _, _, candidate in nsmallest(count, self._heap)]

    def pop(self) -> tuple[float, Candidate]:
        """Remove the best candidate; return its priority and the candidate."""
        negative_priority, _, candidate = heappop(self._heap)
        return -negative_priority, candidate


class Trie:
    """Tree of draft tokens, grown node by node; :meth:`tree` returns the most promising nodes.

    The *gain* of a node is the estimated probability that it and all nodes above it are accepted.

    Node 0 is the root, and nodes are numbered in order of insertion. For ``add(parent, token,
    gain)``::

        add(0, cat, .5)  add(1, sat, .3)  add(0, dog, .4)      0 ┬ cat .5 ─ sat .3
                                                                 └ dog .4
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.gains = [1.0]
        self.origins: list[Origin] = [("", 0)]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, gain: float, origin: Origin) -> int:
        """Return the child of ``parent`` with ``token``, added if it is new.

        ``gain`` is limited to the parent's. An existing child takes ``gain`` and ``origin`` if its
        own gain is smaller.
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
            self.gains[node] = gain
            self.origins[node] = origin
        return node

    def child(self, node: int, token: int) -> int | None:
        """Return the child of ``node`` with ``token``, or ``None``."""
        return self._children[node].get(token)

    def adds_sibling(self, node: int, token: int) -> bool:
        """Whether ``token`` would be a sibling: ``node`` has children, but none with ``token``."""
        return bool(self._children[node]) and token not in self._children[node]

    def merge(self, tree: TokenTree, origin: Origin = ("", 0)) -> None:
        """Add the nodes of a tree with the same root, except nodes that cannot be accepted.

        At most one of a node's children can be right. So the probability of a new child, given its
        parent, is multiplied by the probability that none of the children from other trees is
        right. A child that both trees have keeps the larger gain.

        If ``tree`` has no origins, its nodes get ``origin``. If it has no gains, a node gets half
        its parent's gain.
        """
        own_nodes = {0: 0}  # maps nodes of ``tree`` to nodes of this trie
        # for each node, the probability that none of its children from other trees is right
        others_wrong: dict[int, float] = {}
        for node in range(1, len(tree)):
            if not tree.acceptable[node]:
                continue
            theirs = tree.parents[node]
            parent = own_nodes[theirs]
            token = tree.tokens[node]
            gain = self.gains[parent]
            if tree.gain is None:
                gain /= 2
            elif tree.gain[theirs] > 0.0:
                gain *= tree.gain[node] / tree.gain[theirs]
            if parent not in others_wrong:
                others_wrong[parent] = self.probability_wrong(parent)
            if token not in self._children[parent]:
                gain *= others_wrong[parent]
            own_nodes[node] = self.add(
                parent, token, gain, origin if tree.origin is None else tree.origin[node]
            )

    def probability_wrong(self, node: int) -> float:
        """Return the probability that no child of ``node`` is right if the node is, 0..1."""
        gain = self.gains[node]
        right = sum([self.gains[child] for child in self._children[node].values()])
        return max(0.0, 1.0 - right / gain) if gain > 0.0 else 0.0

    def tree(self, max_nodes: int) -> TokenTree:
        """Return the tree of the ``max_nodes`` draft tokens that are likeliest to be accepted.

        The nodes are in depth-first order. Children are sorted by gain (probability of acceptance),
        the largest first. So the first nodes are the path that follows the likeliest child of each
        node. Of children with equal gains the one added first comes first.
        """
        kept_nodes: Container[int] = range(len(self.tokens))
        if len(self.tokens) - 1 > max_nodes:
            ranked = sorted(range(1, len(self.tokens)), key=lambda node: -self.gains[node])
            kept_nodes = {0, *ranked[: max(0, max_nodes)]}
        order: list[int] = []
        stack = [0]
        while stack:
            node = stack.pop()
            order.append(node)
            children = [child for child in self._children[node].values() if child in kept_nodes]
            if len(children) > 1:
                children.sort(key=lambda child: (self.gains[child], -child))
            stack.extend(children)
        new_index = {-1: -1} | {node: number for number, node in enumerate(order)}
        return TokenTree(
            tuple([self.tokens[node] for node in order]),
            tuple([new_index[self.parents[node]] for node in order]),
            gain=tuple([self.gains[node] for node in order]),
            origin=tuple([self.origins[node] for node in order]),
        )
