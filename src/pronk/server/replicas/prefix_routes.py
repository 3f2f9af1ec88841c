"""Selection of the replica for a prompt, by the longest prefix in a replica's prefix cache.

The digest of a block is a hash of the prompt's tokens up to the end of the block, so that two
prompts with an equal digest share this prefix. A prompt goes to the replica that was the last to
accept a prompt with the same prefix, unless this replica is much busier than the others.
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

# Maximum number of digests in ``PrefixRoutes``; the least recently used ones are dropped.
_MAX_DIGESTS = 200_000
_MAX_BLOCKS = 128  # maximum number of digests of a prompt; later blocks have none
# A replica is much busier than the others if it has more requests than the least busy one, by more
# than this number.
_MAX_EXTRA_REQUESTS = 8
_DIGEST_SIZE = 8  # bytes per digest
_MAX_EARLY_ENDS = 1024  # maximum length of ``InFlightRequests._early_ends``


def prefix_digests(tokens: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
    """Return the digest of each full block of a prompt's token ids, up to ``_MAX_BLOCKS``.

    The digest of a block is a hash of the salt and of all tokens up to the end of the block.
    """
    digests = list[bytes]()
    digest = salt
    num_tokens = min(len(tokens), _MAX_BLOCKS * BLOCK_SIZE)
    for end in range(BLOCK_SIZE, num_tokens + 1, BLOCK_SIZE):
        block = np.asarray(tokens[end - BLOCK_SIZE : end], np.int32).tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=_DIGEST_SIZE).digest()
        digests.append(digest)
    return tuple(digests)


class PrefixRoutes:
    """Table of the replica that accepted the last prompt with each prefix."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, Any] = OrderedDict()
        self._prompts = Counter[Any]()

    def choose(self, prefix: Sequence[bytes], num_requests: dict[Any, int]) -> Any:
        """Return the replica that accepted the prompt with the longest common prefix.

        A replica with over 8 requests more than the least busy one is passed over. If none is left,
        return the replica with the fewest requests, and among equals the one that accepted the
        fewest prompts so far.

        Args:
            prefix: digests of the prompt's blocks (:func:`prefix_digests`).
            num_requests: current number of requests of each available replica, at least one.
        """
        minimum = min(num_requests.values())
        for digest in reversed(prefix):
            replica = self._replicas.get(digest)
            if replica in num_requests and num_requests[replica] <= minimum + _MAX_EXTRA_REQUESTS:
                return replica
        return min(num_requests, key=lambda name: (num_requests[name], self._prompts[name]))

    def retain_replicas(self, replicas: Collection[Any]) -> None:
        """Forget the prefixes and prompt counts of all replicas but ``replicas``."""
        routes = self._replicas.items()
        self._replicas = OrderedDict((digest, name) for digest, name in routes if name in replicas)
        counts = self._prompts.items()
        self._prompts = Counter({name: count for name, count in counts if name in replicas})

    def learn(self, prefix: Sequence[bytes], replica: Any) -> None:
        """Record that a replica accepted a prompt with the digests ``prefix``."""
        self._prompts[replica] += 1
        for digest in prefix:
            self._replicas[digest] = replica
            self._replicas.move_to_end(digest)
        while len(self._replicas) > _MAX_DIGESTS:
            self._replicas.popitem(last=False)


class InFlightRequests(Generic[Name]):
    """Counts of the current requests of each replica.

    A request counts from the selection of its replica to its end.
    """

    def __init__(self) -> None:
        # For each request id, the selected replica and the request's future. The future is None
        # once the replica has accepted the request.
        self._requests: dict[str, tuple[Name, Future[Any] | None]] = {}
        # Ray may report the end of a request before it reports that the replica accepted the
        # request. Until then, the request id and the replica are here.
        self._early_ends = deque[tuple[str, Name]](maxlen=_MAX_EARLY_ENDS)

    def count_requests(self, replicas: Collection[Name]) -> dict[Name, int]:
        """Return the number of requests of each of ``replicas``; forget cancelled requests."""
        for request, (_, future) in [*self._requests.items()]:
            if future is not None and future.cancelled():
                del self._requests[request]
        counts = Counter(replica for replica, _ in self._requests.values())
        return {replica: counts[replica] for replica in replicas}

    def choose(self, request: str, replica: Name, future: Future[Any]) -> None:
        """Record that the router selected a replica for a request.

        ``future`` is cancelled when the request is.
        """
        self._requests[request] = (replica, future)
        # The replica rejected the request before, and now gets it again.
        if (request, replica) in self._early_ends:
            self._early_ends.remove((request, replica))

    def accept(self, request: str, replica: Name) -> None:
        """Record that a replica accepted a request, unless Ray has already reported its end."""
        if (request, replica) in self._early_ends:
            self._early_ends.remove((request, replica))
        else:
            self._requests[request] = (replica, None)

    def end(self, request: str, replica: Name) -> None:
        """Record that a replica ended or rejected a request, unless another replica has it now."""
        selected, future = self._requests.get(request, (None, None))
        if selected == replica:
            del self._requests[request]
            if future is not None:
                self._early_ends.append((request, replica))

    def retain_replicas(self, replicas: Collection[Name]) -> None:
        """Forget the requests of all replicas but ``replicas``, without cancelling them."""
        requests = self._requests.items()
        self._requests = {name: entry for name, entry in requests if entry[0] in replicas}
