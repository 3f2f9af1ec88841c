"""Request router for Ray Serve that selects replicas by the prefix of the prompt."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pronk.replicas.messages import GenerateRequest
from pronk.replicas.prefix_routes import InFlight, PrefixRoutes
from pronk.sampling.params import SamplingParams

__all__ = ["PrefixRouter"]

_NO_PROMPT = GenerateRequest([], SamplingParams())  # for calls of methods without a prompt, such as Replica.about


class PrefixRouter(RequestRouter):
    """Route requests by :mod:`pronk.replicas.prefix_routes`; each calling process has its own router."""

    def initialize_state(self, **options: Any) -> None:
        """Start without known prefixes and without requests in flight."""
        del options
        self.routes, self.busy = PrefixRoutes(), InFlight[ReplicaID]()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica that :class:`PrefixRoutes` chooses, then the others by number of requests."""
        available = {replica.replica_id: replica for replica in self.select_available_replicas(candidate_replicas)}
        if not available:
            return []
        request = _request_of(pending_request)
        replicas = {name: each for name, each in available.items() if name.unique_id not in request.avoid} or available
        busy = self.busy.counts(replicas)
        best = self.routes.choose(request.prefix, busy)
        if pending_request is not None:
            # Count the request now, so that simultaneous requests see it before a replica accepts it.
            self.busy.choose(pending_request.metadata.internal_request_id, best, pending_request.future)
        return [[replicas[name]] for name in sorted(replicas, key=lambda name: (name != best, busy[name]))]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Drop the state of removed replicas."""
        super().update_replicas(replicas)
        names = {replica.replica_id for replica in replicas}
        self.busy.keep(names)
        self.routes.keep(names)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record that a replica accepted a request."""
        del result
        self.routes.learn(_request_of(pending_request).prefix, replica_id)
        self.busy.take(pending_request.metadata.internal_request_id, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record that a request ended or was rejected; Ray routes a rejected request again."""
        self.busy.end(internal_request_id, replica_id)


def _request_of(pending: PendingRequest | None) -> GenerateRequest:
    request = pending.args[0] if pending is not None and pending.args else None
    return request if isinstance(request, GenerateRequest) else _NO_PROMPT
