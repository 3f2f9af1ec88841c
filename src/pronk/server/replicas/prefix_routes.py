"""Selection of a replica for a prompt: the longest cached prefix, unless that replica is much busier.

The digest of a block is a hash of the prompt's tokens up to the end of the block, so two prompts
with an equal digest share this prefix. A prompt goes to the replica that was the last to accept a
prompt with the same prefix.
"""

from __future__ import annotations

import hashlib
from asyncio import Future
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from pronk.backends import BLOCK_SIZE

Name = TypeVar("Name")

# maximum number of digests in ``PrefixRoutes``; the least recently used are dropped
_MAX_DIGESTS = 200_000
_MAX_BLOCKS = 128  # maximum number of digests of a prompt; later blocks have none
# a replica is much busier if it has this number of requests more than the least busy one
_MAX_EXTRA_REQUESTS = 8
_DIGEST_SIZE = 8  # bytes per digest
_MAX_EARLY_ENDS = 1024  # maximum length of ``InFlightRequests._early_ends``


def prefix_digests(tokens: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
    """Return one digest per full block: a hash of the salt and of all tokens up to the end of the block."""
    digests = list[bytes]()
    digest = salt
    for end in range(BLOCK_SIZE, min(len(tokens), _MAX_BLOCKS * BLOCK_SIZE) + 1, BLOCK_SIZE):
        block = np.asarray(tokens[end - BLOCK_SIZE : end], np.int32).tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=_DIGEST_SIZE).digest()
        digests.append(digest)
    return tuple(digests)


class PrefixRoutes:
    """Map from the digest of a prefix to the replica that accepted the last prompt with this prefix."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, Any] = OrderedDict()
        self._prompts = Counter[Any]()

    def choose(self, prefix: Sequence[bytes], num_requests: dict[Any, int]) -> Any:
        """Return the replica with the longest cached prefix.

        Skip replicas that are much busier than others.

        If no replica is found, return the one with the fewest requests, and among equals the one
        that accepted the fewest prompts so far. ``num_requests`` has the current number for each
        available replica, at least one.
        """
        minimum = min(num_requests.values())
        for digest in reversed(prefix):
            replica = self._replicas.get(digest)
            if replica in num_requests and num_requests[replica] <= minimum + _MAX_EXTRA_REQUESTS:
                return replica
        return min(
            num_requests, key=lambda replica: (num_requests[replica], self._prompts[replica])
        )

    def retain_replicas(self, replicas: Collection[Any]) -> None:
        """Forget the prefixes and prompt counts of all replicas but ``replicas``."""
        self._replicas = OrderedDict(
            (digest, name) for digest, name in self._replicas.items() if name in replicas
        )
        self._prompts = Counter(
            {name: count for name, count in self._prompts.items() if name in replicas}
        )

    def learn(self, prefix: Sequence[bytes], replica: Any) -> None:
        """Record that ``replica`` accepted a prompt; ``prefix`` has the digests of the prompt."""
        self._prompts[replica] += 1
        for digest in prefix:
            self._replicas[digest] = replica
            self._replicas.move_to_end(digest)
        while len(self._replicas) > _MAX_DIGESTS:
            self._replicas.popitem(last=False)


class InFlightRequests(Generic[Name]):
    """Current requests of each replica.

    A request counts from the selection of its replica to its end.
    """

    def __init__(self) -> None:
        # Request id to its selected replica, and its future until the replica accepts it (then
        # None).
        self._requests: dict[str, tuple[Name, Future[Any] | None]] = {}
        # (request id, replica) if Ray has reported the end of the request, but not that the replica
        # accepted it.
        self._early_ends = deque[tuple[str, Name]](maxlen=_MAX_EARLY_ENDS)

    def count_requests(self, replicas: Collection[Name]) -> dict[Name, int]:
        """Return the number of requests of each of ``replicas``; forget cancelled requests."""
        cancelled = [
            name
            for name, (_, future) in self._requests.items()
            if future is not None and future.cancelled()
        ]
        for request in cancelled:
            del self._requests[request]
        counts = Counter(replica for replica, _ in self._requests.values())
        return {replica: counts[replica] for replica in replicas}

    def choose(self, request: str, replica: Name, future: Future[Any]) -> None:
        """Record which replica the router selected.

        ``future`` tells whether the request is cancelled.
        """
        self._requests[request] = (replica, future)
        # the replica rejected the request before, and now gets it again
        if (request, replica) in self._early_ends:
            self._early_ends.remove((request, replica))

    def accept(self, request: str, replica: Name) -> None:
        """Record that a replica accepted a request.

        Ignored if Ray has already reported the request's end.
        """
        if (request, replica) in self._early_ends:
            self._early_ends.remove((request, replica))
        else:
            self._requests[request] = (replica, None)

    def end(self, request: str, replica: Name) -> None:
        """Record that a replica ended or rejected a request.

        Ignored if another replica has the request now.
        """
        selected, future = self._requests.get(request, (None, None))
        if selected == replica:
            del self._requests[request]
            if future is not None:
                self._early_ends.append((request, replica))

    def retain_replicas(self, replicas: Collection[Name]) -> None:
        """Forget the requests recorded for all replicas but ``replicas``.

        The requests are not cancelled.
        """
        self._requests = {
            request: entry for request, entry in self._requests.items() if entry[0] in replicas
        }
