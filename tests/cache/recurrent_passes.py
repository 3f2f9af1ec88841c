"""Forward passes over recurrent layers in plain Python, for tests of the cache without a model.

A state is the text that it has taken over: the number of tokens, then the tokens. An update is its
token. Freed slots hold NaN, so that a pass that reads one fails.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.cache.states import StateCounts, StatePool
from pronk.sampling.tree import TokenTree
from tiny_models import make_cache, tiny_config

CONFIG = tiny_config(special="recurrent", windows=(None, None, None))
SIZE = 16


def recurrent_cache(counts: StateCounts, num_blocks: int = 60, **options: Any) -> PagedCache:
    """Return a cache of a model with recurrent layers."""
    options = {"share_prefixes": True} | options
    return make_cache(CONFIG, FLOAT32, num_blocks=num_blocks, state_counts=counts, **options)


def pool_of(cache: PagedCache) -> StatePool:
    """Return the states of a cache."""
    assert cache.states is not None
    return cache.states


class Arguments(NamedTuple):
    """``pronk_recurrence`` of one request in plain values."""

    slots: list[int]
    copies: list[tuple[int, int]]
    length: int
    slot: int
    keeps: bool
    replayed: int
    absorbed: int
    certain: int


class Pass:
    """One pass of a request that has begun; :meth:`run` does what the kernels do."""

    def __init__(
        self,
        cache: PagedCache,
        table: BlockTable,
        tree: TokenTree,
        *,
        num_final: int,
        num_computed: int = 0,
        num_extra: int = 0,
    ) -> None:
        self.pool = pool_of(cache)
        self.tree = tree
        self.num_computed = num_computed
        self.num_extra = num_extra
        self.begun = self.pool.begin_pass(
            table, tree, num_computed=num_computed, num_final=num_final, num_extra=num_extra
        )

    @property
    def arguments(self) -> Arguments:
        struct = self.begun.struct
        num_nodes = len(self.tree) + self.num_extra - struct.absorbed - struct.certain
        slots = _integers(struct.updates, struct.replayed + num_nodes)
        copies = _integers(struct.copies, 2 * struct.num_copies)
        return Arguments(
            slots,
            list(zip(copies[::2], copies[1::2], strict=True)),
            ctypes.c_int32.from_address(struct.length).value,
            struct.slot,
            bool(struct.keeps),
            struct.replayed,
            struct.absorbed,
            struct.certain,
        )

    def run(self) -> list[list[int]]:
        """Return the text up to each node: what the state holds at the node's row."""
        given = self.arguments
        text = read_text(self.pool, given.slot) if given.length else []
        copies = dict(given.copies)
        assert [*copies] == sorted(copies), "expected copies in ascending order"
        num_added = given.replayed + given.certain
        added = [read_token(self.pool, slot) for slot in given.slots[: given.replayed]]
        added += self.tree.tokens[given.absorbed : given.absorbed + given.certain]
        for number, token in enumerate(added, 1):
            text.append(token)
            if number in copies:
                write_text(self.pool, copies.pop(number), text)
        assert not copies, "expected copies of states that the pass reaches"
        if given.keeps:
            write_text(self.pool, given.slot, text)
        first = given.absorbed + given.certain
        before = text[: len(text) - first]
        texts = [text[: len(before) + node + 1] for node in range(first)]
        for node in range(first, len(self.tree)):
            slot = given.slots[given.replayed + node - first]
            if node < self.num_computed:
                token = read_token(self.pool, slot)
                assert token == self.tree.tokens[node], "expected the update of a computed node"
            else:
                write_token(self.pool, slot, self.tree.tokens[node])
            parent = self.tree.parents[node]
            texts.append([*(before if parent < 0 else texts[parent]), self.tree.tokens[node]])
        if given.keeps:
            length = ctypes.c_int32.from_address(self.begun.struct.length)
            length.value += num_added
        return texts


def _integers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address)) if count else []


def _arrays(pool: StatePool, slot: int) -> list[Array]:
    return [array[slot].reshape(-1) for array in pool.states.values()]


def write_text(pool: StatePool, slot: int, text: Sequence[int]) -> None:
    """Overwrite the state in a slot with that of a text."""
    for array in _arrays(pool, slot):
        array[0] = len(text)
        array[1 : len(text) + 1] = text
    for inputs in pool.inputs.values():
        inputs[slot] = 0.0


def read_text(pool: StatePool, slot: int) -> list[int]:
    """Return the text of the state in a slot."""
    texts = list[list[int]]()
    for array in _arrays(pool, slot):
        assert not np.isnan(array[0]), "expected a state, found a freed slot"
        texts.append(array[1 : int(array[0]) + 1].astype(int).tolist())
    assert all(text == texts[0] for text in texts), "expected equal states in all layers"
    return texts[0]


def write_token(pool: StatePool, slot: int, token: int) -> None:
    """Overwrite an update."""
    for array in pool.updates.values():
        array[slot] = token


def read_token(pool: StatePool, slot: int) -> int:
    """Return the token of an update."""
    tokens = [array[slot, 0] for array in pool.updates.values()]
    assert not np.isnan(tokens[0]), "expected an update, found a freed slot"
    return int(tokens[0])
