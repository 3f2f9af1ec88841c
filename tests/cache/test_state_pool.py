"""States of recurrent layers: what a pass is told, commits, rollbacks, and slots.

The passes are those of :mod:`cache.recurrent_passes`, in which a state is the text that it has
taken over.
"""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from cache.recurrent_passes import (
    SIZE,
    Pass,
    pool_of,
    read_text,
    recurrent_cache,
)
from pronk.base.errors import CacheFullError
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.cache.states import StateCounts, StateError
from pronk.sampling.tree import TokenTree
from tiny_models import assert_states_free

COUNTS = StateCounts(requests=2, checkpoints=3, updates=24)
TREE = TokenTree((7, 8, 9, 10, 11), (-1, 0, 1, 0, 3))


class Text:
    """A request: its table, and the tokens that have been committed."""

    def __init__(self, cache: PagedCache, table: BlockTable | None = None) -> None:
        self.cache = cache
        self.table = table or BlockTable()
        self.tokens = list[int]()

    def begin(self, tree: TokenTree, num_final: int = 1, **options: int) -> Pass:
        """Begin a pass, of which the first ``num_final`` rows are final."""
        self.cache.prepare(self.table, self.table.length + len(tree) + options.get("num_extra", 0))
        return Pass(
            self.cache, self.table, tree, num_final=self.table.length + num_final, **options
        )

    def run(self, tree: TokenTree, num_final: int = 1, **options: int) -> Pass:
        """Run a pass; check that the state at each row is that of the row's text."""
        begun = self.begin(tree, num_final, **options)
        texts = begun.run()
        for node, text in enumerate(texts):
            path = [node]
            while tree.parents[path[-1]] >= 0:
                path.append(tree.parents[path[-1]])
            assert text == [*self.tokens, *[tree.tokens[each] for each in reversed(path)]]
        return begun

    def commit(self, tree: TokenTree, nodes: Sequence[int]) -> None:
        self.cache.commit_slots(self.table, nodes)
        self.tokens += [tree.tokens[node] for node in nodes]
        self.cache.cache_blocks(self.table, self.tokens)

    def read(self, tokens: Sequence[int]) -> None:
        """Read tokens of a prompt in one pass."""
        tree = TokenTree.chain(tokens)
        self.run(tree, len(tokens))
        self.commit(tree, range(len(tokens)))

    @property
    def state(self) -> list[int]:
        """The tokens that the state has taken over."""
        table = self.table.states
        assert table is not None
        text = read_text(pool_of(self.cache), table.slot) if table.length else []
        assert len(text) == table.length
        return text


@pytest.fixture
def cache() -> PagedCache:
    return recurrent_cache(COUNTS)


def test_a_prompt_needs_no_updates(cache: PagedCache) -> None:
    text = Text(cache)
    given = text.begin(TokenTree.chain(range(5)), 5).arguments
    assert (given.keeps, given.replayed, given.absorbed, given.certain) == (True, 0, 0, 5)
    assert not given.slots
    assert pool_of(cache).num_free_updates == COUNTS.updates


def test_only_the_root_of_a_tree_enters_the_state(cache: PagedCache) -> None:
    text = Text(cache)
    text.read([1, 2])
    given = text.run(TREE).arguments
    assert (given.keeps, given.replayed, given.absorbed, given.certain) == (True, 0, 0, 1)
    assert len({*given.slots}) == 4
    assert text.state == [1, 2, 7]


def test_accepted_nodes_are_replayed_once(cache: PagedCache) -> None:
    text = Text(cache)
    text.read([1, 2])
    slots = text.run(TREE).arguments.slots
    text.commit(TREE, [0, 3, 4])
    assert text.tokens == [1, 2, 7, 10, 11]
    assert text.state == [1, 2, 7]
    pool = pool_of(cache)
    assert pool.num_free_updates == COUNTS.updates - 2
    given = text.run(TokenTree.chain([5])).arguments
    assert (given.replayed, given.certain) == (2, 1)
    assert given.slots[:2] == slots[2:]
    assert text.state == [1, 2, 7, 10, 11, 5]
    text.commit(TokenTree.chain([5]), [0])
    assert not text.run(TokenTree.chain([6])).arguments.replayed
    assert pool.num_free_updates == COUNTS.updates


@pytest.mark.parametrize("nodes", [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4]], ids=str)
@pytest.mark.parametrize("num_read", [0, 1, 15, 16])
def test_states_are_complete_after_each_commit(
    nodes: list[int], num_read: int, cache: PagedCache
) -> None:
    """Otherwise the scheduler would preempt the request. The path before is replayed meanwhile."""
    text = Text(cache)
    if num_read:
        text.read(range(num_read))
    for _ in range(4):
        text.run(TREE)
        text.commit(TREE, nodes)
        assert cache.has_states(text.table)


