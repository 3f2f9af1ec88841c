"""Ray Serve's question, which replica a request goes to, answered by what its prompt begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pronk.replicas.messages import Ask
from pronk.replicas.prefixes import Routes

__all__ = ["PrefixRouter"]


class PrefixRouter(RequestRouter):
    """Sends requests where their beginnings have been read; see :mod:`pronk.replicas.prefixes`."""

    def initialize_state(self, **options: Any) -> None:
        """Nothing is known yet."""
        del options
        self.routes = Routes()
        self._busy: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one that is best, then the others, the least busy first."""
        there = {replica.replica_id: replica for replica in self.select_available_replicas(candidate_replicas)}
        if not there:
            return []
        busy = {name: self._busy.get(name, 0) for name in there}
        first = self.routes.choose(_prefix(pending_request), busy)
        others = sorted((name for name in there if name != first), key=lambda name: busy[name])
        return [[there[first]], *([there[name]] for name in others)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """There are others than before: of those that are gone nothing is remembered."""
        super().update_replicas(replicas)
        there = {replica.replica_id for replica in replicas}
        self._busy = {name: count for name, count in self._busy.items() if name in there}
        self.routes.keep(there)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It went there."""
        del result
        self.routes.learn(_prefix(pending_request), replica_id)
        self._busy[replica_id] = self._busy.get(replica_id, 0) + 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended, one way or another."""
        del internal_request_id
        self._busy[replica_id] = max(0, self._busy.get(replica_id, 0) - 1)


def _prefix(pending: PendingRequest | None) -> Sequence[bytes]:
    ask = pending.args[0] if pending is not None and pending.args else None
    return ask.prefix if isinstance(ask, Ask) else ()
