"""Bytes of states that a pass reads and writes, counted in the kernels: for any tree those of plain
decoding.
"""

import random

import numpy as np

from models.test_recurrence import EVERY, GROUPED, Model, Text, random_tokens, random_tree
from pronk.kernels.library import Kernels
from pronk.models.layer_executor import LayerExecutor
from pronk.sampling.tree import TokenTree


class Counted(Text):
    """A request that counts the states that its passes read and write."""

    def __init__(self, executor: LayerExecutor) -> None:
        super().__init__(executor)
        self.pool = executor.cache.states
        assert self.pool is not None
        self.pool.traffic = np.zeros(2, np.int64)

    def counted(self) -> tuple[float, float]:
        """Return the numbers of states of all layers that were read and written since the last
        call.
        """
        assert self.pool is not None
        assert self.pool.traffic is not None
        size = sum(array[0].nbytes for array in self.pool.states.values())
        read, written = (self.pool.traffic / size).tolist()
        self.pool.traffic[:] = 0
        return read, written


@EVERY
def test_a_tree_adds_no_state(by: Kernels) -> None:
    """One read and one write in each pass, whatever is replayed and verified."""
    model = Model(by, GROUPED)
    text = Counted(LayerExecutor(model.decoder, model.cache(checkpoints=12)))
    text.read(random_tokens(17, 1))
    assert text.counted() == (0, 2)  # with the checkpoint of 16 tokens
    table = text.table.states
    assert table is not None
    dice = random.Random(1)
    for size in (1, 2, 5, 12, 31, 40, 1):
        before = table.length // 16
        tree = random_tree(dice, dice.randrange(10), size)
        text.run(tree, 1)
        num_copies = int(table.length // 16 > before)
        assert text.counted() == (1, 1 + num_copies)
        path = [len(tree) - 1]
        while tree.parents[path[-1]] >= 0:
            path.append(tree.parents[path[-1]])
        text.commit(path[::-1])


@EVERY
def test_first_layers_and_prompts(by: Kernels) -> None:
    model = Model(by, GROUPED)
    text = Counted(LayerExecutor(model.decoder, model.cache()))
    text.read(random_tokens(10, 1))
    assert text.counted() == (0, 1)
    text.read(random_tokens(5, 2))
    assert text.counted() == (1, 1)
    text.run(TokenTree.chain([1, 2, 3]), 1, num_layers=1)
    assert text.counted() == (0.5, 0)
    text.run(TokenTree.chain([1, 2, 3]), 1)
    assert text.counted() == (1, 2)
