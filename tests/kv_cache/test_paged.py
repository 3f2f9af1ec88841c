"""The paged KV cache: writes go to the slots of the table, commits move rows, shared blocks are copied.

Tests run with all layouts: rows for torch (blocks of 4), panels of 16 slots for the kernels, and both in 8 bits. Each
text begins four slots before the end of a block, so that expected values are the same in all layouts.
"""

import gc
import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle import dense_logits
from pronk.errors import CacheFullError, OptionError
from pronk.execution.attention import Segment
from pronk.execution.model_runner import ForwardJob, ModelRunner
from pronk.kv_cache import budget
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.budget import BLOCK_SIZE, parse_memory
from pronk.kv_cache.layout import kv_bytes_per_token
from pronk.kv_cache.paged import PagedCache
from pronk.speculation.tree import TokenTree
from tiny_models import CPU, kernels, make_cache, text_logits, tiny_config, tiny_decoder

CONFIG = tiny_config(heads=2, kv_heads=2, head_dim=6)
HIDDEN = CONFIG.hidden_size
MARGIN = 16


@dataclass(frozen=True)
class Kind:
    """A layout of the KV cache and a block size."""

    packed: bool
    dtype: torch.dtype
    size: int
    kv_dtype: torch.dtype | None = None

    def make(self, blocks: int = 12) -> PagedCache:
        shape = {"num_blocks": blocks, "block_size": self.size}
        return make_cache(CONFIG, self.dtype, **shape, packed=self.packed, kv_dtype=self.kv_dtype)

    @property
    def lead(self) -> list[int]:
        """Return the first tokens of a text, up to four slots before the end of its first block."""
        return list(range(900, 900 + self.size - 4))

    def poisoned(self, tensor: Tensor) -> Tensor:
        return tensor.isnan() if self.packed else tensor > 1e3


