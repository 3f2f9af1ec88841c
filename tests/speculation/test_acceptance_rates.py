"""Acceptance by way of guessing: what is counted, and how it fades."""

from dataclasses import replace

import pytest

from drafters.helpers import said_of
from pronk.sampling.params import SamplingParams
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.acceptance_stats import SHARE, AcceptanceStats
from pronk.speculation.proposer import Outcome
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.tree import TokenTree

WAYS = {0: 0.5, 1: 0.1, 2: 0.8}


def tree(*origin: tuple[str, int]) -> TokenTree:
    """``0 ┬ 1 ─ 2`` and ``0 ┴ 3 ─ 4``."""
    return TokenTree((9, 1, 2, 3, 4), (-1, 0, 1, 0, 3), origin=(("", 0), *origin))


def test_a_guess_counts_where_its_parent_was_right() -> None:
    rates = AcceptanceRates("me", WAYS)
    rates.learn(said_of(tree(("me", 0), ("me", 2), ("me", 1), ("me", 2)), (1,)))
    assert rates.offered == {0: 1.0, 2: 1.0, 1: 1.0}  # node 4's parent was not reached
    assert rates.taken == {0: 1.0}
    assert rates.rate(0) == pytest.approx((1 + 0.5 * 4) / 5)
    assert rates.rate(1) == pytest.approx(0.1 * 4 / 5)
    assert rates.rate(2) == pytest.approx(0.8 * 4 / 5)


def test_what_others_guessed_does_not_count() -> None:
    rates = AcceptanceRates("me", WAYS)
    rates.learn(said_of(tree(("you", 0), ("me", 2), ("you", 1), ("you", 2)), (1, 2)))
    assert (rates.offered, rates.taken) == ({2: 1.0}, {2: 1.0})
    rates.learn(said_of(TokenTree.chain([1, 2, 3]), (1, 2)))
    assert (rates.offered, rates.taken) == ({2: 1.0}, {2: 1.0})


def test_nodes_that_may_not_be_accepted_do_not_count() -> None:
    rates = AcceptanceRates("me", WAYS)
    rates.learn(said_of(TokenTree((9, 1), (-1, 0), (True, False), origin=(("", 0), ("me", 0))), ()))
    assert rates.offered == {}


def test_rates_approach_what_happens_and_fade_when_nothing_does() -> None:
    rates = AcceptanceRates("me", WAYS)
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("me", 1)))
    for step in range(400):
        rates.learn(said_of(one, (1,) if step % 4 else ()))
    assert rates.rate(1) == pytest.approx(0.71, abs=0.05)
    other = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("me", 0)))
    for _ in range(400):
        rates.learn(said_of(other, ()))
    assert rates.rate(1) == pytest.approx(0.1, abs=0.01)
    assert 0 < rates.rate(0) < 0.05


def test_a_request_begins_with_what_others_have_shown_and_goes_its_own_way() -> None:
    acceptance_stats = AcceptanceStats()
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("me", 1)))
    first = AcceptanceRates("me", WAYS, SharedAcceptance(acceptance_stats))
    for _ in range(100):
        first.learn(said_of(one, (1,)))
    second = AcceptanceRates("me", WAYS, SharedAcceptance(acceptance_stats))
    assert second.rate(1) == second.rate(1, depth=1) == pytest.approx((100 + 0.1 * 16) / 116)
    assert second.rate(1, depth=2) == pytest.approx(0.1)
    assert second.rate(0) == pytest.approx(0.5)
    for _ in range(100):
        second.learn(said_of(one, ()))
    assert second.rate(1, depth=1) < 0.1


def test_what_a_request_tells_others_has_a_bound() -> None:
    acceptance_stats = AcceptanceStats()
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("me", 1)))
    rates = AcceptanceRates("me", WAYS, SharedAcceptance(acceptance_stats))
    for _ in range(3 * SHARE):
        rates.learn(said_of(one, (1,)))
    assert acceptance_stats.counts == {("me", 1, 1, 0): [SHARE, SHARE]}


def test_temperatures_are_told_apart_as_soon_as_they_are_known() -> None:
    acceptance_stats = AcceptanceStats()
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("me", 1)))
    for temperature, path in ((0.0, (1,)), (0.8, ())):
        rates = AcceptanceRates("me", WAYS, SharedAcceptance(acceptance_stats))
        for _ in range(50):
            rates.learn(said_of(one, path, params=SamplingParams(temperature=temperature)))
    fresh = AcceptanceRates("me", WAYS, SharedAcceptance(acceptance_stats))
    assert fresh.rate(1, 1) == pytest.approx((50 + 1.6) / 116)
    fresh.learn(said_of(one, (1,), params=SamplingParams(temperature=0.8)))
    assert fresh.rate(1, 1) < 0.3


def test_requests_whose_guesses_tell_of_their_numbers_tell_nothing() -> None:
    acceptance_stats = AcceptanceStats()
    rates = AcceptanceRates("me", WAYS, SharedAcceptance(acceptance_stats))
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("me", 1)))
    rates.learn(said_of(one, (1,), params=SamplingParams(temperature=0.8, rule="rejection")))
    assert not acceptance_stats.counts
    assert rates.taken == {1: 1.0}


def test_what_the_text_has_not_reached_is_neither_right_nor_wrong() -> None:
    """Five guesses that are always right, of which two are verified: or else they would seem right in three of four."""
    rates, text = AcceptanceRates("a", {0: 0.5}), [*range(100)]
    for start in range(0, 60, 3):
        offered = TokenTree.chain(text[start : start + 6], gain=[1.0] * 6)
        offered = replace(offered, origin=(("", 0), *[("a", 0)] * 5))
        committed = tuple(text[start + 1 : start + 4])
        rates.learn(Outcome(None, offered, (1, 2), committed, start, SamplingParams(), own_proposal=offered))
    assert rates.taken == rates.offered
    assert rates.rate(0) > 0.9
