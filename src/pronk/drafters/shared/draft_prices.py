"""Prices of a draft model's draft tokens, also before its forward passes have been measured."""

from __future__ import annotations

from dataclasses import dataclass

from pronk.speculation.cost_model import CostModel
from pronk.speculation.policy import RequestPolicy
from pronk.speculation.step_value import ChainPrice


@dataclass(frozen=True)
class DraftPrices:
    """Prices of one draft model.

    Attributes:
        own: measured costs of the draft model's forward passes.
        target: costs of the target's forward passes.
        relative_size: size of the draft model divided by that of the target, for prices before any measurement.
    """

    own: CostModel
    target: CostModel
    relative_size: float

    def chain_price(self, policy: RequestPolicy, length: int, num_unread: int) -> ChainPrice | None:
        """Return the price of draft tokens; ``None`` if all are wanted.

        ``length`` is the number of tokens of the request's text, ``num_unread`` how many of them the draft model has to
        read before it drafts.
        """
        if policy.curve is None:
            return None
        measured = self.own
        own = measured.costs(policy.num_requests * length)
        own = own or policy.curve._replace(speed=self.relative_size * policy.curve.speed)
        reading = measured.prompt_row or self.relative_size * (self.target.prompt_row or 0.0)
        return ChainPrice(policy.curve, own.at(policy.num_requests), num_unread * reading)
