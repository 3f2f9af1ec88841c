"""States of recurrent layers: one per request, with exact rollback.

A recurrent layer has a state per request where attention has keys and values per token. A state
that includes a token cannot drop it again. So a pass adds to it only tokens that stay in the
text, and of every other token the pass keeps the *update*: what the token adds to the state (its
key, delta, decay, and input of the convolution), about a hundredth of a state ::

    text      a b c d e f g ┬ h      committed: a to f; g is pending, h and i are draft tokens
                            └ i
    state     a b c d                in the request's slot of the pool
    path              e f            committed draft tokens: updates, replayed by the next pass
    nodes                 - h i      the next pass adds e, f and g, and leaves the updates of h, i

A pass reads the state once, replays the path, adds the pending tokens and writes the state once,
as plain decoding does. The states of draft tokens exist only inside the pass, depth first in the
tree. The recurrence has one order of sums, so the bits of a state depend on its text alone
(``kernels/csrc/recurrence.inc``).

A *checkpoint* is a copy of the state after a prefix of a text. The prefix cache finds it by the
digest of the prefix's last block, see :mod:`pronk.cache.checkpoints`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pronk.base.arrays import FLOAT32, Array, mapped_zeros
from pronk.base.errors import CacheFullError, PronkError
from pronk.cache.checkpoints import Checkpoints
from pronk.checkpoint.config import ModelConfig, RecurrentConfig
from pronk.kernels.structures import CRecurrence
from pronk.sampling.tree import TokenTree
from pronk.sampling.tree_size import DEFAULT_MAX_TREE

if TYPE_CHECKING:
    from pronk.cache.blocks import BlockTable

_MAX_CHECKPOINTS = 16  # with a prefix cache: a few conversations with a few checkpoints each
_MAX_COPIES = 2  # checkpoints without a prefix cache, which would find them
_LANES = 16  # numbers of a vector in the kernels; rows of states are padded to whole vectors


class StateError(PronkError):
    """A state is not that of the committed tokens, because an earlier pass was interrupted.

    The scheduler finds such requests before a pass (:meth:`StatePool.is_complete`), and lets them
    read their texts again.
    """

    def __init__(self) -> None:
        super().__init__("expected the state of the committed tokens, found that of other ones")


class StateCounts(NamedTuple):
    """Numbers of slots of a :class:`StatePool`."""

    requests: int  # requests that can run at the same time
    checkpoints: int  # copies of states for later prompts
    updates: int  # draft tokens of all requests together, in a pass and in the pass before


DEFAULT_COUNTS = StateCounts(requests=9, checkpoints=8, updates=272)


class StatePass(NamedTuple):
    """One request's part of a pass in recurrent layers; keeps the memory of ``struct`` alive."""

    struct: CRecurrence
    arrays: tuple[object, ...]  # objects to whose memory ``struct`` points


@dataclass(eq=False)
class StateTable:
    """State of one request's text, and the updates of the tokens after those of the state.

    Attributes:
        slot: slot of the state.
        path_start: position in the text of the first token of ``path``.
        path: update slots of committed tokens; those before ``length`` are no longer needed.
        nodes: update slots of the nodes of the last pass, -1 for tokens that the state includes.
        wanted: positions in the text at which checkpoints are wanted besides the usual ones.
        fork_at: number of tokens after which other samples of the prompt start; ``None``: there
            are none.
        copies: ``(position, slot)`` of copies of the state that passes have written: checkpoints
            before the prefix cache has the digests of their blocks, and the copy at ``fork_at``.
        own_checkpoints: numbers of blocks of this text whose checkpoints this table has added.
    """

    slot: int
    path_start: int = 0
    path: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    wanted: tuple[int, ...] = ()
    fork_at: int | None = None
    copies: list[tuple[int, int]] = field(default_factory=list)
    own_checkpoints: list[int] = field(default_factory=list)
    # The value of ``length``. The kernels change it when a pass is complete, so that it is right
    # even if the caller of the pass is interrupted before it has recorded the pass.
    c_length: ctypes.c_int32 = field(default_factory=ctypes.c_int32)

    @property
    def length(self) -> int:
        """Number of tokens that the state includes, from the first token of the text on."""
        return self.c_length.value


