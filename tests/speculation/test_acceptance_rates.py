"""Measured acceptance: of one request by kind of draft token, and shared between requests."""

from dataclasses import replace

import pytest

from drafters.helpers import outcome_of
from pronk.sampling.params import SamplingParams
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.acceptance_stats import SHARE, AcceptanceStats
from pronk.speculation.proposer import Outcome
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.tree import TokenTree

PRIORS = {0: 0.5, 1: 0.1, 2: 0.8}


def tree(*origin: tuple[str, int]) -> TokenTree:
    """Return a tree with the branches 0-1-2 and 0-3-4, and the ``origin`` of nodes 1 to 4."""
    return TokenTree((9, 1, 2, 3, 4), (-1, 0, 1, 0, 3), origin=(("", 0), *origin))


def test_a_draft_token_counts_if_its_parent_was_accepted() -> None:
    rates = AcceptanceRates("own", PRIORS)
    rates.learn(outcome_of(tree(("own", 0), ("own", 2), ("own", 1), ("own", 2)), (1,)))
    assert rates.offered == {0: 1.0, 2: 1.0, 1: 1.0}  # node 4's parent was rejected
    assert rates.taken == {0: 1.0}
    assert rates.rate(0) == pytest.approx((1 + 0.5 * 4) / 5)
    assert rates.rate(1) == pytest.approx(0.1 * 4 / 5)
    assert rates.rate(2) == pytest.approx(0.8 * 4 / 5)


def test_draft_tokens_of_other_drafters_do_not_count() -> None:
    rates = AcceptanceRates("own", PRIORS)
    rates.learn(outcome_of(tree(("other", 0), ("own", 2), ("other", 1), ("other", 2)), (1, 2)))
    assert (rates.offered, rates.taken) == ({2: 1.0}, {2: 1.0})
    rates.learn(outcome_of(TokenTree.chain([1, 2, 3]), (1, 2)))
    assert (rates.offered, rates.taken) == ({2: 1.0}, {2: 1.0})


def test_nodes_that_may_not_be_accepted_do_not_count() -> None:
    rates = AcceptanceRates("own", PRIORS)
    rates.learn(outcome_of(TokenTree((9, 1), (-1, 0), (True, False), origin=(("", 0), ("own", 0))), ()))
    assert rates.offered == {}


def test_rates_approach_the_acceptance_and_fade_to_the_prior() -> None:
    rates = AcceptanceRates("own", PRIORS)
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("own", 1)))
    for step in range(400):
        rates.learn(outcome_of(one, (1,) if step % 4 else ()))
    assert rates.rate(1) == pytest.approx(0.71, abs=0.05)
    other = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("own", 0)))
    for _ in range(400):
        rates.learn(outcome_of(other, ()))
    assert rates.rate(1) == pytest.approx(0.1, abs=0.01)
    assert 0 < rates.rate(0) < 0.05


def test_a_request_starts_with_the_shared_statistics() -> None:
    stats = AcceptanceStats()
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("own", 1)))
    first = AcceptanceRates("own", PRIORS, SharedAcceptance(stats))
    for _ in range(100):
        first.learn(outcome_of(one, (1,)))
    second = AcceptanceRates("own", PRIORS, SharedAcceptance(stats))
    assert second.rate(1) == second.rate(1, depth=1) == pytest.approx((100 + 0.1 * 16) / 116)
    assert second.rate(1, depth=2) == pytest.approx(0.1)
    assert second.rate(0) == pytest.approx(0.5)
    for _ in range(100):
        second.learn(outcome_of(one, ()))
    assert second.rate(1, depth=1) < 0.1


def test_one_request_adds_a_bounded_share_to_the_statistics() -> None:
    stats = AcceptanceStats()
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("own", 1)))
    rates = AcceptanceRates("own", PRIORS, SharedAcceptance(stats))
    for _ in range(3 * SHARE):
        rates.learn(outcome_of(one, (1,)))
    assert stats.counts == {("own", 1, 1, 0): [SHARE, SHARE]}


