"""Prefixes that several texts share: full blocks of committed tokens, found again by what they hold.

A block is known by the digest of all tokens up to its end: a chain of keyed hashes, one for each block, that begins
with the tenant's salt. The key is this process's own, so nobody can prepare two texts of one digest; and a hit is
believed only when the tokens are the same, too. Blocks that nobody uses stay as they are until their place is needed,
the least recently used first.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from pronk.kv_cache.blocks import BlockAllocator, BlockTable

__all__ = ["PrefixCache"]

_DIGEST = 16


@dataclass(frozen=True)
class _Entry:
    """A full block.

    Attributes:
        block: its number.
        before: the digest of what comes before it.
        tokens: its own.
    """

    block: int
    before: bytes
    tokens: list[int]


class PrefixCache:
    """What the blocks of one pool hold, by digest.

    The allocator asks it which blocks are worth keeping, and tells it which one has to go.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._found: dict[bytes, _Entry] = {}
        self._digests: dict[int, bytes] = {}  # of each block that is found

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._found)

    def attach(self, allocator: BlockAllocator) -> None:
        """Begin anew: nothing is known of these blocks."""
        self._found.clear()
        self._digests.clear()
        self._allocator = allocator
        allocator.entrust(self)

    def keeps(self, block: int) -> bool:
        """Whether a block that nobody uses is worth keeping."""
        return block in self._digests

    def evict(self, block: int) -> None:
        """The block's place is needed for something else."""
        del self._found[self._digests.pop(block)]

    def forget(self, block: int) -> None:
        """Something else is written there; harmless if nothing is known of it."""
        if block in self._digests:
            self.evict(block)

    def knows(self, digest: bytes) -> bool:
        """Whether a block of this digest can be found."""
        return digest in self._found

    def match(self, tokens: Sequence[int], salt: bytes = b"", digests: list[bytes] | None = None) -> BlockTable | None:
        """A table of the longest known beginning of ``tokens``, in whole blocks; ``None`` if there is none.

        The last token is left out: somebody wants to know what comes after it.

        Args:
            tokens: the text.
            salt: only what was learned with the same one is found.
            digests: those of the text's blocks that are known already; others that it takes are added. Whoever asks
                again for the same text or a longer one hands them in again, and nothing is hashed twice.
        """
        size, digests = self._allocator.block_size, [] if digests is None else digests
        blocks, before = list[int](), self._digest(b"", salt)
        for number in range((len(tokens) - 1) // size):
            own = list(tokens[number * size : (number + 1) * size])
            if number == len(digests):
                digests.append(self._digest(before, _as_bytes(own)))
            entry = self._found.get(digests[number])
            if entry is None or (entry.before, entry.tokens) != (before, own):
                break
            blocks.append(entry.block)
            before = digests[number]
        if not blocks:
            return None
        block_table = BlockTable(length=len(blocks) * size)
        block_table.digests = digests[: len(blocks)]
        self._allocator.share(block_table, blocks)
        return block_table

    def learn(
        self, block_table: BlockTable, tokens: Sequence[int], salt: bytes = b"", certain: int | None = None
    ) -> None:
        """Remember the full blocks of a table that have been filled since the last time.

        Args:
            block_table: the text's; its first ``length`` tokens are committed.
            tokens: the text.
            salt: see :meth:`match`.
            certain: where what is committed may still be taken back, the number of tokens that will stay.
        """
        size = self._allocator.block_size
        stop = block_table.length if certain is None else min(certain, block_table.length)
        for number in range(len(block_table.digests), stop // size):
            own = list(tokens[number * size : (number + 1) * size])
            before = block_table.digests[-1] if block_table.digests else self._digest(b"", salt)
            digest = self._digest(before, _as_bytes(own))
            block_table.digests.append(digest)
            block = block_table.blocks[number - block_table.released] if number >= block_table.released else None
            if block is None or digest in self._found or block in self._digests:
                continue
            self._found[digest] = _Entry(block, before, own)
            self._digests[block] = digest

    def _digest(self, before: bytes, tokens: bytes) -> bytes:
        hashed = blake2b(before, digest_size=_DIGEST, key=self._key)
        hashed.update(b"\0" + tokens)
        return hashed.digest()


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()
