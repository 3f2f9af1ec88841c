"""The token tree: one request's guesses for one pass.

A step of decoding is one forward pass over a tree. The root is the last token that is certain; guesses hang
below it. One rule relates the nodes, for every method: *a node sees the committed tokens, its ancestors and
itself, and its position is the root's position plus its depth.* For the tree ::

    0 ─ 1 ─ 2          tokens   [the, cat, sat, dog, ran]
    └── 3 ─ 4          parents  [ -1,   0,   1,   0,   3]

the nodes have depths 0 1 2 1 2 and see (rows see columns) ::

          0 1 2 3 4
        0 x
        1 x x
        2 x x x
        3 x . . x
        4 x . . x x
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["DraftSample", "Origin", "TokenTree"]

# A drafter's name, and a number that means something to that drafter alone.
Origin = tuple[str, int]

# A token and the distribution that it was drawn from; ``None`` is the point mass on it.
DraftSample = tuple[int, Tensor | None]


@dataclass(frozen=True)
class TokenTree:
    """Guesses for one pass, in an order in which parents come before their children.

    The nodes that follow each other from the root on, each the child of the one before, are the *main chain*; put the
    likeliest path there. Its keys and values lie in consecutive cache slots, as if its tokens had been decoded one at a
    time, so that they need not be moved if they are accepted.

    Attributes:
        tokens: token ids; node 0 is the last certain token.
        parents: ``parents[0] == -1`` and ``0 <= parents[i] < i`` for every other node.
        verify: may the node be accepted? ``None`` means every one. A node that may not (lookahead's window) is
            still computed, and its children may not be accepted either.
        probs: per node the distribution that its token was drawn from, given its path and its earlier siblings, and
            whatever else is in the tree before it: ``[vocab]`` of the target, float64. (Of siblings drawn without
            replacement, a later one's has the earlier ones removed and is normalized again.) ``None`` for a node that
            was not drawn at random, or for all. What was drawn may decide what is drawn next, but not what is kept: a
            node that its own token could have cost its place has another law than this.
        gain: the drafter's estimate of the probability that the walk reaches each node, never larger than its parent's,
            or ``None``.
        origin: per node, who guessed it and by which of its ways: what acceptance is counted by. Or ``None``.
        acceptable: which nodes the walk can reach: those that may be accepted, and all above them as well.

    Raises:
        ValueError: if the parents are not a tree in this order, lengths differ, or two acceptable siblings carry
            the same token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    verify: tuple[bool, ...] | None = None
    probs: tuple[Tensor | None, ...] | None = None
    gain: tuple[float, ...] | None = None
    origin: tuple[Origin, ...] | None = None
    acceptable: tuple[bool, ...] = field(init=False, repr=False, compare=False)
    _children: tuple[dict[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = len(self.tokens)
        if size == 0 or len(self.parents) != size or self.parents[0] != -1:
            msg = f"expected as many parents as tokens, the first -1; found {size} tokens, parents {self.parents}"
            raise ValueError(msg)
        for name, values in (
            ("verify", self.verify),
            ("gain", self.gain),
            ("probs", self.probs),
            ("origin", self.origin),
        ):
            if values is not None and len(values) != size:
                msg = f"expected {size} entries in {name}, found {len(values)}"
                raise ValueError(msg)
        children: list[dict[int, int]] = [{} for _ in range(size)]
        acceptable = [True] * size
        for node in range(1, size):
            parent = self.parents[node]
            if not 0 <= parent < node:
                msg = f"node {node} has parent {parent}; expected a node before it"
                raise ValueError(msg)
            acceptable[node] = acceptable[parent] and (self.verify is None or self.verify[node])
            if not acceptable[node]:
                continue
            if self.tokens[node] in children[parent]:
                msg = f"node {parent} has two children with token {self.tokens[node]}; expected them merged"
                raise ValueError(msg)
            children[parent][self.tokens[node]] = node
        object.__setattr__(self, "_children", tuple(children))
        object.__setattr__(self, "acceptable", tuple(acceptable))

    @classmethod
    def chain(
        cls,
        tokens: Iterable[int],
        gain: Iterable[float] | None = None,
        probs: Iterable[Tensor | None] | None = None,
    ) -> TokenTree:
        """The tokens one below the other; the first is the root."""
        ids = tuple(tokens)
        return cls(
            ids,
            tuple(range(-1, len(ids) - 1)),
            probs=None if probs is None else tuple(probs),
            gain=None if gain is None else tuple(gain),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_draft_tokens(self) -> int:
        """Nodes below the root."""
        return len(self.tokens) - 1

    def child(self, node: int, token: int) -> int | None:
        """The acceptable child of ``node`` that carries ``token``."""
        return self._children[node].get(token)

    def guess(self, node: int) -> DraftSample:
        """The token of ``node`` and what it was drawn from."""
        return self.tokens[node], None if self.probs is None else self.probs[node]

    def draft_tokens(self, node: int) -> tuple[DraftSample, ...]:
        """The acceptable children of ``node``, in the order of the nodes."""
        return tuple(self.guess(child) for child in self._children[node].values())

    def first_chain(self, node: int) -> tuple[int, ...]:
        """The nodes below ``node``, each the first acceptable child of the one before."""
        chain: list[int] = []
        while self._children[node]:
            node = next(iter(self._children[node].values()))
            chain.append(node)
        return tuple(chain)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges between each node and the root."""
        depths = [0] * len(self)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return tuple(depths)

    @cached_property
    def main_chain(self) -> int:
        """How many nodes from the root on are each the child of the node before."""
        for node, parent in enumerate(self.parents):
            if parent != node - 1:
                return node
        return len(self)

    @cached_property
    def visible(self) -> NDArray[np.bool_]:
        """``[nodes, nodes]``: row ``i`` sees column ``j`` if ``j`` is ``i`` or an ancestor of ``i``."""
        size, main = len(self), self.main_chain
        seen = np.zeros((size, size), dtype=np.bool_)
        seen[:main, :main] = np.tri(main, dtype=np.bool_)
        for node in range(main, size):
            seen[node] = seen[self.parents[node]]
            seen[node, node] = True
        return seen

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root, left out, down to ``node``."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def hang_below(self, chain: Sequence[int]) -> TokenTree:
        """This tree with ``chain`` above it: its root becomes the child of the last token of ``chain``."""
        above = len(chain)
        if not above:
            return self
        lead = range(-1, above - 1)
        return TokenTree(
            (*chain, *self.tokens),
            (*lead, above - 1, *(parent + above for parent in self.parents[1:])),
            None if self.verify is None else ((True,) * above + (True, *self.verify[1:])),
            None if self.probs is None else ((None,) * above + self.probs),
        )

    def beside(self, other: TokenTree) -> TokenTree:
        """This tree with those nodes of another below its root that may not be accepted, and hang there by each other.

        Neither has ``probs``.
        """
        place = {0: 0}
        for node, parent in enumerate(other.parents):
            if not other.acceptable[node] and parent in place:
                place[node] = len(self) + len(place) - 1
        nodes = [*place][1:]
        theirs = other.origin or (("", 0),) * len(other)
        return TokenTree(
            (*self.tokens, *(other.tokens[node] for node in nodes)),
            (*self.parents, *(place[other.parents[node]] for node in nodes)),
            (*(self.verify or (True,) * len(self)), *(False,) * len(nodes)),
            gain=None if self.gain is None else (*self.gain, *(0.0,) * len(nodes)),
            origin=(*(self.origin or (("", 0),) * len(self)), *(theirs[node] for node in nodes)),
        )

    def keep(self, nodes: Iterable[int]) -> TokenTree:
        """The tree of ``nodes`` alone, in their old order; a node whose parent is not kept is left out as well."""
        wanted = set(nodes) | {0}
        new: dict[int, int] = {-1: -1}
        for node, parent in enumerate(self.parents):
            if node in wanted and parent in new:
                new[node] = len(new) - 1
        kept = [node for node in new if node >= 0]
        return TokenTree(
            tuple(self.tokens[i] for i in kept),
            tuple(new[self.parents[i]] for i in kept),
            None if self.verify is None else tuple(self.verify[i] for i in kept),
            None if self.probs is None else tuple(self.probs[i] for i in kept),
            None if self.gain is None else tuple(self.gain[i] for i in kept),
            None if self.origin is None else tuple(self.origin[i] for i in kept),
        )

    def limit(self, max_depth: int, max_nodes: int) -> TokenTree:
        """At most ``max_nodes`` guesses, the first ones, and none deeper than ``max_depth``."""
        if self.num_draft_tokens <= max_nodes and max(self.depths) <= max_depth:
            return self
        fitting = [node for node, depth in enumerate(self.depths) if depth <= max_depth]
        return self.keep(fitting[: max_nodes + 1])
