"""Division of trees among processes: lookahead parallelism (Fu et al. 2024, section 3.4).

A node depends only on its ancestors, not on other branches. All nodes form one sequence, each tree
in preorder, and the sequence is cut into one *process shard* per process. The nodes of one tree in
a process shard are a *tree shard*. A process also recomputes the ancestors of a tree shard's first
node, here in parentheses. One tree and two processes ::

    0 ┬ 1 ─ 2 ─ 3        preorder    0 1 2 3 4 5 6        process 0    0 1 2 3
      └ 4 ┬ 5            depth       0 1 2 3 1 2 2        process 1   (0) 4 5 6
          └ 6

For the trees of lookahead decoding this is the paper's split of window columns and candidates. The
cuts minimize the time of the slowest process, by the measured costs of forward passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from pronk import TokenTree

# Number of steps of the search for the shortest time, for an error of 2**-20 of the upper bound.
_NUM_BISECTIONS = 20


class TreeShard(NamedTuple):
    """The nodes of one request's tree that one process computes."""

    entry: int  # index of the request's entry in the batch
    # node indices, recomputed ancestors first; parents precede their children
    nodes: tuple[int, ...]
    num_ancestors: int  # number of recomputed ancestors, the first entries of ``nodes``

    @property
    def own_nodes(self) -> tuple[int, ...]:
        """Nodes whose outputs the driver uses: all but the recomputed ancestors."""
        return self.nodes[self.num_ancestors :]


# The nodes of all trees that one process, the driver or a worker, computes in a forward pass.
ProcessShard = tuple[TreeShard, ...]


def count_rows(process_shard: ProcessShard) -> int:
    """Return the number of rows of a process's forward pass, recomputed ancestors included."""
    return sum(len(tree_shard.nodes) for tree_shard in process_shard)


def preorder(tree: TokenTree) -> list[int]:
    """Return the nodes of a tree in preorder, siblings in the order of their numbers."""
    if tree.main_chain == len(tree):
        return list(range(len(tree)))
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(len(tree) - 1, 0, -1):
        children[tree.parents[node]].append(node)
    order = list[int]()
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(children[node])
    return order


def partition_trees(
    trees: Sequence[TokenTree],
    costs: Sequence[Callable[[int], float]],
    communication: Sequence[float] | None = None,
) -> list[ProcessShard]:
    """Divide trees among processes so that the slowest process finishes as early as possible.

    A process that would not reduce the time gets an empty shard.

    Args:
        trees: tree of each request.
        costs: for each process, the driver first, a function from a number of rows to the seconds
            of a forward pass.
        communication: seconds of communication of each process with a shard that is not empty; 0 by
            default.

    Returns:
        The shard of each process.
    """
    nodes = _NodeSequence(trees)
    communication = communication or [0.0] * len(costs)
    counts = range(1, min(len(costs), len(nodes)) + 1)  # numbers of processes that compute
    _, ends = min(
        (_find_cuts(nodes, costs[:count], communication[:count]) for count in counts),
        key=itemgetter(0),
    )
    begins = [0, *ends[:-1]]
    shards = [nodes.shard(begin, end) for begin, end in zip(begins, ends, strict=True)]
    return shards + [()] * (len(costs) - len(shards))


class _NodeSequence:
    """Sequence of all nodes of all trees, each tree in preorder.

    A position is an index in the sequence.
    """

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        self.trees = trees
        self.orders = [preorder(tree) for tree in trees]
        # For each position: index of the node's tree, and index of the node in the tree's preorder.
        self.indices = [
            (entry, index) for entry, order in enumerate(self.orders) for index in range(len(order))
        ]
        # For each position: number of ancestors to recompute if a shard begins there, the node's
        # depth.
        self.num_ancestors = [
            self.trees[entry].depths[self.orders[entry][index]] for entry, index in self.indices
        ]

    def __len__(self) -> int:
        return len(self.indices)

    def shard(self, begin: int, end: int) -> ProcessShard:
        """Return the process shard of the nodes at the positions ``begin`` to ``end - 1``."""
        tree_shards = list[TreeShard]()
        position = begin
        while position < end:
            entry, index = self.indices[position]
            count = min(end - position, len(self.orders[entry]) - index)
            own_nodes = self.orders[entry][index : index + count]
            ancestors = (0, *self.trees[entry].path(own_nodes[0]))[:-1] if own_nodes[0] else ()
            tree_shards.append(TreeShard(entry, (*ancestors, *own_nodes), len(ancestors)))
            position += count
        return tuple(tree_shards)


def _find_cuts(
    nodes: _NodeSequence, costs: Sequence[Callable[[int], float]], communication: Sequence[float]
) -> tuple[float, list[int]]:
    """Return the seconds of the fastest division, and the end position of each process's shard."""
    # seconds[p][r - 1] are the seconds of process p for r rows with communication, raised where
    # needed so that they do not decrease with r.
    seconds = [
        [*accumulate((exchange + cost(rows) for rows in range(1, len(nodes) + 1)), max)]
        for cost, exchange in zip(costs, communication, strict=True)
    ]
    # The search begins with the division in which the driver computes all nodes.
    low = 0.0
    high = seconds[0][-1]
    ends = [len(nodes)] * len(costs)
    for _ in range(_NUM_BISECTIONS if len(costs) > 1 else 0):
        middle = (low + high) / 2
        middle_ends = _fill_shards(nodes, seconds, middle)
        if middle_ends is None:
            low = middle
        else:
            high = middle
            ends = middle_ends
    return high, ends


def _fill_shards(
    nodes: _NodeSequence, seconds: Sequence[Sequence[float]], max_seconds: float
) -> list[int] | None:
    """Give each process in turn as many nodes as it computes in ``max_seconds``.

    Returns:
        The end position of each shard, or ``None`` if nodes remain. It is also ``None`` if the
        driver gets no node, because each forward pass must measure the driver's costs.
    """
    ends = list[int]()
    position = 0
    if seconds[0][0] > max_seconds:
        return None
    for process_seconds in seconds:
        num_rows = bisect_right(process_seconds, max_seconds)
        if position < len(nodes):
            position = min(len(nodes), position + max(0, num_rows - nodes.num_ancestors[position]))
        ends.append(position)
    return ends if position == len(nodes) else None
