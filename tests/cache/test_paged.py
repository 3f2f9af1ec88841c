"""The paged KV cache: programs write to the slots of the table, commits move rows, shared blocks
are copied.

Tests run with all layouts: panels of 16 slots, and panels and rows in 8 bits; ``tests/torch`` runs
them with rows. Most texts begin four slots before the end of a block.
"""

import gc
import math
import os
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from oracle import Rounding, dense_logits, round_to_4_bits, round_to_8_bits
from pronk.base.arrays import BFLOAT16, FLOAT32, INT4, INT8, KV_DTYPES, UINT8, Array, DType
from pronk.base.errors import CacheFullError, OptionError
from pronk.cache import budget
from pronk.cache.blocks import BlockTable
from pronk.cache.budget import BLOCK_SIZE, parse_memory
from pronk.cache.layout import kv_bytes_per_token
from pronk.cache.options import KV_DTYPE_NAMES
from pronk.cache.paged import PagedCache
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.linear import Linear, Norm, WeightLayout
from pronk.models.program import KVSource, Program
from pronk.sampling.tree import TokenTree
from tiny_models import (
    kernels,
    make_cache,
    read_kv,
    text_logits,
    tiny_config,
    tiny_decoder,
    tiny_module,
)

CONFIG = replace(tiny_config(heads=2, kv_heads=2, head_dim=6), rope=None)
HIDDEN = CONFIG.hidden_size
MARGIN = 16
SIZE = 16  # tokens of a block
# first tokens of a text, up to four slots before the end of its first block
LEAD = [*range(900, 900 + SIZE - 4)]


@dataclass(frozen=True)
class Kind:
    """A layout of the KV cache."""

    dtype: DType
    kv_dtype: DType | None = None

    def make(self, blocks: int = 12) -> PagedCache:
        shape: dict[str, Any] = {
            "num_blocks": blocks,
            "block_size": SIZE,
            "kv_dtype": self.kv_dtype,
        }
        return make_cache(CONFIG, self.dtype, **shape)


