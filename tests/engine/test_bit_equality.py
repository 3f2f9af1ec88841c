"""Kernels give each text the same bits of logits and KV cache in all forward passes.

The reference is plain decoding: one token per forward pass, alone, on one thread, in consecutive
blocks. Compared are other chunks of prompts, token trees, shared passes, scattered blocks and
numbers of threads, by :meth:`ModelRunner.forward`.

Functions ``*_differ`` yield the differences. A planted defect, which sums one product in two
halves, must change the result of each of them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from covering import covering
from oracle import dense_logits, to_array, to_tensor
from own_process import in_own_process
from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, Array, DType, is_finite
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.cache.states import StateCounts
from pronk.kernels.threads import num_threads, set_threads
from pronk.models.choice import compute_dtype
from pronk.models.decoder import Decoder, Layer
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.linear import Linear, WeightLayout
from pronk.models.model_runner import ForwardResult, ModelRunner
from pronk.models.program import KVSource, Program
from pronk.sampling.tree import TokenTree
from tiny_models import (
    StrictAllocator,
    kernels,
    make_cache,
    pack_several_forms,
    read_kv,
    sharing_decoder,
    tiny_decoder,
    tiny_module,
)

LENGTH = 1300
SHORT = 600  # still more than the largest chunk
CHUNKS = (2, 3, 5, 16, 33, 64, 100, 512)  # the reference has chunks of 1
MOST_NODES = 128
MOST_ROWS = 700

DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
# In float32 these are slow tests: the tests of all variants cover the differences between the
# dtypes.
MOSTLY = pytest.mark.parametrize(
    "dtype", [pytest.param(FLOAT32, marks=pytest.mark.slow), BFLOAT16], ids=["float32", "bfloat16"]
)

# "group" is the number of query heads per key/value head: below, at and above what the kernels
# compute together.
VARIANTS: dict[str, dict[str, Any]] = {
    "group 1": {"heads": 4, "kv_heads": 4},
    "group 2": {"heads": 4, "kv_heads": 2},
    "group 3": {},
    "group 5": {"heads": 5, "kv_heads": 1, "head_dim": 32},
    "group 8": {"heads": 16, "kv_heads": 2},
    "one head": {"heads": 1, "kv_heads": 1, "head_dim": 64},
    "windows": {"windows": (100, 100)},
    "windows of all kinds": {"windows": (1, None, 37), "heads": 7, "kv_heads": 1},
    "head of 80": {"heads": 2, "head_dim": 80},
    "odd sizes": {"heads": 3, "kv_heads": 1, "head_dim": 10, "hidden": 50, "vocab": 77},
    "convolutions": {"special": "convolutions", "windows": (None, None, None)},
    "convolutions of odd size": {
        "special": "convolutions",
        "windows": (None, None),
        "hidden": 50,
        "head_dim": 10,
    },
    "recurrent": {"special": "recurrent", "windows": (None, None, None)},
    "latent attention": {"special": "latent"},
    "latent attention of 13 heads": {"special": "plain latent", "heads": 13},
    "mamba": {"special": "mamba", "windows": (None, None, None)},
    "parallel": {"special": "parallel", "windows": (None, None, None)},
    "classic": {"heads": 4, "kv_heads": 4, "classic": True},
    "norms and a scaling": {"qk_norm": True, "dynamic": True},
    "gemma": {"special": "gemma", "windows": (50, None)},
    "gemma4": {"special": "gemma4", "windows": (50, None, 50, None)},
    "norms of outputs": {"special": "outputs"},
    "experts": {"special": "experts"},
    "routers": {"special": "routers"},
    "sublayers": {"special": "sublayers", "windows": (None,) * 6},
    "biases": {"special": "biases", "windows": (None, 37), "head_dim": 32},
}
OTHER_WEIGHTS: dict[str, tuple[DType, dict[str, Any]]] = {
    "float16": (FLOAT16, {}),
    "int8": (FLOAT32, {"weights": "int8"}),
    "int4": (FLOAT32, {"weights": "int4"}),
    "int4, rows of bfloat16": (BFLOAT16, {"weights": "int4", "qk_norm": True}),
    "int8, rows of bfloat16": (BFLOAT16, {"weights": "int8", "classic": True}),
    "latent attention, int8": (FLOAT32, {"weights": "int8", "special": "latent"}),
    "experts, int4": (FLOAT32, {"weights": "int4", "special": "experts"}),
    "experts, int8, rows of bfloat16": (BFLOAT16, {"weights": "int8", "special": "experts"}),
}
# In float32 most variants are slow tests.
EACH = pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        pytest.param(variant, dtype, marks=pytest.mark.slow if slow else ())
        for variant in VARIANTS
        for dtype in (FLOAT32, BFLOAT16)
        for slow in [
            dtype == FLOAT32
            and variant not in ("group 3", "windows of all kinds", "odd sizes", "classic")
        ]
    ],
    ids=str,
)
# The kernels choose the tiles of a product by its size, so one model has realistic sizes.
WIDE = {"hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab": 1024, "windows": (None,)}

MakeRunner = Callable[[Decoder, PagedCache], ModelRunner]


class ScatteredBlocks(StrictAllocator):
    """Allocates blocks in random order."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.dice = random.Random(num_blocks)

    def _next_blocks(self, count: int, place: int) -> list[int]:
        return [
            self.dice.choice([block for block, count in enumerate(self.references) if not count])
        ]