class StatePool:
    """States and updates of all requests of one model.

    Attributes:
        counts: numbers of slots.
        states: by layer, float32 ``[num_slots, value_heads, key_dim, value_dim rounded up to 16]``.
        inputs: by layer, float32 ``[num_slots, taps - 1, channels]``: inputs of the convolution at
            the last tokens of the state, the oldest first.
        updates: by layer, float32 ``[num_updates, …]``; ``recurrence.inc`` has the parts.
        checkpoints: copies of states.
        caches_prefixes: whether checkpoints are of use: later prompts can share blocks.
        traffic: int64 ``[2]``, bytes of states that passes have read and written, without those of
            convolutions; ``None``: they are not counted.
    """

    def __init__(
        self,
        config: ModelConfig,
        counts: StateCounts,
        block_size: int,
        poison: float | None = None,
    ) -> None:
        """Allocate the arrays; memory is taken when a slot is used for the first time.

        ``poison`` is written to freed slots, so that tests detect reads of them.
        """
        assert config.recurrent is not None, "expected a model with recurrent layers"
        self.counts = counts
        self.block_size = block_size
        self.poison = poison
        self.caches_prefixes = False
        self.traffic: Array | None = None
        self.num_slots = counts.requests + counts.checkpoints
        self.num_updates = counts.updates
        self.states: dict[int, Array] = {}
        self.inputs: dict[int, Array] = {}
        self.updates: dict[int, Array] = {}
        recurrent = config.recurrent
        state_shape = _state_shape(recurrent)
        input_shape = (recurrent.taps - 1, recurrent.num_channels)
        for layer in range(config.num_layers):
            if config.recurrent_of(layer) is None:
                continue
            self.states[layer] = self._new_array(self.num_slots, state_shape)
            self.inputs[layer] = self._new_array(self.num_slots, input_shape)
            self.updates[layer] = self._new_array(self.num_updates, (update_size(recurrent),))
        self.checkpoints = Checkpoints()
        # Slots are taken from the end: the one that was freed last is still in the caches.
        self._free_requests = list(range(counts.requests))
        self._free_checkpoints = list(range(counts.requests, self.num_slots))
        self._free_updates = list(range(self.num_updates))

    @staticmethod
    def _new_array(count: int, shape: tuple[int, ...]) -> Array:
        return mapped_zeros((count, *shape), FLOAT32, huge_pages=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (*self.states.values(), *self.inputs.values(), *self.updates.values())
        return sum(array.nbytes for array in arrays)

    @property
    def has_free_state(self) -> bool:
        """Whether another request can get a state."""
        return bool(self._free_requests)

    @property
    def num_free_updates(self) -> int:
        """Number of update slots that no request holds."""
        return len(self._free_updates)

    def reserve(self, block_table: BlockTable) -> None:
        """Give a request a state, if it has none: that of the empty text.

        Raises:
            CacheFullError: all states are taken.
        """
        if block_table.states is not None:
            return
        if not self._free_requests:
            msg = (
                f"expected a free state of the recurrent layers, found {self.counts.requests} in "
                "use; raise kv_memory, or lower the number of requests"
            )
            raise CacheFullError(msg)
        block_table.states = StateTable(self._free_requests.pop())

    def restore(self, block_table: BlockTable, checkpoint: int) -> None:
        """Give a request without a state a copy of the state in slot ``checkpoint``.

        The checkpoint is that of all the table's tokens. Raises as :meth:`reserve`.
        """
        self.reserve(block_table)
        table = block_table.states
        assert table is not None
        for arrays in (self.states, self.inputs):
            for array in arrays.values():
                array[table.slot] = array[checkpoint]
        table.c_length.value = block_table.length

    def fork(self, block_table: BlockTable, forked: BlockTable) -> bool:
        """Give ``forked`` the state of its text, which is the beginning of another table's text.

        Return False if ``block_table`` has no copy of the state after these tokens
        (``StateTable.fork_at``), or if no state is free.
        """
        table = block_table.states
        if table is None or not self.has_free_state:
            return False
        for position, slot in table.copies:
            if position == forked.length <= table.length:
                self.restore(forked, slot)
                return True
        return False

    def begin_pass(
        self,
        block_table: BlockTable,
        tree: TokenTree,
        *,
        num_computed: int,
        num_final: int,
        num_extra: int = 0,
    ) -> StatePass:
        """Return the arguments of a pass over the nodes of ``tree`` from ``num_computed`` on.

        Args:
            block_table: the request's table.
            tree: nodes after the committed tokens.
            num_computed: number of leading nodes that earlier passes have computed.
            num_final: number of tokens that stay in the text, from its beginning; the state takes
                over those that are committed, or rows of the pass.
            num_extra: number of update slots for further nodes, a chain below the last one.

        Raises:
            StateError: the state includes a row of this pass already, or lacks tokens, or updates
                of computed nodes are missing.
            CacheFullError: update slots or states are missing.
        """
        self.reserve(block_table)
        table = block_table.states
        assert table is not None
        committed = block_table.length
        self._drop_taken_over(table)
        absorbed = max(0, table.length - committed)
        if absorbed > num_computed or not self.is_complete(block_table, committed + absorbed):
            raise StateError
        keeps = num_final >= committed
        certain = 0
        if keeps and absorbed == num_computed:
            longest = tree.main_chain if num_computed + 1 < len(tree) else len(tree)
            certain = max(0, min(num_final - committed, longest) - absorbed)
        first = absorbed + certain
        computed = table.nodes[first:num_computed]
        if -1 in computed or len(computed) < num_computed - first:
            raise StateError
        self._resize_nodes(table, first, len(tree) + num_extra)
        slots = np.array([*table.path, *table.nodes[first:]], np.int32)
        copies = np.empty((0, 2), np.int32)
        if keeps:
            copies = self._plan_copies(block_table, max(table.length, committed) + certain)
        struct = CRecurrence(
            slots.ctypes.data,
            copies.ctypes.data,
            ctypes.addressof(table.c_length),
            table.slot,
            int(keeps),
            len(table.path),
            absorbed,
            certain,
            len(copies),
        )
        return StatePass(struct, (slots, copies, table))

    def is_complete(self, block_table: BlockTable, length: int | None = None) -> bool:
        """Return whether the state and the path are those of the first ``length`` tokens.

        By default, these are the committed ones. False after an interrupted step: then the text
        must be read again.
        """
        length = block_table.length if length is None else length
        table = block_table.states
        if table is None:
            return not length
        num_in_path = table.path_start + len(table.path) if table.path else 0
        return max(table.length, num_in_path) == length and table.path_start <= table.length

    def read_state(self, slot: int) -> bytes:
        """Return the bytes of the state in a slot, ``state_bytes``."""
        arrays = (*self.states.values(), *self.inputs.values())
        return b"".join(array[slot].tobytes() for array in arrays)

    def write_state(self, block_table: BlockTable, data: bytes) -> None:
        """Give a table the state of all its tokens: ``data``, which :meth:`read_state` returned.

        The state becomes a checkpoint, too, so that the next prompt need not read it again.
        """
        self.reserve(block_table)
        table = block_table.states
        assert table is not None
        slots = [table.slot]
        copy = self._take_checkpoint_slot(block_table)
        if copy is not None:
            slots.append(copy)
            table.copies.append((block_table.length, copy))
        begin = 0
        for arrays in (self.states, self.inputs):
            for array in arrays.values():
                shape = array.shape[1:]
                size = math.prod(shape)
                array[slots] = np.frombuffer(data, array.dtype, size, begin).reshape(shape)
                begin += size * array.itemsize
        table.c_length.value = block_table.length

    @property
    def state_bytes(self) -> int:
        """Number of bytes of a state, over all layers."""
        arrays = (*self.states.values(), *self.inputs.values())
        return sum(array.nbytes for array in arrays) // self.num_slots

    def commit(self, block_table: BlockTable, offsets: Sequence[int]) -> None:
        """Commit nodes of the last pass: tokens that are now part of the text.

        ``offsets`` are the numbers of the nodes in the pass, from 0, in the order of the text. Call
        this before ``block_table.length`` changes.
        """
        table = block_table.states
        if table is None:
            return
        self._drop_taken_over(table)
        committed = block_table.length
        for index, node in enumerate(offsets):
            position = committed + index
            if position < table.length:
                assert node == index, "expected a committed chain in the state"
                continue
            if not table.path:
                table.path_start = position
            table.path.append(table.nodes[node])
            table.nodes[node] = -1
        if offsets == range(len(offsets)):
            del table.nodes[: len(offsets)]  # the nodes below stay computed
        else:
            self._free_nodes(table, 0)

    def rollback(self, block_table: BlockTable, length: int) -> int:
        """Drop the tokens of a text after the first ``length``.

        Return the number of tokens that need not be computed again: ``length``, or 0 if the state
        includes a dropped token. No token can be removed from a state, so the state is then freed,
        and the text has to be read from its beginning or from a checkpoint.
        """
        table = block_table.states
        if table is None:
            return length
        self._free_nodes(table, 0)
        if table.length > length:
            self.release(block_table)
            return 0
        num_kept = max(0, length - table.path_start)
        self._free_update_slots(table.path[num_kept:])
        del table.path[num_kept:]
        return length

    def release(self, block_table: BlockTable) -> None:
        """Free the state and the updates of a request."""
        table = block_table.states
        if table is None:
            return
        block_table.states = None
        self._free_nodes(table, 0)
        self._free_update_slots(table.path)
        for _, slot in table.copies:
            self._free_slot(slot)
        self._free_slot(table.slot)

    def reset(self) -> None:
        """Free all slots but those of checkpoints; existing tables must not be used any more."""
        taken = set(self.checkpoints.slots())
        self._free_requests = list(range(self.counts.requests))
        self._free_checkpoints = [
            slot for slot in range(self.counts.requests, self.num_slots) if slot not in taken
        ]
        self._free_updates = list(range(self.num_updates))

    def add_checkpoints(self, block_table: BlockTable) -> None:
        """Hand the copies of the last passes to ``checkpoints``, as far as digests are known."""
        table = block_table.states
        if table is None or not table.copies:
            return
        left = list[tuple[int, int]]()
        for position, slot in table.copies:
            number = position // self.block_size
            if position > table.length:
                self._free_slot(slot)  # the pass that should have written it did not run
            elif position == table.fork_at or number > len(block_table.digests):
                left.append((position, slot))
            elif self.checkpoints.add(block_table.digests[number - 1], slot):
                table.own_checkpoints.append(number)
                self._thin_out(block_table, number)
            else:
                self._free_slot(slot)
        table.copies = left

    def drop_checkpoints(self) -> None:
        """Free all checkpoints."""
        for slot in self.checkpoints.clear():
            self._free_slot(slot)

    def drop_checkpoint(self, digest: bytes) -> None:
        """Free the checkpoint at the end of the KV block of this digest, if there is one."""
        slot = self.checkpoints.remove(digest)
        if slot is not None:
            self._free_slot(slot)

    def _drop_taken_over(self, table: StateTable) -> None:
        """Free the updates of committed tokens that the state includes."""
        num_taken = min(len(table.path), max(0, table.length - table.path_start))
        self._free_update_slots(table.path[:num_taken])
        del table.path[:num_taken]
        table.path_start += num_taken

    def _resize_nodes(self, table: StateTable, first: int, count: int) -> None:
        """Give each node from ``first`` on an update slot, and the nodes before none."""
        self._free_nodes(table, count)
        table.nodes += [-1] * (count - len(table.nodes))
        for node in range(first):
            if table.nodes[node] >= 0:
                self._free_update_slots([table.nodes[node]])
                table.nodes[node] = -1
        missing = [node for node in range(first, count) if table.nodes[node] < 0]
        if len(missing) > len(self._free_updates):
            msg = (
                f"expected {len(missing)} free updates of recurrent layers, found "
                f"{len(self._free_updates)}; raise kv_memory, or propose fewer draft tokens"
            )
            raise CacheFullError(msg)
        for node in missing:
            table.nodes[node] = self._free_updates.pop()

    def _free_nodes(self, table: StateTable, first: int) -> None:
        """Free the update slots of the nodes from ``first`` on."""
        self._free_update_slots([slot for slot in table.nodes[first:] if slot >= 0])
        del table.nodes[first:]

    def _plan_copies(self, block_table: BlockTable, length: int) -> Array:
        """Take slots for the checkpoints of a pass after which the state has ``length`` tokens.

        Return pairs of the number of tokens that the pass has added, and a slot.
        """
        table = block_table.states
        assert table is not None
        for _, slot in [each for each in table.copies if each[0] > table.length]:
            self._free_slot(slot)  # of a pass that did not run
        table.copies = [each for each in table.copies if each[0] <= table.length]
        ends = self._checkpoint_ends(table, length) if self.caches_prefixes else set[int]()
        if table.fork_at is not None and table.fork_at <= length:
            ends.add(table.fork_at)
        taken = {position for position, _ in table.copies}
        planned = list[tuple[int, int]]()
        for end in sorted(end for end in ends - taken if end > table.length):
            taken_slot = self._take_checkpoint_slot(block_table)
            if taken_slot is not None:
                planned.append((end, taken_slot))
        table.copies += planned
        pairs = [(end - table.length, slot) for end, slot in planned]
        return np.array(pairs, np.int32).reshape(len(pairs), 2)

    def _checkpoint_ends(self, table: StateTable, length: int) -> set[int]:
        """Return where a text of ``length`` tokens should have checkpoints: ends of full blocks."""
        size = self.block_size
        numbers = _spread(length // size)
        numbers |= {position // size for position in table.wanted if position <= length}
        return {number * size for number in numbers}

    def _thin_out(self, block_table: BlockTable, newest: int) -> None:
        """Drop own checkpoints that are neither wanted nor in ``_spread(newest)``."""
        table = block_table.states
        assert table is not None
        kept = _spread(newest)
        for number in self._unwanted_checkpoints(table):
            if number not in kept:
                self.drop_checkpoint(block_table.digests[number - 1])
                table.own_checkpoints.remove(number)

    def _unwanted_checkpoints(self, table: StateTable) -> list[int]:
        wanted = {position // self.block_size for position in table.wanted}
        return [number for number in table.own_checkpoints if number not in wanted]

    def _take_checkpoint_slot(self, block_table: BlockTable) -> int | None:
        """Return a free slot, or that of a checkpoint, which is removed.

        The last checkpoint of the text itself goes first, unless it is wanted: otherwise a long
        answer would take the slots of all other texts. Then the least recently used one goes.
        """
        if self._free_checkpoints:
            return self._free_checkpoints.pop()
        table = block_table.states
        assert table is not None
        for number in sorted(self._unwanted_checkpoints(table), reverse=True):
            table.own_checkpoints.remove(number)
            slot = self.checkpoints.remove(block_table.digests[number - 1])
            if slot is not None:
                return slot
        return self.checkpoints.remove_oldest()

    def _free_update_slots(self, slots: Sequence[int]) -> None:
        if self.poison is not None:
            for array in self.updates.values():
                array[slots] = self.poison
        self._free_updates += slots

    def _free_slot(self, slot: int) -> None:
        if self.poison is not None:
            for arrays in (self.states, self.inputs):
                for array in arrays.values():
                    array[slot] = self.poison
        is_checkpoint = slot >= self.counts.requests
        (self._free_checkpoints if is_checkpoint else self._free_requests).append(slot)


def _spread(newest: int) -> set[int]:
    """Return numbers of blocks up to ``newest``, ever farther apart.

    For each ``i``, these are the last two multiples of ``2 ** i``. Of 126, they are 126, 125, 124,
    120, 112, 96 and 64.
    """
    numbers = set[int]()
    for shift in range(newest.bit_length()):
        last = newest >> shift << shift
        numbers |= {last, last - (1 << shift)}
    return {number for number in numbers if number > 0}


def count_states(
    config: ModelConfig,
    max_requests: int,
    num_bytes: int,
    *,
    share_prefixes: bool,
    max_tree: int = DEFAULT_MAX_TREE,
) -> StateCounts:
    """Divide memory for states of recurrent layers among requests, checkpoints and draft tokens.

    Three quarters are for states, at most one for each request and another, and 16 checkpoints, or
    2 without a prefix cache; a third of the states at most, rounded up. The rest is for
    updates, at most those of two trees of ``max_tree`` rows.

    Args:
        config: a model with recurrent layers.
        max_requests: number of requests that run at the same time.
        num_bytes: memory in bytes. The result may need more: it has at least one state and 16
            updates.
        share_prefixes: whether there is a prefix cache, which finds checkpoints.
        max_tree: maximum number of rows of a request in a forward pass.
    """
    assert config.recurrent is not None
    num_layers = sum(config.recurrent.layers)
    per_state = num_layers * state_size(config.recurrent) * FLOAT32.itemsize
    per_update = num_layers * update_size(config.recurrent) * FLOAT32.itemsize
    # A waiting request takes a state before it preempts another.
    requests = max_requests + 1
    checkpoints = _MAX_CHECKPOINTS if share_prefixes else _MAX_COPIES
    num_states = max(1, min(requests + checkpoints, num_bytes * 3 // 4 // per_state))
    checkpoints = min(checkpoints, -(-num_states // 3))
    requests = min(requests, max(1, num_states - checkpoints))
    most_updates = 2 * (requests + max_tree)
    num_updates = max(16, min(most_updates, num_bytes // 4 // per_update))
    return StateCounts(requests, num_states - requests, num_updates)


def count_state_bytes(config: ModelConfig, counts: StateCounts) -> int:
    """Return the number of bytes of a :class:`StatePool`."""
    assert config.recurrent is not None
    num_states = counts.requests + counts.checkpoints
    size = num_states * state_size(config.recurrent)
    size += counts.updates * update_size(config.recurrent)
    return sum(config.recurrent.layers) * size * FLOAT32.itemsize


def state_size(recurrent: RecurrentConfig) -> int:
    """Return the number of float32 numbers of a request's state in one layer."""
    rows = (recurrent.taps - 1) * recurrent.num_channels
    heads, keys, values = _state_shape(recurrent)
    return heads * keys * values + rows


def update_size(recurrent: RecurrentConfig) -> int:
    """Return the number of float32 numbers of a token's update in one layer."""
    keys = recurrent.num_channels + recurrent.key_heads * recurrent.key_dim
    deltas = recurrent.value_heads * _round_up(recurrent.value_dim)
    return _round_up(_round_up(keys) + deltas + recurrent.value_heads)


def _state_shape(recurrent: RecurrentConfig) -> tuple[int, int, int]:
    return recurrent.value_heads, recurrent.key_dim, _round_up(recurrent.value_dim)


def _round_up(count: int) -> int:
    return -(-count // _LANES) * _LANES
