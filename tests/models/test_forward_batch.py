"""Rows of batches, derived node by node."""

import random

import numpy as np

from pronk.base.arrays import FLOAT32
from pronk.cache.blocks import BlockTable
from pronk.checkpoint.rope import RopeConfig, RopeTable
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.tree import TokenTree
from tiny_models import make_cache, tiny_decoder

TREES = (
    TokenTree.chain([7, 8, 9]),
    TokenTree((1, 2, 3, 4, 5), (-1, 0, 0, 2, 1)),
    TokenTree.chain([6]),
)
LENGTHS = (4, 30, 0)
NUM_COMPUTED = (0, 2, 0)


def make_batch(**options: range) -> ForwardBatch:
    entries = [
        BatchEntry(BlockTable(length=length), tree, num_computed=num_computed, **options)
        for length, tree, num_computed in zip(LENGTHS, TREES, NUM_COMPUTED, strict=True)
    ]
    return ForwardBatch(entries)


def test_rows_of_several_entries() -> None:
    batch = make_batch()
    assert batch.row_counts == [3, 3, 1]
    assert batch.num_rows == 7
    assert batch.num_committed == 34
    assert batch.tokens.tolist() == [7, 8, 9, 3, 4, 5, 6]
    assert batch.positions.tolist() == [4, 5, 6, 31, 32, 32, 0]
    assert batch.num_positions == 35
    parts = batch.split_rows(np.arange(7))
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6]]


def test_rows_with_logits() -> None:
    entries = make_batch().entries
    nodes = (range(3), range(2, 4), range(1, 1))
    pairs = zip(entries, nodes, strict=True)
    batch = ForwardBatch([entry._replace(logits_nodes=each) for entry, each in pairs])
    assert list(batch.logits_rows) == [0, 1, 2, 3, 4]
    assert batch.logits_counts == [3, 2, 0]
    parts = batch.split_logits(np.arange(5))
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4], []]
    alone = ForwardBatch([batch.entries[1]])
    assert alone.logits_rows == range(2)


def test_slots_follow_the_committed_tokens() -> None:
    cache = make_cache(tiny_decoder().config, FLOAT32)
    dice = random.Random(0)
    entries = list[BatchEntry]()
    want = list[int]()
    for tree, num_computed in zip(TREES, NUM_COMPUTED, strict=True):
        table = BlockTable(length=dice.randrange(40))
        cache.prepare(table, table.length + len(tree))
        entries.append(BatchEntry(table, tree, num_computed=num_computed))
        for node in range(num_computed, len(tree)):
            block, offset = divmod(table.length + node, cache.block_size)
            want.append(table.blocks[block] * cache.block_size + offset)
    assert ForwardBatch(entries).slots(cache).tolist() == want


def test_dynamic_rotations_are_those_of_each_row() -> None:
    """Tokens of a prompt are rotated for the prompt's length, others for the text up to them."""
    table = RopeTable(RopeConfig(8, kind="dynamic", factor=2.0, original=4))
    batch = ForwardBatch([entry._replace(prompt_length=6) for entry in make_batch().entries])
    entries = batch.dynamic_rope_entries(table)
    for row, position in zip(entries, batch.positions.tolist(), strict=True):
        want = table.compute_entries([position], [max(6, position + 1)])
        assert np.array_equal(row, want[0])
    assert batch.dynamic_rope_entries(table) is entries
