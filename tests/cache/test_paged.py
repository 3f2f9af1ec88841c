"""The pool: rows land where the table says, commits move them, shared blocks are copied, and nothing else changes."""

from __future__ import annotations

import gc
import math
import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from models import CPU, POISON, make_cache, tiny_config
from pronk.cache import budget
from pronk.cache.blocks import BlockTable
from pronk.cache.budget import BLOCK_SIZE, parse_memory
from pronk.cache.paged import KV_ALIGNMENT, PagedCache
from pronk.errors import CacheFullError, OptionError

SIZE = 4
CONFIG = tiny_config(heads=2, kv_heads=2, head_dim=3)


def make(blocks: int = 12) -> PagedCache:
    return make_cache(CONFIG, torch.float32, num_blocks=blocks, block_size=SIZE)


def rows(values: list[int]) -> Tensor:
    """``[rows, kv_heads, head_dim]`` that are told apart by their values."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 2, 3)


def write(cache: PagedCache, table: BlockTable, values: list[int]) -> None:
    """Draft ``values`` after the committed tokens, in every layer; values are the keys' negatives."""
    start = table.length
    cache.prepare(table, start + len(values))
    slots = torch.from_numpy(cache.slots(table, start, start + len(values)))
    for layer in range(len(cache.keys)):
        cache.write(layer, slots, rows(values) + layer, -rows(values) - layer)


def read(cache: PagedCache, table: BlockTable, start: int, stop: int) -> list[int]:
    """What was written there; the same in all layers and heads, in keys and values."""
    where = cache.where(table, start, stop)
    every = [pool[:, where] - layer for layer, pool in enumerate(cache.keys)]
    every += [-pool[:, where] - layer for layer, pool in enumerate(cache.values)]
    for found in every:
        assert torch.equal(found, every[0][:1, :, :1].expand_as(found))
    return [int(value) for value in every[0][0, :, 0]]


def test_the_memory_map() -> None:
    cache = make(5)
    assert cache.num_slots == 5 * SIZE + KV_ALIGNMENT
    assert cache.spare_slot == cache.num_slots - 1
    assert len(cache.keys) == len(cache.values) == 2
    for pool in (*cache.keys, *cache.values):
        assert pool.shape == (2, cache.num_slots, 3)
        assert bool((pool == POISON).all())
    fresh = PagedCache(CONFIG, num_blocks=5, block_size=SIZE, dtype=torch.bfloat16, device=CPU)
    assert all(pool.dtype == torch.bfloat16 and not pool.any() for pool in (*fresh.keys, *fresh.values))


def test_the_example_of_the_docstring() -> None:
    cache = make_cache(CONFIG, torch.float32, num_blocks=10, block_size=16)
    table = BlockTable(blocks=[7, 8], released=2, length=40)
    assert cache.slots(table, 37, 38).tolist() == [7 * 16 + 5]
    assert cache.slots(table, 32, 64).tolist() == list(range(112, 144))


def test_slots_of_scattered_blocks() -> None:
    cache = make()
    table = BlockTable(blocks=[7, 2, 3], released=1, in_run=False)
    assert cache.slots(table, 4, 16).tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 12, 13, 14, 15]
    # What the table does not hold is somewhere that can be read.
    outside = cache.slots(table, 0, 24)
    assert outside[4:16].tolist() == cache.slots(table, 4, 16).tolist()
    assert all(0 <= slot < cache.num_slots for slot in outside)
    assert isinstance(cache.where(table, 0, 24), Tensor)


def test_views() -> None:
    """A run is read as a view, past its end too, and before its start if there is something before."""
    cache = make()
    assert cache.where(BlockTable(blocks=[2, 3]), 0, 8) == slice(8, 16)
    assert cache.where(BlockTable(blocks=[2, 3]), 0, 512) == slice(8, 520)
    assert cache.where(BlockTable(blocks=[10, 11]), 0, 512) == slice(40, 552)
    assert cache.where(BlockTable(blocks=[3, 4], released=2), 0, 512) == slice(4, 516)
    before = cache.where(BlockTable(blocks=[0, 1], released=1), 0, 12)
    assert isinstance(before, Tensor)
    assert before[4:].tolist() == list(range(8))
    assert 0 <= int(before.min()) <= int(before.max()) < cache.num_slots


def test_drafts_are_written_behind_the_committed_tokens() -> None:
    cache, table = make(), BlockTable()
    write(cache, table, [1, 2, 3])
    assert (table.length, len(table.blocks)) == (0, 1)
    cache.commit(table, range(3))
    write(cache, table, [4, 5, 6, 7])
    cache.commit(table, range(2))
    assert (table.length, read(cache, table, 0, 5)) == (5, [1, 2, 3, 4, 5])
    write(cache, table, [8])
    cache.commit(table, [0])
    assert read(cache, table, 0, 6) == [1, 2, 3, 4, 5, 8]


