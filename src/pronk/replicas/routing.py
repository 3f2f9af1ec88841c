"""Ray Serve's question, which replica a request goes to, answered by what its prompt begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pronk.replicas.messages import GenerateRequest
from pronk.replicas.prefix_routes import InFlight, PrefixRoutes

__all__ = ["PrefixRouter"]


class PrefixRouter(RequestRouter):
    """Sends requests where their beginnings have been read; see :mod:`pronk.replicas.prefix_routes`."""

    def initialize_state(self, **options: Any) -> None:
        """Nothing is known yet."""
        del options
        self.routes, self.busy = PrefixRoutes(), InFlight[ReplicaID]()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one that is best, then the others, the least busy first."""
        there = {replica.replica_id: replica for replica in self.select_available_replicas(candidate_replicas)}
        if not there:
            return []
        ask = _ask_of(pending_request)
        avoided = frozenset[str]() if ask is None else ask.avoid
        there = {name: each for name, each in there.items() if name.unique_id not in avoided} or there
        busy = self.busy.counts(there)
        first = self.routes.choose(_prefix(pending_request), busy)
        if pending_request is not None:
            # From now on: those that come in the same moment are to see it.
            self.busy.choose(_id_of(pending_request), first, pending_request.future)
        others = sorted((name for name in there if name != first), key=lambda name: busy[name])
        return [[there[first]], *([there[name]] for name in others)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """There are others than before: of those that are gone nothing is remembered."""
        super().update_replicas(replicas)
        there = {replica.replica_id for replica in replicas}
        self.busy.keep(there)
        self.routes.keep(there)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It went there."""
        del result
        self.routes.learn(_prefix(pending_request), replica_id)
        self.busy.take(_id_of(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended there, one way or another; or it was not taken, and will be sent somewhere again."""
        self.busy.end(internal_request_id, replica_id)


def _id_of(pending: PendingRequest) -> str:
    found: str = pending.metadata.internal_request_id
    return found


def _ask_of(pending: PendingRequest | None) -> GenerateRequest | None:
    ask = pending.args[0] if pending is not None and pending.args else None
    return ask if isinstance(ask, GenerateRequest) else None


def _prefix(pending: PendingRequest | None) -> Sequence[bytes]:
    ask = _ask_of(pending)
    return () if ask is None else ask.prefix