def test_first_layers_leave_the_state(cache: PagedCache) -> None:
    """A pass with ``num_final`` 0 computes nodes, for a drafter or for the first layers only."""
    text = Text(cache)
    text.read([1, 2])
    text.run(TREE)
    text.commit(TREE, [0, 3])
    for _ in range(2):
        begun = Pass(cache, text.table, TREE, num_final=0)
        given = begun.arguments
        assert (given.keeps, given.replayed, given.certain) == (False, 1, 0)
        assert len({*given.slots}) == 6
        assert not given.copies
        begun.run()
        assert text.state == [1, 2, 7]
    text.run(TREE)
    assert text.state == [1, 2, 7, 10, 7]


def test_trees_grow_by_passes(cache: PagedCache) -> None:
    """Each pass computes further nodes, and only the first may take over the root."""
    text = Text(cache)
    text.read([1, 2])
    for num_computed, num_nodes in ((0, 1), (1, 3), (3, 4), (4, 5)):
        tree = TokenTree(TREE.tokens[:num_nodes], TREE.parents[:num_nodes])
        given = text.run(tree, num_computed=num_computed).arguments
        assert (given.absorbed, given.certain) == ((0, 1) if not num_computed else (1, 0))
        assert text.state == [1, 2, 7]
    text.commit(TREE, [0, 3, 4])
    assert cache.has_states(text.table)


def test_rows_of_a_chain_by_one_call(cache: PagedCache) -> None:
    text = Text(cache)
    text.read([1, 2])
    given = text.begin(TokenTree.chain([3, 4]), 1, num_extra=3).arguments
    assert (given.certain, len({*given.slots})) == (1, 4)


def test_computed_nodes_without_updates_are_refused(cache: PagedCache) -> None:
    text = Text(cache)
    text.read([1, 2])
    with pytest.raises(StateError):
        text.begin(TREE, num_computed=2)


def test_a_row_that_the_state_has_taken_over_is_refused(cache: PagedCache) -> None:
    """As after an interrupt between a pass and its commit."""
    text = Text(cache)
    text.read([1, 2])
    text.run(TREE)
    assert not cache.has_states(text.table)
    with pytest.raises(StateError):
        text.begin(TREE)


def test_tokens_that_no_pass_has_computed_are_refused(cache: PagedCache) -> None:
    text = Text(cache)
    text.read([1, 2])
    text.table.length += 1
    assert not cache.has_states(text.table)
    with pytest.raises(StateError):
        text.begin(TREE)


def test_a_path_that_is_too_long_is_refused(cache: PagedCache) -> None:
    """As after an error between the commit of the states and that of the keys."""
    text = Text(cache)
    text.read([1, 2])
    text.run(TREE)
    pool_of(cache).commit(text.table, [0, 3, 4])
    text.table.length += 1
    assert not cache.has_states(text.table)
    with pytest.raises(StateError):
        text.begin(TREE)


def test_a_pass_that_did_not_run_changes_nothing(cache: PagedCache) -> None:
    text = Text(cache)
    text.read(range(SIZE - 1))
    text.run(TREE)
    text.commit(TREE, [0, 3])
    for _ in range(3):
        assert text.begin(TREE).arguments.replayed == 1
    text.run(TREE)
    text.commit(TREE, [0, 1, 2])
    cache.release(text.table)
    assert_states_free(pool_of(cache))


@pytest.mark.parametrize("length", range(6))
def test_rollback_to_a_prefix(length: int, cache: PagedCache) -> None:
    """Tokens of the path are dropped; a state that has taken over more is released."""
    text = Text(cache)
    text.read([1, 2])
    text.run(TREE)
    text.commit(TREE, [0, 3, 4])
    num_left = cache.rollback(text.table, length)
    assert num_left == (length if length >= 3 else 0) == text.table.length
    assert cache.has_states(text.table)
    text.tokens = text.tokens[:num_left]
    text.run(TREE)
    text.commit(TREE, [0, 1])
    cache.release(text.table)
    assert_states_free(pool_of(cache))


def test_updates_are_limited() -> None:
    cache = recurrent_cache(StateCounts(2, 0, 5))
    text = Text(cache)
    other = Text(cache)
    text.run(TREE)
    with pytest.raises(
        CacheFullError, match="expected 4 free updates of recurrent layers, found 1"
    ):
        other.begin(TREE)
    text.commit(TREE, [0])
    other.run(TokenTree.chain([7, 8]))
    with pytest.raises(CacheFullError, match="expected 5 free updates"):
        text.begin(TokenTree.chain(range(9)), 4)
    text.run(TREE)
    for each in (text, other):
        cache.release(each.table)
    assert_states_free(pool_of(cache))


def test_states_are_limited(cache: PagedCache) -> None:
    texts = [Text(cache) for _ in range(3)]
    for each in texts[:2]:
        each.read([1])
    assert not pool_of(cache).has_free_state
    with pytest.raises(
        CacheFullError, match="expected a free state of the recurrent layers, found 2"
    ):
        texts[2].read([1])
    cache.release(texts[0].table)
    texts[2].read([3])
    assert texts[1].state == [1]
    assert texts[2].state == [3]


