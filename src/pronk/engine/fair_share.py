"""Fair scheduling of tenants with virtual token counters (Sheng et al. 2024).

Each tenant has a counter of served tokens. Prompt tokens count once. Generated tokens count twice,
because a forward pass yields few of them. The waiting tenant with the smallest counter starts
first. If a tenant returns after a pause, its counter is raised to the minimum of the active
tenants. The counters of two tenants with waiting requests differ by at most the tokens of one batch
(*Fairness in Serving Large Language Models*).

The class also stores when the last forward pass of each tenant ended. A tenant that has waited too
long since gets a turn (:class:`~pronk.engine.scheduler.Scheduler`).
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

    # for each tenant, the weighted number of served tokens; may be raised by ``join``
    counters: dict[str, int] = field(default_factory=dict)
    # for each tenant with requests, when its last forward pass ended, or when it began to wait
    _last_passes: dict[str, float] = field(default_factory=dict)
    _in_pass: Collection[str] = ()  # tenants with requests in the current forward pass
    # for each tenant, the number of its waiting and running requests
    _num_requests: Counter[str] = field(default_factory=Counter)

    def join(self, tenant: str, now: float) -> None:
        """Register a request of a tenant that began to wait at the time ``now``.

        If the tenant has no other requests, its counter is raised to the minimum of the active
        tenants, so that a pause gives it no advantage.
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
        """Add served tokens to a tenant's counter, by which the scheduler orders the tenants.

        Args:
            tenant: name of the tenant.
            prefilled: number of computed prompt tokens, without those from the prefix cache.
            generated: number of generated tokens.
        """
        self.counters[tenant] += _PER_PROMPT_TOKEN * prefilled + _PER_GENERATED_TOKEN * generated

    def begin_pass(self, tenants: Collection[str]) -> None:
        """Record which tenants have requests in the forward pass that begins."""
        self._in_pass = tenants

    def end_pass(self, now: float) -> None:
        """Record that the current forward pass ended at the time ``now``."""
        for tenant in self._in_pass:
            if tenant in self._last_passes:
                self._last_passes[tenant] = now
        self._in_pass = ()

    def waiting_since(self, time: float) -> list[str]:
        """Return the tenants whose last forward pass ended at or before a time, oldest first.

        A tenant without a forward pass so far has waited since its first request.
        """
        waiting = [tenant for tenant, last in self._last_passes.items() if last <= time]
        return sorted(waiting, key=self._last_passes.__getitem__)

    def _min_counter(self) -> int:
        return min(
            (self.counters[name] for name, count in self._num_requests.items() if count), default=0
        )
