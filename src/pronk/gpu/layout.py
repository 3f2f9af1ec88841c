"""Positions and KV slots of the rows of a pass, as the kernels read them.

All numbers of a pass are one int32 array (:func:`pack_layout`), which is sent to the device in one
copy. Its parts have the sizes of a :class:`LayoutSize`. Unused rows compute token 0 at position 0,
and write to a slot that no request has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pronk.backends import BatchEntry, ForwardBatch, PagedCache

Integers = NDArray[np.int32]

# Values of ``RowLayout.parents`` that are no rows: of the root of a tree to verify, and of rows
# that no walk reaches.
ROOT = -1
NOT_WALKED = -2


class LayoutPart(NamedTuple):
    """A part of the array of a pass: its name in :class:`RowLayout`, its place and its shape."""

    name: str
    place: slice
    shape: tuple[int, ...]


class LayoutSize(NamedTuple):
    """Sizes of the arrays of a pass.

    Attributes:
        rows: number of rows.
        entries: number of block tables.
        pages: number of blocks of a table.
        paths: number of paths from a root to a leaf.
        depth: number of nodes of a path.
    """

    rows: int
    entries: int
    pages: int
    paths: int
    depth: int

    @property
    def parts(self) -> list[LayoutPart]:
        """The parts of the array, in order."""
        per_row = ("tokens", "positions", "slots", "entries", "committed", "row_paths", "parents")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(per_row, (self.rows,))
        shapes["tables"] = (self.entries, self.pages)
        shapes["paths"] = (self.paths, self.depth)
        parts = list[LayoutPart]()
        start = 0
        for name, shape in shapes.items():
            stop = start + prod(shape)
            parts.append(LayoutPart(name, slice(start, stop), shape))
            start = stop
        return parts


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The rows of a pass on the device; all tensors are int32.

    Attributes:
        tokens: token id of each row.
        positions: position of each row in its text.
        slots: KV slot that each row writes.
        entries: row of ``tables`` that each row reads.
        committed: number of committed tokens of each row's text.
        row_paths: row of ``paths`` that each row reads.
        parents: row of each row's parent in a tree to verify, ``ROOT`` or ``NOT_WALKED``.
        tables: block numbers ``[entries, pages]`` of the positions 0 to 15, 16 to 31, ….
        paths: slots ``[paths, depth]`` of the nodes from a root to a leaf.
        block_size: number of positions of a block.
        max_position: upper bound of ``positions``.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    entries: Tensor
    committed: Tensor
    row_paths: Tensor
    parents: Tensor
    tables: Tensor
    paths: Tensor
    block_size: int
    max_position: int

    def part(self, start: int, stop: int, tokens: Tensor | None = None) -> RowLayout:
        """Return the rows ``start … stop - 1``, with other tokens if these are given."""
        rows = slice(start, stop)
        return replace(
            self,
            tokens=self.tokens[rows] if tokens is None else tokens,
            positions=self.positions[rows],
            slots=self.slots[rows],
            entries=self.entries[rows],
            committed=self.committed[rows],
            row_paths=self.row_paths[rows],
            parents=self.parents[rows],
        )


def layout_of(numbers: Tensor, size: LayoutSize, block_size: int, max_position: int) -> RowLayout:
    """Return the parts of an int32 array of :func:`pack_layout` as views."""
    parts = {part.name: numbers[part.place].view(part.shape) for part in size.parts}
    return RowLayout(**parts, block_size=block_size, max_position=max_position)


def measure(batch: ForwardBatch, cache: PagedCache) -> LayoutSize:
    """Return the sizes that a batch needs."""
    trees = [entry.tree for entry in batch.entries]
    return LayoutSize(
        batch.num_rows,
        len(batch.entries),
        -(-batch.num_positions // cache.block_size),
        sum(len(_leaves(tree.parents)) for tree in trees),
        max(max(tree.depths) + 1 for tree in trees),
    )


def _leaves(parents: tuple[int, ...]) -> list[int]:
    """Return the nodes without children."""
    inner = set(parents)
    return [node for node in range(len(parents)) if node not in inner]


def pack_layout(
    batch: ForwardBatch,
    cache: PagedCache,
    size: LayoutSize,
    free_slot: int,
    places: NDArray[np.int64] | None = None,
) -> Integers:
    """Return the numbers of a batch as one array.

    Args:
        batch: the rows, whose slots are allocated.
        cache: pool of the slots.
        size: sizes of the parts, at least those of :func:`measure`.
        free_slot: slot that unused rows write.
        places: index of each row of the batch in the parts; by default 0, 1, …. Trees to verify
            have their rows in order.
    """
    if places is None:
        places = np.arange(batch.num_rows)
    numbers = np.zeros(size.parts[-1].place.stop, np.int32)
    parts = {part.name: numbers[part.place].reshape(part.shape) for part in size.parts}
    parts["slots"][:] = free_slot
    parts["paths"][:] = free_slot
    parts["parents"][:] = NOT_WALKED
    parts["tokens"][places] = batch.tokens
    parts["positions"][places] = batch.positions
    parts["slots"][places] = batch.slots(cache)
    first_row = 0
    first_path = 0
    for number, entry in enumerate(batch.entries):
        rows = places[first_row : first_row + entry.num_rows]
        parts["entries"][rows] = number
        parts["committed"][rows] = entry.block_table.length
        first = entry.block_table.num_released
        blocks = entry.block_table.blocks[: size.pages - first]
        parts["tables"][number, first : first + len(blocks)] = blocks
        paths, path_of_node = _paths(entry, cache)
        for path in paths:
            parts["paths"][first_path, : len(path)] = path
            first_path += 1
        own = np.asarray(path_of_node[entry.num_computed :])
        parts["row_paths"][rows] = first_path - len(paths) + own
        if is_walked(entry):
            parts["parents"][rows] = _parent_rows(entry, first_row)
        first_row += entry.num_rows
    return numbers


def is_walked(entry: BatchEntry) -> bool:
    """Return whether the device verifies an entry's tree.

    It does for requests whose tokens it can choose, in passes that compute the whole tree. The root
    is the first of the nodes with logits.
    """
    is_chosen = entry.stateless_sampler is not None and len(entry.logits_nodes) > 0
    assert not is_chosen or entry.num_computed == 0, "expected a pass that computes the whole tree"
    return is_chosen


def _parent_rows(entry: BatchEntry, first_row: int) -> Integers:
    """Return the row of each node's parent in the tree to verify."""
    tree = entry.tree
    root = entry.logits_nodes.start
    parents = np.asarray(tree.parents, np.int32) + np.int32(first_row)
    parents[:root] = NOT_WALKED
    parents[root] = ROOT
    if tree.verify is not None:
        parents[~np.asarray(tree.acceptable)] = NOT_WALKED
    return parents


def _paths(entry: BatchEntry, cache: PagedCache) -> tuple[list[NDArray[np.int64]], list[int]]:
    """Return the slots of each path from the root to a leaf, and for each node one of its paths."""
    parents = entry.tree.parents
    length = entry.block_table.length
    slots = cache.slots(entry.block_table, length, length + len(parents))
    leaves = _leaves(parents)
    if len(leaves) == 1:
        return [slots], [0] * len(parents)
    path_of_node = [-1] * len(parents)
    paths = list[NDArray[np.int64]]()
    for number, leaf in enumerate(leaves):
        nodes = list[int]()
        node = leaf
        while node >= 0:
            nodes.append(node)
            path_of_node[node] = number
            node = parents[node]
        paths.append(slots[nodes[::-1]])
    return paths, path_of_node
