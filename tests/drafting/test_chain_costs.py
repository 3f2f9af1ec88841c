"""Costs of chains in the ledger: the seconds of a proposal besides its draft tokens."""

from typing import Any

import pytest

from drafting.helpers import context
from drafting.simulation import VOCAB, Source, World, always
from pronk.drafting.ledger import RequestLedger
from pronk.drafting.planner import DraftPlan
from pronk.drafting.shared.stepwise import extension_rule
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.drafting.tree_union import TreeUnion
from pronk.models.cost_model import CostCurve
from pronk.sampling.tree import TokenTree

COSTS = StepCosts(CostCurve(1.0, 1.0, 0.0))


class Chain(Source):
    """A drafter whose draft tokens take 0.1 seconds each."""

    def chain_costs(self, context: Any, costs: StepCosts) -> ChainCosts:
        return ChainCosts(0.1)


def begun() -> tuple[Chain, RequestLedger, DraftPlan]:
    ledger = RequestLedger()
    ledger.begin()
    ledger.set_costs(COSTS, float("inf"))
    drafter = Chain(World(length=1), "draft", 0.0, always(0.0))
    asked = context(None, [1], 9, 9, vocab=VOCAB, ledger=ledger)
    planned = ledger.plan(drafter, asked, TreeUnion(COSTS))
    assert planned.reason == "pays"
    return drafter, ledger, planned


@pytest.mark.parametrize(
    ("parents", "depth"), [((-1, 0), 1), ((-1, 0, 1), 2), ((-1, 0, 1, 0, 0, 1), 2)]
)
def test_the_start_of_a_proposal_is_what_its_passes_do_not_take(
    parents: tuple[int, ...], depth: int
) -> None:
    """A pass takes 0.1 seconds, and there is one per depth: siblings cost no pass."""
    drafter, ledger, planned = begun()
    tree = TokenTree(tuple(range(1, len(parents) + 1)), parents)
    ledger.ledger.drafters["draft"].num_calls = 2  # the first call prepares the drafter
    for _ in range(3):
        assert ledger.ledger.drafters["draft"].start == 0.0  # not known before three are measured
        ledger.add(drafter, planned, 0.5, tree, TreeUnion(COSTS), [1])
    assert ledger.ledger.drafters["draft"].start == pytest.approx(0.5 - 0.1 * depth)


def test_an_empty_proposal_is_no_measure_of_a_start() -> None:
    """Its duration may be that of finding the KV cache full."""
    drafter, ledger, planned = begun()
    ledger.ledger.drafters["draft"].num_calls = 2
    ledger.add(drafter, planned, 0.5, TokenTree((1,), (-1,)), TreeUnion(COSTS), [1])
    assert not ledger.ledger.drafters["draft"].starts


def test_the_parts_of_a_composite_take_no_part_of_the_time_for_learning() -> None:
    """The planner asks the composite; a part asks only whether to extend a chain, by its own costs."""
    ledger = RequestLedger()
    drafter = Chain(World(length=1), "draft", 0.0, always(0.0))
    fast = StepCosts(CostCurve(0.01, 1.0, 0.0))  # a pass of the target is faster than a draft token
    for costs, wanted in ((COSTS, True), (fast, False)):
        plan = DraftPlan("pays", costs)
        part = context(None, [1], 9, 9, vocab=VOCAB, ledger=ledger, plan=plan)
        assert extension_rule(drafter, part)(()) == wanted
    assert not ledger.ledger.drafters
