"""Prefix cache: full blocks of committed tokens, found by a digest of the text up to their end.

``digest(block) = hash(digest(previous block), tokens of the block)``. The chain begins with a hash
of the tenant's salt. The hash has a key: random per process, or that of the prompt cache on disk. A
hit also compares the tokens. If empty blocks run out, the allocator takes cached blocks that no
table holds, least recently used first.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from pronk.cache.blocks import BlockAllocator, BlockTable

_DIGEST_BYTES = 32  # no client can prepare two texts with the same digest, even if the key is known


@dataclass(frozen=True)
class _Entry:
    """A cached block: its number, the digest of the text before the block, and the tokens in the block."""

    block: int
    parent_digest: bytes
    tokens: list[int]


class PrefixCache:
    """The cached blocks of one :class:`PagedCache`, by digest."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)  # key of the hash; changed only while no block is cached
        self._entries: dict[bytes, _Entry] = {}
        self._digests: dict[int, bytes] = {}  # digest of each cached block, by block number

    def __len__(self) -> int:
        return len(self._entries)

    def attach(self, allocator: BlockAllocator) -> None:
        """Remove all blocks, and connect the prefix cache with a new allocator."""
        self._entries.clear()
        self._digests.clear()
        self._allocator = allocator
        allocator.set_prefix_cache(self)

    def is_cached(self, block: int) -> bool:
        """Return whether later prompts can reuse the content of the block."""
        return block in self._digests

    def evict(self, block: int) -> None:
        """Remove a block from the prefix cache, if it is cached, before it is overwritten."""
        if block in self._digests:
            del self._entries[self._digests.pop(block)]

    def contains(self, digest: bytes) -> bool:
        """Return whether a block with this digest is cached."""
        return digest in self._entries

    def match(
        self, tokens: Sequence[int], salt: bytes = b"", digests: list[bytes] | None = None
    ) -> BlockTable | None:
        """Return a table with the longest cached prefix of ``tokens``.

        ``None`` if no block is cached.

        The prefix has whole blocks only, of texts inserted with the same ``salt``. It never
        contains the last token, which must be computed to get logits. ``digests`` are those of the
        text's first blocks; computed ones are appended. Pass the same list again for the same or a
        longer text, so that each block is hashed only once.
        """
        size = self._allocator.block_size
        digests = [] if digests is None else digests
        blocks = list[int]()
        parent = self._digest(b"", salt)
        for number in range((len(tokens) - 1) // size):
            block_tokens = list(tokens[number * size : (number + 1) * size])
            if number == len(digests):
                self._append_digest(digests, tokens, salt)
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

    def extend_digests(
        self, tokens: Sequence[int], salt: bytes, digests: list[bytes]
    ) -> list[bytes]:
        """Return the digests of all blocks that :meth:`match` looks up.

        The arguments are those of ``match``.
        """
        while len(digests) < (len(tokens) - 1) // self._allocator.block_size:
            self._append_digest(digests, tokens, salt)
        return digests

    def insert(
        self,
        block_table: BlockTable,
        tokens: Sequence[int],
        salt: bytes = b"",
        num_committed: int | None = None,
    ) -> None:
        """Add the blocks of a table with the text ``tokens`` that have been filled since the last call.

        ``num_committed`` is the number of leading tokens that cannot be rolled back any more;
        ``None`` means all.
        """
        size = self._allocator.block_size
        stop = (
            block_table.length if num_committed is None else min(num_committed, block_table.length)
        )
        for number in range(len(block_table.digests), stop // size):
            parent = block_table.digests[-1] if block_table.digests else self._digest(b"", salt)
            digest = self._append_digest(block_table.digests, tokens, salt)
            index = number - block_table.num_released
            if (
                index >= 0
                and digest not in self._entries
                and block_table.blocks[index] not in self._digests
            ):
                block_tokens = list(tokens[number * size : (number + 1) * size])
                self._entries[digest] = _Entry(block_table.blocks[index], parent, block_tokens)
                self._digests[block_table.blocks[index]] = digest

    def _append_digest(self, digests: list[bytes], tokens: Sequence[int], salt: bytes) -> bytes:
        """Append the digest of the next block to the digests of all blocks before it; return it."""
        size = self._allocator.block_size
        number = len(digests)
        parent = digests[-1] if digests else self._digest(b"", salt)
        block_tokens = np.asarray(tokens[number * size : (number + 1) * size], dtype=np.int32)
        digests.append(self._digest(parent, block_tokens.tobytes()))
        return digests[-1]

    def _digest(self, parent: bytes, tokens: bytes) -> bytes:
        return blake2b(parent + b"\0" + tokens, digest_size=_DIGEST_BYTES, key=self.key).digest()
