"""Verification of token trees on the device against the walk of the engine."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gpu.tiny_gpu import DEVICE, gpu_runner
from pronk.base.arrays import Array
from pronk.cache.blocks import BlockTable
from pronk.gpu import walk as module
from pronk.gpu.layout import layout_of, measure, pack_layout
from pronk.gpu.runner import GpuRunner
from pronk.gpu.steps import ROW_BUCKETS
from pronk.gpu.walk import verified_paths, walk
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.stateless import StatelessSampler
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import VerifiedPath, verify_tree
from tiny_models import VOCAB, kernels

pytestmark = pytest.mark.usefixtures("small_tiles")

GREEDY = StatelessSampler(0.0, 0)


def random_tree(dice: random.Random, size: int) -> TokenTree:
    """Return a tree of two tokens, with distinct children, some of them not acceptable."""
    tokens = [dice.randrange(2)]
    parents = [-1]
    children = {(-1, tokens[0])}
    while len(tokens) < size:
        parent = dice.randrange(len(tokens))
        token = dice.randrange(2)
        if (parent, token) in children:
            parent, token = len(tokens) - 1, dice.randrange(2)
        children.add((parent, token))
        tokens.append(token)
        parents.append(parent)
    verify = tuple(node == 0 or dice.random() < 0.9 for node in range(size))
    return TokenTree(tuple(tokens), tuple(parents), verify)


def entries_of(runner: GpuRunner, trees: Sequence[TokenTree]) -> list[BatchEntry]:
    """Return entries of requests without committed tokens."""
    found = list[BatchEntry]()
    for tree in trees:
        table = BlockTable()
        runner.cache.prepare(table, len(tree))
        found.append(BatchEntry(table, tree, range(len(tree)), stateless_sampler=GREEDY))
    return found


def test_walks_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six trees and a tree that the device does not verify; a block of 16 rows cuts the trees."""
    monkeypatch.setattr(module, "_BLOCK", 16)
    runner = gpu_runner(heads=2, kv_heads=1)
    dice = random.Random(1)
    lengths = [0]
    for _ in range(8):
        trees = [random_tree(dice, dice.randint(1, 12)) for _ in range(7)]
        entries = entries_of(runner, trees)
        entries[3] = entries[3]._replace(stateless_sampler=None)
        batch = ForwardBatch(entries)
        size = measure(batch, runner.cache)._replace(rows=96)
        numbers = torch.from_numpy(pack_layout(batch, runner.cache, size, 0)).to(DEVICE)
        chosen = [dice.randrange(2) for _ in range(size.rows)]
        layout = layout_of(numbers, size, 16, 20)
        walked = walk(torch.tensor(chosen, dtype=torch.int32, device=DEVICE), layout)
        first = 0
        for number, (tree, path) in enumerate(
            zip(trees, verified_paths(batch, walked.tolist()), strict=True)
        ):
            own = chosen[first : first + len(tree)]
            first += len(tree)
            assert path == (None if number == 3 else verify_tree(tree, own.__getitem__))
            lengths.append(0 if path is None else len(path.path))
        for entry in entries:
            runner.cache.release(entry.block_table)
    assert max(lengths) > 2


def host_path(tree: TokenTree, logits: Array, sampler: StatelessSampler) -> VerifiedPath:
    """Return the path that the engine finds in logits, for a root at position 0."""

    def choose(node: int) -> int:
        return sampler.choose(kernels(), logits[node], 1 + tree.depths[node])

    return verify_tree(tree, choose)


def test_steps_verify_their_trees() -> None:
    """Chains and trees of the target's own tokens, greedy and sampled, in one padded step."""
    runner = gpu_runner(heads=2, kv_heads=1)
    runner.steps.pads = True
    samplers = [GREEDY, StatelessSampler(0.8, 3)]
    trees = [TokenTree.chain([5]), TokenTree.chain([9])]
    accepted = 0
    for _ in range(3):
        entries = [
            entry._replace(stateless_sampler=sampler)
            for entry, sampler in zip(entries_of(runner, trees), samplers, strict=True)
        ]
        result = runner.forward(ForwardBatch(entries))
        assert result.paths is not None
        for number, (tree, sampler) in enumerate(zip(trees, samplers, strict=True)):
            path = host_path(tree, result.logits[number][:], sampler)
            assert result.paths[number] == path
            accepted = max(accepted, len(path.path))
            # the next tree has this path, and a sibling before each of its tokens
            tokens, parents = [tree.tokens[0]], [-1]
            parent = 0
            for token in path.tokens:
                parents += [parent, parent]
                tokens += [token + 1 if token < 50 else token - 1, token]
                parent = len(tokens) - 1
            trees[number] = TokenTree(tuple(tokens), tuple(parents))
            runner.cache.release(entries[number].block_table)
    assert accepted >= 2


def test_a_tree_of_more_rows_than_a_graph_has() -> None:
    """All tokens hang below the root, so that the target's is among them."""
    runner = gpu_runner(heads=2, kv_heads=1, windows=(None,))
    tree = TokenTree((5, *range(VOCAB), 9, 9), (-1, *[0] * VOCAB, 1, 2))
    assert len(tree) > ROW_BUCKETS[-1]
    (entry,) = entries_of(runner, [tree])
    sampler = StatelessSampler(0.8, 3)
    result = runner.forward(ForwardBatch([entry._replace(stateless_sampler=sampler)]))
    path = host_path(tree, result.logits[0][:], sampler)
    assert len(path.path) > 0
    assert result.paths == [path]


def test_a_path_with_logits_that_are_not_finite_is_the_hosts() -> None:
    runner = gpu_runner(heads=2, kv_heads=1)
    batch = ForwardBatch(entries_of(runner, [TokenTree.chain([1, 2, 0])]))
    size = measure(batch, runner.cache)
    layout = layout_of(
        torch.from_numpy(pack_layout(batch, runner.cache, size, 0)).to(DEVICE), size, 16, 20
    )

    def paths(chosen: Sequence[int]) -> list[VerifiedPath | None]:
        tokens = torch.tensor(chosen, dtype=torch.int32, device=DEVICE)
        return verified_paths(batch, walk(tokens, layout).tolist())

    assert paths([2, -1, 0]) == [None]
    assert paths([0, -1, 0]) == [VerifiedPath((), (0,))]
    assert np.array_equal(batch.positions, [0, 1, 2])
