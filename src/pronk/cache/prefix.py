"""Prefix cache: finds the KV blocks of earlier texts that begin with the same tokens.

Only full blocks of committed tokens are cached. The key of a block is a digest of the text up to
the end of the block::

    digest(block) = hash(digest(previous block), tokens of the block)

The chain of digests begins with a hash of the request's salt, so that requests with different salts
share no blocks. The hash function is keyed, with a random key per process or the key of the prompt
cache on disk. Besides the digest, the tokens are compared. If no block is empty, the allocator
takes cached blocks that no table holds, least recently used first.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from pronk.cache.blocks import BlockAllocator, BlockTable

# With 32 bytes, a client cannot find two texts with the same digest, even if the key is known.
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class _Entry:
    """A cached block.

    Attributes:
        block: its number.
        parent_digest: digest of the text before the block.
        tokens: token ids in the block.
    """

    block: int
    parent_digest: bytes
    tokens: list[int]


class PrefixCache:
    """The cached blocks of one :class:`PagedCache`, by the digest of the text up to their end."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)  # key of the hash; changed only while no block is cached
        # called with the digest of a block that leaves the cache
        self.on_evict: Callable[[bytes], None] | None = None
        self._entries: dict[bytes, _Entry] = {}
        self._digests: dict[int, bytes] = {}  # digest of each cached block, by block number

    def __len__(self) -> int:
        return len(self._entries)

    def attach(self, allocator: BlockAllocator) -> None:
        """Remove all blocks, and use the blocks of another allocator from now on."""
        self._entries.clear()
        self._digests.clear()
        self._allocator = allocator
        allocator.set_prefix_cache(self)

    def is_cached(self, block: int) -> bool:
        """Return whether the prefix cache holds the block, so that later prompts can reuse it."""
        return block in self._digests

    def evict(self, block: int) -> None:
        """Remove a block from the prefix cache, if it is cached, before it is overwritten."""
        if block in self._digests:
            digest = self._digests.pop(block)
            del self._entries[digest]
            if self.on_evict is not None:
                self.on_evict(digest)

    def contains(self, digest: bytes) -> bool:
        """Return whether a block with this digest is cached."""
        return digest in self._entries

    def match(
        self, tokens: Sequence[int], salt: bytes = b"", digests: list[bytes] | None = None
    ) -> BlockTable | None:
        """Return a table with the longest cached prefix of a text; ``None`` if no block is cached.

        The prefix consists of whole blocks. It never contains the last token, which must be
        computed to get logits.

        Args:
            tokens: token ids of the text.
            salt: only blocks that were inserted with the same salt are found.
            digests: digests of the text's first blocks; digests of further blocks are computed and
                appended. Pass the same list again for the same or a longer text, so that each block
                is hashed only once.
        """
        size = self._allocator.block_size
        digests = [] if digests is None else digests
        blocks = list[int]()
        parent = self._digest(b"", salt)
        for number in range((len(tokens) - 1) // size):
            if number == len(digests):
                self._append_digest(digests, tokens, salt)
            entry = self._entries.get(digests[number])
            if entry is None or entry.parent_digest != parent:
                break
            block_tokens = list(tokens[number * size : (number + 1) * size])
            if entry.tokens != block_tokens:
                break
            blocks.append(entry.block)
            parent = digests[number]
        if not blocks:
            return None
        block_table = BlockTable(length=len(blocks) * size)
        block_table.digests = digests[: len(blocks)]
        self._allocator.assign_cached(block_table, blocks)
        return block_table

    def extend_digests(
        self, tokens: Sequence[int], salt: bytes, digests: list[bytes]
    ) -> list[bytes]:
        """Append the missing digests of a text's full blocks to ``digests``, and return the list.

        A block that ends with the last token is left out. The arguments are those of :meth:`match`.
        """
        num_blocks = (len(tokens) - 1) // self._allocator.block_size
        while len(digests) < num_blocks:
            self._append_digest(digests, tokens, salt)
        return digests

    def insert(
        self,
        block_table: BlockTable,
        tokens: Sequence[int],
        salt: bytes = b"",
        num_committed: int | None = None,
    ) -> None:
        """Add the blocks of a table that have been filled since the last call.

        Args:
            block_table: a table, whose ``digests`` are extended.
            tokens: token ids of its text.
            salt: as in :meth:`match`.
            num_committed: number of leading tokens that cannot be rolled back any more; ``None``:
                all.
        """
        size = self._allocator.block_size
        stop = block_table.length
        if num_committed is not None:
            stop = min(num_committed, stop)
        for number in range(len(block_table.digests), stop // size):
            parent = self._last_digest(block_table.digests, salt)
            digest = self._append_digest(block_table.digests, tokens, salt)
            index = number - block_table.num_released
            if index < 0 or digest in self._entries:
                continue
            block = block_table.blocks[index]
            if block in self._digests:
                continue
            block_tokens = list(tokens[number * size : (number + 1) * size])
            self._entries[digest] = _Entry(block, parent, block_tokens)
            self._digests[block] = digest

    def _append_digest(self, digests: list[bytes], tokens: Sequence[int], salt: bytes) -> bytes:
        """Compute the digest of block ``len(digests)`` of a text; append it to ``digests``."""
        size = self._allocator.block_size
        number = len(digests)
        block_tokens = np.asarray(tokens[number * size : (number + 1) * size], dtype=np.int32)
        digest = self._digest(self._last_digest(digests, salt), block_tokens.tobytes())
        digests.append(digest)
        return digest

    def _last_digest(self, digests: Sequence[bytes], salt: bytes) -> bytes:
        """Return the digest of the last block, or that of the salt if there is no block yet."""
        return digests[-1] if digests else self._digest(b"", salt)

    def _digest(self, parent: bytes, tokens: bytes) -> bytes:
        return blake2b(parent + b"\0" + tokens, digest_size=_DIGEST_BYTES, key=self.key).digest()
