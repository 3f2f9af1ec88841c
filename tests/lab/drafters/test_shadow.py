"""Shadow passes of a draft model inside ``cape``."""

from drafting.drafting import bound
from drafting.shared.test_shadow import GREEDY, SPEC, answer, check_wrapper, stateless
from pronk.drafting.proposer import ask
from pronk.models.cost_model import CostCurve
from tiny_models import Clock, make_engine, tiny_decoder


def test_a_shadow_pass_leaves_proposals_of_siblings_possible() -> None:
    """The empty offer of a shadow pass must not decide how the rates of the siblings are
    counted.
    """
    tokens = answer(40)
    proposer = bound(f"cape({SPEC})", make_engine(tiny_decoder()))
    first = stateless(proposer.start(tokens), tokens[:38], GREEDY)
    policy = first.policy
    policy.begin()
    policy.policy.elapsed = 1e6
    policy.set_prices(CostCurve(1e-9, 1.0, 0.0), 1, 1e6)  # the target is so fast that nothing pays
    ask(proposer, [first], Clock())
    assert [report.reason for report in policy.reports] == ["explores"]
    assert not policy.reports[0].tree.num_draft_tokens
    assert sum(policy.acceptance.source(proposer.chain_source).offered.values()) > 0
    policy.begin()
    # the target is so slow that everything pays
    policy.set_prices(CostCurve(1e6, 1.0, 0.0), 1, 1e9)
    ask(proposer, [stateless(first.state, tokens[:39], GREEDY, policy)], Clock())
    assert [report.reason for report in policy.reports] == ["pays"]
    assert policy.reports[0].tree.num_draft_tokens > 3  # a chain and siblings


def test_a_wrapper_counts_for_its_inner_drafter() -> None:
    check_wrapper("cape")
