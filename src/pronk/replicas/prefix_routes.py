"""Selection of a replica for a prompt: the longest cached prefix, unless that replica is much busier.

The digest of a block covers the prompt from the beginning to the end of the block. Prompts with an equal digest share
this prefix. The replica with the latest of these prompts has the prefix in its cache, so it gets the next one too.
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

_MAX_DIGESTS = 200_000  # number of remembered digests; beyond that, the least recently used one is dropped
_MAX_BLOCKS = 128  # number of blocks per prompt with a digest, counted from the beginning of the prompt
_MAX_EXTRA = 8  # choose a replica for its cached prefix only if it has at most so many requests above the minimum
_DIGEST_SIZE = 8  # bytes
_MAX_EARLY_ENDS = 1024  # number of remembered ends that Ray has reported before the acceptance of the request


def prefix_digests(tokens: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
    """Return one digest per full block, over the salt and the text up to the end of the block."""
    digests, digest = list[bytes](), salt
    for end in range(BLOCK_SIZE, min(len(tokens), _MAX_BLOCKS * BLOCK_SIZE) + 1, BLOCK_SIZE):
        block = np.asarray(tokens[end - BLOCK_SIZE : end], np.int32).tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=_DIGEST_SIZE).digest()
        digests.append(digest)
    return tuple(digests)


class PrefixRoutes:
    """Map from the digests of prefixes to the replicas that have these prefixes in their cache."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, Any] = OrderedDict()
        self._prompts = Counter[Any]()

    def choose(self, prefix: Sequence[bytes], busy: dict[Any, int]) -> Any:
        """Return the replica with the longest cached prefix; skip replicas that are much busier than others.

        Without a cached prefix, return the replica with the fewest requests, and among equals the one with the fewest
        prompts so far. ``busy`` maps each available replica to its number of requests; it is not empty.
        """
        least = min(busy.values())
        for digest in reversed(prefix):
            replica = self._replicas.get(digest)
            if replica in busy and busy[replica] <= least + _MAX_EXTRA:
                return replica
        return min(busy, key=lambda each: (busy[each], self._prompts[each]))

    def keep(self, replicas: Collection[Any]) -> None:
        """Drop the state of all replicas but ``replicas``."""
        self._replicas = OrderedDict((digest, name) for digest, name in self._replicas.items() if name in replicas)
        self._prompts = Counter({name: count for name, count in self._prompts.items() if name in replicas})

    def learn(self, prefix: Sequence[bytes], replica: Any) -> None:
        """Record that ``replica`` accepted the prompt with the digests ``prefix``."""
        self._prompts[replica] += 1
        for digest in prefix:
            self._replicas[digest] = replica
            self._replicas.move_to_end(digest)
        while len(self._replicas) > _MAX_DIGESTS:
            self._replicas.popitem(last=False)


class PendingRoute(Protocol):
    """Future of a request that no replica has accepted yet."""

    def cancelled(self) -> bool:
        """Return whether the caller has cancelled the request."""


class InFlight(Generic[Name]):
    """Requests of each replica, from the selection of the replica to the end of the request."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[Name, PendingRoute | None]] = {}  # by id; None after the acceptance
        self._early_ends = deque[tuple[str, Name]](maxlen=_MAX_EARLY_ENDS)

    def counts(self, replicas: Collection[Name]) -> dict[Name, int]:
        """Return the number of requests of each of ``replicas``."""
        cancelled = [name for name, (_, future) in self._requests.items() if future is not None and future.cancelled()]
        for request in cancelled:
            del self._requests[request]
        counts = Counter(replica for replica, _ in self._requests.values())
        return {replica: counts[replica] for replica in replicas}

    def choose(self, request: str, replica: Name, future: PendingRoute) -> None:
        """Record the replica selected for a request id; ``future`` tells whether the request is cancelled."""
        self._requests[request] = (replica, future)
        if (request, replica) in self._early_ends:  # routed again: the reported end was a rejection by the replica
            self._early_ends.remove((request, replica))

    def take(self, request: str, replica: Name) -> None:
        """Record that a replica accepted a request, unless the end of the request is already reported."""
        if (request, replica) in self._early_ends:
            self._early_ends.remove((request, replica))
        else:
            self._requests[request] = (replica, None)

    def end(self, request: str, replica: Name) -> None:
        """Record that a replica ended or rejected a request; ignored if another replica has the request now."""
        selected, future = self._requests.get(request, (None, None))
        if selected == replica:
            del self._requests[request]
            if future is not None:
                self._early_ends.append((request, replica))

    def keep(self, replicas: Collection[Name]) -> None:
        """Drop the requests of all replicas but ``replicas``."""
        self._requests = {name: each for name, each in self._requests.items() if each[0] in replicas}
