"""Texts that one layer reads, in chunks, trees and batches: the bits of a row depend on its own
text alone.
"""

from collections.abc import Sequence

import numpy as np

from pronk.base.arrays import BFLOAT16, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree


class LayerTexts:
    """A program of one layer, with texts in its cache.

    Attributes:
        hidden: width of the stream.
        dtype: that of the stream.
        cache: cache of the layer.
        program: the layer's operations.
    """

    hidden: int
    dtype: DType
    cache: PagedCache
    program: Program

    def run(self, segments: Sequence[tuple[BlockTable, TokenTree, int]], x: Array) -> Array:
        """Return the outputs of the rows ``x`` of all segments; nothing is committed.

        A segment is a text, a tree, and the number of the tree's nodes that are computed.
        """
        for table, tree, _ in segments:
            self.cache.prepare(table, table.length + len(tree))
        batch = ForwardBatch(
            [BatchEntry(table, tree, num_computed=computed) for table, tree, computed in segments]
        )
        stream = x.astype(self.dtype)
        self.program.run(batch, stream)
        return stream

    def read(self, x: Array, chunks: Sequence[int], table: BlockTable | None = None) -> Array:
        """Return the outputs of a text in chunks, which are committed."""
        table = table or BlockTable()
        found = list[Array]()
        start = 0
        for count in chunks:
            tree = TokenTree.chain([0] * count)
            found.append(self.run([(table, tree, 0)], x[start : start + count]))
            self.cache.commit_slots(table, range(count))
            start += count
        return np.concatenate(found)

    def check_tree_and_batch(self, x: Array, alone: Array) -> None:
        """Check a tree with wrong siblings beside another request, in two passes, then the text
        after a commit.

        ``alone`` are the outputs of the text ``x``, read token by token.
        """
        start = 31
        other = some_rows(9, self.hidden, 7)
        table = BlockTable()
        neighbour = BlockTable()
        self.read(x, [start], table)
        count = len(x) - start - 5  # tokens on the path
        parents = [-1]
        rows = [x[start]]
        for token in range(start + 1, start + count):
            parents += [len(rows) - 1] * 2
            rows += [other[token % 9], x[token]]  # a wrong sibling, then the text
        tree = TokenTree((0, *(1, 0) * (count - 1)), tuple(parents))
        nodes = [0, *range(2, 2 * count - 1, 2)]
        both = self.run(
            [(neighbour, TokenTree.chain([0] * 9), 0), (table, tree, 0)],
            np.concatenate((other, np.stack(rows))),
        )
        assert same(both[9:][nodes], alone[start : start + count])
        assert same(both[:9], self.read(other, [9]))
        half = len(rows) // 2
        begun = TokenTree(tree.tokens[:half], tree.parents[:half])
        first = self.run([(table, begun, 0)], np.stack(rows[:half]))
        second = self.run([(table, tree, half)], np.stack(rows[half:]))
        assert same(np.concatenate((first, second))[nodes], alone[start : start + count])
        self.cache.commit_slots(table, nodes)
        assert same(self.read(x[start + count :], [1, 4], table), alone[start + count :])


def some_rows(count: int, hidden: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1.0, 1.0, (count, hidden)).astype(BFLOAT16)


def same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()
