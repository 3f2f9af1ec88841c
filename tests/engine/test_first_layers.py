"""Rows through the first layers against whole forward passes: equal bits by the kernels, close by
torch.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from drafting.kernel_calls import Calls
from engine.cases import text
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType, is_finite
from pronk.cache.blocks import BlockTable
from pronk.models.decoder import Decoder
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree import TokenTree
from tiny_models import VOCAB, make_cache, read_kv, tiny_decoder

LENGTHS = (1, 30, 508, 77)
MIXED = (None, 24, None, 24)
WINDOWS = (24, 24, 24, 24)


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
        self.runner = ModelRunner(decoder, make_cache(decoder.config, dtype))
        self.layers = range(1, decoder.config.num_layers + 1)
        for layer in self.layers:
            self.runner.cache.save_feature(layer, self)
        self.tables = [self._read(text(seed, length)) for seed, length in enumerate(LENGTHS)]

    def _read(self, tokens: Sequence[int]) -> BlockTable:
        block_table = BlockTable()
        self.runner.cache.prepare(block_table, len(tokens) + 20)
        self.runner.forward(
            ForwardBatch([BatchEntry(block_table, TokenTree.chain(tokens), range(0), len(tokens))])
        )
        block_table.length = len(tokens)
        return block_table

    def entries(self, trees: Sequence[TokenTree]) -> list[BatchEntry]:
        return [
            BatchEntry(block_table, tree, range(len(tree)), block_table.length)
            for block_table, tree in zip(self.tables, trees, strict=True)
        ]

    def first_layers(
        self, number: int, tree: TokenTree, num_layers: int, dice: random.Random
    ) -> Array:
        """Run a tree after text ``number`` through the first layers, in a random number of
        passes.
        """
        block_table = self.tables[number]
        outputs = list[Array]()
        num_computed = 0
        while num_computed < len(tree):
            stop = dice.randint(num_computed + 1, len(tree))
            entry = BatchEntry(
                block_table,
                tree.keep(range(stop)),
                prompt_length=block_table.length,
                num_computed=num_computed,
            )
            (rows,) = self.runner.run_first_layers(ForwardBatch([entry]), num_layers)
            assert rows.shape == (stop - num_computed, self.runner.decoder.config.hidden_size)
            outputs.append(rows)
            num_computed = stop
        return np.concatenate(outputs)

    def stored(self, num_nodes: Sequence[int] = (0,) * len(LENGTHS)) -> list[Array]:
        """Return keys, values and layers' outputs of the texts and of the nodes that follow
        each.
        """
        cache = self.runner.cache
        rows = list[Array]()
        for block_table, more in zip(self.tables, num_nodes, strict=True):
            held = replace(block_table, length=block_table.length + more)
            rows += [
                part for layer in range(len(cache.keys)) for part in read_kv(cache, layer, held)
            ]
            rows += [cache.read_feature(layer, held, 0, held.length) for layer in cache.features]
        return rows


def assert_equal(runner: ModelRunner, got: Sequence[Array], want: Sequence[Array]) -> None:
    for one, other in zip(got, want, strict=True):
        assert is_finite(one)
        if runner.exact:
            assert np.array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=0.0, atol=1e-4)


def compare(
    decoder: Decoder, dtype: DType, drafted: list[TokenTree], verified: list[TokenTree], seed: int
) -> None:
    """Run ``drafted`` through the first layers, then ``verified`` through all; compare with whole
    passes.

    Of the four texts, the last gets no rows of ``drafted``.
    """
    plain = TextsInCache(decoder, dtype)
    drafting = TextsInCache(decoder, dtype)
    texts = plain.stored()
    num_nodes = [*map(len, verified)]
    want = plain.runner.forward(ForwardBatch(plain.entries(verified)))
    stored = plain.stored(num_nodes)
    outputs = plain.runner.forward(
        ForwardBatch(plain.entries(drafted)), frozenset(plain.layers)
    ).hidden
    dice = random.Random(seed)
    for number in range(len(LENGTHS) - 1):
        num_layers = dice.randint(1, decoder.config.num_layers - 1)
        rows = drafting.first_layers(number, drafted[number], num_layers, dice)
        assert_equal(plain.runner, [rows], [outputs[num_layers][number]])
    assert_equal(plain.runner, drafting.stored(), texts)
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(drafting.runner.cache, patch).calls
        got = drafting.runner.forward(ForwardBatch(drafting.entries(verified)))
    assert_equal(plain.runner, [each[:] for each in got.logits], [each[:] for each in want.logits])
    assert_equal(plain.runner, drafting.stored(num_nodes), stored)
    if plain.runner.exact:
        config = decoder.config
        storing = [layer for layer in plain.layers if config.shape_of(layer - 1).reads is None]
        assert [layer + 1 for layer, _ in calls] == storing
        assert {len(slots) for _, slots in calls} == {sum(num_nodes)}, (
            "every layer computes every row"
        )


@pytest.mark.few(6)
@pytest.mark.parametrize("shape", [chain, bushy, chain_with_leaves])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("windows", [(None,) * 4, MIXED, WINDOWS], ids=["all", "mixed", "window"])
def test_first_layers_change_no_bit_of_a_forward_pass(
    windows: tuple[int | None, ...], dtype: DType, shape: Callable[[random.Random], TokenTree]
) -> None:
    decoder = tiny_decoder(dtype, windows=windows)
    for seed in range(3):
        dice = random.Random(seed)
        drafted = [shape(dice) for _ in LENGTHS]
        compare(decoder, dtype, drafted, drafted if seed else [bushy(dice) for _ in LENGTHS], seed)


@pytest.mark.parametrize("special", ["", "convolutions", "gemma4"])
def test_first_layers_of_other_models(special: str) -> None:
    decoder = tiny_decoder(windows=(None,) * 4, special=special)
    for seed in range(3):
        dice = random.Random(seed)
        drafted = [shape(dice) for shape in (chain, bushy, chain_with_leaves, chain)]
        compare(
            decoder, FLOAT32, drafted, drafted if seed else [bushy(dice) for _ in LENGTHS], seed
        )


def test_first_layers_with_learned_positions_and_biases() -> None:
    decoder = tiny_decoder(windows=(None,) * 3, classic=True)
    dice = random.Random(2)
    trees = [chain_with_leaves(dice) for _ in LENGTHS]
    compare(decoder, FLOAT32, trees, trees, 2)


def test_first_layers_of_several_requests_in_one_pass() -> None:
    decoder = tiny_decoder(windows=MIXED)
    together = TextsInCache(decoder, FLOAT32)
    alone = TextsInCache(decoder, FLOAT32)
    trees = [bushy(random.Random(number)) for number in range(len(LENGTHS))]
    entries = [entry._replace(logits_nodes=range(0)) for entry in together.entries(trees)]
    got = together.runner.run_first_layers(ForwardBatch(entries), 2)
    want = [
        alone.first_layers(number, tree, 2, random.Random(0)) for number, tree in enumerate(trees)
    ]
    assert_equal(together.runner, got, want)