KINDS = {
    "torch": Kind(False, torch.float32, 4),
    "torch, bfloat16": Kind(False, torch.bfloat16, 16),
    "kernels": Kind(True, torch.float32, 16),
    "kernels, bfloat16": Kind(True, torch.bfloat16, 16),
    "torch, 8 bits": Kind(False, torch.float32, 4, torch.int8),
    "kernels, 8 bits": Kind(True, torch.float32, 16, torch.int8),
    "kernels, 8 bits of bfloat16": Kind(True, torch.bfloat16, 16, torch.int8),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def rows(values: list[int], layer: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return keys ``[rows, 2, 6]`` with the numbers ``value // 100, value % 100, layer, head, 127, 0``.

    Numbers below 100 are exact in bfloat16; 127 makes the scale of 8-bit codes 1.
    """
    own = [[[v // 100, v % 100, layer, head, 127, 0] for head in range(2)] for v in values]
    return torch.tensor(own, dtype=dtype)


def outputs(values: list[int], layer: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return hidden states ``[rows, hidden]`` that repeat ``value // 100 + layer, value % 100 + layer``."""
    number = torch.tensor(values)[:, None]
    return (torch.cat((number // 100, number % 100), dim=1).repeat(1, HIDDEN // 2) + layer).to(dtype)


def write(cache: PagedCache, block_table: BlockTable, values: list[int]) -> None:
    """Write the rows of ``values`` after the committed tokens in every layer; V is the negated K."""
    start = block_table.length
    cache.prepare(block_table, start + len(values))
    slots = torch.from_numpy(cache.slots(block_table, start, start + len(values)))
    for layer in range(len(cache.keys)):
        keys = rows(values, layer, cache.dtype)
        cache.write(layer, slots, keys, -keys)
    for layer in cache.hidden:
        cache.write_hidden(layer, slots, outputs(values, layer, cache.dtype))


def start_text(cache: PagedCache, kind: Kind) -> BlockTable:
    block_table = BlockTable()
    if kind.lead:
        write(cache, block_table, kind.lead)
        cache.commit(block_table, range(len(kind.lead)))
    return block_table


def every(cache: PagedCache, where: slice | Tensor | None = None) -> list[Tensor]:
    """Return all pools as ``[heads, slots, size]``: K and V of each layer, then kept layer outputs."""
    where = slice(0, cache.num_slots) if where is None else where
    found = [pool for layer in range(len(cache.keys)) for pool in cache.read_slots(layer, where)]
    return found + [pool[:, where] for pool in cache.hidden.values()]


def read(cache: PagedCache, block_table: BlockTable, start: int, stop: int) -> list[int]:
    """Return the values of some tokens, after a check that all layers, heads and kept outputs have them."""
    found = [pool.float() for pool in every(cache, cache.slot_index(block_table, start, stop))]
    values: list[int] = (100 * found[0][0, :, 0] + found[0][0, :, 1]).round().long().tolist()
    for layer in range(len(cache.keys)):
        want = rows(values, layer).transpose(0, 1)
        assert torch.equal(found[2 * layer], want)
        assert torch.equal(found[2 * layer + 1], -want)
    for layer, pool in zip(cache.hidden, found[2 * len(cache.keys) :], strict=True):
        assert torch.equal(pool[0], outputs(values, layer))
    return values


def held(cache: PagedCache, block_table: BlockTable, kind: Kind) -> list[int]:
    """Return the values of a text without ``kind.lead``, which comes first."""
    found = read(cache, block_table, 0, block_table.length)
    assert found[: len(kind.lead)] == kind.lead
    return found[len(kind.lead) :]


def test_shapes_and_sizes_of_pools(kind: Kind) -> None:
    cache = kind.make(5)
    slots = cache.num_slots
    assert slots == 5 * kind.size + MARGIN
    assert len(cache.keys) == len(cache.values) == 2
    coded = kind.kv_dtype is not None
    values = (2, slots, 10 if coded else 6)
    panels = (2, slots // 16, 6, 16, 1) if kind.dtype == torch.float32 else (2, slots // 16, 3, 16, 2)
    panels = (2, slots // 16, 10, 16) if coded else panels
    assert all(pool.shape == (panels if kind.packed else values) for pool in cache.keys)
    assert all(pool.shape == values for pool in cache.values)
    assert sum(pool.nbytes for pool in (*cache.keys, *cache.values)) == slots * cache.bytes_per_token
    for pool in every(cache):
        assert pool.shape == (2, slots, 6)
        assert bool(kind.poisoned(pool).all())
    fresh = PagedCache(CONFIG, num_blocks=5, block_size=kind.size, dtype=torch.bfloat16, device=CPU)
    assert all(pool.dtype == torch.bfloat16 and not pool.any() for pool in (*fresh.keys, *fresh.values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_panels(dtype: torch.dtype) -> None:
    """Keys of 16 slots are stored dimension by dimension; in bfloat16, by pairs of dimensions."""
    cache = make_cache(CONFIG, dtype, num_blocks=3)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(2 * 48 * 6).view(2, 48, 6).remainder(251).to(dtype)
    cache.write(0, slots, keys.transpose(0, 1), -keys.transpose(0, 1))
    for head in range(2):
        for place, slot in enumerate(slots.tolist()):
            for d in range(6):
                panel = cache.keys[0][head, slot // 16]
                found = panel[d, slot % 16, 0] if dtype == torch.float32 else panel[d // 2, slot % 16, d % 2]
                assert found == keys[head, place, d]
    assert torch.equal(cache.read_slots(0, slots)[0], keys)
    assert torch.equal(cache.read_slots(0, slots)[1], -keys)
    assert torch.equal(cache.read_slots(0, slice(7, 30))[0], cache.read_slots(0, torch.arange(7, 30))[0])
    assert cache.read_slots(0, slice(48, 64))[0].isnan().all()
    with pytest.raises(AssertionError, match="panels of 16"):
        make_cache(CONFIG, dtype, block_size=24)


@pytest.mark.parametrize("packed", [True, False], ids=["kernels", "torch"])
def test_codes_of_8_bits(packed: bool) -> None:
    """Each key and value of each head is stored beside its scale; zeros stay zeros."""
    cache, slots = Kind(packed, torch.float32, 16, torch.int8).make(3), torch.randperm(48)
    keys, values = (
        torch.randn(2, 48, 2, 6, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 48)[:, None, None]
    )
    keys[5] = 0.0
    cache.write(1, slots, keys, values)
    for head in range(2):
        for token, slot in enumerate(slots.tolist()):
            for kept, row, panels in (
                (cache.keys[1], keys[token, head], packed),
                (cache.values[1], values[token, head], False),
            ):
                scale = row.abs().max() / 127.0
                codes = (row / scale).nan_to_num().round() if scale else row
                if panels:
                    panel = kept[head, slot // 16]
                    own = torch.cat((panel[:6, slot % 16], panel[6:].flatten()[slot % 16 * 4 : slot % 16 * 4 + 4]))
                else:
                    own = kept[head, slot]
                assert torch.equal(own[:6].float(), codes)
                assert own[6:].clone().view(torch.float32) == scale
    found = [each.transpose(0, 1) for each in cache.read_slots(1, slots)]
    for kept, given in zip(found, (keys, values), strict=True):
        assert bool(((kept - given).abs() <= given.abs().amax(-1, keepdim=True) * (0.5001 / 127)).all())
    assert not found[0][5].any()


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["plain", "8 bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_kernels_and_torch_write_the_same_rows(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    found = []
    for packed in (True, False):
        decoder = tiny_decoder(dtype, packed=packed)
        cache = make_cache(decoder.config, dtype, num_blocks=8, packed=packed, kv_dtype=kv_dtype)
        block_table = BlockTable()
        cache.prepare(block_table, 70)
        job = ForwardJob(Segment(block_table, TokenTree.chain(range(70))), range(70), 70)
        ModelRunner(decoder, cache).forward([job])
        cache.commit(block_table, range(70))
        found.append(cache.read(0, block_table))
        assert all(each.shape == (2, 70, 16) for each in found[-1])
    near = {"rtol": 0.0, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    if kv_dtype is not None:  # numbers that differ in the last bit may round to different codes
        near["atol"] += float(max(each.abs().max() for each in found[0])) / 127
    torch.testing.assert_close(*found, **near)
    assert text_logits(tiny_decoder(dtype), range(70), dtype).shape == (70, 131)


@pytest.mark.parametrize("packed", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"heads": 7, "kv_heads": 1, "windows": (30, None)}, {"classic": True, "heads": 4, "kv_heads": 4}],
    ids=str,
)
@torch.inference_mode()
def test_logits_with_a_cache_of_8_bits(shape: dict[str, Any], packed: bool) -> None:
    """Logits equal those of dense attention with rounded keys and values, up to rare differences in rounding."""
    tokens = random.Random(0).choices(range(131), k=90)
    plain = tiny_decoder(torch.float32, packed=False, **shape)
    want = dense_logits(plain, tokens, coded=True)
    found = text_logits(tiny_decoder(torch.float32, packed=packed, **shape), tokens, kv_dtype=torch.int8)
    rounding = float((want - dense_logits(plain, tokens)).abs().mean())
    assert float((found - want).abs().mean()) < 0.05 * rounding


def test_the_example_of_the_docstring() -> None:
    cache = make_cache(CONFIG, torch.float32, num_blocks=10, block_size=16)
    block_table = BlockTable(blocks=[7, 8], num_released=2, length=40)
    assert cache.slots(block_table, 37, 38).tolist() == [7 * 16 + 5]
    assert cache.slots(block_table, 32, 64).tolist() == list(range(112, 144))
    assert list(block_table.c_blocks) == [7, 8]


def test_slots_of_scattered_blocks() -> None:
    cache = KINDS["torch"].make()
    block_table = BlockTable(blocks=[7, 2, 3], num_released=1, contiguous=False)
    assert cache.slots(block_table, 4, 16).tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 12, 13, 14, 15]
    # For tokens in released or missing blocks, any slot of the pool may be returned.
    outside = cache.slots(block_table, 0, 24)
    assert outside[4:16].tolist() == cache.slots(block_table, 4, 16).tolist()
    assert all(0 <= slot < cache.num_slots for slot in outside)
    assert isinstance(cache.slot_index(block_table, 0, 24), Tensor)


def test_views() -> None:
    """Consecutive blocks are read as a view, beyond their end too, and before their start if slots exist there."""
    cache = KINDS["torch"].make()
    assert cache.slot_index(BlockTable(blocks=[2, 3]), 0, 8) == slice(8, 16)
    assert cache.slot_index(BlockTable(blocks=[2, 3]), 0, 40) == slice(8, 48)
    assert cache.slot_index(BlockTable(blocks=[10, 11]), 0, 24) == slice(40, 64)
    assert cache.slot_index(BlockTable(blocks=[3, 4], num_released=2), 0, 40) == slice(4, 44)
    before = cache.slot_index(BlockTable(blocks=[0, 1], num_released=1), 0, 12)
    assert isinstance(before, Tensor)
    assert before[4:].tolist() == list(range(8))
    assert 0 <= int(before.min()) <= int(before.max()) < cache.num_slots


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
    cache, block_table = kind.make(), BlockTable(blocks)
    if keeps:
        cache.keep_hidden(2, cache)
    block_table.update_derived()
    for block in blocks:
        cache.allocator.references[block] = 1
    write(cache, block_table, [*kind.lead, 1, 2, 3])
    cache.commit(block_table, range(len(kind.lead) + 3))
    write(cache, block_table, list(range(10, 17)))
    before = [pool.clone() for pool in every(cache)]
    cache.commit(block_table, offsets)
    assert held(cache, block_table, kind) == [1, 2, 3, *kept]
    first = block_table.length - len(kept)
    moved = [first + place for place, offset in enumerate(offsets) if offset != place]
    rest = sorted({*range(cache.num_slots)} - {*cache.slots(block_table, 0, block_table.length)[moved].tolist()})
    for old, new in zip(before, every(cache), strict=True):
        assert torch.equal(old[:, rest].nan_to_num(7.0), new[:, rest].nan_to_num(7.0))


@pytest.mark.parametrize("seed", range(6))
def test_commit_of_many_rows(kind: Kind, seed: int) -> None:
    """Source and target slots overlap."""
    dice, cache = random.Random(seed), kind.make(40)
    cache.keep_hidden(1, cache)
    block_table = start_text(cache, kind)
    draft = dice.sample(range(800), 100)
    write(cache, block_table, draft)
    kept = sorted(dice.sample(range(100), 60))
    cache.commit(block_table, kept)
    assert held(cache, block_table, kind) == [draft[i] for i in kept]


def test_moves_accept_arrays_that_are_not_contiguous(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous copies of the arrays stay alive while the kernels read them."""
    cache = kind.make(40)
    block_table = start_text(cache, kind)
    draft = list(range(100, 150))
    write(cache, block_table, draft)
    slots, taken = cache.slots(block_table, block_table.length, block_table.length + len(draft)), list[Any]()
    if cache.kernels is not None:
        move = cache.kernels.library.pronk_move

        def busy(*arguments: Any) -> int:
            taken.extend(np.zeros(20, np.int64) for _ in range(100))
            return int(move(*arguments))

        monkeypatch.setattr(cache.kernels.library, "pronk_move", busy)
    source, target = np.array([(slots[2 * place + 1], slots[place]) for place in range(20)], np.int64).T
    cache.move(source, target)
    cache.commit(block_table, range(20))
    assert held(cache, block_table, kind) == draft[1:41:2]


def test_commit_after_a_resize_or_with_more_kept_outputs(kind: Kind) -> None:
    cache = kind.make(6)
    for change in (lambda: None, lambda: cache.resize(9), lambda: cache.keep_hidden(1, cache), lambda: cache.resize(7)):
        before = cache.version
        change()
        for pool in (*cache.keys, *cache.values, *cache.hidden.values()):
            pool.zero_()
        block_table = start_text(cache, kind)
        write(cache, block_table, [1, 2, 3, 4])
        cache.commit(block_table, [0, 2, 3])
        assert held(cache, block_table, kind) == [1, 3, 4]
        assert cache.version == before + (cache.version != before)
        cache.release(block_table)
    assert cache.version == 4


def test_a_shared_block_is_copied_before_it_is_written(kind: Kind) -> None:
    cache = kind.make()
    cache.keep_hidden(2, cache)
    block_table, lead = start_text(cache, kind), len(kind.lead)
    write(cache, block_table, [1, 2, 3, 4, 5, 6])
    cache.commit(block_table, range(6))
    other, third = cache.fork(block_table, lead + 6), cache.fork(block_table, lead + 5)
    write(cache, other, [20, 21, 22])
    cache.commit(other, range(3))
    write(cache, block_table, [10])
    cache.commit(block_table, range(1))
    write(cache, third, [30])
    cache.commit(third, range(1))
    assert held(cache, block_table, kind) == [1, 2, 3, 4, 5, 6, 10]
    assert held(cache, other, kind) == [1, 2, 3, 4, 5, 6, 20, 21, 22]
    assert held(cache, third, kind) == [1, 2, 3, 4, 5, 30]
    assert block_table.blocks[0] == other.blocks[0] == third.blocks[0]
    assert len({block_table.blocks[1], other.blocks[1], third.blocks[1]}) == 3
    assert cache.allocator.references[block_table.blocks[0]] == 3
    for each in (block_table, other, third):
        assert list(each.c_blocks) == each.blocks
    cache.release(block_table)
    assert held(cache, other, kind) == [1, 2, 3, 4, 5, 6, 20, 21, 22]


def test_a_full_shared_block_is_not_copied(kind: Kind) -> None:
    cache, block_table, count = kind.make(), BlockTable(), 2 * kind.size
    write(cache, block_table, list(range(count)))
    cache.commit(block_table, range(count))
    other = cache.fork(block_table, count)
    write(cache, other, [9])
    assert other.blocks[:2] == block_table.blocks
    assert cache.allocator.num_free == 12 - 3


def test_freed_blocks_are_poisoned_and_no_others(kind: Kind) -> None:
    cache, block_table, size = kind.make(), BlockTable(), kind.size
    for pool in (*cache.keys, *cache.values):
        pool.zero_()
    count = 2 * size + 2
    write(cache, block_table, list(range(1, count + 1)))
    cache.commit(block_table, range(count))
    other = cache.fork(block_table, size)
    cache.release_before(block_table, count - 1)
    for pool in every(cache):
        assert bool(kind.poisoned(pool[:, size : 2 * size]).all())
        assert not bool(kind.poisoned(pool)[:, [*range(size), *range(2 * size, 4 * size)]].any())
    assert read(cache, block_table, 2 * size, count) == [count - 1, count]
    assert read(cache, other, 0, size) == list(range(1, size + 1))
    cache.release(block_table)
    cache.release(other)
    for pool in every(cache):
        assert bool(kind.poisoned(pool[:, : 3 * size]).all())
        assert not bool(kind.poisoned(pool[:, 3 * size :]).any())


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


@pytest.mark.parametrize("seed", range(3))
def test_random_operations(kind: Kind, seed: int) -> None:
    """Requests write, commit, fork, roll back and release; each reads its own tokens only."""
    dice, cache, texts, value, size = random.Random(seed), kind.make(30), list[Text](), 0, kind.size
    for step in range(150):
        if not texts or (dice.random() < 0.15 and cache.allocator.num_free > 12):
            texts.append(Text())
        text = dice.choice(texts)
        block_table, operation = text.block_table, dice.random()
        if operation < 0.6 and cache.allocator.num_free > 6:
            draft = [(value := value + 1) % 10_000 for _ in range(dice.randint(1, 2 * size + 1))]
            write(cache, block_table, draft)
            kept = sorted(dice.sample(range(len(draft)), dice.randint(0, len(draft))))
            cache.commit(block_table, kept)
            text.tokens += [draft[i] for i in kept]
        elif operation < 0.7 and len(text.tokens) > block_table.num_released * size:
            count = dice.randint(block_table.num_released * size, len(text.tokens))
            texts.append(Text(cache.fork(block_table, count), text.tokens[:count]))
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
    assert all(bool(kind.poisoned(pool).all()) for pool in every(cache))


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
    """Return the number of blocks for ``kv_memory=memory``, which is equal for torch and kernels."""
    for by in (None, kernels()):
        pool = budget.KVBudget(memory, requests, CPU).add(CONFIG, dtype, by)
        assert pool.kernels is by
        assert sum(each.nbytes for each in (*pool.keys, *pool.values)) == pool.num_slots * pool.bytes_per_token
    return pool.allocator.num_blocks


def test_blocks_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache fills the budget; without a budget it holds all requests, within a quarter of the memory."""
    block = 2 * 2 * 2 * 6 * 4 * BLOCK_SIZE  # keys and values, layers, heads, size of a head, bytes, tokens
    assert kv_bytes_per_token(CONFIG, torch.float32) * BLOCK_SIZE == block
    assert kv_bytes_per_token(CONFIG, torch.int8) * 4 * 6 == kv_bytes_per_token(CONFIG, torch.float32) * (6 + 4)
    assert blocks(torch.float32, block, 9) == 1
    assert blocks(torch.float32, 10 * block - 1, 9) == 9
    assert blocks(torch.bfloat16, 10 * block, 9) == 20
    with pytest.raises(OptionError, match=f"kv_memory: expected at least {block} bytes.*found '1k'"):
        blocks(torch.float32, "1k", 9)
    needed = 3 * math.ceil((CONFIG.context + 128) / BLOCK_SIZE)
    assert blocks(torch.float32, None, 3) == needed
    monkeypatch.setattr(budget, "_memory_bytes", lambda _: 4 * 10 * block)
    assert blocks(torch.float32, None, 3) == 10
    monkeypatch.setattr(budget, "_memory_bytes", lambda _: 100)
    assert blocks(torch.float32, None, 3) == 1


def test_pools_share_the_budget() -> None:
    """A second cache takes memory from the first one; both have the same number of blocks."""
    block = kv_bytes_per_token(CONFIG, torch.float32) * BLOCK_SIZE
    memory = budget.KVBudget(10 * block, 9, CPU)
    target = memory.add(CONFIG, torch.float32)
    block_table = BlockTable()
    target.prepare(block_table, 9 * BLOCK_SIZE)
    with pytest.raises(OptionError, match="expected no running request while a draft model is added"):
        memory.add(CONFIG, torch.bfloat16)
    target.release(block_table)
    draft = memory.add(CONFIG, torch.bfloat16)
    assert target.allocator.num_blocks == draft.allocator.num_blocks == 6  # 10 / 1.5
    assert all(len(pool[0]) == target.num_slots for pool in target.keys)
    target.prepare(block_table, 6 * BLOCK_SIZE)
    with pytest.raises(CacheFullError):
        target.prepare(block_table, 6 * BLOCK_SIZE + 1)
    target.release(block_table)
    del draft
    gc.collect()
    assert memory.add(CONFIG, torch.bfloat16).allocator.num_blocks == 6, "the memory of the first draft is free again"
    with pytest.raises(OptionError, match="kv_memory: expected at least"):
        budget.KVBudget(block, 9, CPU).add(replace(CONFIG, num_layers=7, windows=(None,) * 7), torch.float32)
