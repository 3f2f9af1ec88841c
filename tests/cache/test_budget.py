"""The memory budget of KV pools with states of recurrent layers."""

import gc
import itertools
from dataclasses import replace
from functools import partial

import pytest

from checkpoints import MakeCheckpoint
from pronk.base.arrays import FLOAT32, INT8, DType
from pronk.base.errors import OptionError
from pronk.cache import budget
from pronk.cache.blocks import max_held_blocks
from pronk.cache.budget import (
    BLOCK_SIZE,
    KVBudget,
    default_kv_bytes,
    full_context_blocks,
    request_memory,
)
from pronk.cache.layout import kv_bytes_per_token
from pronk.cache.paged import PagedCache
from pronk.cache.states import StateCounts, count_state_bytes, count_states
from pronk.checkpoint.config import ModelConfig, RecurrentConfig
from pronk.models.loader import read_config
from tiny_models import kernels, tiny_config

DENSE = tiny_config(windows=(None,) * 3)
# A state is as large as about 30 updates, as in Qwen3.5.
RECURRENT = RecurrentConfig((True, False, True), 2, 4, key_dim=128, value_dim=128, taps=4)
CONFIG = replace(DENSE, recurrent=RECURRENT)
ALL_RECURRENT = replace(CONFIG, recurrent=replace(RECURRENT, layers=(True,) * 3))
BLOCK = kv_bytes_per_token(CONFIG, FLOAT32) * BLOCK_SIZE
MOST = count_state_bytes(CONFIG, count_states(CONFIG, 8, 1 << 40, share_prefixes=True))
FEWEST = count_state_bytes(CONFIG, count_states(CONFIG, 8, 0, share_prefixes=True))


def add(memory: KVBudget, config: ModelConfig = CONFIG) -> PagedCache:
    """Return a new pool with a prefix cache."""
    return memory.add(config, FLOAT32, partial(PagedCache, kernels=kernels()), share_prefixes=True)


def counts_of(pool: PagedCache) -> StateCounts:
    """Return the numbers of states of a pool."""
    assert pool.states is not None
    return pool.states.counts


@pytest.mark.parametrize("kv_dtype", [FLOAT32, INT8])
@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "gemma3_text", "gemma4_text", "lfm2", "qwen3_5_text", "deepseek_v3"],
)
def test_memory_of_a_request_is_that_of_a_pool(
    family: str, kv_dtype: DType, checkpoint: MakeCheckpoint
) -> None:
    """A pool with the blocks and the state of one request has as many bytes."""
    config = read_config(checkpoint(family))
    length = 200
    found = request_memory(config, FLOAT32, length, 32, kv_dtype)
    num_blocks = max_held_blocks(length, config.window, 32, BLOCK_SIZE)
    options = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE}
    pool = PagedCache(config, kernels=kernels(), **options, dtype=FLOAT32, kv_dtype=kv_dtype)
    stored = sum(each.nbytes for each in (*pool.keys, *pool.values))
    assert found.kv_bytes * pool.num_slots == stored * num_blocks * BLOCK_SIZE
    assert found.kv_bytes > 0
    if pool.states is not None:
        pool.resize_states(StateCounts(requests=1, checkpoints=0, updates=0))
    assert found.state_bytes == pool.fixed_bytes
    assert (found.state_bytes > 0) == (config.recurrent is not None)


