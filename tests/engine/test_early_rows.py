"""Trees with early rows against whole forward passes: equal bits by the kernels, close numbers by torch."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from drafting.kernel_calls import Calls
from engine.cases import text
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType, is_finite
from pronk.cache.blocks import BlockTable
from pronk.models.decoder import Decoder
from pronk.models.forward_job import EarlyRows, EarlyTokens, Segment
from pronk.models.model_runner import ForwardJob, ForwardResult, ModelRunner
from pronk.sampling.tree import TokenTree
from tiny_models import VOCAB, make_cache, read_kv, tiny_decoder

LENGTHS = (1, 30, 508, 77)
MIXED, WINDOWS = (None, 24, None, 24), (24, 24, 24, 24)


def chain(dice: random.Random) -> TokenTree:
    return TokenTree.chain(dice.randrange(VOCAB) for _ in range(dice.randint(2, 9)))


def bushy(dice: random.Random) -> TokenTree:
    size = dice.randint(3, 12)
    parents = [-1, *(dice.randrange(node) for node in range(1, size))]
    return TokenTree(tuple(dice.sample(range(VOCAB), size)), tuple(parents))


def chain_with_leaves(dice: random.Random) -> TokenTree:
    trunk = chain(dice)
    leaves = [dice.randrange(len(trunk)) for _ in range(4)]
    fresh = [token for token in range(VOCAB) if token not in trunk.tokens]
    return TokenTree((*trunk.tokens, *dice.sample(fresh, 4)), (*trunk.parents, *leaves))


class TextsInCache:
    """A model runner whose KV cache keeps the outputs of all layers and holds four texts."""

    def __init__(self, decoder: Decoder, dtype: DType) -> None:
        self.runner = ModelRunner(decoder, make_cache(decoder.config, dtype, packed=decoder.backend.exact))
        self.layers = range(1, decoder.config.num_layers + 1)
        for layer in self.layers:
            self.runner.cache.keep_hidden(layer, self)
        self.tables = [self._read(text(seed, length)) for seed, length in enumerate(LENGTHS)]

    def _read(self, tokens: Sequence[int]) -> BlockTable:
        block_table = BlockTable()
        self.runner.cache.prepare(block_table, len(tokens) + 20)
        self.runner.forward([ForwardJob(Segment(block_table, TokenTree.chain(tokens)), range(0), len(tokens))])
        block_table.length = len(tokens)
        return block_table

    def jobs(self, trees: Sequence[TokenTree], early: Sequence[EarlyRows | None] | None = None) -> list[ForwardJob]:
        return [
            ForwardJob(Segment(block_table, tree, early=one), range(len(tree)), block_table.length)
            for block_table, tree, one in zip(self.tables, trees, early or [None] * len(trees), strict=True)
        ]

    def stored(self, trees: Sequence[TokenTree]) -> list[Array]:
        """Return keys, values and layers' outputs of the texts and the trees."""
        cache, rows = self.runner.cache, list[Array]()
        for block_table, tree in zip(self.tables, trees, strict=True):
            held = replace(block_table, length=block_table.length + len(tree))
            rows += [part for layer in range(len(cache.keys)) for part in read_kv(cache, layer, held)]
            rows += [cache.read_hidden(layer, held, 0, held.length) for layer in cache.hidden]
        return rows


def compute_early(by: TextsInCache, tree: TokenTree, number: int, early: EarlyRows, dice: random.Random) -> None:
    """Compute the early rows of one tree in a random number of passes."""
    done, table = 0, by.tables[number]
    while done < early.num_nodes:
        upto = dice.randint(done + 1, early.num_nodes)
        job = ForwardJob(Segment(table, tree.keep(range(upto)), done), range(0), table.length)
        (rows,) = by.runner.run_first_layers([job], early.num_layers)
        assert rows.shape == (upto - done, by.runner.decoder.config.hidden_size)
        done = upto


def compare(decoder: Decoder, dtype: DType, trees: list[TokenTree], early: list[EarlyRows | None], seed: int) -> None:
    whole, split = TextsInCache(decoder, dtype), TextsInCache(decoder, dtype)
    want = whole.runner.forward(whole.jobs(trees))
    dice = random.Random(seed)
    for number, (tree, one) in enumerate(zip(trees, early, strict=True)):
        if one is not None:
            compute_early(split, tree, number, one, dice)
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(split.runner.cache, patch).calls
        got: ForwardResult = split.runner.forward(split.jobs(trees, early))
    pairs = [*zip(got.logits, want.logits, strict=True), *zip(split.stored(trees), whole.stored(trees), strict=True)]
    for one, other in pairs:
        assert is_finite(one)
        if split.runner.exact:
            assert np.array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=0.0, atol=1e-4)
    if not split.runner.exact:
        return
    for layer in range(decoder.config.num_layers):
        skipped = sum(one.num_nodes for one in early if one is not None and layer < one.num_layers)
        stored = [slots for number, slots in calls if number == layer]
        assert sum(map(len, stored)) == sum(map(len, trees)) - skipped