def test_rates_depend_on_the_temperature_once_it_is_known() -> None:
    stats = AcceptanceStats()
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("own", 1)))
    for temperature, path in ((0.0, (1,)), (0.8, ())):
        rates = AcceptanceRates("own", PRIORS, SharedAcceptance(stats))
        for _ in range(50):
            rates.learn(outcome_of(one, path, params=SamplingParams(temperature=temperature)))
    fresh = AcceptanceRates("own", PRIORS, SharedAcceptance(stats))
    assert fresh.rate(1, 1) == pytest.approx((50 + 1.6) / 116)
    fresh.learn(outcome_of(one, (1,), params=SamplingParams(temperature=0.8)))
    assert fresh.rate(1, 1) < 0.3


def test_requests_under_rejection_add_nothing_to_the_statistics() -> None:
    stats = AcceptanceStats()
    rates = AcceptanceRates("own", PRIORS, SharedAcceptance(stats))
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("own", 1)))
    rates.learn(outcome_of(one, (1,), params=SamplingParams(temperature=0.8, rule="rejection")))
    assert not stats.counts
    assert rates.taken == {1: 1.0}


def test_draft_tokens_beyond_the_text_do_not_count() -> None:
    """Five draft tokens are right, but only those within the three committed tokens count."""
    rates, text = AcceptanceRates("a", {0: 0.5}), [*range(100)]
    for start in range(0, 60, 3):
        offered = TokenTree.chain(text[start : start + 6], gain=[1.0] * 6)
        offered = replace(offered, origin=(("", 0), *[("a", 0)] * 5))
        committed = tuple(text[start + 1 : start + 4])
        rates.learn(Outcome(None, offered, (1, 2), committed, start, SamplingParams(), own_proposal=offered))
    assert rates.taken == rates.offered
    assert rates.rate(0) > 0.9


def test_few_counts_leave_the_prior_and_many_replace_it() -> None:
    stats = AcceptanceStats()
    assert stats.rate("a", 1, 1, 0.0, 0.3) == pytest.approx(0.3)
    for number in range(1000):
        stats.learn("a", 1, 1, 0.0, right=number % 4 == 0)
        if number == 0:
            assert stats.rate("a", 1, 1, 0.0, 0.3) == pytest.approx((1 + 0.3 * 16) / 17)
    assert stats.rate("a", 1, 1, 0.0, 0.3) == pytest.approx(0.25, abs=0.01)


def test_statistics_depend_on_kind_depth_and_temperature() -> None:
    stats = AcceptanceStats()
    for _ in range(1000):
        stats.learn("a", 1, 2, 0.7, right=True)
    assert stats.rate("a", 1, 2, 0.7, 0.1) > 0.9
    assert stats.rate("a", 1, 2, 1.0, 0.1) > 0.9  # 0.7 and 1.0 have the same counts
    for other in (("b", 1, 2, 0.7), ("a", 2, 2, 0.7), ("a", 1, 1, 0.7), ("a", 1, 2, 0.0), ("a", 1, 2, 1.5)):
        assert stats.rate(*other, 0.1) == pytest.approx(0.1)
    assert stats.rate("a", 1, 0, None, 0.1) > 0.9
    stats.learn("a", 1, 4, 0.7, right=True)
    # All depths from 4 on have the same counts.
    assert stats.rate("a", 1, 9, 0.7, 0.1) == stats.rate("a", 1, 4, 0.7, 0.1) > 0.1


def test_old_counts_fade() -> None:
    stats = AcceptanceStats()
    for _ in range(20_000):
        stats.learn("a", 1, 1, 0.0, right=True)
    for _ in range(8_000):
        stats.learn("a", 1, 1, 0.0, right=False)
    assert stats.rate("a", 1, 1, 0.0, 0.5) < 0.25
    ((offered, taken),) = stats.counts.values()
    assert 0 <= taken <= offered <= 4096