KINDS = {
    "kernels": Kind(FLOAT32),
    "kernels, bfloat16": Kind(BFLOAT16),
    "kernels, 8 bits": Kind(FLOAT32, INT8),
    "kernels, 8 bits of bfloat16": Kind(BFLOAT16, INT8),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def rows(values: list[int], layer: int) -> Array:
    """Return keys ``[rows, 2, 6]`` with the numbers ``value // 100, value % 100, layer, head, 127,
    0``.

    Numbers below 100 are exact in bfloat16; 127 makes the scale of 8-bit codes 1.
    """
    own = [[[v // 100, v % 100, layer, head, 127, 0] for head in range(2)] for v in values]
    return np.array(own, np.float32)


def outputs(values: list[int], layer: int) -> Array:
    """Return hidden states ``[rows, hidden]`` that repeat ``value // 100 + layer, value % 100 +
    layer``.
    """
    number = np.array(values, np.float32)[:, None]
    return np.tile(np.concatenate((number // 100, number % 100), axis=1), HIDDEN // 2) + np.float32(
        layer
    )


def write(cache: PagedCache, block_table: BlockTable, values: list[int]) -> None:
    """Write the rows of ``values`` after the committed tokens in every layer; V is the negated
    K.
    """
    for layer in range(len(cache.keys)):
        keys = rows(values, layer)
        write_rows(cache, block_table, layer, keys, -keys)
    for layer in cache.features:
        program = Program(cache.kernels, HIDDEN, cache.dtype, cache)
        program.store_feature(layer)
        program.run(
            rows_after(block_table, len(values)), outputs(values, layer).astype(cache.dtype)
        )


def write_rows(
    cache: PagedCache, block_table: BlockTable, layer: int, keys: Array, values: Array
) -> None:
    """Write keys and values ``[rows, heads, size]`` after the committed tokens by a program of the
    cache's kernels.

    The input of row ``i`` is the unit vector ``i``, for which the projection returns column ``i``
    of its weight.
    """
    count = len(keys)
    config = cache.config
    cache.prepare(block_table, block_table.length + count)
    inputs = 256  # a unit vector times its square root has a mean square of exactly 1
    weight = np.zeros((sum(config.qkv_sizes), inputs), np.float32)
    weight[config.qkv_sizes[0] :, :count] = (
        np.concatenate((keys, values), axis=1).reshape(count, -1).T
    )
    linear = Linear(
        cache.kernels, weight.astype(cache.dtype), None, WeightLayout(unit=config.head_dim), None
    )
    program = Program(cache.kernels, inputs, cache.dtype, cache)
    program.project(
        linear, Norm(np.full(inputs, 1 / 16, np.float32), None, 0.0), config, KVSource(layer)
    )
    units = 16 * np.eye(count, inputs, dtype=np.float32)
    program.run(rows_after(block_table, count), units.astype(cache.dtype))


def rows_after(block_table: BlockTable, count: int) -> ForwardBatch:
    tokens = [0] * count
    return ForwardBatch([BatchEntry(block_table, TokenTree.chain(tokens))])


def start_text(cache: PagedCache) -> BlockTable:
    block_table = BlockTable()
    write(cache, block_table, LEAD)
    cache.commit_slots(block_table, range(len(LEAD)))
    return block_table


def every(cache: PagedCache, slots: slice | Array = slice(None)) -> list[Array]:
    """Return slots of all pools as float32 ``[heads, slots, size]``: K and V of each layer, then
    kept layer outputs.
    """
    whole = BlockTable([*range(cache.allocator.num_blocks)], length=cache.num_slots)
    found = [pool for layer in range(len(cache.keys)) for pool in read_kv(cache, layer, whole)]
    found += [
        cache.read_feature(layer, whole, 0, cache.num_slots)[None] for layer in cache.features
    ]
    return [pool[:, slots].astype(np.float32) for pool in found]


def read(cache: PagedCache, block_table: BlockTable, start: int, stop: int) -> list[int]:
    """Return the values of some tokens, after a check that all layers, heads and kept outputs have
    them.
    """
    found = every(cache, cache.slots(block_table, start, stop))
    values: list[int] = np.rint(100 * found[0][0, :, 0] + found[0][0, :, 1]).astype(int).tolist()
    for layer in range(len(cache.keys)):
        want = rows(values, layer).swapaxes(0, 1)
        assert np.array_equal(found[2 * layer], want)
        assert np.array_equal(found[2 * layer + 1], -want)
    for layer, pool in zip(cache.features, found[2 * len(cache.keys) :], strict=True):
        assert np.array_equal(pool[0], outputs(values, layer))
        assert np.array_equal(
            cache.read_feature(layer, block_table, start, stop).astype(np.float32), pool[0]
        )
    return values


def held(cache: PagedCache, block_table: BlockTable) -> list[int]:
    """Return the values of a text without ``LEAD``, which comes first."""
    found = read(cache, block_table, 0, block_table.length)
    assert found[: len(LEAD)] == LEAD
    return found[len(LEAD) :]


def test_shapes_and_sizes_of_pools(kind: Kind) -> None:
    cache = kind.make(5)
    slots = cache.num_slots
    assert slots == 5 * SIZE + MARGIN
    assert len(cache.keys) == len(cache.values) == 2
    coded = kind.kv_dtype is not None
    values = (2, slots, 10 if coded else 6)
    panels = (2, slots // 16, 6, 16, 1) if kind.dtype == FLOAT32 else (2, slots // 16, 3, 16, 2)
    panels = (2, slots // 16, 10, 16) if coded else panels
    assert all(pool.shape == (panels) for pool in cache.keys)
    assert all(pool.shape == values for pool in cache.values)
    assert (
        sum(pool.nbytes for pool in (*cache.keys, *cache.values)) == slots * cache.bytes_per_token
    )
    for pool in every(cache):
        assert pool.shape == (2, slots, 6)
        assert np.isnan(pool).all()
    fresh = PagedCache(CONFIG, num_blocks=5, block_size=SIZE, dtype=BFLOAT16, kernels=None)
    assert all(pool.dtype == BFLOAT16 and not pool.any() for pool in (*fresh.keys, *fresh.values))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_panels(dtype: DType) -> None:
    """Keys of 16 slots are stored dimension by dimension; in bfloat16, by pairs of dimensions."""
    cache = make_cache(CONFIG, dtype, num_blocks=4)
    block_table = BlockTable([2, 0, 1])
    block_table.update_derived()
    keys = (np.arange(48 * 2 * 6).reshape(48, 2, 6) % 251).astype(np.float32)
    write_rows(cache, block_table, 0, keys, -keys)
    slots = cache.slots(block_table, 0, 48)
    for head in range(2):
        for place, slot in enumerate(slots.tolist()):
            for d in range(6):
                panel = cache.keys[0][head, slot // 16]
                found = (
                    panel[d, slot % 16, 0] if dtype == FLOAT32 else panel[d // 2, slot % 16, d % 2]
                )
                assert found == keys[place, head, d]
    block_table.length = 48
    for found, want in zip(read_kv(cache, 0, block_table), (keys, -keys), strict=True):
        assert found.dtype == dtype
        assert np.array_equal(found.swapaxes(0, 1), want)
    assert np.isnan(every(cache, slice(48, 64))[0]).all()
    with pytest.raises(AssertionError, match="panels of 16"):
        make_cache(CONFIG, dtype, block_size=24)


def test_names_of_dtypes() -> None:
    assert tuple(KV_DTYPES) == KV_DTYPE_NAMES


def test_codes_of_8_bits() -> None:
    """Each key and value of each head is stored beside its scale; zeros stay zeros."""
    cache = KINDS["kernels, 8 bits"].make(4)
    block_table = BlockTable([2, 0, 1])
    block_table.update_derived()
    numbers = np.random.default_rng(0).standard_normal((2, 48, 2, 6), np.float32)
    keys, values = numbers * np.logspace(-9, 9, 48, dtype=np.float32)[:, None, None]
    keys[5] = 0.0
    write_rows(cache, block_table, 1, keys, values)
    for head in range(2):
        for token, slot in enumerate(cache.slots(block_table, 0, 48).tolist()):
            panel = cache.keys[1][head, slot // 16]
            key = np.concatenate(
                (panel[:6, slot % 16], panel[6:].reshape(-1)[slot % 16 * 4 : slot % 16 * 4 + 4])
            )
            for own, row in (
                (key, keys[token, head]),
                (cache.values[1][head, slot], values[token, head]),
            ):
                largest = np.abs(row).max()
                assert (
                    own[:6].tolist()
                    == np.rint(row * (np.float32(127) / max(largest, np.float32(1e-30)))).tolist()
                )
                assert own[6:].copy().view(np.float32) == largest / np.float32(127)
    block_table.length = 48
    found = [each.swapaxes(0, 1) for each in read_kv(cache, 1, block_table)]
    for kept, given in zip(found, (keys, values), strict=True):
        assert (np.abs(kept - given) <= np.abs(given).max(-1, keepdims=True) * (0.5001 / 127)).all()
    assert not found[0][5].any()


def test_stored_bytes_are_those_of_every_layout() -> None:
    """Slots that one cache exports are the tokens of the cache that imports them, at any slots."""
    for kind in KINDS.values():
        source = kind.make(4)
        target = kind.make(5)
        for cache in (source, target):
            cache.save_feature(2, cache)
        block_table = BlockTable()
        values = list(range(100, 150))
        write(source, block_table, values)
        stored = source.export_slots(source.slots(block_table, 0, 50))
        assert (stored.shape, stored.dtype) == ((50, source.bytes_per_token), UINT8)
        other = BlockTable([4, 1, 0, 2])
        other.update_derived()
        order = np.random.default_rng(0).permutation(50)
        target.import_slots(target.slots(other, 0, 50)[order], stored[order])
        assert read(target, other, 0, 50) == values


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": 7, "kv_heads": 1, "windows": (30, None)},
        {"classic": True, "heads": 4, "kv_heads": 4},
        {"head_dim": 48, "kv_heads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("kv_dtype", "rounded"),
    [(INT8, round_to_8_bits), (INT4, round_to_4_bits)],
    ids=["int8", "int4"],
)
def test_logits_with_a_quantized_cache(
    shape: dict[str, Any], kv_dtype: DType, rounded: Rounding
) -> None:
    """Logits equal those of dense attention with rounded keys and values, up to rare differences in
    rounding.
    """
    tokens = random.Random(0).choices(range(131), k=90)
    plain = tiny_module(FLOAT32, **shape)
    want = dense_logits(plain, tokens, rounding=rounded)
    found = text_logits(tiny_decoder(FLOAT32, **shape), tokens, kv_dtype=kv_dtype)
    rounding = np.abs(want - dense_logits(plain, tokens)).mean()
    assert np.abs(found - want).mean() < 0.05 * rounding


def test_the_example_of_the_docstring() -> None:
    cache = make_cache(CONFIG, FLOAT32, num_blocks=10, block_size=16)
    block_table = BlockTable(blocks=[7, 8], num_released=2, length=40)
    assert cache.slots(block_table, 37, 38).tolist() == [7 * 16 + 5]
    assert cache.slots(block_table, 32, 64).tolist() == list(range(112, 144))
    assert list(block_table.c_blocks) == [7, 8]


def test_slots_of_scattered_blocks() -> None:
    cache = KINDS["kernels"].make()
    block_table = BlockTable(blocks=[7, 2, 3], num_released=1, contiguous=False)
    assert cache.slots(block_table, 16, 64).tolist() == [*range(112, 128), *range(32, 64)]
    # For tokens in released or missing blocks, any slot of the pool may be returned.
    outside = cache.slots(block_table, 0, 96)
    assert outside[16:64].tolist() == cache.slots(block_table, 16, 64).tolist()
    assert all(0 <= slot < cache.num_slots for slot in outside)


def test_slots_of_consecutive_blocks() -> None:
    """Slots are consecutive beyond the end of the blocks too, and before their start if slots exist
    there.
    """
    cache = KINDS["kernels"].make()
    assert cache.slots(BlockTable(blocks=[2, 3]), 0, 32).tolist() == [*range(32, 64)]
    assert cache.slots(BlockTable(blocks=[2, 3]), 0, 160).tolist() == [*range(32, 192)]
    assert cache.slots(BlockTable(blocks=[10, 11]), 0, 48).tolist() == [*range(160, 208)]
    assert cache.slots(BlockTable(blocks=[3, 4], num_released=2), 0, 160).tolist() == [
        *range(16, 176)
    ]
    for block_table in (BlockTable(blocks=[0, 1], num_released=1), BlockTable(blocks=[10, 11])):
        found = cache.slots(block_table, 0, 80)
        start = block_table.num_released * SIZE
        assert found[start : start + 32].tolist() == [
            *range(block_table.blocks[0] * 16, block_table.blocks[0] * 16 + 32)
        ]
        assert all(0 <= slot < cache.num_slots for slot in found)


@pytest.mark.parametrize(
    ("offsets", "kept"),
    [
        ([], []),
        ([0], [10]),
        ([0, 1, 2], [10, 11, 12]),
        ([0, 2, 5], [10, 12, 15]),
        ([3], [13]),
        ([0, 4, 5, 6], [10, 14, 15, 16]),
        ([0, 1, 2, 4, 5, 6], [10, 11, 12, 14, 15, 16]),
    ],
)
@pytest.mark.parametrize("blocks", [[0, 1, 2, 3], [5, 1, 9, 0]], ids=["run", "scattered"])
@pytest.mark.parametrize("keeps", [False, True], ids=["", "keeps hidden"])
def test_commit_moves_the_accepted_rows(
    kind: Kind, blocks: list[int], offsets: list[int], kept: list[int], *, keeps: bool
) -> None:
    cache = kind.make()
    block_table = BlockTable(blocks)
    if keeps:
        cache.save_feature(2, cache)
    block_table.update_derived()
    for block in blocks:
        cache.allocator.references[block] = 1
    write(cache, block_table, [*LEAD, 1, 2, 3])
    cache.commit_slots(block_table, range(len(LEAD) + 3))
    write(cache, block_table, list(range(10, 17)))
    before = every(cache)
    cache.commit_slots(block_table, offsets)
    assert held(cache, block_table) == [1, 2, 3, *kept]
    first = block_table.length - len(kept)
    moved = [first + place for place, offset in enumerate(offsets) if offset != place]
    rest = sorted(
        {*range(cache.num_slots)}
        - {*cache.slots(block_table, 0, block_table.length)[moved].tolist()}
    )
    for old, new in zip(before, every(cache), strict=True):
        assert np.array_equal(old[:, rest], new[:, rest], equal_nan=True)


@pytest.mark.parametrize("seed", range(6))
def test_commit_of_many_rows(kind: Kind, seed: int) -> None:
    """Source and target slots overlap."""
    dice = random.Random(seed)
    cache = kind.make(40)
    cache.save_feature(1, cache)
    block_table = start_text(cache)
    draft = dice.sample(range(800), 100)
    write(cache, block_table, draft)
    kept = sorted(dice.sample(range(100), 60))
    cache.commit_slots(block_table, kept)
    assert held(cache, block_table) == [draft[i] for i in kept]


def test_moves_accept_arrays_that_are_not_contiguous(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contiguous copies of the arrays stay alive while the kernels read them."""
    cache = kind.make(40)
    block_table = start_text(cache)
    draft = list(range(100, 150))
    write(cache, block_table, draft)
    slots = cache.slots(block_table, block_table.length, block_table.length + len(draft))
    taken = list[Any]()
    if cache.kernels is not None:
        move = cache.kernels.library.pronk_move

        def busy(*arguments: Any) -> int:
            taken.extend(np.zeros(20, np.int64) for _ in range(100))
            return int(move(*arguments))

        monkeypatch.setattr(cache.kernels.library, "pronk_move", busy)
    source, target = np.array(
        [(slots[2 * place + 1], slots[place]) for place in range(20)], np.int64
    ).T
    cache.move(source, target)
    cache.commit_slots(block_table, range(20))
    assert held(cache, block_table) == draft[1:41:2]


def test_commit_after_a_resize_or_with_more_kept_outputs(kind: Kind) -> None:
    cache = kind.make(6)
    for change in (
        lambda: None,
        lambda: cache.resize(9),
        lambda: cache.save_feature(1, cache),
        lambda: cache.resize(7),
    ):
        before = cache.version
        change()
        for pool in (*cache.keys, *cache.values, *cache.features.values()):
            pool[...] = 0
        block_table = start_text(cache)
        write(cache, block_table, [1, 2, 3, 4])
        cache.commit_slots(block_table, [0, 2, 3])
        assert held(cache, block_table) == [1, 3, 4]
        assert cache.version == before + (cache.version != before)
        cache.release(block_table)
    assert cache.version == 4


def test_a_shared_block_is_copied_before_it_is_written(kind: Kind) -> None:
    cache = kind.make()
    cache.save_feature(2, cache)
    block_table = start_text(cache)
    lead = len(LEAD)
    write(cache, block_table, [1, 2, 3, 4, 5, 6])
    cache.commit_slots(block_table, range(6))
    other = cache.allocator.fork(block_table, lead + 6)
    third = cache.allocator.fork(block_table, lead + 5)
    write(cache, other, [20, 21, 22])
    cache.commit_slots(other, range(3))
    write(cache, block_table, [10])
    cache.commit_slots(block_table, range(1))
    write(cache, third, [30])
    cache.commit_slots(third, range(1))
    assert held(cache, block_table) == [1, 2, 3, 4, 5, 6, 10]
    assert held(cache, other) == [1, 2, 3, 4, 5, 6, 20, 21, 22]
    assert held(cache, third) == [1, 2, 3, 4, 5, 30]
    assert block_table.blocks[0] == other.blocks[0] == third.blocks[0]
    assert len({block_table.blocks[1], other.blocks[1], third.blocks[1]}) == 3
    assert cache.allocator.references[block_table.blocks[0]] == 3
    for each in (block_table, other, third):
        assert list(each.c_blocks) == each.blocks
    cache.release(block_table)
    assert held(cache, other) == [1, 2, 3, 4, 5, 6, 20, 21, 22]


def test_a_full_shared_block_is_not_copied(kind: Kind) -> None:
    cache = kind.make()
    block_table = BlockTable()
    count = 2 * SIZE
    write(cache, block_table, list(range(count)))
    cache.commit_slots(block_table, range(count))
    other = cache.allocator.fork(block_table, count)
    write(cache, other, [9])
    assert other.blocks[:2] == block_table.blocks
    assert cache.allocator.num_free == 12 - 3


def test_freed_blocks_are_poisoned_and_no_others(kind: Kind) -> None:
    cache = kind.make()
    block_table = BlockTable()
    size = SIZE
    for pool in (*cache.keys, *cache.values):
        pool[...] = 0
    count = 2 * size + 2
    write(cache, block_table, list(range(1, count + 1)))
    cache.commit_slots(block_table, range(count))
    other = cache.allocator.fork(block_table, size)
    cache.release_before(block_table, count - 1)
    for pool in every(cache):
        assert np.isnan(pool[:, size : 2 * size]).all()
        assert not np.isnan(pool)[:, [*range(size), *range(2 * size, 4 * size)]].any()
    assert read(cache, block_table, 2 * size, count) == [count - 1, count]
    assert read(cache, other, 0, size) == list(range(1, size + 1))
    cache.release(block_table)
    cache.release(other)
    for pool in every(cache):
        assert np.isnan(pool[:, : 3 * size]).all()
        assert not np.isnan(pool[:, 3 * size :]).any()


@dataclass
class Text:
    """A block table and the tokens that the cache must hold for it."""

    block_table: BlockTable = field(default_factory=BlockTable)
    tokens: list[int] = field(default_factory=list)


def assert_all_readable(cache: PagedCache, texts: list[Text]) -> None:
    for text in texts:
        assert text.block_table.length == len(text.tokens)
        assert list(text.block_table.c_blocks) == text.block_table.blocks
        start = text.block_table.num_released * cache.block_size
        if start < len(text.tokens):
            assert read(cache, text.block_table, start, len(text.tokens)) == text.tokens[start:]


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(kind: Kind, seed: int) -> None:
    """Requests write, commit, fork, roll back and release; each reads its own tokens only."""
    dice = random.Random(seed)
    cache = kind.make(30)
    texts = list[Text]()
    value = 0
    size = SIZE
    for step in range(150):
        if not texts or (dice.random() < 0.15 and cache.allocator.num_free > 12):
            texts.append(Text())
        text = dice.choice(texts)
        block_table = text.block_table
        operation = dice.random()
        if operation < 0.6 and cache.allocator.num_free > 6:
            draft = [(value := value + 1) % 10_000 for _ in range(dice.randint(1, 2 * size + 1))]
            write(cache, block_table, draft)
            kept = sorted(dice.sample(range(len(draft)), dice.randint(0, len(draft))))
            cache.commit_slots(block_table, kept)
            text.tokens += [draft[i] for i in kept]
        elif operation < 0.7 and len(text.tokens) > block_table.num_released * size:
            count = dice.randint(block_table.num_released * size, len(text.tokens))
            texts.append(Text(cache.allocator.fork(block_table, count), text.tokens[:count]))
        elif operation < 0.8 and block_table.num_released * size < len(text.tokens):
            cache.release_before(block_table, dice.randint(0, len(text.tokens)))
        elif operation < 0.9:
            count = dice.randint(max(0, len(text.tokens) - 2), len(text.tokens))
            if count >= block_table.num_released * size:
                cache.rollback(block_table, count)
                del text.tokens[count:]
        else:
            cache.release(block_table)
            texts.remove(text)
        assert_all_readable(cache, texts if step % 10 == 9 else texts[-2:])
    for text in texts:
        cache.release(text.block_table)
    assert cache.allocator.num_free == 30
    assert all(np.isnan(pool).all() for pool in every(cache))


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        (10**12, 10**12),
        ("1", 1),
        ("500MB", 500 * 10**6),
        ("500 mb", 500 * 10**6),
        ("2GiB", 2 * 2**30),
        (" 1.5 GiB ", 3 * 2**29),
        ("64k", 64_000),
        ("64KiB", 65_536),
        ("3B", 3),
        ("2G", 2 * 10**9),
        ("2Gi", 2 * 2**30),
    ],
)
def test_memory_sizes(value: str | int, size: int) -> None:
    assert parse_memory(value) == size


@pytest.mark.parametrize(
    "value",
    [0, -1, True, False, "", "GB", "-1GB", "0", "0.0GB", "1 TB", "1e9", "two", "1,5G", "nan"],
)
def test_memory_sizes_that_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match="kv_memory: expected a positive number") as caught:
        parse_memory(value)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


def blocks(dtype: DType, memory: str | int | None, requests: int) -> int:
    """Return the number of blocks for ``kv_memory=memory``."""
    make_pool = partial(PagedCache, kernels=kernels())
    pool = budget.KVBudget(memory, requests).add(CONFIG, dtype, make_pool)
    assert pool.kernels is kernels()
    assert (
        sum(each.nbytes for each in (*pool.keys, *pool.values))
        == pool.num_slots * pool.bytes_per_token
    )
    return pool.allocator.num_blocks


def test_blocks_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache fills the budget; without a budget it holds all requests, within a quarter of the
    memory.
    """
    # keys and values, layers, heads, size of a head, bytes, tokens
    block = 2 * 2 * 2 * 6 * 4 * BLOCK_SIZE
    assert kv_bytes_per_token(CONFIG, FLOAT32) * BLOCK_SIZE == block
    assert kv_bytes_per_token(CONFIG, INT8) * 4 * 6 == kv_bytes_per_token(CONFIG, FLOAT32) * (6 + 4)
    # Heads of 6 are padded to a group of 32: 16 bytes of codes and a scale of 2 bytes.
    assert kv_bytes_per_token(CONFIG, INT4) * 4 * 6 == kv_bytes_per_token(CONFIG, FLOAT32) * 18
    assert blocks(FLOAT32, block, 9) == 1
    assert blocks(FLOAT32, 10 * block - 1, 9) == 9
    assert blocks(BFLOAT16, 10 * block, 9) == 20
    with pytest.raises(
        OptionError, match=f"kv_memory: expected at least {block} bytes.*found '1k'"
    ):
        blocks(FLOAT32, "1k", 9)
    needed = 3 * math.ceil((CONFIG.context + 128) / BLOCK_SIZE)
    assert blocks(FLOAT32, None, 3) == needed
    monkeypatch.setattr(budget, "machine_memory", lambda: 4 * 10 * block)
    assert blocks(FLOAT32, None, 3) == 10
    monkeypatch.setattr(budget, "machine_memory", lambda: 100)
    assert blocks(FLOAT32, None, 3) == 1


def test_default_size_without_sysconf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no ``os.sysconf``: the default is that of a machine with 8 GiB."""
    monkeypatch.delattr(os, "sysconf")
    assert budget.machine_memory() is None
    assert budget.KVBudget(None, 1)._max_bytes == 2 << 30


def test_pools_share_the_budget() -> None:
    """A second cache takes memory from the first one; both have the same number of blocks."""
    block = kv_bytes_per_token(CONFIG, FLOAT32) * BLOCK_SIZE
    memory = budget.KVBudget(10 * block, 9)
    make = partial(PagedCache, kernels=kernels())
    target = memory.add(CONFIG, FLOAT32, make)
    block_table = BlockTable()
    target.prepare(block_table, 9 * BLOCK_SIZE)
    with pytest.raises(
        OptionError, match="expected no running request while a draft model is added"
    ):
        memory.add(CONFIG, BFLOAT16, make)
    target.release(block_table)
    draft = memory.add(CONFIG, BFLOAT16, make)
    assert target.allocator.num_blocks == draft.allocator.num_blocks == 6  # 10 / 1.5
    assert all(len(pool[0]) == target.num_slots for pool in target.values)
    target.prepare(block_table, 6 * BLOCK_SIZE)
    with pytest.raises(CacheFullError):
        target.prepare(block_table, 6 * BLOCK_SIZE + 1)
    target.release(block_table)
    del draft
    gc.collect()
    assert memory.add(CONFIG, BFLOAT16, make).allocator.num_blocks == 6, (
        "the memory of the first draft is free again"
    )
    with pytest.raises(OptionError, match="kv_memory: expected at least"):
        budget.KVBudget(block, 9).add(
            replace(CONFIG, num_layers=7, windows=(None,) * 7), FLOAT32, make
        )


@pytest.mark.parametrize("kv_dtype", [INT8, INT4], ids=str)
def test_quantized_slots_are_exported_and_moved_as_a_whole(kv_dtype: DType) -> None:
    dice = np.random.default_rng(0)
    source, target = (
        make_cache(CONFIG, FLOAT32, num_blocks=4, block_size=SIZE, kv_dtype=kv_dtype)
        for _ in range(2)
    )
    for pool in (*source.keys, *source.values):
        pool[...] = dice.integers(-128, 128, pool.shape)
    slots = np.array([3, 17, 20])
    stored = source.export_slots(slots)
    assert stored.shape == (3, source.bytes_per_token)
    target.import_slots(np.array([40, 5, 2]), stored)
    assert np.array_equal(target.export_slots(np.array([40, 5, 2])), stored)
    target.move(np.array([40, 5]), np.array([5, 63]))
    assert np.array_equal(target.export_slots(np.array([5, 63, 2])), stored)
