"""Drafters of ``auto`` that pay only where further rows of a forward pass are free, as on GPUs.

A step is *wide* for a request if a pass of 16 rows of each request takes as long as one of one row,
by the measured costs of the target's passes. On CPUs 2 to 5 rows are free, so no step is wide. In
wide steps ``auto`` also asks ``lookahead`` (Fu et al. 2024), whose window takes many rows, and adds
the siblings of ``cape`` (Du et al. 2024) to the chains of a draft model or head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pronk.drafting.proposer import DraftContext, Proposer, States
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree

_WIDE_ROWS = 16


def free_rows(costs: StepCosts | None) -> int:
    """Return how many rows each request may have in a pass that takes as long as one of one row.

    1 if the costs are ignored (``None``).
    """
    return 1 if costs is None else max(1, costs.curve.free_rows // costs.num_requests)


def is_wide(context: DraftContext[Any]) -> bool:
    """Return whether a step is wide for a request."""
    return free_rows(context.ledger.costs) >= _WIDE_ROWS


class WideSiblings(Proposer[States]):
    """Proposes the trees of ``cape`` in wide steps, otherwise the chains of its inner drafter.

    The planner sees the inner drafter: its label, its costs and its acceptance rates.
    """

    def __init__(self, cape: Proposer[Any]) -> None:
        self.set_parts([cape])
        (self._chains,) = cape.parts
        self._trees = cape
        self.name = self._chains.name
        self.capabilities = cape.capabilities

    @property
    def label(self) -> str:
        return self._chains.label

    @property
    def chain_label(self) -> str:
        return self._chains.chain_label

    def drafts_for(self, params: SamplingParams) -> bool:
        return self._chains.drafts_for(params)

    def chain_costs(self, context: DraftContext[States], costs: StepCosts) -> ChainCosts | None:
        return self._chains.chain_costs(self._for_chains(context), costs)

    def score_history(self, context: DraftContext[States]) -> bool:
        return self._chains.score_history(self._for_chains(context))

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        wide = [context for context in contexts if is_wide(context)]
        others = [context for context in contexts if not is_wide(context)]
        trees = iter(self._trees.propose([each.with_state(each.state[0]) for each in wide]))
        chains = iter(self._chains.propose([self._for_chains(each) for each in others]))
        return [next(trees if is_wide(context) else chains) for context in contexts]

    @staticmethod
    def _for_chains(context: DraftContext[States]) -> DraftContext[Any]:
        """Return the context with the state of the inner drafter, a part of ``cape``'s."""
        (state,) = context.state[0]
        return context.with_state(state)
