"""Splitting trees among processes: lookahead parallelism (Fu et al. 2024, section 3.4) for any tree.

A branch depends only on its ancestors, not on its siblings. All nodes form one sequence, each tree in preorder, and the
sequence is cut into one piece per process. A process recomputes the ancestors of its piece's first node. With two
processes ::

    0 ┬ 1 ─ 2 ─ 3          preorder   0 1 2 3 4 5 6        first   0 1 2 3
      └ 4 ┬ 5              ancestors  · · · · 1 2 2        second  (0) 4 5 6
          └ 6

For lookahead decoding this splits window columns and candidates as the paper does. The cuts minimize the time of the
slowest process, by the measured cost of each process's forward passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from pronk.speculation.tree import TokenTree

__all__ = ["TreePart", "WorkerShare", "partition_trees", "preorder"]

# Steps of the bisection for the minimum time: a relative precision of one in a million.
_HALVINGS = 20


class TreePart(NamedTuple):
    """The nodes of one tree that one process computes.

    Attributes:
        job: index of the tree.
        nodes: nodes of the tree, parents before children: recomputed ancestors, then own nodes.
        num_ancestors: number of recomputed ancestors.
    """

    job: int
    nodes: tuple[int, ...]
    num_ancestors: int

    @property
    def own(self) -> tuple[int, ...]:
        """Return the nodes whose outputs only this process delivers."""
        return self.nodes[self.num_ancestors :]


@dataclass(frozen=True)
class WorkerShare:
    """The nodes of all trees that one process computes in a step."""

    pieces: tuple[TreePart, ...]

    @property
    def rows(self) -> int:
        """Return the number of rows of the process's forward pass."""
        return sum(len(piece.nodes) for piece in self.pieces)


def preorder(tree: TokenTree) -> list[int]:
    """Return the nodes in preorder, first children first."""
    if tree.main_chain == len(tree):
        return list(range(len(tree)))
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(len(tree) - 1, 0, -1):
        children[tree.parents[node]].append(node)
    order, stack = list[int](), [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(children[node])
    return order


def partition_trees(
    trees: Sequence[TokenTree], costs: Sequence[Callable[[int], float]], communication: Sequence[float] | None = None
) -> list[WorkerShare]:
    """Split trees among processes so that the slowest process finishes as early as possible.

    A process that would not reduce the time gets an empty share.

    Args:
        trees: trees, at least one.
        costs: for each process, seconds of its forward pass by its rows, increasing; the first process is the driver.
        communication: for each process, seconds of communication if its share is not empty.
    """
    nodes = _NodeSequence(trees)
    best: tuple[float, list[int]] | None = None
    for used in range(1, len(costs) + 1):
        found = _cut(nodes, costs[:used], (communication or [0.0] * len(costs))[:used])
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    assert best is not None
    _, stops = best
    starts = [0, *stops[:-1]]
    shares = [nodes.share(begin, end) for begin, end in zip(starts, stops, strict=True)]
    return shares + [WorkerShare(())] * (len(costs) - len(shares))


class _NodeSequence:
    """The sequence of all trees' nodes, each tree in preorder."""

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        self.trees = trees
        self.orders = [preorder(tree) for tree in trees]
        self.positions = [(job, position) for job, order in enumerate(self.orders) for position in range(len(order))]
        # Number of ancestors that a piece beginning at each position recomputes.
        self.num_ancestors = [self.trees[job].depths[self.orders[job][position]] for job, position in self.positions]

    def __len__(self) -> int:
        return len(self.positions)

    def share(self, begin: int, end: int) -> WorkerShare:
        """Return the pieces of the positions ``begin .. end - 1``."""
        pieces, at = list[TreePart](), begin
        while at < end:
            job, position = self.positions[at]
            count = min(end - at, len(self.orders[job]) - position)
            own = self.orders[job][position : position + count]
            ancestors = (0, *self.trees[job].path(own[0]))[:-1] if own[0] else ()
            pieces.append(TreePart(job, (*ancestors, *own), len(ancestors)))
            at += count
        return WorkerShare(tuple(pieces))


def _cut(
    nodes: _NodeSequence, costs: Sequence[Callable[[int], float]], communication: Sequence[float]
) -> tuple[float, list[int]] | None:
    """Return the seconds of the best cut and each piece's end; ``None`` if the nodes do not suffice."""
    if len(costs) > len(nodes):
        return None
    # A piece and its ancestors are nodes of the trees, so a process has at most len(row) rows.
    seconds = [
        [*accumulate((seconds_to_send + cost(rows) for rows in range(1, len(nodes) + 1)), max)]
        for cost, seconds_to_send in zip(costs, communication, strict=True)
    ]
    low, high = 0.0, seconds[0][-1]
    stops = _fill(nodes, seconds, high)
    if len(costs) == 1 or stops is None:
        return (high, [len(nodes)]) if len(costs) == 1 else None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _fill(nodes, seconds, middle)
        if found is None:
            low = middle
        else:
            high, stops = middle, found
    return high, stops


def _fill(nodes: _NodeSequence, seconds: Sequence[Sequence[float]], max_seconds: float) -> list[int] | None:
    """Give each process the rows that it computes in ``max_seconds``; ``None`` if nodes are left over.

    The driver always gets a piece, since the cost of its forward passes has to stay known.
    """
    stops, at = list[int](), 0
    if seconds[0][0] > max_seconds:
        return None
    for process_seconds in seconds:
        rows = bisect_right(process_seconds, max_seconds)
        at = min(len(nodes), at + max(0, rows - nodes.num_ancestors[at])) if at < len(nodes) else at
        stops.append(at)
    return stops if at == len(nodes) else None