class Texts:
    """A model runner and its KV cache, for texts that the test writes pass by pass."""

    def __init__(
        self,
        decoder: Decoder,
        make: MakeRunner = ModelRunner,
        *,
        tokens: int = 2 * LENGTH,
        block_size: int = 16,
        scattered: bool = False,
        kv_dtype: DType | None = None,
    ) -> None:
        dtype = compute_dtype(decoder.embedding.dtype)
        blocks = -(-tokens // block_size) + 8
        shape: dict[str, Any] = {
            "num_blocks": blocks,
            "block_size": block_size,
            "kv_dtype": kv_dtype,
            "state_counts": StateCounts(requests=40, checkpoints=1, updates=3 * MOST_ROWS),
        }
        self.cache = make_cache(decoder.config, dtype, **shape)
        self.cache.allocator = (ScatteredBlocks if scattered else StrictAllocator)(
            blocks, block_size
        )
        self.runner = make(decoder, self.cache)
        self.window = decoder.config.window

    def entry(
        self, block_table: BlockTable, tree: TokenTree, computed: int = 0, *, final: bool = False
    ) -> BatchEntry:
        """Return the entry for all nodes of a tree from number ``computed`` on; their KV slots are
        reserved. ``final``: the nodes are a part of the text.
        """
        stop = block_table.length + len(tree)
        self.cache.prepare(block_table, stop)
        return BatchEntry(
            block_table,
            tree,
            range(computed, len(tree)),
            num_computed=computed,
            prompt_length=1,
            num_final=stop if final else 0,
        )

    def compute(
        self,
        block_table: BlockTable,
        tree: TokenTree,
        cuts: Sequence[int] = (),
        *,
        final: bool = False,
    ) -> Array:
        """Return logits ``[nodes, vocab]`` of a tree, in one pass or in several passes that end at
        ``cuts``.
        """
        steps = pairwise(sorted({0, *cuts, len(tree)}))
        entries = (
            self.entry(block_table, tree.keep(range(stop)), start, final=final)
            for start, stop in steps
        )
        return np.concatenate(
            [self.runner.forward(ForwardBatch([entry])).logits[0] for entry in entries]
        )

    def commit(self, block_table: BlockTable, nodes: Sequence[int]) -> None:
        self.cache.commit_slots(block_table, nodes)
        if self.window is not None:
            self.cache.release_before(block_table, block_table.length - self.window + 1)

    def read(
        self, block_table: BlockTable, tokens: Sequence[int], chunks: Sequence[int] | None = None
    ) -> Array:
        """Append tokens to the text in ``chunks`` or one by one; return logits ``[len(tokens),
        vocab]``.
        """
        rows = list[Array]()
        start = 0
        for count in chunks or [1] * len(tokens):
            tree = TokenTree.chain(tokens[start : start + count])
            rows.append(self.compute(block_table, tree, final=True))
            self.commit(block_table, range(count))
            start += count
        assert start == len(tokens)
        return np.concatenate(rows)

    def held(self, block_table: BlockTable) -> list[Array]:
        """Return the keys and values of the text that are still held, layer by layer."""
        layers = [
            index
            for index, layer in enumerate(self.runner.decoder.layers)
            if layer.reads is None and len(self.cache.keys[index])
        ]
        return [each for layer in layers for each in read_kv(self.cache, layer, block_table)]


def same(one: Array, other: Array) -> bool:
    """Return whether all bits are equal and all numbers finite."""
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    as_bits = np.int32 if one.itemsize == 4 else np.int16
    return is_finite(one) and np.array_equal(
        *(np.ascontiguousarray(each).view(as_bits) for each in (one, other))
    )


def same_caches(one: Sequence[Array], other: Sequence[Array]) -> bool:
    """Return whether two caches agree in the last positions of both; with larger blocks a cache
    holds more of them.
    """
    kept = [(a[:, -b.shape[1] :], b[:, -a.shape[1] :]) for a, b in zip(one, other, strict=True)]
    return all(same(a, b) for a, b in kept)


def some_text(decoder: Decoder, seed: int = 0, length: int = LENGTH) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(decoder.config.vocab_size) for _ in range(length)]


