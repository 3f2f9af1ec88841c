"""Whose turn it is: the tenant that has been served least.

Each tenant has a counter of the tokens that it was served: those of its prompts that were read, and those that were
said, which count twice, as a pass says few of them. Of those who wait, the one with the least goes first. Who comes
back after a pause is lifted to the least counter of those who are here, so that nobody saves up turns: the *virtual
token counter* of Sheng et al. 2024 (Fairness in Serving Large Language Models), where two tenants that both have
requests waiting never differ by more than what the requests of a batch take.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["FairShare"]

# What a token counts that was read, and one that was said, as in the paper.
_READ, _SAID = 1, 2


@dataclass
class FairShare:
    """Counters of those who have requests here.

    Attributes:
        served: of each tenant; who is not in it has less than all others.
    """

    served: dict[str, int] = field(default_factory=dict)
    _requests: Counter[str] = field(default_factory=Counter)

    def join(self, tenant: str) -> None:
        """A request of theirs has come."""
        if not self._requests[tenant]:
            self.served[tenant] = max(self.served.get(tenant, 0), self._least())
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of theirs has left."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]
            # Whoever would be lifted anyway, or is the last one here, need not be remembered.
            least = self._least()
            keep = {each: n for each, n in self.served.items() if self._requests and n > least}
            self.served = keep | {each: self.served[each] for each in self._requests}

    def serve(self, tenant: str, *, read: int = 0, said: int = 0) -> None:
        """Count tokens that they were served."""
        self.served[tenant] += _READ * read + _SAID * said

    def _least(self) -> int:
        return min((self.served[each] for each, count in self._requests.items() if count), default=0)
