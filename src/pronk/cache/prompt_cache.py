"""Prompt cache: the second level of the prefix cache, on disk, where blocks outlive the process.

A block on disk has the key of the prefix cache (:mod:`pronk.cache.prefix`): a digest of the
tenant's salt and of the text up to the end of the block. The key of this hash is made from the
``identity``, a text with everything else that the bytes of a block depend on, such as the model.
The kernels fix the order of every sum, so a stored block has exactly the bytes that a forward pass
would compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from pronk.cache.block_store import BlockStore
from pronk.cache.blocks import BlockTable

if TYPE_CHECKING:
    from pronk.cache.paged import PagedCache

# Bytes of blocks per read: limits the memory for copies, and the time of a part of :meth:`load`.
_READ_BYTES = 16 << 20
_MAX_BLOCKS_PER_READ = 500  # limit of ``BlockStore.read``


class _Reading(NamedTuple):
    """Blocks of a text to read, from ``start`` to ``stop``, and the state after them."""

    start: int
    stop: int
    # Whether a first part is of use without the rest. Not under a sliding window, and not for
    # recurrent layers, whose state is that after the last block.
    in_parts: bool
    state: bytes | None = None  # state of recurrent layers, if the model has such layers


class PromptCache:
    """The blocks of one :class:`PagedCache` that are stored on disk.

    Attributes:
        store: the blocks of all prompts and models in one folder.
        num_hits: number of texts that began with blocks from disk.
    """

    def __init__(self, store: BlockStore, identity: str) -> None:
        """``identity`` names everything that the bytes of a block depend on besides its text."""
        self.store = store
        self.num_hits = 0
        self._identity = identity
        # Moving average of the seconds to read a block; ``None`` before the first read.
        self._seconds_per_block: float | None = None

    def attach(self, cache: PagedCache) -> None:
        """Connect a new, empty cache.

        The digests of its prefix cache become the same in every process. A cache without a prefix
        cache is not connected.
        """
        if cache.prefix_cache is not None:
            layout = (
                f"{self._identity} blocks of {cache.block_size} tokens of {cache.kv_dtype} for "
                f"{cache.dtype}"
            )
            cache.prefix_cache.key = blake2b(layout.encode()).digest()
            self._cache = cache
            cache.prompt_cache = self

    def store_blocks(self, block_table: BlockTable) -> None:
        """Store the full blocks of a table that are not on disk yet.

        The blocks are copied, and a thread writes the copies. Blocks for which the thread's queue
        has no room are copied in a later call. The time of use of blocks that are on disk already
        is updated, because the least recently used blocks are evicted first.
        """
        table = block_table
        digests = block_table.digests
        size = self._block_bytes
        if table.num_stored >= len(digests) or not self.store.has_room(size):
            return
        before = table.num_stored
        keys = self._keys(digests)
        new = dict[int, bytes]()
        while table.num_stored < len(digests):
            number = table.num_stored
            if number >= table.num_released and not self.store.is_known(keys[number]):
                if not self.store.has_room((len(new) + 1) * size):
                    break
                block = table.blocks[number - table.num_released]
                new[number] = self._cache.read_block(block)
            table.num_stored += 1
        if table.num_stored > before:
            self.store.write(keys[: table.num_stored], new)

    def store_states(self, block_table: BlockTable, *, is_released: bool = False) -> None:
        """Store the checkpoints of a text that later prompts may need on disk.

        They are those at the positions ``StateTable.wanted``. Each is stored as soon as a pass has
        written it, because checkpoints of other texts may take its slot. If the table is being
        released, its last checkpoint is stored, too.
        """
        states = self._cache.states
        table = block_table.states
        if states is None or table is None or not table.own_checkpoints:
            return
        size = self._cache.block_size
        needed = {position // size for position in table.wanted}
        if is_released:
            needed.add(max(table.own_checkpoints))
        for number in sorted(needed.intersection(table.own_checkpoints)):
            digest = block_table.digests[number - 1]
            (key,) = self._state_keys([digest])
            if self.store.is_known(key):
                if is_released:
                    self.store.write([key], {})  # records the use
                continue
            slot = states.checkpoints.slot_of(digest)
            if slot is not None and self.store.has_room(states.state_bytes):
                self.store.write([key], {0: states.read_state(slot)})

    def load(
        self,
        block_table: BlockTable,
        tokens: Sequence[int],
        salt: bytes,
        digests: list[bytes],
        seconds_per_token: float | None,
    ) -> Iterator[int]:
        """Read the blocks after a table's cached prefix from disk, in parts that extend the table.

        The last token is never read, because it must be computed to get logits. Under a sliding
        window, only the blocks of the window are read, all in one part, because none is of use
        without the others.

        Args:
            block_table: a table with a cached prefix of the text, or empty.
            tokens: token ids of the text.
            salt: salt of the tenant.
            digests: digests of the text's first blocks; digests of further blocks are appended.
            seconds_per_token: measured duration of the computation of a prompt's token; ``None`` if
                unknown. Blocks are read only if reading is faster.

        Yields:
            The number of tokens that are left to read, after each part but the last.
        """
        cache = self._cache
        size = cache.block_size
        reading = self._plan_reading(block_table, tokens, salt, digests, seconds_per_token)
        if reading is None:
            return
        first = block_table.length // size
        start = reading.start
        stop = reading.stop
        blocks_per_part = self._blocks_per_read if reading.in_parts else stop - start
        if start > first:
            cache.release(block_table)
            block_table.num_released = start
            block_table.length = start * size
        keys = self._keys(digests[:stop])
        before = self._seconds_per_block
        seconds = 0.0
        for begin in range(start, stop, blocks_per_part):
            end = min(begin + blocks_per_part, stop)
            start_time = perf_counter()
            reached = self._read(block_table, tokens, keys, begin, end)
            if reached < stop and not reading.in_parts:
                cache.release(block_table)
                return
            block_table.length = reached * size
            if reading.state is not None:
                cache.write_state(block_table, reading.state)
                self.store.write(self._state_keys(digests[stop - 1 : stop]), {})  # records the use
            cache.cache_blocks(block_table, tokens, salt)
            if begin == start and reached > start:
                self.num_hits += 1
            if reached < end:
                return
            seconds += perf_counter() - start_time
            per_block = seconds / (end - start)
            self._seconds_per_block = per_block if before is None else (before + per_block) / 2
            if end < stop:
                yield (stop - end) * size

    def _plan_reading(
        self,
        block_table: BlockTable,
        tokens: Sequence[int],
        salt: bytes,
        digests: list[bytes],
        seconds_per_token: float | None,
    ) -> _Reading | None:
        """Return what to read after a table's cached prefix; ``None`` if nothing pays.

        The arguments are those of :meth:`load`.
        """
        cache = self._cache
        size = cache.block_size
        length = block_table.length
        # A table with a part of a block is a fork of another sample's table, with the whole prompt.
        if length % size or cache.prefix_cache is None:
            return None
        first = length // size
        digests = cache.prefix_cache.extend_digests(tokens, salt, digests)
        stop = first + self.store.count_leading(self._keys(digests)[first:])
        states = cache.states
        num_state_blocks = 0
        if states is not None:
            # The text goes on from the last state on disk.
            stop = first + self.store.find_last(self._state_keys(digests[first:stop]))
            num_state_blocks = -(-states.state_bytes // self._block_bytes)
        if stop == first:
            return None
        start = self._first_needed(first, stop)
        num_read = stop - start + num_state_blocks
        if not self._pays(num_read, (stop - first) * size, seconds_per_token):
            return None
        if states is None:
            return _Reading(start, stop, in_parts=start == first)
        (state,) = self.store.read(self._state_keys(digests[stop - 1 : stop]))
        has_slot = block_table.states is not None or states.has_free_state
        if state is None or len(state) != states.state_bytes or not has_slot:
            return None
        return _Reading(start, stop, in_parts=False, state=state)

    def _first_needed(self, first: int, stop: int) -> int:
        """Return the first of blocks ``first .. stop - 1`` that is in the attention window."""
        window = self._cache.config.window
        if window is None:
            return first
        size = self._cache.block_size
        return max(first, (stop * size - window + 1) // size)

    def _read(
        self,
        block_table: BlockTable,
        tokens: Sequence[int],
        keys: Sequence[bytes],
        start: int,
        stop: int,
    ) -> int:
        """Read blocks ``start .. stop - 1`` of a text from disk into the cache.

        Returns:
            ``stop``, or the number of the first block that is missing or damaged; ``start`` if the
            cache has no room for the blocks.
        """
        cache = self._cache
        size = self._cache.block_size
        number = start
        if cache.allocator.num_missing(block_table, stop * size) > cache.allocator.num_free:
            return start
        cache.prepare(block_table, stop * size)
        for begin in range(start, stop, self._blocks_per_read):
            end = min(begin + self._blocks_per_read, stop)
            for content in self.store.read(keys[begin:end]):
                if content is None or len(content) != self._block_bytes:
                    return number
                block = block_table.blocks[number - block_table.num_released]
                cache.write_block(block, content, tokens[number * size : (number + 1) * size])
                number += 1
        return number

    def _pays(self, num_read: int, num_saved: int, seconds_per_token: float | None) -> bool:
        """Return whether reading ``num_read`` blocks is faster than computing ``num_saved`` tokens.

        True if one of the durations is unknown. After each False, the measured duration of a read
        is lowered by a tenth, so that a disk that was slow once is tried again.
        """
        per_block = self._seconds_per_block
        if seconds_per_token is None or per_block is None:
            return True
        if num_read * per_block < num_saved * seconds_per_token:
            return True
        self._seconds_per_block = 0.9 * per_block
        return False

    @property
    def _blocks_per_read(self) -> int:
        num_blocks = _READ_BYTES // self._block_bytes
        return max(1, min(_MAX_BLOCKS_PER_READ, num_blocks))

    @property
    def _block_bytes(self) -> int:
        return self._cache.block_size * self._cache.bytes_per_token

    def _state_keys(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the keys on disk of the states at the ends of blocks with these digests."""
        key = b"states of recurrent layers"
        return [blake2b(digest, key=key, digest_size=32).digest() for digest in digests]

    def _keys(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the keys on disk of blocks with these digests.

        The bytes of a block also depend on the layer outputs that the cache saves for drafters, so
        the names of these outputs become a part of the keys.
        """
        names = sorted(map(self._cache.feature_name, self._cache.features))
        if not names:
            return list(digests)
        key = blake2b("\n".join(names).encode()).digest()
        return [blake2b(digest, key=key, digest_size=32).digest() for digest in digests]