@cache
def plain(
    decoder: Decoder, length: int, seed: int = 0, kv_dtype: DType | None = None
) -> tuple[Array, list[Array]]:
    """Return logits, keys and values of ``some_text`` by plain decoding."""
    threads = num_threads()
    set_threads(1, 1)
    texts = Texts(decoder, kv_dtype=kv_dtype)
    block_table = BlockTable()
    logits = texts.read(block_table, some_text(decoder, seed, length))
    set_threads(threads, 1)
    return logits, texts.held(block_table)


def cut(length: int, size: int) -> list[int]:
    return [size] * (length // size) + [length % size] * (length % size > 0)


def random_cut(length: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    chunks = list[int]()
    while (left := length - sum(chunks)) > 0:
        chunks.append(
            min(left, dice.choice((1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 64, 100, 129, 400)))
        )
    return chunks


def random_tree(dice: random.Random, vocab: int, size: int) -> TokenTree:
    """Return a random tree whose parents are any nodes, the latest or the first ones, or that
    begins as a chain.
    """
    kind = dice.choice(("any", "deep", "wide", "chain"))
    trunk = dice.randint(1, size) if kind == "chain" else 1
    tokens = [dice.randrange(vocab)]
    parents = [-1]
    taken = {(-1, -1)}
    while len(tokens) < size:
        node = len(tokens)
        if node < trunk or (kind == "deep" and dice.random() < 0.9):
            parent = node - 1
        else:
            parent = dice.randrange(min(node, 6) if kind == "wide" else node)
        token = dice.randrange(vocab)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


def paths_alone(texts: Texts, block_table: BlockTable, tree: TokenTree) -> Array:
    """Return logits ``[nodes, vocab]`` by plain decoding of every path of a tree below the
    committed text.
    """
    rows: list[Array] = [np.empty(0)] * len(tree)
    if texts.cache.states is not None:  # a state cannot go back to a parent: read whole paths
        for node in range(len(tree)):
            path = [node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            tokens = [tree.tokens[each] for each in path]
            rows[node] = texts.compute(block_table, TokenTree.chain(tokens))[-1]
        return np.stack(rows)
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], 1):
        children[parent].append(node)
    length = block_table.length
    waiting = [0]
    while waiting:
        node = waiting.pop()
        block_table.length = length + tree.depths[node]
        rows[node] = texts.compute(block_table, TokenTree.chain([tree.tokens[node]]))[0]
        waiting += children[node]
    block_table.length = length
    return np.stack(rows)


def chunks_differ(
    decoder: Decoder,
    make: MakeRunner = ModelRunner,
    *,
    length: int = LENGTH,
    chunks: Sequence[int] = CHUNKS,
    **texts: Any,
) -> Iterator[str]:
    """Compute a text in chunks of several sizes."""
    tokens = some_text(decoder, length=length)
    (want, cached) = plain(decoder, length, kv_dtype=texts.get("kv_dtype"))
    cuts = {f"chunks of {size}": cut(length, size) for size in chunks}
    for name, parts in (cuts | {"any chunks": random_cut(length, 0)}).items():
        own = Texts(decoder, make, **texts)
        block_table = BlockTable()
        got = own.read(block_table, tokens, parts)
        if not same(got, want):
            yield f"{name}: the logits of {int((got != want).any(-1).sum())} tokens"
        if not same_caches(own.held(block_table), cached):
            yield f"{name}: the cache"


def trees_differ(
    decoder: Decoder,
    make: MakeRunner = ModelRunner,
    *,
    seed: int = 0,
    steps: int = 5,
    sizes: Sequence[int] = (),
    **texts: Any,
) -> Iterator[str]:
    """Verify random trees one after the other and accept a random path of each.

    The trees have the ``sizes``; by default, random ones up to ``MOST_NODES``.
    """
    dice = random.Random(seed)
    vocab = decoder.config.vocab_size
    own = Texts(decoder, make, **texts)
    alone = Texts(decoder, kv_dtype=texts.get("kv_dtype"))
    block_table = BlockTable()
    reference = BlockTable()
    for step in range(steps):
        # Text before the next tree: 0, 1 or 40 tokens, or up to one token below a multiple of 64.
        rest = -block_table.length % 64
        lead = some_text(
            decoder,
            dice.random(),
            dice.choice((0, 1, 40, rest + 63, rest + 319) if step else (0, 63)),
        )
        if lead:
            own.read(block_table, lead, [len(lead)])
            alone.read(reference, lead, [1] * len(lead) if len(lead) < 64 else cut(len(lead), 64))
        usual = (MOST_NODES, dice.randint(2, MOST_NODES), dice.randint(2, 12))
        tree = random_tree(dice, vocab, dice.choice(sizes or usual))
        cuts = dice.sample(range(1, len(tree)), min(len(tree) - 1, dice.choice((0, 0, 1, 2))))
        if not same(own.compute(block_table, tree, cuts), paths_alone(alone, reference, tree)):
            yield (
                f"step {step}: the logits of a tree of {len(tree)} nodes below "
                f"{block_table.length} tokens"
            )
        path = [0, *tree.path(dice.randrange(len(tree)))]
        own.commit(block_table, path)
        alone.read(reference, [tree.tokens[node] for node in path])
        if not same_caches(own.held(block_table), alone.held(reference)):
            yield f"step {step}: the cache after {len(path)} nodes were accepted"


def batches_differ(
    decoder: Decoder, make: MakeRunner = ModelRunner, *, seed: int = 0, **texts: Any
) -> Iterator[str]:
    """Compute changing batches of up to 700 rows; each request has a tree or a chunk of its
    prompt.
    """
    dice = random.Random(seed)
    vocab = decoder.config.vocab_size
    own = Texts(decoder, make, tokens=7000, **texts)
    alone = Texts(decoder, tokens=7000, kv_dtype=texts.get("kv_dtype"))
    lengths = (0, 1, 15, 64, 200, 500, 777)
    sizes = (1, 1, 2, 9, 64, 128, 490)
    tables = [(BlockTable(), BlockTable()) for _ in lengths]
    for index, (length, pair) in enumerate(zip(lengths, tables, strict=True)):
        for each, block_table in zip((own, alone), pair, strict=True):
            if length:
                each.read(block_table, some_text(decoder, index, length), [length])
    for step in range(2):
        chosen = dice.sample(tables, dice.randint(2, len(tables)) if step else len(tables))
        trees = [
            random_tree(dice, vocab, size)
            if size <= MOST_NODES
            else TokenTree.chain(some_text(decoder, step, size))
            for size in dice.sample(sizes, len(chosen))
        ]
        assert step or MOST_ROWS - 10 < sum(map(len, trees)) <= MOST_ROWS
        entries = [
            own.entry(block_table, tree)
            for (block_table, _), tree in zip(chosen, trees, strict=True)
        ]
        together = own.runner.forward(ForwardBatch(entries)).logits
        for (block_table, other), tree, got in zip(chosen, trees, together, strict=True):
            if not same(got, alone.compute(other, tree)):
                yield (
                    f"pass {step}: the logits of a tree of {len(tree)} nodes below "
                    f"{block_table.length} tokens"
                )
            path = [0, *tree.path(dice.randrange(len(tree)))]
            own.commit(block_table, path)
            alone.commit(other, path)
            if not same_caches(own.held(block_table), alone.held(other)):
                yield f"pass {step}: the cache of a text of {block_table.length} tokens"


@pytest.mark.few(10)
@EACH
def test_chunks_of_prompts(variant: str, dtype: DType) -> None:
    """Two variants have all chunks and a long text; the text of each is read token by token."""
    decoder = tiny_decoder(dtype, **VARIANTS[variant])
    if variant in ("group 3", "windows of all kinds"):
        assert not [*chunks_differ(decoder)]
    else:
        assert not [*chunks_differ(decoder, length=SHORT, chunks=(33, 512))]


@EACH
def test_token_trees(variant: str, dtype: DType) -> None:
    for seed in range(2):
        assert not [*trees_differ(tiny_decoder(dtype, **VARIANTS[variant]), seed=seed)]


@pytest.mark.parametrize(
    ("variant", "dtype", "size"),
    covering(
        ("group 3", "windows of all kinds", "recurrent", "latent attention", "experts"),
        (FLOAT32, BFLOAT16),
        (200, 500),
        strength=1,
    ),
    ids=str,
)
def test_trees_of_more_rows_than_by_default(variant: str, dtype: DType, size: int) -> None:
    decoder = tiny_decoder(dtype, **VARIANTS[variant])
    assert not [*trees_differ(decoder, steps=2, sizes=[size])]


@pytest.mark.few(10)
@EACH
def test_shared_passes(variant: str, dtype: DType) -> None:
    assert not [*batches_differ(tiny_decoder(dtype, **VARIANTS[variant]))]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_weights_of_other_types(name: str) -> None:
    dtype, variant = OTHER_WEIGHTS[name]
    decoder = tiny_decoder(dtype, **variant)
    assert not [
        *chunks_differ(decoder, length=300),
        *trees_differ(decoder),
        *batches_differ(decoder),
    ]


@pytest.mark.few(6)
@MOSTLY
@pytest.mark.parametrize(
    "variant",
    [
        "group 3",
        "group 8",
        "windows of all kinds",
        "head of 80",
        "odd sizes",
        "classic",
        "convolutions",
        "latent attention",
        "biases",
    ],
)
@pytest.mark.parametrize("kv_dtype", [INT8, INT4], ids=str)
def test_quantized_cache(variant: str, dtype: DType, kv_dtype: DType) -> None:
    decoder = tiny_decoder(dtype, **VARIANTS[variant])
    texts = {"kv_dtype": kv_dtype}
    assert not [
        *chunks_differ(decoder, length=600, chunks=(33, 512), **texts),
        *trees_differ(decoder, **texts),
    ]
    assert not [*batches_differ(decoder, **texts)]
    assert not same(plain(decoder, 600)[0], plain(decoder, 600, **texts)[0])


@MOSTLY
@pytest.mark.parametrize("windows", [(None,) * 4, (None, 37, 9, None)], ids=str)
def test_layers_that_read_the_keys_of_earlier_layers(
    windows: tuple[int | None, ...], dtype: DType
) -> None:
    by = kernels()
    decoder = sharing_decoder(
        tiny_module(dtype, windows=windows), by, {2: KVSource(1), 3: KVSource(0)}
    )
    assert not [
        *chunks_differ(decoder, length=300, chunks=(33, 100)),
        *trees_differ(decoder),
        *batches_differ(decoder),
    ]


@pytest.mark.few(2)
@MOSTLY
@pytest.mark.parametrize("variant", ["group 3", "odd sizes", "classic", "norms and a scaling"])
def test_projections_of_several_forms(variant: str, dtype: DType) -> None:
    decoder = pack_several_forms(tiny_module(dtype, **VARIANTS[variant]), kernels())
    assert not [
        *chunks_differ(decoder, length=300),
        *trees_differ(decoder),
        *batches_differ(decoder),
    ]
    set_threads(3, 1)
    assert not [*chunks_differ(decoder, length=150, chunks=(1, 16, 100))]


@pytest.mark.few(1)
@DTYPES
def test_a_wider_model(dtype: DType) -> None:
    decoder = tiny_decoder(dtype, **WIDE)
    assert not [
        *chunks_differ(decoder, length=560, chunks=(3, 16, 100, 560)),
        *trees_differ(decoder, steps=3),
    ]
    assert not [*batches_differ(decoder)]


@pytest.mark.few(2)
@MOSTLY
@pytest.mark.parametrize("scattered", [False, True], ids=["run", "scattered"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_sizes_and_scattered_blocks(
    block_size: int, dtype: DType, *, scattered: bool
) -> None:
    texts = {"block_size": block_size, "scattered": scattered}
    for variant in ("group 3", "windows", "convolutions"):
        decoder = tiny_decoder(dtype, **VARIANTS[variant])
        assert not [*chunks_differ(decoder, length=SHORT, chunks=(100,), **texts)]
        assert not [*trees_differ(decoder, **texts)]
    assert not [*batches_differ(decoder, **texts)]


@pytest.mark.few(3)
@DTYPES
@pytest.mark.parametrize("threads", [2, 3, 5, 8])
@in_own_process
def test_numbers_of_threads(threads: int, dtype: DType) -> None:
    set_threads(threads, 1)
    decoder, odd, wide = (
        tiny_decoder(dtype, **each) for each in (VARIANTS["group 8"], VARIANTS["odd sizes"], WIDE)
    )
    short = tiny_decoder(dtype, **VARIANTS["convolutions of odd size"])
    assert not [
        *chunks_differ(short, length=150, chunks=(1, 16, 100)),
        *trees_differ(short, steps=1),
    ]
    assert not [
        *chunks_differ(decoder, length=150, chunks=(1, 16, 100, 150)),
        *trees_differ(decoder, steps=1),
    ]
    assert not [*batches_differ(odd), *chunks_differ(wide, length=150, chunks=(16, 100))]


class HalvedLayer(Layer):
    """A layer that sums its last product in two halves."""

    halves: Sequence[Linear]

    def compile(self, program: Program, index: int) -> None:
        program.attention(self, index)
        program.linear(self.up, norm=self.mlp_norm, activation=self.config.activation, to="B")
        for half in self.halves:
            program.linear(half, source="B", residual=True)


def halved(decoder: Decoder) -> Decoder:
    """Return the model with :class:`HalvedLayer`, whose logits have other bits."""
    made = copy(decoder)
    made.layers = []
    for layer in decoder.layers:
        other = HalvedLayer.__new__(HalvedLayer)
        other.__dict__.update(layer.__dict__)
        weight = layer.down.packed.unpack().astype(decoder.embedding.dtype)
        half = weight.shape[1] // 2
        parts = (weight, weight.copy())
        parts[0][:, half:] = 0.0
        parts[1][:, :half] = 0.0
        other.halves = [Linear(decoder.kernels, part, None, WeightLayout(), None) for part in parts]
        made.layers.append(other)
    return made


DEFECTS: dict[
    str, tuple[Callable[[ForwardBatch], bool], Callable[..., Iterator[str]], dict[str, Any]]
] = {
    "more than 16 rows": (
        lambda batch: batch.num_rows > 16,
        chunks_differ,
        {"length": 300},
    ),
    "shared passes": (lambda batch: len(batch.entries) > 1, batches_differ, {}),
    "branches": (
        lambda batch: any(entry.tree.main_chain < len(entry.tree) for entry in batch.entries),
        trees_differ,
        {},
    ),
    "trees in several passes": (
        lambda batch: any(entry.num_computed for entry in batch.entries),
        trees_differ,
        {},
    ),
    "scattered blocks": (
        lambda batch: any(not entry.block_table.contiguous for entry in batch.entries),
        chunks_differ,
        {"length": 300, "chunks": (1,), "scattered": True},
    ),
    "threads": (lambda _: num_threads() > 1, chunks_differ, {"length": 300, "chunks": (100,)}),
}


@DTYPES
@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_detected(defect: str, dtype: DType) -> None:
    applies, differ, options = DEFECTS[defect]

    class Planted(ModelRunner):
        def __init__(self, decoder: Decoder, pool: PagedCache) -> None:
            super().__init__(decoder, pool)
            self.other = ModelRunner(halved(decoder), pool)

        def forward(
            self, batch: ForwardBatch, collect: frozenset[int] = frozenset()
        ) -> ForwardResult:
            return (self.other if applies(batch) else super()).forward(batch, collect)

    decoder = tiny_decoder(dtype)
    if defect == "threads":
        set_threads(2, 1)
    assert not [*differ(decoder, **options)]
    found = [*differ(decoder, Planted, **options)]
    assert any("logits" in each for each in found)
    assert any("cache" in each for each in found)


@pytest.mark.few(10)
@EACH
def test_plain_decoding_is_as_exact_as_torch(variant: str, dtype: DType) -> None:
    """The reference of this file is compared with dense passes in float64 and by torch."""
    special = ("convolutions", "gemma4", "latent", "recurrent", "mamba", "parallel", "sublayers")
    if variant.startswith(special):
        pytest.skip(
            "the oracle has plain attention; tests/models/test_logits.py compares transformers"
        )
    decoder = tiny_decoder(dtype, **VARIANTS[variant])
    module = tiny_module(dtype, **VARIANTS[variant])
    # beyond 200 tokens, dynamic rotations depend on the text's length
    tokens = some_text(decoder)[:200]
    exact = dense_logits(deepcopy(module).double(), tokens, np.dtype(np.float64))
    mine = plain(decoder, SHORT)[0][:200]
    theirs = dense_logits(module, tokens, dtype)
    errors = [
        float(np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact))
        for got in (mine, theirs)
    ]
    assert errors[0] < 1.05 * errors[1]
    assert errors[0] < (1e-5 if dtype == FLOAT32 else 0.1)


def test_logits_of_wanted_nodes_and_hidden_states_of_all() -> None:
    decoder = tiny_decoder()
    texts = Texts(decoder)
    trees = [
        TokenTree.chain(some_text(decoder, seed, size)) for seed, size in enumerate((7, 1, 12))
    ]
    entries = [texts.entry(BlockTable(), tree) for tree in trees]
    every = texts.runner.forward(ForwardBatch(entries), frozenset({1, 2}))
    wanted = [range(3, 7), range(0), range(11, 12)]
    some = texts.runner.forward(
        ForwardBatch(
            [
                BatchEntry(entry.block_table, entry.tree, nodes, 1)
                for entry, nodes in zip(entries, wanted, strict=True)
            ]
        )
    )
    for i, nodes in enumerate(wanted):
        assert some.logits[i].shape == (len(nodes), decoder.config.vocab_size)
        assert np.array_equal(some.logits[i], every.logits[i][list(nodes)])
        normed = to_array(tiny_module().norm(to_tensor(every.hidden[2][i])))
        np.testing.assert_allclose(
            decoder.head.logits(normed), every.logits[i], rtol=0.0, atol=1e-4
        )
        assert every.hidden[1][i].shape == (len(trees[i]), 64)
        assert not np.array_equal(every.hidden[1][i], every.hidden[2][i])
    assert not some.hidden
    none = texts.runner.forward(
        ForwardBatch([BatchEntry(entries[0].block_table, entries[0].tree, range(7, 7), 1)])
    )
    assert none.logits[0].shape == (0, decoder.config.vocab_size)
