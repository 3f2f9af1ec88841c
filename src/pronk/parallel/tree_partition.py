"""Who computes which nodes of a step's trees: lookahead parallelism (Fu et al. 2024, section 3.4) for any tree.

A branch needs nothing of its neighbours, only its ancestors. So the nodes of all trees are put in one row, each tree in
preorder, and the row is cut into pieces, one for each worker; what a piece lacks above its first node is computed once
more. With two workers ::

    0 ┬ 1 ─ 2 ─ 3          preorder   0 1 2 3 4 5 6        first   0 1 2 3
      └ 4 ┬ 5              ancestors  · · · · 1 2 2        second  (0) 4 5 6
          └ 6

For lookahead that deals the columns of its window and its candidates as the paper does. Pieces are as long as the
slowest worker allows, by what passes have cost each of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from pronk.speculation.tree import TokenTree

__all__ = ["TreePart", "WorkerShare", "deal", "preorder"]

# Halvings by which the shortest possible time is found.
_HALVINGS = 20


class TreePart(NamedTuple):
    """What a worker computes of one tree.

    Attributes:
        job: number of the tree.
        nodes: of the tree, parents before their children; the last ones are the worker's own.
        above: so many of the first ones are another's too, which are computed once more.
    """

    job: int
    nodes: tuple[int, ...]
    above: int

    @property
    def own(self) -> tuple[int, ...]:
        """Nodes that no other worker answers for."""
        return self.nodes[self.above :]


@dataclass(frozen=True)
class WorkerShare:
    """What one worker computes in a step."""

    pieces: tuple[TreePart, ...]

    @property
    def rows(self) -> int:
        """Of its pass."""
        return sum(len(piece.nodes) for piece in self.pieces)


def preorder(tree: TokenTree) -> list[int]:
    """The nodes, each before all that is below it, and its first child before the others."""
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


def deal(
    trees: Sequence[TokenTree], costs: Sequence[Callable[[int], float]], extra: Sequence[float] | None = None
) -> list[WorkerShare]:
    """Deal some trees to workers, so that the last one is done as early as possible.

    Args:
        trees: at least one.
        costs: for each worker, seconds of its pass by its rows, which grow with them; the first one is this process.
        extra: seconds that it takes each worker beyond its pass, if it has a part at all.

    Returns:
        A share for each worker, in order; those that would not make it faster have none.
    """
    row = _Row(trees)
    best: tuple[float, list[int]] | None = None
    for used in range(1, len(costs) + 1):
        found = _cut(row, costs[:used], (extra or [0.0] * len(costs))[:used])
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    assert best is not None
    _, ends = best
    begins = [0, *ends[:-1]]
    shares = [row.share(begin, end) for begin, end in zip(begins, ends, strict=True)]
    return shares + [WorkerShare(())] * (len(costs) - len(shares))


class _Row:
    """The nodes of all trees, one after the other."""

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        self.trees = trees
        self.orders = [preorder(tree) for tree in trees]
        self.places = [(job, place) for job, order in enumerate(self.orders) for place in range(len(order))]
        # What a piece that begins there has to compute once more.
        self.above = [self.trees[job].depths[self.orders[job][place]] for job, place in self.places]

    def __len__(self) -> int:
        return len(self.places)

    def share(self, begin: int, end: int) -> WorkerShare:
        """The pieces from one place to another."""
        pieces, at = list[TreePart](), begin
        while at < end:
            job, place = self.places[at]
            count = min(end - at, len(self.orders[job]) - place)
            own = self.orders[job][place : place + count]
            above = (0, *self.trees[job].path(own[0]))[:-1] if own[0] else ()
            pieces.append(TreePart(job, (*above, *own), len(above)))
            at += count
        return WorkerShare(tuple(pieces))


def _cut(row: _Row, costs: Sequence[Callable[[int], float]], extra: Sequence[float]) -> tuple[float, list[int]] | None:
    """Where to cut, and the seconds until all are done; ``None`` if so many workers have not a node each."""
    if len(costs) > len(row):
        return None
    # A worker never has more rows than all nodes, since a piece and what is above it are nodes of the trees.
    seconds = [
        [*accumulate((more + cost(rows) for rows in range(1, len(row) + 1)), max)]
        for cost, more in zip(costs, extra, strict=True)
    ]
    low, high = 0.0, seconds[0][-1]
    ends = _fill(row, seconds, high)
    if len(costs) == 1 or ends is None:
        return (high, [len(row)]) if len(costs) == 1 else None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _fill(row, seconds, middle)
        if found is None:
            low = middle
        else:
            high, ends = middle, found
    return high, ends


def _fill(row: _Row, seconds: Sequence[Sequence[float]], most: float) -> list[int] | None:
    """Give each worker as much as it can do in time; ``None`` if that is not all, or nothing for the first one.

    This process always has a part: what its passes cost would not be known otherwise.
    """
    ends, at = list[int](), 0
    if seconds[0][0] > most:
        return None
    for own in seconds:
        rows = bisect_right(own, most)
        at = min(len(row), at + max(0, rows - row.above[at])) if at < len(row) else at
        ends.append(at)
    return ends if at == len(row) else None
