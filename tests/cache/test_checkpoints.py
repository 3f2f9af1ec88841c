"""Checkpoints of states: where they are written, which are kept, and what a prefix hit finds."""

from collections.abc import Sequence

import pytest

from cache.recurrent_passes import (
    SIZE,
    pool_of,
    read_text,
    recurrent_cache,
)
from cache.test_state_pool import Text
from pronk.cache.blocks import BlockTable
from pronk.cache.checkpoints import Checkpoints
from pronk.cache.paged import PagedCache
from pronk.cache.states import StateCounts
from pronk.sampling.tree import TokenTree
from tiny_models import assert_states_free

MANY = StateCounts(requests=3, checkpoints=12, updates=24)
PROMPT = [number % 50 for number in range(200)]


def positions(cache: PagedCache, tokens: Sequence[int]) -> list[int]:
    """Return the numbers of tokens at which a text has checkpoints; check their states."""
    pool = pool_of(cache)
    assert cache.prefix_cache is not None
    digests = cache.prefix_cache.extend_digests([*tokens, 0], b"", [])
    found = list[int]()
    for number, digest in enumerate(digests, 1):
        slot = pool.checkpoints.slot_of(digest)
        if slot is not None:
            assert read_text(pool, slot) == [*tokens[: number * SIZE]]
            found.append(number * SIZE)
    return found


def read(cache: PagedCache, tokens: Sequence[int], wanted: tuple[int, ...] = ()) -> Text:
    """Read a prompt in one pass, without its last token."""
    text = Text(cache)
    cache.prepare(text.table, len(tokens))
    cache.want_checkpoints(text.table, wanted)
    text.read(tokens[:-1])
    return text


def hit(cache: PagedCache, tokens: Sequence[int]) -> int:
    """Return the number of tokens of a prompt that are in the cache; check their state."""
    found = cache.match_prefix(tokens)
    if found is None:
        return 0
    text = Text(cache, found)
    length = found.length
    assert text.state == [*tokens[:length]]
    assert cache.has_states(found)
    cache.release(found)
    return length


def test_least_recently_used_first() -> None:
    made = Checkpoints()
    assert made.add(b"a", 1)
    assert made.add(b"b", 2)
    assert made.add(b"c", 3)
    assert not made.add(b"a", 4)  # becomes the last one
    assert made.find([b"x", b"b", b"y"]) == (2, 2)
    assert made.find([b"x"]) is None
    assert made.slots() == [3, 1, 2]
    assert made.remove_oldest() == 3
    assert made.remove(b"b") == 2
    assert made.remove(b"b") is None
    assert made.clear() == [1]
    assert made.remove_oldest() is None
    assert len(made) == 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64, 65])
def test_the_end_of_the_last_full_block(length: int) -> None:
    cache = recurrent_cache(MANY)
    text = read(cache, PROMPT[:length])
    last = (length - 1) // SIZE * SIZE
    assert max(positions(cache, PROMPT[:length]), default=0) == last
    cache.release(text.table)
    assert hit(cache, PROMPT[:length]) == last
    assert_states_free(pool_of(cache))


def test_wanted_positions() -> None:
    """The ends of the last blocks before them, in one pass or in chunks."""
    wanted = (5, 16, 40, 63, 100, 500)
    for chunk in (200, 7, 16, 50):
        cache = recurrent_cache(MANY)
        text = Text(cache)
        cache.prepare(text.table, 120)
        cache.want_checkpoints(text.table, wanted)
        for start in range(0, 120, chunk):
            text.read(PROMPT[start : min(start + chunk, 120)])
        assert {16, 32, 48, 96, 112} <= {*positions(cache, PROMPT[:120])}
        cache.release(text.table)
        for cut, expected in (
            (16, 0),
            (17, 16),
            (31, 16),
            (33, 32),
            (49, 48),
            (97, 96),
            (120, 112),
        ):
            assert hit(cache, [*PROMPT[:cut], 49]) >= expected
            assert hit(cache, PROMPT[:cut]) <= cut - 1
        assert_states_free(pool_of(cache))


