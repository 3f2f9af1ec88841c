"""Request router for Ray Serve that selects replicas by the prefix of the prompt."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pronk import SamplingParams
from pronk.server.replicas.messages import GenerateRequest
from pronk.server.replicas.prefix_routes import InFlightRequests, PrefixRoutes

# Seconds in which a replica must tell its number of requests; then the router tries another one.
# Ray waits 0.1 s, which a replica on a busy machine misses. The prompt, and all later ones with its
# prefix, would move to a replica that has the prefix not in its cache.
_ANSWER_TIMEOUT = 2.0

# Stands in for the request of calls without one, such as Replica.about().
_EMPTY_REQUEST = GenerateRequest([], SamplingParams())


class PrefixRouter(RequestRouter):
    """Router of requests by the prefixes of their prompts; each calling process has its own."""

    # Ray's names of the first and of the largest time limit.
    queue_len_response_deadline_s = _ANSWER_TIMEOUT
    max_queue_len_response_deadline_s = _ANSWER_TIMEOUT

    def initialize_state(self, **options: Any) -> None:
        """Start without known prefixes and without requests in flight."""
        del options
        self.routes = PrefixRoutes()
        self.in_flight = InFlightRequests[ReplicaID]()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the available replicas in the order in which Ray tries them, each in a list.

        The replica that ``PrefixRoutes`` chooses comes first; the others follow by their number of
        requests, the smallest first.
        """
        selected = self.select_available_replicas(candidate_replicas)
        available = {replica.replica_id: replica for replica in selected}
        if not available:
            return []
        avoid = _request_of(pending_request).avoid
        preferred = {name: each for name, each in available.items() if name.unique_id not in avoid}
        replicas = preferred or available
        num_requests = self.in_flight.count_requests(replicas)
        best = self.routes.choose(_request_of(pending_request).prefix, num_requests)
        if pending_request is not None:
            # The request counts from now on, so that simultaneous requests choose another replica
            # even before this one accepts the request.
            request_id = pending_request.metadata.internal_request_id
            self.in_flight.choose(request_id, best, pending_request.future)
        order = sorted(replicas, key=lambda name: (name != best, num_requests[name]))
        return [[replicas[name]] for name in order]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the prefixes and requests of removed replicas."""
        super().update_replicas(replicas)
        names = {replica.replica_id for replica in replicas}
        self.in_flight.retain_replicas(names)
        self.routes.retain_replicas(names)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Record that a replica accepted a request."""
        del result
        self.routes.learn(_request_of(pending_request).prefix, replica_id)
        self.in_flight.accept(pending_request.metadata.internal_request_id, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record that a request ended, or that a replica rejected it; Ray routes it again then."""
        self.in_flight.end(internal_request_id, replica_id)


def _request_of(pending: PendingRequest | None) -> GenerateRequest:
    request = pending.args[0] if pending is not None and pending.args else None
    return request if isinstance(request, GenerateRequest) else _EMPTY_REQUEST
