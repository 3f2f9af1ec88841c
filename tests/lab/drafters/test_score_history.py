"""Scoring of the history by a draft model inside ``cape``."""

from drafting.drafting import bound
from drafting.shared.test_score_history import GREEDY, SPEC, answer, check_wrapper, stateless
from pronk.drafting.planned_calls import propose_planned
from pronk.drafting.step_costs import StepCosts
from pronk.drafting.tree_union import TreeUnion
from pronk.models.cost_model import CostCurve
from tiny_models import Clock, make_engine, tiny_decoder


def test_a_scored_history_leaves_proposals_of_siblings_possible() -> None:
    """The empty proposal must not decide how the rates of the siblings are counted."""
    tokens = answer(40)
    proposer = bound(f"cape({SPEC})", make_engine(tiny_decoder()))
    first = stateless(proposer.start(tokens), tokens[:38], GREEDY)
    ledger = first.ledger
    ledger.begin()
    ledger.ledger.elapsed = 1e6
    # The target is so fast that nothing pays.
    ledger.set_costs(StepCosts(CostCurve(1e-9, 1.0, 0.0)), 1e6)
    propose_planned(proposer, [first], [TreeUnion(ledger.costs)], Clock())
    assert [report.reason for report in ledger.reports] == ["learns"]
    assert not ledger.reports[0].tree.num_draft_tokens
    assert sum(ledger.acceptance.rates(proposer.chain_label).reached.values()) > 0
    ledger.begin()
    # The target is so slow that everything pays.
    ledger.set_costs(StepCosts(CostCurve(1e6, 1.0, 0.0)), 1e9)
    later = stateless(first.state, tokens[:39], GREEDY, ledger)
    propose_planned(proposer, [later], [TreeUnion(ledger.costs)], Clock())
    assert [report.reason for report in ledger.reports] == ["pays"]
    assert ledger.reports[0].tree.num_draft_tokens > 3  # a chain and siblings


def test_a_wrapper_counts_for_its_inner_drafter() -> None:
    check_wrapper("cape")
