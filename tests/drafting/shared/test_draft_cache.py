"""The KV cache of a drafter with a model of its own: which rows stay, and which can be reused."""

from pronk.base.arrays import FLOAT32
from pronk.drafting.shared.draft_cache import DraftCache
from tiny_models import make_cache, tiny_config

BLOCK = 16


def cache_with(tokens: list[int]) -> DraftCache:
    """Return a cache of ``tokens``, all of them final, with slots for three blocks more."""
    cache = DraftCache(make_cache(tiny_config(), FLOAT32, share_prefixes=True))
    cache.pool.prepare(cache.block_table, len(tokens) + 3 * BLOCK)
    cache.append(tokens)
    cache.num_final = len(tokens)
    cache.register_prefix()
    return cache


def test_a_common_prefix_keeps_the_row_of_its_last_token() -> None:
    cache = cache_with([1, 2, 3, 4])
    cache.keep_common_prefix([1, 2, 3], 0, 4)
    assert cache.tokens == [1, 2, 3]
    assert cache.block_table.length == 3
    cache.keep_common_prefix([1, 9, 3, 4], 0, 4)
    assert cache.tokens == [1]
    assert cache.block_table.length == 1


def test_a_cache_may_begin_at_the_second_token() -> None:
    cache = cache_with([1, 2, 3, 4])
    cache.keep_common_prefix([0, 1, 2, 3, 9], 1, 2)
    assert cache.tokens == [1, 2]
    cache.skip_to(2 * BLOCK, [*range(3 * BLOCK)], 1)
    assert cache.tokens == [*range(1, 2 * BLOCK + 1)]


def test_skipped_tokens_count_as_cached_and_hold_no_blocks() -> None:
    text = [*range(4 * BLOCK)]
    cache = cache_with(text[:BLOCK])
    cache.skip_to(3 * BLOCK, text, 0)
    assert cache.tokens == text[: 3 * BLOCK]
    assert cache.block_table.length == 3 * BLOCK
    assert cache.block_table.num_released == 3
    assert len(cache.block_table.blocks) == 1


def test_a_cache_may_skip_more_than_its_blocks() -> None:
    text = [*range(8 * BLOCK)]
    cache = cache_with(text[:BLOCK])
    cache.skip_to(6 * BLOCK, text, 0)
    assert not cache.block_table.blocks
    cache.pool.prepare(cache.block_table, len(text))
    assert len(cache.block_table.blocks) == 2, "the skipped tokens need no slots"


def test_rows_of_skipped_tokens_are_not_reused() -> None:
    """Nothing has been computed for them, though the cache had slots for them."""
    text = [*range(4 * BLOCK)]
    cache = cache_with(text[:BLOCK])
    cache.skip_to(3 * BLOCK, text, 0)
    cache.num_final = 3 * BLOCK
    cache.append(text[3 * BLOCK :])
    cache.register_prefix()
    found = cache.pool.match_prefix([*text, 0])
    assert found is not None
    assert found.length == BLOCK
