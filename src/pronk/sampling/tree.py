"""The token tree: one request's draft tokens for one forward pass.

The root is the last committed token; the other nodes are draft tokens. Each node attends to the
committed tokens, its ancestors and itself. The position of a node is the root's position plus the
node's depth. For the tree ::

    0 ─ 1 ─ 2          tokens   [the, cat, sat, dog, ran]
    └── 3 ─ 4          parents  [ -1,   0,   1,   0,   3]

the nodes have depths 0 1 2 1 2, and the attention mask (rows attend to columns) is ::

          0 1 2 3 4
        0 x
        1 x x
        2 x x x
        3 x . . x
        4 x . . x x
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from types import NoneType
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array

# Origin of a draft token, a key of acceptance statistics: the drafter's name, and a number whose
# meaning the drafter defines.
Origin = tuple[str, int]

# A draft token's id, and the distribution ``[vocab]`` from which it was drawn; ``None`` if it was
# not drawn at random.
DraftSample = tuple[int, Array | None]


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens of one request for one forward pass, parents before children.

    The *main chain* is the longest run of nodes ``0, 1, 2, …`` in which each node is the child of
    the previous one. The most likely path should be the main chain: its rows of keys and values are
    already consecutive in the cache, so that accepting its nodes moves no rows.

    A tree is not checked when it is made. The engine checks each proposal once, by
    :attr:`is_plain`; trees that are made of valid ones are valid. What is derived from the fields,
    such as depths and children, is computed once, when it is first needed.

    Attributes:
        tokens: token ids; node 0 is the last committed token.
        parents: index of each node's parent: -1 for node 0, and ``0 <= parents[i] < i`` for every
            other node.
        verify: for each node, whether the node may be accepted; ``None`` if all nodes may be.
            False marks nodes that are computed but never accepted, like the window of the drafter
            ``lookahead``; their descendants are not accepted either.
        probs: for each node, the distribution ``[vocab]`` (float64, target's vocabulary) from which
            its token was drawn, given all earlier nodes. Of siblings drawn without replacement,
            the earlier ones have probability 0 and the other probabilities sum to 1. An entry is
            ``None`` if the token was not drawn at random, and ``probs`` is ``None`` if no token
            was. A node must not be dropped because of its token: the remaining tokens would not be
            distributed as ``probs``.
        gain: for each node, the estimated probability of its acceptance, at most that of its
            parent; ``None`` if unknown.
        origin: for each node, the drafter that proposed the node, as a key of acceptance
            statistics; ``None`` if unknown.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    verify: tuple[bool, ...] | None = None
    probs: tuple[Array | None, ...] | None = None
    gain: tuple[float, ...] | None = None
    origin: tuple[Origin, ...] | None = None

    def check(self) -> None:
        """Check a tree that a drafter proposes.

        Raises:
            ValueError: the parents are not a tree in this order, lengths differ, a gain is not in
                0..1, or two acceptable siblings carry the same token.
        """
        size = len(self.tokens)
        parents = self.parents
        if size == 0 or len(parents) != size or parents[0] != -1:
            msg = (
                f"expected one parent per token, the first -1; found {size} tokens, "
                f"parents {parents}"
            )
            raise ValueError(msg)
        for name in ("verify", "gain", "probs", "origin"):
            values = getattr(self, name)
            if values is not None and len(values) != size:
                msg = f"expected {size} entries in {name}, found {len(values)}"
                raise ValueError(msg)
        gain = self.gain or (0.0,)
        # The sum is NaN if a gain is.
        if not (min(gain) >= 0.0 and max(gain) <= 1.0 and isfinite(sum(gain))):
            msg = f"expected probabilities, 0..1, in gain, found {self.gain}; check the drafter"
            raise ValueError(msg)
        self._links  # noqa: B018 - computed now, it raises the other errors

    @cached_property
    def is_plain(self) -> bool:
        """Whether the fields are tuples of Python's own numbers, and ``probs`` are arrays.

        Raises the errors of :meth:`check`.
        """
        self.check()
        fields = (self.tokens, self.parents, self.verify, self.probs, self.gain, self.origin)
        pairs = self.origin or ()
        names, kinds = zip(*pairs, strict=True) if self.origin else ((), ())
        return (
            set(map(type, fields)) <= {tuple, NoneType}
            and set(map(type, self.tokens)) == set(map(type, self.parents)) == {int}
            and set(map(type, self.gain or ())) <= {float}
            and set(map(type, self.verify or ())) <= {bool}
            and set(map(type, pairs)) <= {tuple}
            and set(map(type, names)) <= {str}
            and set(map(type, kinds)) <= {int}
            and set(map(type, self.probs or ())) <= {NoneType, np.ndarray}
        )

    @cached_property
    def _links(self) -> tuple[tuple[bool, ...], tuple[dict[int, int], ...]]:
        """The values of :attr:`acceptable` and, for each node, of :meth:`children`.

        Raise a ValueError if a parent comes after its child, or acceptable siblings have equal
        tokens.
        """
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        acceptable = [True] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            token = self.tokens[node]
            if not 0 <= parent < node:
                msg = (
                    f"expected parents before their children, found node {node} with parent "
                    f"{parent}; reorder the nodes"
                )
                raise ValueError(msg)
            if not acceptable[parent] or (self.verify is not None and not self.verify[node]):
                acceptable[node] = False
            elif token in children[parent]:
                msg = (
                    f"expected distinct children, found token {token} twice below node {parent}; "
                    "merge them"
                )
                raise ValueError(msg)
            else:
                children[parent][token] = node
        return tuple(acceptable), tuple(children)

    @property
    def acceptable(self) -> tuple[bool, ...]:
        """For each node, whether the node and all its ancestors may be accepted.

        A node may not be accepted if its entry in ``verify`` is False.
        """
        acceptable, _ = self._links
        return acceptable

    @property
    def acceptable_parents(self) -> Sequence[int]:
        """Parent of each node; -1 for the root and for nodes that may not be accepted."""
        if self.verify is None:
            return self.parents
        pairs = zip(self.parents, self.acceptable, strict=True)
        return [parent if acceptable else -1 for parent, acceptable in pairs]

    @property
    def _children(self) -> tuple[dict[int, int], ...]:
        _, children = self._links
        return children

    @classmethod
    def chain(
        cls,
        tokens: Iterable[int],
        gain: Iterable[float] | None = None,
        probs: Iterable[Array | None] | None = None,
    ) -> TokenTree:
        """Return a tree without branches of the given tokens; the first one is the root.

        ``gain`` and ``probs`` are the fields of the tree, with an entry for each token.
        """
        ids = tuple(tokens)
        return cls(
            ids,
            tuple(range(-1, len(ids) - 1)),
            probs=None if probs is None else tuple(probs),
            gain=None if gain is None else tuple(gain),
        )

    def __len__(self) -> int:
        """Return the number of nodes, the root included."""
        return len(self.tokens)

    @property
    def num_draft_tokens(self) -> int:
        """Number of nodes without the root."""
        return len(self.tokens) - 1

    def num_matched(self, tokens: Sequence[int]) -> int:
        """Return how many of the first ``tokens`` form a path of acceptable nodes from the root."""
        _, children = self._links
        node = 0
        for count, token in enumerate(tokens):
            child = children[node].get(token)
            if child is None:
                return count
            node = child
        return len(tokens)

    def child(self, node: int, token: int) -> int | None:
        """Return the acceptable child of ``node`` with the token ``token``, or ``None``."""
        _, children = self._links
        return children[node].get(token)

    def children(self, node: int) -> Mapping[int, int]:
        """Return the acceptable children of ``node``, by token, in the order of the nodes."""
        _, children = self._links
        return children[node]

    def draft_sample(self, node: int) -> DraftSample:
        """Return the token of ``node``, and the distribution that it was drawn from.

        The distribution is ``None`` if the token was not drawn at random.
        """
        return self.tokens[node], None if self.probs is None else self.probs[node]

    def draft_samples(self, node: int) -> tuple[DraftSample, ...]:
        """Return token and distribution of each acceptable child of ``node``, in node order."""
        return tuple(self.draft_sample(child) for child in self._children[node].values())

    def first_chain(self, node: int) -> tuple[int, ...]:
        """Return the chain below ``node``: its first acceptable child, that child's first, ….

        The chain ends at a node without acceptable children.
        """
        chain: list[int] = []
        while children := self._children[node]:
            node = next(iter(children.values()))
            chain.append(node)
        return tuple(chain)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has depth 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def main_chain(self) -> int:
        """Number of leading nodes ``0, 1, 2, …`` each of which is the child of the previous one."""
        return next(
            (node for node, parent in enumerate(self.parents) if parent != node - 1), len(self)
        )

    @cached_property
    def visible(self) -> NDArray[np.bool_]:
        """Attention mask ``[nodes, nodes]``.

        Entry ``[i, j]`` is True if ``j`` is ``i`` or an ancestor of ``i``.
        """
        size = len(self)
        main = self.main_chain
        seen = np.zeros((size, size), dtype=np.bool_)
        seen[:main, :main] = np.tri(main, dtype=np.bool_)
        for node in range(main, size):
            seen[node] = seen[self.parents[node]]
            seen[node, node] = True
        return seen

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes on the path from the root (excluded) to ``node`` (included)."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def hang_below(self, chain: Sequence[int]) -> TokenTree:
        """Return a tree that begins with the tokens ``chain``, followed by this whole tree.

        The first token of ``chain`` is the new root, and this tree's root is the child of the last
        one. The result has no ``gain`` and no ``origin``.
        """
        num_above = len(chain)
        if not num_above:
            return self
        parents_above = range(-1, num_above - 1)
        return TokenTree(
            (*chain, *self.tokens),
            (*parents_above, num_above - 1, *(parent + num_above for parent in self.parents[1:])),
            None if self.verify is None else ((True,) * num_above + (True, *self.verify[1:])),
            None if self.probs is None else ((None,) * num_above + self.probs),
        )

    def with_unacceptable(self, other: TokenTree) -> TokenTree:
        """Return this tree with the unacceptable nodes of ``other`` added.

        A node of ``other`` is added if the node and all its ancestors below the root are
        unacceptable. Children of the root of ``other`` become children of this tree's root. Neither
        tree may have ``probs``.
        """
        new_index = {0: 0}
        for node, parent in enumerate(other.parents):
            if not other.acceptable[node] and parent in new_index:
                new_index[node] = len(self) + len(new_index) - 1
        nodes = [*new_index][1:]  # indices of the nodes of ``other`` to add
        other_origins = other.origin or (("", 0),) * len(other)
        return TokenTree(
            (*self.tokens, *(other.tokens[node] for node in nodes)),
            (*self.parents, *(new_index[other.parents[node]] for node in nodes)),
            (*(self.verify or (True,) * len(self)), *(False,) * len(nodes)),
            gain=None if self.gain is None else (*self.gain, *(0.0,) * len(nodes)),
            origin=(
                *(self.origin or (("", 0),) * len(self)),
                *(other_origins[node] for node in nodes),
            ),
        )

    def keep(self, nodes: Iterable[int]) -> TokenTree:
        """Return a tree of the root and the given nodes.

        A node is left out if one of its ancestors is not among ``nodes``.
        """
        kept_nodes = set(nodes) | {0}
        new_index: dict[int, int] = {-1: -1}
        for node, parent in enumerate(self.parents):
            if node in kept_nodes and parent in new_index:
                new_index[node] = len(new_index) - 1
        kept = [node for node in new_index if node >= 0]
        return TokenTree(
            tuple([self.tokens[i] for i in kept]),
            tuple([new_index[self.parents[i]] for i in kept]),
            None if self.verify is None else tuple([self.verify[i] for i in kept]),
            None if self.probs is None else tuple([self.probs[i] for i in kept]),
            None if self.gain is None else tuple([self.gain[i] for i in kept]),
            None if self.origin is None else tuple([self.origin[i] for i in kept]),
        )

    def with_origin(self, origin: Origin) -> TokenTree:
        """Return the tree with ``origin`` for each of its nodes; a tree with origins unchanged."""
        return self if self.origin is not None else replace(self, origin=(origin,) * len(self))

    def limit(self, max_depth: int, max_nodes: int) -> TokenTree:
        """Return the tree with at most ``max_nodes`` draft tokens, none deeper than ``max_depth``.

        The first nodes in the order of the tree are kept.
        """
        num_draft_tokens = len(self.tokens) - 1
        # no node is deeper than the number of draft tokens
        is_flat = num_draft_tokens <= max_depth or max(self.depths) <= max_depth
        if num_draft_tokens <= max_nodes and is_flat:
            return self
        fitting = [node for node, depth in enumerate(self.depths) if depth <= max_depth]
        return self.keep(fitting[: max_nodes + 1])


class TokenView(Sequence[int]):
    """A text and draft tokens after the text as one sequence.

    The text, which may be long, is not copied. Tokens that are appended to ``text`` later do not
    count, and ``more`` must not change. A slice of the sequence is a list.
    """

    def __init__(self, text: Sequence[int], more: Sequence[int]) -> None:
        self._text = text
        self._more = more
        self._size = len(text)

    def __len__(self) -> int:
        return self._size + len(self._more)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Return a token, or a list of the tokens of a slice."""
        size = self._size
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            return [
                *self._text[start:stop],
                *self._more[max(0, start - size) : max(0, stop - size)],
            ]
        place = index if index >= 0 else index + len(self)
        if not 0 <= place < len(self):
            raise IndexError(index)
        return self._text[place] if place < size else self._more[place - size]
