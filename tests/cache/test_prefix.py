"""The prefix cache: hits by tokens and salt, and evictions."""

import random
from dataclasses import dataclass, field

import pytest

from pronk.base.arrays import FLOAT32
from pronk.cache.blocks import BlockAllocator, BlockTable
from pronk.cache.prefix import PrefixCache
from tiny_models import make_cache, tiny_config

SIZE = 4


def made(blocks: int = 12) -> tuple[BlockAllocator, PrefixCache]:
    allocator = BlockAllocator(blocks, SIZE)
    prefix = PrefixCache()
    prefix.attach(allocator)
    return allocator, prefix


def text(
    allocator: BlockAllocator, prefix: PrefixCache, tokens: list[int], salt: bytes = b""
) -> BlockTable:
    """Return the block table of a text, with blocks of the prefix cache if possible, and cache its
    blocks.
    """
    block_table = prefix.match(tokens, salt) or BlockTable()
    allocator.allocate(block_table, len(tokens))
    block_table.length = len(tokens)
    prefix.insert(block_table, tokens, salt)
    return block_table


def test_hits_are_whole_blocks_without_the_last_token() -> None:
    allocator, prefix = made()
    tokens = list(range(10))
    block_table = text(allocator, prefix, tokens)
    assert len(prefix) == 2
    for length, found in ((4, 0), (5, 4), (8, 4), (9, 8), (10, 8)):
        match = prefix.match(tokens[:length])
        assert (0 if match is None else match.length) == found
        if match is not None:
            assert match.blocks == block_table.blocks[: found // SIZE]
            allocator.release(match)
    assert prefix.match([1, *tokens[1:]]) is None
    other = prefix.match([*tokens[:5], 0, 0, 0, 0, 0])
    assert other is not None
    assert other.length == 4
    assert allocator.references[block_table.blocks[0]] == 2


def test_equal_digests_of_different_tokens_give_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, prefix = made()
    monkeypatch.setattr(prefix, "_digest", lambda before, tokens: b"always the same")
    text(allocator, prefix, [1, 2, 3, 4, 5])
    assert prefix.match([1, 2, 3, 5, 5]) is None


def test_idle_blocks_are_cached_until_they_are_needed() -> None:
    allocator, prefix = made(6)
    old = [*range(9)]
    new = [*range(50, 59)]
    for tokens in (old, new):
        allocator.release(text(allocator, prefix, tokens))
    assert allocator.num_free == 6
    assert len(allocator.evictable) == len(prefix) == 4
    third = text(allocator, prefix, [7, 7, 7])  # evicts no cached block, because one block is empty
    assert len(prefix) == 4
    fourth = BlockTable()
    allocator.allocate(fourth, 2 * SIZE)
    assert len(prefix) == 3
    match = prefix.match(old)
    assert match is not None
    assert match.length == 4, "the end of the oldest text is evicted first"
    allocator.release(match)
    whole = prefix.match(new)
    assert whole is not None
    assert whole.length == 8
    for block_table in (third, fourth, whole):
        allocator.release(block_table)
    assert allocator.num_free == 6
    assert not any(allocator.references)


def test_a_new_allocator_gives_no_hit() -> None:
    allocator, prefix = made()
    text(allocator, prefix, [*range(9)])
    allocator.reset()
    assert len(allocator.evictable) == 2
    other = BlockAllocator(12, SIZE)
    prefix.attach(other)
    assert prefix.match([*range(9)]) is None


@dataclass
class Held:
    block_table: BlockTable
    tokens: list[int] = field(default_factory=list)


@pytest.mark.parametrize("seed", range(20))
def test_random_texts(seed: int) -> None:
    """Hits hold the right text and salt, blocks in use are not evicted, and no block is lost."""
    dice = random.Random(seed)
    written = dict[int, tuple[int, ...]]()
    allocator, prefix = made(dice.randint(6, 30))
    texts = list[Held]()
    hits = 0
    evictions = 0
    for _ in range(400):
        if texts and (dice.random() < 0.4 or allocator.num_free < 4):
            allocator.release(texts.pop(dice.randrange(len(texts))).block_table)
            continue
        tokens = [dice.randrange(2) for _ in range(dice.randint(1, 16))]
        salt = dice.choice([b"", b"a"])
        block_table = prefix.match(tokens, salt) or BlockTable()
        for number, block in enumerate(block_table.blocks):
            assert written[block] == (salt, *tokens[: (number + 1) * SIZE])
            hits += 1
        if allocator.num_missing(block_table, len(tokens)) > allocator.num_free:
            allocator.release(block_table)
            continue
        before = len(prefix)
        allocator.allocate(block_table, len(tokens))
        evictions += before - len(prefix)
        for number in range(block_table.length // SIZE, len(block_table.blocks)):
            written[block_table.blocks[number]] = (salt, *tokens[: (number + 1) * SIZE])
        block_table.length = len(tokens)
        prefix.insert(block_table, tokens, salt)
        texts.append(Held(block_table, tokens))
        references = [0] * allocator.num_blocks
        for each in texts:
            for block in each.block_table.blocks:
                references[block] += 1
        assert references == allocator.references
        assert allocator.num_free == references.count(0)
        assert all(
            not references[block] and prefix.is_cached(block) for block in allocator.evictable
        )
    assert hits > 0
    assert evictions > 0
    for each in texts:
        allocator.release(each.block_table)
    assert allocator.num_free == allocator.num_blocks


def test_keeping_more_outputs_clears_the_prefix_cache() -> None:
    """Blocks computed before do not hold the outputs of the layer that is kept from now on."""
    cache = make_cache(tiny_config(), FLOAT32, num_blocks=8, share_prefixes=True)
    tokens = [*range(40)]
    block_table = BlockTable()
    cache.prepare(block_table, 40)
    cache.commit_slots(block_table, range(40))
    cache.cache_blocks(block_table, tokens)
    match = cache.match_prefix(tokens)
    assert match is not None
    assert match.length == 32
    cache.release(match)
    cache.save_feature(1, cache)
    assert cache.match_prefix(tokens) is None
    cache.cache_blocks(block_table, tokens)
    assert cache.match_prefix(tokens) is None, "the text has blocks of the old cache"


def test_known_digests_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, prefix = made(20)
    tokens = [*range(30)]
    allocator.release(text(allocator, prefix, tokens[:13]))
    hashed = list[bytes]()
    digest = prefix._digest

    def counted(before: bytes, own: bytes) -> bytes:
        hashed.append(own)
        return digest(before, own)

    monkeypatch.setattr(prefix, "_digest", counted)
    digests = list[bytes]()
    for salt, count in ((b"", 4), (b"", 0)):
        hashed.clear()
        match = prefix.match(tokens, salt, digests)
        assert match is not None
        assert match.length == 12
        assert match.digests == digests[:3]
        allocator.release(match)
        assert sum(map(bool, hashed)) == count
    assert [prefix.contains(each) for each in digests] == [True, True, True, False]
    allocator.release(text(allocator, prefix, tokens[:17]))
    assert all(map(prefix.contains, digests))