@pytest.mark.parametrize("shape", [chain, bushy, chain_with_leaves])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("windows", [(None,) * 4, MIXED, WINDOWS], ids=["all", "mixed", "window"])
def test_early_rows_change_no_bit(windows: tuple[int | None, ...], dtype: DType, shape: object) -> None:
    decoder = tiny_decoder(dtype, windows=windows)
    for seed in range(3):
        dice = random.Random(seed)
        trees = [shape(dice) for _ in LENGTHS]  # type: ignore[operator]
        early = [EarlyRows(dice.randint(1, 3), dice.randint(1, len(tree))) for tree in trees]
        compare(decoder, dtype, trees, [*early[:3], None], seed)


@pytest.mark.parametrize("packed", [True, False], ids=["kernels", "torch"])
def test_whole_trees_of_early_rows(*, packed: bool) -> None:
    decoder = tiny_decoder(windows=(None,) * 4, packed=packed)
    trees = [chain(random.Random(seed)) for seed in range(4)]
    compare(decoder, FLOAT32, trees, [EarlyRows(1, len(tree)) for tree in trees], 0)
    several = [EarlyRows(layers, len(trees[layers - 1])) for layers in (1, 2, 3)]
    compare(decoder, FLOAT32, trees, [*several, None], 1)


@pytest.mark.parametrize("packed", [True, False], ids=["kernels", "torch"])
def test_with_short_convolutions(*, packed: bool) -> None:
    decoder = tiny_decoder(windows=(None,) * 4, special="convolutions", packed=packed)
    for seed in range(3):
        dice = random.Random(seed)
        trees = [shape(dice) for shape in (chain, bushy, chain_with_leaves, chain)]
        early = [EarlyRows(dice.randint(1, 3), dice.randint(1, len(tree))) for tree in trees]
        compare(decoder, FLOAT32, trees, [*early[:3], None], seed)


@pytest.mark.parametrize("packed", [True, False], ids=["kernels", "torch"])
def test_with_learned_positions_and_biases(*, packed: bool) -> None:
    decoder = tiny_decoder(windows=(None,) * 3, classic=True, packed=packed)
    dice = random.Random(2)
    trees = [chain_with_leaves(dice) for _ in LENGTHS]
    compare(decoder, FLOAT32, trees, [EarlyRows(2, 2), EarlyRows(1, len(trees[1])), None, EarlyRows(2, 1)], 2)


def test_rows_behind_a_removed_node_are_computed_again() -> None:
    decoder = tiny_decoder(windows=(None,) * 4)
    whole, split = TextsInCache(decoder, FLOAT32), TextsInCache(decoder, FLOAT32)
    cut, early = list[TokenTree](), list[EarlyRows | None]()
    for number in range(4):
        tree = chain_with_leaves(random.Random(number))
        compute_early(split, tree, number, EarlyRows(2, len(tree)), random.Random(0))
        main = tree.main_chain
        cut.append(tree.keep(node for node in range(len(tree)) if node != main))
        early.append(EarlyRows.of(EarlyTokens(2, tree.tokens), cut[-1]))
        assert early[-1] == EarlyRows(2, main)
        assert len(cut[-1]) == len(tree) - 1 > main
    want = whole.runner.forward(whole.jobs(cut))
    got = split.runner.forward(split.jobs(cut, early))
    for one, other in zip(got.logits, want.logits, strict=True):
        assert np.array_equal(one, other)


def test_early_rows_of_a_tree() -> None:
    tree = TokenTree((5, 6, 7, 8, 9), (-1, 0, 1, 1, 3))
    assert EarlyRows.of(None, tree) is None
    assert EarlyRows.of(EarlyTokens(2, (4, 6)), tree) is None
    assert EarlyRows.of(EarlyTokens(2, (5,)), tree) == EarlyRows(2, 1)
    assert EarlyRows.of(EarlyTokens(2, (5, 6, 1, 8)), tree) == EarlyRows(2, 2)
    assert EarlyRows.of(EarlyTokens(3, (5, 6, 7, 8, 9)), tree) == EarlyRows(3, 3), "node 3 leaves the chain"