def test_freed_slots_are_poisoned(cache: PagedCache) -> None:
    text = Text(cache)
    text.read([1, 2])
    slots = text.run(TREE).arguments.slots
    table = text.table.states
    assert table is not None
    cache.release(text.table)
    pool = pool_of(cache)
    for layer in (0, 2):
        assert np.isnan(pool.states[layer][table.slot]).all()
        assert np.isnan(pool.inputs[layer][table.slot]).all()
        assert np.isnan(pool.updates[layer][slots]).all()


def test_reset_frees_all_but_checkpoints(cache: PagedCache) -> None:
    text = Text(cache)
    text.read(range(20))
    text.run(TREE)
    pool = pool_of(cache)
    assert len(pool.checkpoints) == 1
    pool.reset()
    assert_states_free(pool)
    found = cache.match_prefix([*range(20)])
    assert found is not None
    assert found.length == SIZE


def test_states_as_bytes(cache: PagedCache) -> None:
    """The record on disk."""
    text = Text(cache)
    text.read(range(20))
    pool = pool_of(cache)
    assert text.table.states is not None
    data = pool.read_state(text.table.states.slot)
    assert (
        len(data) == pool.state_bytes == pool.states[0][0].nbytes * 2 + pool.inputs[0][0].nbytes * 2
    )
    other = Text(cache)
    other.read([1, 2])
    other.table.length = 20
    cache.write_state(other.table, data)
    assert other.state == [*range(20)]
    assert cache.has_states(other.table)


def random_tree(dice: random.Random, size: int) -> TokenTree:
    tokens = [dice.randrange(50) for _ in range(size)]
    parents = [-1, *[dice.randrange(max(0, node - 3), node) for node in range(1, size)]]
    return TokenTree(tuple(tokens), tuple(parents))


def random_path(dice: random.Random, tree: TokenTree) -> list[int]:
    path = [dice.randrange(len(tree))]
    while tree.parents[path[-1]] >= 0:
        path.append(tree.parents[path[-1]])
    return path[::-1]


class Script:
    """Random operations on a few requests; each pass checks the state at each of its rows."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        dice = self.dice
        self.counts = StateCounts(3, dice.choice((0, 1, 2, 5)), 60)
        self.cache = recurrent_cache(self.counts, num_blocks=40)
        self.pool = pool_of(self.cache)
        self.texts = list[Text]()
        self.num_hits = 0
        self.num_replayed = 0

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            if len(self.texts) < 3:
                self.start()
            self.operate(self.dice.choice(self.texts))
        for text in self.texts:
            self.cache.release(text.table)
        assert_states_free(self.pool)

    def start(self) -> None:
        """Begin a text that may have a cached prefix: one of two prompts, cut at any place."""
        prompt = [(number * 7) % 50 for number in range(self.dice.randrange(1, 100))]
        if self.dice.random() < 0.3:
            prompt[40:] = [1] * len(prompt[40:])
        text = Text(self.cache, self.cache.match_prefix(prompt))
        text.tokens = prompt[: text.table.length]
        if text.tokens:
            self.num_hits += 1
            assert text.state == text.tokens
        self.texts.append(text)
        self.cache.prepare(text.table, len(prompt))
        wanted = tuple(self.dice.randrange(len(prompt) + 1) for _ in range(2))
        self.cache.want_checkpoints(text.table, wanted)
        while len(text.tokens) < len(prompt):
            chunk = prompt[len(text.tokens) :][: self.dice.randrange(1, 60)]
            text.read(chunk)

    def operate(self, text: Text) -> None:
        dice = self.dice
        tree = random_tree(dice, dice.randrange(1, 8))
        chance = dice.random()
        if chance < 0.08 or len(text.tokens) > 150:
            self.texts.remove(text)
            self.cache.release(text.table)
        elif chance < 0.16:
            num_left = self.cache.rollback(text.table, dice.randrange(len(text.tokens) + 1))
            del text.tokens[num_left:]
        elif chance < 0.24:  # interrupted before or after the pass
            begun = text.begin(tree)
            if dice.random() < 0.5:
                begun.run()
                assert not self.cache.has_states(text.table)
                del text.tokens[self.cache.rollback(text.table, len(text.tokens)) :]
        else:
            if chance < 0.34:  # the first layers
                text.run(tree, -1)
            cut = dice.randrange(1, len(tree) + 1)
            for start, stop in ((0, cut), (cut, len(tree))):
                if start < stop:
                    part = TokenTree(tree.tokens[:stop], tree.parents[:stop])
                    begun = text.run(part, num_computed=start)
                    self.num_replayed += begun.arguments.replayed
            text.commit(tree, random_path(dice, tree))
            assert self.cache.has_states(text.table)


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 400), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_scripts(seeds: range) -> None:
    scripts = [Script(seed) for seed in seeds]
    for script in scripts:
        script.run(120)
    assert sum(script.num_hits for script in scripts) > 2 * len(seeds)
    assert sum(script.num_replayed for script in scripts) > 50 * len(seeds)