def test_old_checkpoints_are_thinned_out() -> None:
    """Of n blocks, those remain that are the last two multiples of a power of 2, and wanted ones."""
    cache = recurrent_cache(MANY)
    text = Text(cache)
    cache.prepare(text.table, 190)
    cache.want_checkpoints(text.table, (50,))
    for number in range(1, 12):
        text.read(PROMPT[(number - 1) * SIZE : number * SIZE])
        multiples = [range(power, number + 1, power)[-2:] for power in (1, 2, 4, 8)]
        expected = {each for pair in multiples for each in pair}
        expected |= {3} if number >= 3 else set()
        assert {each // SIZE for each in positions(cache, text.tokens)} == expected


def test_a_replayed_path_crosses_the_end_of_a_block() -> None:
    cache = recurrent_cache(MANY)
    text = Text(cache)
    text.read(PROMPT[:14])
    tree = TokenTree((14, 9, 15, 16, 17), (-1, 0, 0, 2, 3))
    text.run(tree)
    text.commit(tree, [0, 2, 3, 4])
    assert positions(cache, text.tokens) == []
    begun = text.run(TokenTree.chain([18]))
    (copy,) = begun.arguments.copies
    assert copy[0] == 1  # after the first of three replayed tokens
    text.commit(TokenTree.chain([18]), [0])
    assert text.tokens == PROMPT[:19]
    assert positions(cache, text.tokens) == [16]


@pytest.mark.parametrize("runs", [False, True])
def test_copies_of_an_interrupted_pass(runs: bool) -> None:
    """They are lost, or used if the pass has run and its tokens are committed after all."""
    cache = recurrent_cache(MANY)
    pool = pool_of(cache)
    text = Text(cache)
    text.read(PROMPT[:15])
    tree = TokenTree.chain([15])
    begun = text.begin(tree)
    assert len(begun.arguments.copies) == 1
    if runs:
        begun.run()
        assert len(pool._free_checkpoints) == MANY.checkpoints - 1
    else:
        cache.cache_blocks(text.table, text.tokens)
        assert len(pool._free_checkpoints) == MANY.checkpoints
        text.run(tree)
    text.commit(tree, [0])
    assert positions(cache, text.tokens) == [16]
    cache.release(text.table)
    assert_states_free(pool)


def test_digests_that_are_not_known_yet() -> None:
    """A draft model's tokens enter the prefix cache after they are known to be final."""
    cache = recurrent_cache(MANY)
    text = Text(cache)
    tree = TokenTree.chain(PROMPT[:40])
    text.run(tree, 40)
    cache.commit_slots(text.table, range(40))
    cache.cache_blocks(text.table, PROMPT[:40], num_committed=20)
    assert positions(cache, PROMPT[:40]) == [16]
    cache.cache_blocks(text.table, PROMPT[:40], num_committed=40)
    assert positions(cache, PROMPT[:40]) == [16, 32]
    cache.release(text.table)
    assert_states_free(pool_of(cache))


def test_the_least_recently_used_makes_room() -> None:
    cache = recurrent_cache(StateCounts(2, 2, 24))
    others = [[number] * 20 for number in (1, 2)]
    for tokens in others:
        cache.release(read(cache, tokens).table)
    assert hit(cache, others[0]) == SIZE
    cache.release(read(cache, PROMPT[:20]).table)
    assert [hit(cache, tokens) for tokens in (*others, PROMPT[:20])] == [SIZE, 0, SIZE]
    assert_states_free(pool_of(cache))


def test_without_room_for_checkpoints() -> None:
    cache = recurrent_cache(StateCounts(2, 0, 24))
    cache.release(read(cache, PROMPT[:50], (20, 40)).table)
    assert hit(cache, PROMPT[:50]) == 0
    assert_states_free(pool_of(cache))


def test_equal_prompts_have_one_checkpoint() -> None:
    cache = recurrent_cache(MANY)
    texts = [read(cache, PROMPT[:40]) for _ in range(2)]
    assert len(pool_of(cache).checkpoints) == 2
    for text in texts:
        cache.release(text.table)
    assert hit(cache, PROMPT[:40]) == 32
    assert_states_free(pool_of(cache))


def test_a_checkpoint_belongs_to_its_salt() -> None:
    cache = recurrent_cache(MANY)
    cache.release(read(cache, PROMPT[:40]).table)
    assert cache.match_prefix(PROMPT[:40], b"other") is None
    assert hit(cache, PROMPT[:40]) == 32


def test_a_checkpoint_leaves_with_its_block() -> None:
    cache = recurrent_cache(MANY, num_blocks=4)
    cache.release(read(cache, PROMPT[:60]).table)
    assert len(pool_of(cache).checkpoints) == 2
    cache.release(read(cache, [1] * 60).table)
    assert len(pool_of(cache).checkpoints) == 2
    assert hit(cache, PROMPT[:60]) == 0
    assert hit(cache, [1] * 60) == 48
    assert_states_free(pool_of(cache))


def test_a_new_pool_has_no_checkpoints() -> None:
    cache = recurrent_cache(MANY)
    cache.release(read(cache, PROMPT[:60]).table)
    cache.resize(30)
    assert len(pool_of(cache).checkpoints) == 0
    assert_states_free(pool_of(cache))
    assert hit(cache, PROMPT[:60]) == 0


def test_a_hit_without_a_free_state() -> None:
    """The prompt is read again, and its blocks are released."""
    cache = recurrent_cache(StateCounts(1, 4, 24))
    cache.release(read(cache, PROMPT[:40]).table)
    other = read(cache, [1] * 20)
    assert cache.match_prefix(PROMPT[:40]) is None
    assert cache.allocator.num_free == 60 - len(other.table.blocks)
    cache.release(other.table)
    assert hit(cache, PROMPT[:40]) == 32


def test_cached_blocks_without_a_checkpoint() -> None:
    """A hit is cut at the last checkpoint, and the tokens between are read again."""
    cache = recurrent_cache(MANY)
    cache.release(read(cache, PROMPT[:100], (40,)).table)
    found = cache.match_prefix([*PROMPT[:60], 1])
    assert found is not None
    assert found.length == 32
    assert len(found.blocks) == len(found.digests) == 2
    text = Text(cache, found)
    text.tokens = PROMPT[:32]
    text.read(PROMPT[32:60])
    cache.release(found)
    assert hit(cache, [*PROMPT[:60], 1]) == 48


def test_other_tables_have_no_state() -> None:
    cache = recurrent_cache(MANY)
    assert cache.has_states(BlockTable())
    assert not cache.has_states(BlockTable(length=3))


def test_a_long_answer_leaves_the_checkpoints_of_others() -> None:
    """Its own last checkpoint makes room, unless it is wanted."""
    cache = recurrent_cache(StateCounts(2, 3, 24))
    cache.release(read(cache, [1] * 20).table)
    text = read(cache, PROMPT[:41], (40,))
    for number in range(40, 190):
        text.read([PROMPT[number]])
        expected = {number + 1 - (number + 1) % SIZE, 32}
        expected |= {16} if number + 1 < 48 else set()
        assert {*positions(cache, text.tokens)} == expected
    cache.release(text.table)
    assert hit(cache, [1] * 20) == SIZE
    assert_states_free(pool_of(cache))