@pytest.mark.parametrize("size", [8 * FEWEST, MOST, 3 * MOST, 20 * MOST])
def test_states_get_at_most_half_of_what_other_states_leave(size: int) -> None:
    memory = KVBudget(size, 8)
    pools = list[PagedCache]()
    left = size
    for number in range(2):
        pools.append(add(memory))
        assert min(left // 2, MOST) * 2 // 3 < pools[-1].fixed_bytes <= max(left // 2, FEWEST)
        left -= pools[-1].fixed_bytes
        num_blocks = {pool.allocator.num_blocks for pool in pools}
        assert num_blocks == {left // ((number + 1) * BLOCK)}


def test_a_third_pool_gets_the_memory_of_a_deleted_one() -> None:
    memory = KVBudget(6 * MOST, 8)
    target = add(memory)
    draft = add(memory)
    expected = counts_of(draft), target.allocator.num_blocks
    del draft
    gc.collect()
    draft = add(memory)
    assert (counts_of(draft), target.allocator.num_blocks) == expected


def test_states_that_leave_no_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = f"{FEWEST + BLOCK} bytes, one block of {BLOCK_SIZE} tokens and {FEWEST} of states"
    for size in (FEWEST, FEWEST + BLOCK - 1):
        with pytest.raises(OptionError, match=f"kv_memory: expected at least {needed}.*{size}"):
            add(KVBudget(size, 8))
        monkeypatch.setattr(budget, "machine_memory", lambda size=size: 4 * size)
        with pytest.raises(OptionError, match=f"{needed}.*; found {size} by default; set"):
            add(KVBudget(None, 8))
    for memory in (KVBudget(FEWEST + BLOCK, 8), KVBudget(None, 8, memory=4 * (FEWEST + BLOCK))):
        assert add(memory).allocator.num_blocks == 1
    assert add(KVBudget(None, 8, memory=4), DENSE).allocator.num_blocks == 1


def test_a_second_pool_of_the_default_size_is_refused() -> None:
    memory = KVBudget(None, 8, memory=4 * (FEWEST + BLOCK))
    pool = add(memory)
    with pytest.raises(OptionError, match=f"{2 * (FEWEST + BLOCK)} bytes.*by default"):
        add(memory)
    assert pool.allocator.num_blocks == 1


@pytest.mark.parametrize("max_requests", [1, 3, 8, 40])
def test_checkpoints_without_a_prefix_cache(max_requests: int) -> None:
    """Only two are left, and requests get the memory."""
    for size in (0, FEWEST, MOST // 3, MOST, 4 * MOST):
        shared = count_states(CONFIG, max_requests, size, share_prefixes=True)
        alone = count_states(CONFIG, max_requests, size, share_prefixes=False)
        assert alone.checkpoints <= 2
        assert alone.checkpoints <= shared.checkpoints <= 16
        assert shared.requests <= alone.requests <= max_requests + 1
        assert alone.requests >= min(max_requests + 1, sum(shared[:2]) - 2)
    assert (shared.checkpoints, alone.checkpoints) == (16, 2)
    pool = KVBudget(4 * MOST, max_requests).add(
        CONFIG, FLOAT32, partial(PagedCache, kernels=kernels())
    )
    assert counts_of(pool).checkpoints == 2


def test_blocks_of_recurrent_layers_alone_need_no_memory() -> None:
    full = full_context_blocks(CONFIG, 8)
    states = count_state_bytes(
        ALL_RECURRENT, count_states(ALL_RECURRENT, 8, 1 << 40, share_prefixes=True)
    )
    for memory in (KVBudget(None, 8), KVBudget(3 * states, 8)):
        pool = add(memory, ALL_RECURRENT)
        assert (pool.fixed_bytes, pool.allocator.num_blocks) == (states, full)
    draft = add(memory, DENSE)
    block = kv_bytes_per_token(DENSE, FLOAT32) * BLOCK_SIZE
    assert pool.allocator.num_blocks == draft.allocator.num_blocks == 2 * states // block
    with pytest.raises(OptionError, match=r"expected at least \d+ bytes.*states"):
        add(KVBudget(1, 8), ALL_RECURRENT)


@pytest.mark.parametrize(
    ("config", "shares"), [*itertools.product([DENSE, CONFIG, ALL_RECURRENT], [False, True])]
)
def test_the_default_size(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, *, shares: bool
) -> None:
    """A budget of this size has nearly the states of one without a size; a limit is kept."""

    def default(limit: int | None) -> int:
        return default_kv_bytes(config, FLOAT32, FLOAT32, 8, limit, share_prefixes=shares)

    def made(memory: KVBudget) -> PagedCache:
        make = partial(PagedCache, kernels=kernels())
        return memory.add(config, FLOAT32, make, share_prefixes=shares)

    monkeypatch.setattr(budget, "machine_memory", lambda: 1 << 30)
    explicit = made(KVBudget(default(None), 8))
    implicit = made(KVBudget(None, 8))
    assert explicit.fixed_bytes >= 0.8 * implicit.fixed_bytes
    assert explicit.allocator.num_blocks >= implicit.allocator.num_blocks
    for limit in (2 * FEWEST, MOST, 3 * MOST):
        size = default(limit)
        assert size <= limit
        assert made(KVBudget(size, 8)).allocator.num_blocks >= 1
