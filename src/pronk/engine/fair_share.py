"""Fair scheduling of tenants with virtual token counters.

Each tenant has a counter of served tokens. Prompt tokens count once. Generated tokens count twice, because a forward
pass yields few of them. The waiting tenant with the smallest counter starts first. If a tenant returns after a pause,
its counter is raised to the minimum of the active tenants, so that a pause gives no advantage. The counters of two
tenants with waiting requests differ by at most the tokens of one batch (Sheng et al. 2024, Fairness in Serving Large
Language Models).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["FairShare"]

# Counter increments for a prompt token and for a generated token, as in the paper.
_PER_PROMPT_TOKEN, _PER_GENERATED_TOKEN = 1, 2


@dataclass
class FairShare:
    """Token counters of the tenants with waiting or running requests."""

    served: dict[str, int] = field(default_factory=dict)  # prompt tokens + 2 · generated tokens; see ``join``
    _requests: Counter[str] = field(default_factory=Counter)  # number of requests by tenant

    def join(self, tenant: str) -> None:
        """Register a new request of a tenant."""
        if not self._requests[tenant]:
            self.served[tenant] = max(self.served.get(tenant, 0), self._min_served())
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Unregister a request of a tenant."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]
            # Forget absent tenants at or below the minimum, where ``join`` would start them, or all if none is active.
            minimum = self._min_served()
            kept = {name: served for name, served in self.served.items() if self._requests and served > minimum}
            self.served = kept | {name: self.served[name] for name in self._requests}

    def serve(self, tenant: str, *, prefilled: int = 0, generated: int = 0) -> None:
        """Count tokens served to a tenant."""
        self.served[tenant] += _PER_PROMPT_TOKEN * prefilled + _PER_GENERATED_TOKEN * generated

    def _min_served(self) -> int:
        return min((self.served[name] for name, count in self._requests.items() if count), default=0)
