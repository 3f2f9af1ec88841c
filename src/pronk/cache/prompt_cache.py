"""Prompt cache: the second level of the prefix cache, on disk, where blocks outlive the process.

A block on disk has the key of the prefix cache (:mod:`pronk.cache.prefix`): a digest of the
tenant's salt and of the text up to the end of the block. The first link of this chain is the
``identity``, a text with everything else that the bytes of a block depend on. A stored block
therefore has the bytes that a forward pass would compute, because the kernels fix the order of
every sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING

from pronk.cache.block_store import BlockStore
from pronk.cache.blocks import BlockTable

if TYPE_CHECKING:
    from pronk.cache.paged import PagedCache

# bytes of blocks per read; bounds the memory for their copies, and the time of a part
_READ_BYTES = 16 << 20


class PromptCache:
    """Blocks of one :class:`PagedCache` on disk."""

    def __init__(self, store: BlockStore, identity: str) -> None:
        self.store = store
        self.num_hits = 0  # number of texts of which blocks were read
        self._identity = identity
        # moving average of reads; ``None`` before the first
        self._seconds_per_block: float | None = None

    def attach(self, cache: PagedCache) -> None:
        """Connect a new, empty cache that has a prefix cache, which then has the same keys in every process."""
        if cache.prefix_cache is not None:
            layout = (
                f"{self._identity} blocks of {cache.block_size} tokens of {cache.kv_dtype} for "
                f"{cache.dtype}"
            )
            cache.prefix_cache.key = blake2b(layout.encode()).digest()
            self._cache = cache
            cache.prompt_cache = self

    def store_blocks(self, block_table: BlockTable) -> None:
        """Copy the full blocks of a table that are not on disk yet, and queue the copies for the writer.

        Blocks for which the queue has no room are copied in a later call. A call that finds more
        blocks of the table's text on disk also records their use, for eviction.
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
                new[number] = self._cache.read_block(table.blocks[number - table.num_released])
            table.num_stored += 1
        if table.num_stored > before:
            self.store.write(keys[: table.num_stored], new)

    def load(
        self,
        block_table: BlockTable,
        tokens: Sequence[int],
        salt: bytes,
        digests: list[bytes],
        seconds_per_token: float | None,
    ) -> Iterator[int]:
        """Read the blocks after a table's cached prefix from disk, in parts that extend the table.

        Blocks of a sliding window are one part, because none is of use without the others. The last
        token is never read, because it must be computed to get logits. Computed digests are
        appended to ``digests``, those of the text's first blocks. ``seconds_per_token`` is the
        measured duration of computing a token of a prompt; ``None`` if unknown.

        Yields:
            After each part but the last: the number of tokens that are left to read.
        """
        cache = self._cache
        size = self._cache.block_size
        length = block_table.length
        # a fork of another sample's table, which has the whole prompt
        if length % size or cache.prefix_cache is None:
            return
        first = length // size
        keys = self._keys(cache.prefix_cache.extend_digests(tokens, salt, digests))
        stop = first + self.store.count_leading(keys[first:])
        start = first
        window = cache.config.window
        if window is not None:  # blocks that have left the attention window are not needed
            start = max(first, (stop * size - window + 1) // size)
        if stop == first or not self._pays(stop - start, (stop - first) * size, seconds_per_token):
            return
        if start > first:
            cache.release(block_table)
            block_table.num_released = start
            block_table.length = start * size
        count = stop - start if start > first else self._blocks_per_read
        before = self._seconds_per_block
        seconds = 0.0
        for begin in range(start, stop, count):
            end = min(begin + count, stop)
            start_time = perf_counter()
            reached = self._read(block_table, tokens, keys, begin, end)
            if start > first and reached < stop:  # a part of the window is missing
                cache.release(block_table)
                return
            block_table.length = reached * size
            cache.cache_blocks(block_table, tokens, salt)
            self.num_hits += begin == start and reached > start
            if reached < end:
                return
            seconds += perf_counter() - start_time
            per_block = seconds / (end - start)
            self._seconds_per_block = per_block if before is None else (before + per_block) / 2
            if end < stop:
                yield (stop - end) * size

    def _read(
        self,
        block_table: BlockTable,
        tokens: Sequence[int],
        keys: Sequence[bytes],
        start: int,
        stop: int,
    ) -> int:
        """Read blocks ``start .. stop - 1`` of a text if they fit.

        Return the number of the first missing.
        """
        cache = self._cache
        size = self._cache.block_size
        number = start
        if cache.allocator.num_missing(block_table, stop * size) > cache.allocator.num_free:
            return start
        cache.prepare(block_table, stop * size)
        for begin in range(start, stop, self._blocks_per_read):
            for content in self.store.read(keys[begin : min(begin + self._blocks_per_read, stop)]):
                if content is None or len(content) != self._block_bytes:
                    return number
                block = block_table.blocks[number - block_table.num_released]
                cache.write_block(block, content, tokens[number * size : (number + 1) * size])
                number += 1
        return number

    def _pays(self, num_read: int, num_saved: int, seconds_per_token: float | None) -> bool:
        """Return whether reading blocks is faster than computing tokens, by measured durations, if known.

        After each refusal the estimate is lowered by a tenth, so that a disk that was slow once is
        tried again.
        """
        per_block = self._seconds_per_block
        if (
            seconds_per_token is None
            or per_block is None
            or num_read * per_block < num_saved * seconds_per_token
        ):
            return True
        self._seconds_per_block = 0.9 * per_block
        return False

    @property
    def _blocks_per_read(self) -> int:
        return max(1, min(500, _READ_BYTES // self._block_bytes))

    @property
    def _block_bytes(self) -> int:
        return self._cache.block_size * self._cache.bytes_per_token

    def _keys(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the keys on disk, which depend on what the cache keeps for drafters besides."""
        names = "\n".join(sorted(map(self._cache.feature_name, self._cache.features)))
        if not names:
            return list(digests)
        key = blake2b(names.encode()).digest()
        return [blake2b(digest, key=key, digest_size=32).digest() for digest in digests]
