"""Which replica a request goes to: one that has read its beginning before, unless that one is much busier.

A prompt is known by the digests of its blocks, each of everything up to its end. Where a request went, the cache will
find them; so the next text that begins alike goes there as well, by the longest beginning that is known.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pronk.cache.budget import BLOCK_SIZE

__all__ = ["Routes", "prefix_digests"]

# Digests that are remembered; the oldest ones go first.
_MOST = 200_000
# Blocks of a prompt that are looked at.
_BLOCKS = 128
# A replica may have so many requests more than the least busy one, and still get those that it knows.
_BUSIER = 8
_DIGEST = 8  # bytes


def prefix_digests(tokens: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
    """Of the blocks of a prompt, each of everything up to its end; only of one salt are they ever the same."""
    found, before = list[bytes](), salt
    for end in range(BLOCK_SIZE, min(len(tokens), _BLOCKS * BLOCK_SIZE) + 1, BLOCK_SIZE):
        block = np.asarray(tokens[end - BLOCK_SIZE : end], np.int32).tobytes()
        before = hashlib.blake2b(before + block, digest_size=_DIGEST).digest()
        found.append(before)
    return tuple(found)


class Routes:
    """Which replica has read which beginnings."""

    def __init__(self) -> None:
        self._where: OrderedDict[bytes, Any] = OrderedDict()
        self._prompts = Counter[Any]()

    def choose(self, prefix: Sequence[bytes], busy: dict[Any, int]) -> Any:
        """The replica that knows the longest beginning, unless it is much busier than others; else the least busy.

        Of those that are as busy, it is the one that has had the fewest prompts.

        Args:
            prefix: of the prompt.
            busy: requests of each replica there is; at least one.
        """
        least = min(busy.values())
        for digest in reversed(prefix):
            replica = self._where.get(digest)
            if replica in busy and busy[replica] <= least + _BUSIER:
                return replica
        return min(busy, key=lambda each: (busy[each], self._prompts[each]))

    def keep(self, replicas: Collection[Any]) -> None:
        """Forget all others."""
        self._where = OrderedDict((digest, name) for digest, name in self._where.items() if name in replicas)
        self._prompts = Counter({name: count for name, count in self._prompts.items() if name in replicas})

    def learn(self, prefix: Sequence[bytes], replica: Any) -> None:
        """A prompt went there."""
        self._prompts[replica] += 1
        for digest in prefix:
            self._where[digest] = replica
            self._where.move_to_end(digest)
        while len(self._where) > _MOST:
            self._where.popitem(last=False)
