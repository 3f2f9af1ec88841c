"""Fair scheduling of tenants with virtual token counters (Sheng et al. 2024).

Each tenant has a counter of served tokens. Prompt tokens count once. Generated tokens count twice,
because a forward pass yields few of them. The waiting tenant with the smallest counter starts
first. If a tenant returns after a pause, its counter is raised to the minimum of the active
tenants. The counters of two tenants with waiting requests differ by at most the tokens of one batch
(*Fairness in Serving Large Language Models*).

A tenant also has the time at which its last forward pass ended, for the turns of
:class:`~pronk.engine.scheduler.Scheduler`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

# Counter increments for a prompt token and for a generated token, as in the paper.
_PER_PROMPT_TOKEN = 1
_PER_GENERATED_TOKEN = 2


@dataclass
class FairShare:
    """Token counters of the tenants with waiting or running requests."""

    # weighted number of served tokens by tenant; see ``join``
    counters: dict[str, int] = field(default_factory=dict)
    # see ``waiting_since``; tenants with requests
    _last_passes: dict[str, float] = field(default_factory=dict)
    _in_pass: Collection[str] = ()  # tenants of the forward pass that is running
    # number of waiting and running requests by tenant
    _num_requests: Counter[str] = field(default_factory=Counter)

    def join(self, tenant: str, now: float) -> None:
        """Register a request.

        Raise the counter of a tenant without other requests to the minimum.
        """
        if not self._num_requests[tenant]:
            self._last_passes[tenant] = now
            self.counters[tenant] = max(self.counters.get(tenant, 0), self._min_counter())
        self._num_requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Unregister a request of a tenant."""
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant], self._last_passes[tenant]
            # Forget the counters of absent tenants that ``join`` would raise anyway, or all if no
            # tenant is active.
            minimum = self._min_counter()
            kept = {
                name: count
                for name, count in self.counters.items()
                if self._num_requests and count > minimum
            }
            self.counters = kept | {name: self.counters[name] for name in self._num_requests}

    def serve(self, tenant: str, *, prefilled: int = 0, generated: int = 0) -> None:
        """Count tokens served to a tenant."""
        self.counters[tenant] += _PER_PROMPT_TOKEN * prefilled + _PER_GENERATED_TOKEN * generated

    def begin_pass(self, tenants: Collection[str]) -> None:
        """Record the tenants of a forward pass that begins."""
        self._in_pass = tenants

    def end_pass(self, now: float) -> None:
        """Record that the last forward pass is over."""
        self._last_passes |= {
            tenant: now for tenant in self._in_pass if tenant in self._last_passes
        }
        self._in_pass = ()

    def waiting_since(self, time: float) -> list[str]:
        """Return the tenants whose last forward pass ended at or before a time, oldest first.

        Before its first pass, a tenant waits since its first request.
        """
        waiting = [tenant for tenant, last in self._last_passes.items() if last <= time]
        return sorted(waiting, key=self._last_passes.__getitem__)

    def _min_counter(self) -> int:
        return min(
            (self.counters[name] for name, count in self._num_requests.items() if count), default=0
        )
