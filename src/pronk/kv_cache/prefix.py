"""Prefix cache: full blocks of committed tokens, found by the digest of their text.

A block's digest is a chain of keyed hashes over all tokens up to its end, one hash per block, starting from the
tenant's salt. The key is random per process, so two texts with one digest cannot be prepared; a hit also compares the
tokens. Unreferenced blocks keep their content until the allocator reuses them, least recently used first.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from pronk.kv_cache.blocks import BlockAllocator, BlockTable

__all__ = ["PrefixCache"]

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class _Entry:
    """A cached block: its number, the digest of the preceding text, its own tokens."""

    block: int
    parent_digest: bytes
    tokens: list[int]


class PrefixCache:
    """Index of the cached blocks of one pool by digest, and the allocator's :class:`CachedBlockIndex`."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._entries: dict[bytes, _Entry] = {}
        self._digests: dict[int, bytes] = {}  # digest of each cached block

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._entries)

    def attach(self, allocator: BlockAllocator) -> None:
        """Clear the cache and serve ``allocator``."""
        self._entries.clear()
        self._digests.clear()
        self._allocator = allocator
        allocator.set_prefix_cache(self)

    def is_cached(self, block: int) -> bool:
        """Return whether the block is cached."""
        return block in self._digests

    def evict(self, block: int) -> None:
        """Remove a cached block."""
        del self._entries[self._digests.pop(block)]

    def discard(self, block: int) -> None:
        """Remove a block that is about to be overwritten, if it is cached."""
        if block in self._digests:
            self.evict(block)

    def contains(self, digest: bytes) -> bool:
        """Return whether a block with this digest is cached."""
        return digest in self._entries

    def match(self, tokens: Sequence[int], salt: bytes = b"", digests: list[bytes] | None = None) -> BlockTable | None:
        """Return a table of the longest cached prefix of ``tokens``; ``None`` if there is none.

        The prefix is a whole number of blocks. It never contains the last token, which has to be computed for the next
        token's logits.

        Args:
            tokens: tokens of the text.
            salt: tenant's salt; only blocks learned with the same salt match.
            digests: known digests of the text's blocks; missing ones are appended as needed. Pass the same list again
                for the same or a longer text to hash each block only once.
        """
        size, digests = self._allocator.block_size, [] if digests is None else digests
        blocks, parent = list[int](), self._digest(b"", salt)
        for number in range((len(tokens) - 1) // size):
            block_tokens = list(tokens[number * size : (number + 1) * size])
            if number == len(digests):
                digests.append(self._digest(parent, _as_bytes(block_tokens)))
            entry = self._entries.get(digests[number])
            if entry is None or (entry.parent_digest, entry.tokens) != (parent, block_tokens):
                break
            blocks.append(entry.block)
            parent = digests[number]
        if not blocks:
            return None
        block_table = BlockTable(length=len(blocks) * size)
        block_table.digests = digests[: len(blocks)]
        self._allocator.assign_cached(block_table, blocks)
        return block_table

    def insert(
        self, block_table: BlockTable, tokens: Sequence[int], salt: bytes = b"", num_committed: int | None = None
    ) -> None:
        """Cache the blocks of a table that have been filled since the last call.

        Args:
            block_table: table of the text; its first ``length`` tokens are committed.
            tokens: tokens of the text.
            salt: see :meth:`match`.
            num_committed: number of tokens that will not be rolled back, if that is less than ``length``.
        """
        size = self._allocator.block_size
        stop = block_table.length if num_committed is None else min(num_committed, block_table.length)
        for number in range(len(block_table.digests), stop // size):
            block_tokens = list(tokens[number * size : (number + 1) * size])
            parent = block_table.digests[-1] if block_table.digests else self._digest(b"", salt)
            digest = self._digest(parent, _as_bytes(block_tokens))
            block_table.digests.append(digest)
            block = (
                block_table.blocks[number - block_table.num_released] if number >= block_table.num_released else None
            )
            if block is None or digest in self._entries or block in self._digests:
                continue
            self._entries[digest] = _Entry(block, parent, block_tokens)
            self._digests[block] = digest

    def _digest(self, parent: bytes, tokens: bytes) -> bytes:
        hashed = blake2b(parent, digest_size=_DIGEST_BYTES, key=self._key)
        hashed.update(b"\0" + tokens)
        return hashed.digest()


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()
