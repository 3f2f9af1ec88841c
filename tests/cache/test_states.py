"""States of short convolutions in the paged KV cache: sizes, commits, copies, bytes, and freed
blocks.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from pronk.base.arrays import BFLOAT16, FLOAT32, INT8, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.cache.budget import BLOCK_SIZE, KVBudget
from pronk.cache.layout import kv_bytes_per_token, state_bytes
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import ConvolutionConfig
from tiny_models import kernels, make_cache, read_kv, tiny_config

SIZE = 16
CONFIG = replace(
    tiny_config(heads=2, kv_heads=2, head_dim=6, windows=(None,) * 3),
    convolution=ConvolutionConfig(taps=3, layers=(True, False, True)),
)
HIDDEN = CONFIG.hidden_size
CACHES: dict[str, dict[str, Any]] = {
    "kernels": {"dtype": FLOAT32},
    "kernels, bfloat16": {"dtype": BFLOAT16},
    "kernels, 8 bits of bfloat16": {"dtype": BFLOAT16, "kv_dtype": INT8},
}


@pytest.fixture(params=CACHES)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CACHES[request.param]


def made(options: dict[str, Any], **more: Any) -> PagedCache:
    return make_cache(CONFIG, num_blocks=6, block_size=SIZE, **options, **more)


def write(cache: PagedCache, table: BlockTable, values: list[int]) -> None:
    """Write states that repeat each value, plus the number of the layer, after the committed
    tokens.
    """
    cache.prepare(table, table.length + len(values))
    slots = cache.slots(table, table.length, table.length + len(values))
    for layer in (0, 2):
        for slot, value in zip(slots.tolist(), values, strict=True):
            cache.keys[layer][0, slot] = value + layer


def held(cache: PagedCache, table: BlockTable) -> list[int]:
    """Return the values of a text, after a check that both layers have them."""
    states = [read_kv(cache, layer, table)[0].astype(np.float32) for layer in (0, 2)]
    assert all(each.shape == (1, table.length, HIDDEN) for each in states)
    assert np.array_equal(states[0] + 2, states[1])
    assert np.array_equal(states[0][0], np.repeat(states[0][0, :, :1], HIDDEN, axis=1))
    values: list[int] = states[0][0, :, 0].astype(int).tolist()
    return values


def test_sizes(options: dict[str, Any]) -> None:
    cache = made(options)
    for layer in (0, 2):
        assert tuple(cache.keys[layer].shape) == (1, cache.num_slots, HIDDEN)
        assert len(cache.values[layer]) == 0
        assert read_kv(cache, layer, BlockTable())[1].size == 0
    dtype: DType = options["dtype"]
    keys = kv_bytes_per_token(CONFIG, options.get("kv_dtype", dtype))
    assert keys == 2 * 2 * (6 + 4 if "kv_dtype" in options else 6 * dtype.itemsize)
    assert state_bytes(CONFIG, dtype) == 2 * HIDDEN * dtype.itemsize
    assert cache.bytes_per_token == keys + state_bytes(CONFIG, dtype)
    if cache.kernels is not None:
        stored = sum(pool.nbytes for pool in (*cache.keys, *cache.values))
        assert stored == cache.num_slots * cache.bytes_per_token


def test_commit_moves_states(options: dict[str, Any]) -> None:
    cache = made(options)
    table = BlockTable()
    write(cache, table, [*range(1, 13)])
    cache.commit_slots(table, range(12))
    write(cache, table, [*range(20, 32)])  # across the end of a block
    cache.commit_slots(table, [0, 2, 3, 7, 8, 11])
    assert held(cache, table) == [*range(1, 13), 20, 22, 23, 27, 28, 31]
    cache.rollback(table, 14)
    write(cache, table, [40, 41])
    cache.commit_slots(table, [1])
    assert held(cache, table) == [*range(1, 13), 20, 22, 41]


def test_a_shared_block_is_copied_before_it_is_written(options: dict[str, Any]) -> None:
    cache = made(options)
    table = BlockTable()
    write(cache, table, [*range(20)])
    cache.commit_slots(table, range(20))
    other = cache.allocator.fork(table, 18)
    other.length = 18
    write(cache, other, [90, 91])
    cache.commit_slots(other, range(2))
    assert held(cache, table) == [*range(20)]
    assert held(cache, other) == [*range(18), 90, 91]


def test_stored_bytes(options: dict[str, Any]) -> None:
    """Slots are exported to workers, blocks to the disk."""
    one = made(options)
    other = made(options)
    table = BlockTable()
    copied = BlockTable()
    write(one, table, [*range(SIZE)])
    one.commit_slots(table, range(SIZE))
    stored = one.export_slots(one.slots(table, 0, SIZE))
    assert stored.shape == (SIZE, one.bytes_per_token)
    other.prepare(copied, 2 * SIZE)
    other.import_slots(other.slots(copied, 0, SIZE), stored)
    block = one.read_block(table.blocks[0])
    assert len(block) == SIZE * one.bytes_per_token
    other.write_block(copied.blocks[1], block, [0] * SIZE)
    copied.length = 2 * SIZE
    assert held(other, copied) == [*range(SIZE)] * 2


def test_freed_blocks_are_poisoned(options: dict[str, Any]) -> None:
    cache = made(options)
    table = BlockTable()
    write(cache, table, [1] * SIZE)
    block = table.blocks[0]
    cache.release(table)
    states: Array = np.asarray(cache.keys[2][0, block * SIZE : (block + 1) * SIZE]).astype(
        np.float32
    )
    assert (np.isnan(states) | (states > 1e3)).all()


def test_states_count_in_the_budget() -> None:
    block = (kv_bytes_per_token(CONFIG, INT8) + state_bytes(CONFIG, BFLOAT16)) * BLOCK_SIZE
    make_pool = partial(PagedCache, kernels=kernels())
    pool = KVBudget(5 * block + 1, 1).add(CONFIG, BFLOAT16, make_pool, INT8)
    assert pool.allocator.num_blocks == 5