@pytest.mark.parametrize(
    ("offsets", "kept"),
    [
        ([], []),
        ([0], [10]),
        ([0, 1, 2], [10, 11, 12]),
        ([0, 2, 5], [10, 12, 15]),
        ([3], [13]),
        ([0, 4, 5, 6], [10, 14, 15, 16]),
    ],
)
@pytest.mark.parametrize("blocks", [[0, 1, 2, 3], [5, 1, 9, 0]], ids=["run", "scattered"])
def test_commit_moves_the_accepted_rows(blocks: list[int], offsets: list[int], kept: list[int]) -> None:
    cache, table = make(), BlockTable(blocks, in_run=blocks[1] == 1 and blocks[0] == 0)
    for block in blocks:
        cache.allocator.references[block] = 1
    write(cache, table, [1, 2, 3])
    cache.commit(table, range(3))
    write(cache, table, list(range(10, 17)))
    before = [pool.clone() for pool in (*cache.keys, *cache.values)]
    cache.commit(table, offsets)
    assert table.length == 3 + len(kept)
    assert read(cache, table, 0, table.length) == [1, 2, 3, *kept]
    if offsets == list(range(len(offsets))):  # nothing had to be moved
        assert all(map(torch.equal, before, (*cache.keys, *cache.values)))


def test_rollback() -> None:
    cache, table = make(), BlockTable()
    write(cache, table, [1, 2, 3, 4, 5, 6])
    cache.commit(table, range(6))
    cache.rollback(table, 2)
    write(cache, table, [7, 8])
    cache.commit(table, range(2))
    assert (table.length, read(cache, table, 0, 4)) == (4, [1, 2, 7, 8])


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    cache, table = make(), BlockTable()
    write(cache, table, [1, 2, 3, 4, 5, 6])
    cache.commit(table, range(6))
    other, third = cache.fork(table, 6), cache.fork(table, 5)
    write(cache, other, [20, 21, 22])
    cache.commit(other, range(3))
    write(cache, table, [10])
    cache.commit(table, range(1))
    write(cache, third, [30])
    cache.commit(third, range(1))
    assert read(cache, table, 0, 7) == [1, 2, 3, 4, 5, 6, 10]
    assert read(cache, other, 0, 9) == [1, 2, 3, 4, 5, 6, 20, 21, 22]
    assert read(cache, third, 0, 6) == [1, 2, 3, 4, 5, 30]
    assert table.blocks[0] == other.blocks[0] == third.blocks[0]
    assert len({table.blocks[1], other.blocks[1], third.blocks[1]}) == 3
    assert cache.allocator.references[table.blocks[0]] == 3
    cache.release(table)
    assert read(cache, other, 0, 9) == [1, 2, 3, 4, 5, 6, 20, 21, 22]


def test_a_full_shared_block_is_not_copied() -> None:
    cache, table = make(), BlockTable()
    write(cache, table, list(range(8)))
    cache.commit(table, range(8))
    other = cache.fork(table, 8)
    write(cache, other, [9])
    assert other.blocks[:2] == table.blocks
    assert cache.allocator.num_free == 12 - 3


def test_freed_blocks_are_poisoned_and_no_others() -> None:
    cache, table = make(), BlockTable()
    for pool in (*cache.keys, *cache.values):
        pool.zero_()
    write(cache, table, list(range(1, 11)))
    cache.commit(table, range(10))
    other = cache.fork(table, 4)
    cache.release_before(table, 9)
    for pool in (*cache.keys, *cache.values):
        assert bool((pool[:, 4:8] == POISON).all())
        assert not bool((pool == POISON)[:, [*range(4), *range(8, 16)]].any())
    assert read(cache, table, 8, 10) == [9, 10]
    assert read(cache, other, 0, 4) == [1, 2, 3, 4]
    cache.release(table)
    cache.release(other)
    for pool in (*cache.keys, *cache.values):
        assert bool((pool[:, :12] == POISON).all())
        assert not bool((pool[:, 12:] == POISON).any())


@dataclass
class Text:
    """A request as it should be: its table beside the tokens that it must read."""

    table: BlockTable = field(default_factory=BlockTable)
    tokens: list[int] = field(default_factory=list)


def assert_all_readable(cache: PagedCache, texts: list[Text]) -> None:
    for text in texts:
        assert text.table.length == len(text.tokens)
        start = text.table.released * SIZE
        if start < len(text.tokens):
            assert read(cache, text.table, start, len(text.tokens)) == text.tokens[start:]


