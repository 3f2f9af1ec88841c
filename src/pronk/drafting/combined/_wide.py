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


def is_wide(num_free: int) -> bool:
    """Return whether a step is wide for a request with ``num_free`` rows (:func:`free_rows`)."""
    return num_free >= _WIDE_ROWS


class WideSiblings(Proposer[States]):
    """Proposes the trees of ``cape`` in wide steps, otherwise the chains of its inner drafter.

    The planner sees the inner drafter: its label, its costs and its acceptance rates. The state of
    a request is that of ``cape``, whose only part is the inner drafter.
    """

    def __init__(self, cape: Proposer[Any]) -> None:
        self.set_parts(cape.parts)
        (self._chains,) = cape.parts
        self._trees = cape
        self.name = self._chains.name
        self.label = self._chains.label
        self.chain_label = self._chains.chain_label
        self.capabilities = cape.capabilities

    def drafts_for(self, params: SamplingParams) -> bool:
        return self._chains.drafts_for(params)

    def chain_costs(self, context: DraftContext[States], costs: StepCosts) -> ChainCosts | None:
        return self._chains.chain_costs(self._for_chains(context), costs)

    def score_history(self, context: DraftContext[States]) -> bool:
        return self._chains.score_history(self._for_chains(context))

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        are_wide = [is_wide(free_rows(context.ledger.costs)) for context in contexts]
        wide: list[DraftContext[Any]] = []
        others: list[DraftContext[Any]] = []
        for context, has_free_rows in zip(contexts, are_wide, strict=True):
            if has_free_rows:
                wide.append(context)
            else:
                others.append(self._for_chains(context))
        trees = iter(self._trees.propose(wide) if wide else ())
        chains = iter(self._chains.propose(others) if others else ())
        return [next(trees if has_free_rows else chains) for has_free_rows in are_wide]

    @staticmethod
    def _for_chains(context: DraftContext[States]) -> DraftContext[Any]:
        """Return the context with the state of the inner drafter."""
        (state,) = context.state
        return context.with_state(state)
