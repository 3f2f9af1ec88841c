"""States of recurrent layers after accepted and rejected draft tokens, against the oracle."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from models.test_loader import load
from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree import TokenTree
from recurrent_models import FAMILIES, HEADS, RecurrentOracle
from tiny_models import kernels, make_cache

VOCAB = 300
PROMPT = 9
TOLERANCE = 1e-4


class Text:
    """A text in a KV cache, extended pass by pass.

    Attributes:
        tokens: the committed tokens.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.cache: PagedCache = make_cache(decoder.config, FLOAT32, num_blocks=16)
        self.runner = ModelRunner(decoder, self.cache)
        self.table = BlockTable()
        self.tokens: list[int] = []

    def add(self, tree: TokenTree, accepted: Sequence[int], num_final: int) -> Array:
        """Compute a tree after the text; commit the nodes ``accepted``; return all logits."""
        self.cache.prepare(self.table, len(self.tokens) + len(tree))
        entry = BatchEntry(self.table, tree, range(len(tree)), num_final=num_final)
        logits: Array = self.runner.forward(ForwardBatch([entry])).logits[0][:].copy()
        self.cache.commit_slots(self.table, accepted)
        self.tokens += [tree.tokens[node] for node in accepted]
        return logits

    def states(self) -> tuple[int, dict[int, Array], dict[int, Array]]:
        """Return the number of tokens in the states, and by layer the states and inputs."""
        pool = self.cache.states
        table = self.table.states
        assert pool is not None
        assert table is not None
        matrices = {layer: each[table.slot].copy() for layer, each in pool.states.items()}
        inputs = {layer: each[table.slot].copy() for layer, each in pool.inputs.items()}
        return table.length, matrices, inputs


def random_tree(dice: random.Random, pending: int) -> tuple[TokenTree, list[int]]:
    """Return a tree whose root is ``pending``, and a path from the root to accept."""
    count = dice.randrange(1, 9)
    parents = [-1, *(dice.randrange(node) for node in range(1, count))]
    tokens = [pending, *(dice.randrange(VOCAB) for _ in range(count - 1))]
    node = dice.randrange(count)
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return TokenTree(tokens, parents), path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", HEADS)
def test_states_after_accepted_and_rejected_tokens(
    family: str, heads: str, checkpoint: MakeCheckpoint
) -> None:
    """They are those of the oracle, and have the bits of a text that is read at once."""
    folder = checkpoint(family, **HEADS[heads])
    decoder = load(folder, kernels=kernels())
    dice = random.Random(f"{family} {heads}")
    text = Text(decoder)
    prompt = TokenTree.chain([dice.randrange(VOCAB) for _ in range(PROMPT)])
    text.add(prompt, range(PROMPT), PROMPT)
    logits = []
    rejected = 0
    for _ in range(12):
        tree, path = random_tree(dice, dice.randrange(VOCAB))
        found = text.add(tree, path, len(text.tokens) + 1)
        logits += [found[node] for node in path]
        rejected += len(tree) - len(path)
    assert rejected > 5, "too few rejected tokens to show anything"
    length, matrices, inputs = text.states()
    assert length > PROMPT, "the states have taken over no draft token"

    expected, states = RecurrentOracle(folder).read(text.tokens)
    assert np.abs(np.stack(logits) - expected[PROMPT:]).max() < TOLERANCE
    oracle = states[length - 1]
    for layer, matrix in oracle.matrices.items():
        assert np.abs(matrices[layer][..., : matrix.shape[-1]] - matrix).max() < TOLERANCE
        assert np.abs(inputs[layer] - oracle.inputs[layer]).max() < TOLERANCE

    fresh = Text(decoder)
    once = fresh.add(TokenTree.chain(text.tokens[:length]), range(length), length)
    assert np.array_equal(once[PROMPT:], np.stack(logits)[: length - PROMPT])
    fresh_length, fresh_matrices, fresh_inputs = fresh.states()
    assert fresh_length == length
    for layer in matrices:
        assert matrices[layer].tobytes() == fresh_matrices[layer].tobytes()
        assert inputs[layer].tobytes() == fresh_inputs[layer].tobytes()
