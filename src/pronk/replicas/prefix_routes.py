"""Which replica a request goes to: one that has read its beginning before, unless that one is much busier.

A prompt is known by the digests of its blocks, each of everything up to its end. Where a request went, the cache will
find them; so the next text that begins alike goes there as well, by the longest beginning that is known.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from pronk.kv_cache.budget import BLOCK_SIZE

__all__ = ["InFlight", "PrefixRoutes", "prefix_digests"]

Name = TypeVar("Name")

# Digests that are remembered; the oldest ones go first.
_MOST = 200_000
# Blocks of a prompt that are looked at.
_BLOCKS = 128
# A replica may have so many requests more than the least busy one, and still get those that it knows.
_BUSIER = 8
_DIGEST = 8  # bytes
# Requests of which the end is remembered that came before it was said where they went.
_ENDED = 1024


def prefix_digests(tokens: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
    """Of the blocks of a prompt, each of everything up to its end; only of one salt are they ever the same."""
    found, before = list[bytes](), salt
    for end in range(BLOCK_SIZE, min(len(tokens), _BLOCKS * BLOCK_SIZE) + 1, BLOCK_SIZE):
        block = np.asarray(tokens[end - BLOCK_SIZE : end], np.int32).tobytes()
        before = hashlib.blake2b(before + block, digest_size=_DIGEST).digest()
        found.append(before)
    return tuple(found)


class PrefixRoutes:
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


class PendingRoute(Protocol):
    """Of a request that is to be sent somewhere: whether it has been, or nobody waits for that any more."""

    def cancelled(self) -> bool:
        """Nobody waits."""
        ...


class InFlight(Generic[Name]):
    """Which request each replica has, from the moment that it is chosen for it."""

    def __init__(self) -> None:
        self._where: dict[str, tuple[Name, PendingRoute | None]] = {}
        self._ended = deque[tuple[str, Name]](maxlen=_ENDED)

    def counts(self, replicas: Collection[Name]) -> dict[Name, int]:
        """How many each of some replicas has."""
        for request in [each for each, (_, future) in self._where.items() if future is not None and future.cancelled()]:
            del self._where[request]
        counts = Counter(replica for replica, _ in self._where.values())
        return {replica: counts[replica] for replica in replicas}

    def choose(self, request: str, replica: Name, future: PendingRoute) -> None:
        """One is chosen, and may not get it: until then ``future`` is looked at."""
        self._where[request] = (replica, future)
        if (request, replica) in self._ended:  # it was not taken there before, which was not its end
            self._ended.remove((request, replica))

    def take(self, request: str, replica: Name) -> None:
        """It has taken the request in, whose end may have been told already."""
        if (request, replica) in self._ended:
            self._ended.remove((request, replica))
        else:
            self._where[request] = (replica, None)

    def end(self, request: str, replica: Name) -> None:
        """It has ended there, or was not taken; meanwhile another one may have been chosen."""
        chosen, future = self._where.get(request, (None, None))
        if chosen == replica:
            del self._where[request]
            if future is not None:
                self._ended.append((request, replica))

    def keep(self, replicas: Collection[Name]) -> None:
        """Forget all others, and what they had."""
        self._where = {name: each for name, each in self._where.items() if each[0] in replicas}