@pytest.mark.parametrize("seed", range(12))
def test_random_operations(seed: int) -> None:
    """Many requests drafting, committing, forking, sliding and leaving: each reads its own tokens, and only those."""
    dice, cache, texts, value = random.Random(seed), make(30), list[Text](), 0
    for _ in range(150):
        if not texts or (dice.random() < 0.15 and cache.allocator.num_free > 12):
            texts.append(Text())
        text = dice.choice(texts)
        table, operation = text.table, dice.random()
        if operation < 0.6 and cache.allocator.num_free > 6:
            draft = [value := value + 1 for _ in range(dice.randint(1, 9))]
            write(cache, table, draft)
            kept = sorted(dice.sample(range(len(draft)), dice.randint(0, len(draft))))
            cache.commit(table, kept)
            text.tokens += [draft[i] for i in kept]
        elif operation < 0.7 and len(text.tokens) > table.released * SIZE:
            count = dice.randint(table.released * SIZE, len(text.tokens))
            texts.append(Text(cache.fork(table, count), text.tokens[:count]))
        elif operation < 0.8 and table.released * SIZE < len(text.tokens):
            cache.release_before(table, dice.randint(0, len(text.tokens)))
        elif operation < 0.9:
            count = dice.randint(max(0, len(text.tokens) - 2), len(text.tokens))
            if count >= table.released * SIZE:
                cache.rollback(table, count)
                del text.tokens[count:]
        else:
            cache.release(table)
            texts.remove(text)
        assert_all_readable(cache, texts)
    for text in texts:
        cache.release(text.table)
    assert cache.allocator.num_free == 30
    assert bool((cache.keys[0] == POISON).all())


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
    "value", [0, -1, True, False, "", "GB", "-1GB", "0", "0.0GB", "1 TB", "1e9", "two", "1,5G", "nan"]
)
def test_memory_sizes_that_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match="kv_memory: expected a positive number") as caught:
        parse_memory(value)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


def blocks(dtype: torch.dtype, memory: str | int | None, requests: int) -> int:
    return budget.KVBudget(memory, requests, CPU).add(CONFIG, dtype).allocator.num_blocks


def test_blocks_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the budget holds; without one, what the requests need, within a quarter of the memory."""
    block = 2 * 2 * 2 * 3 * 4 * BLOCK_SIZE  # keys and values, layers, heads, size of a head, bytes, tokens
    assert CONFIG.kv_bytes_per_token(4) * BLOCK_SIZE == block
    assert blocks(torch.float32, block, 9) == 1
    assert blocks(torch.float32, 10 * block - 1, 9) == 9
    assert blocks(torch.bfloat16, 10 * block, 9) == 20
    with pytest.raises(OptionError, match=f"kv_memory: expected at least {block} bytes.*found '1k'"):
        blocks(torch.float32, "1k", 9)
    needed = 3 * (math.ceil(CONFIG.context / BLOCK_SIZE) + 1)
    assert blocks(torch.float32, None, 3) == needed
    monkeypatch.setattr(budget, "_memory", lambda _: 4 * 10 * block)
    assert blocks(torch.float32, None, 3) == 10
    monkeypatch.setattr(budget, "_memory", lambda _: 100)
    assert blocks(torch.float32, None, 3) == 1


def test_pools_share_the_budget() -> None:
    """A second pool takes its share from the first; both have the same number of blocks, whatever their layers take."""
    block = CONFIG.kv_bytes_per_token(4) * BLOCK_SIZE
    memory = budget.KVBudget(10 * block, 9, CPU)
    target = memory.add(CONFIG, torch.float32)
    table = BlockTable()
    target.prepare(table, 9 * BLOCK_SIZE)
    with pytest.raises(OptionError, match="expected no request while a draft model joins"):
        memory.add(CONFIG, torch.bfloat16)
    target.release(table)
    draft = memory.add(CONFIG, torch.bfloat16)
    assert target.allocator.num_blocks == draft.allocator.num_blocks == 6  # 6.67 of one and a half
    assert all(len(pool[0]) == target.num_slots for pool in target.keys)
    target.prepare(table, 6 * BLOCK_SIZE)
    with pytest.raises(CacheFullError):
        target.prepare(table, 6 * BLOCK_SIZE + 1)
    target.release(table)
    del draft
    gc.collect()
    assert memory.add(CONFIG, torch.bfloat16).allocator.num_blocks == 6, "the first draft's share is free again"
    with pytest.raises(OptionError, match="kv_memory: expected at least"):
        budget.KVBudget(block, 9, CPU).add(replace(CONFIG, num_layers=7, windows=(None,) * 7), torch.float32)
