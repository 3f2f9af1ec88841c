"""Acceptance by way of guessing: what is counted, and how it fades."""

from __future__ import annotations

import pytest

from pronk.drafters.shared.rates import Rates
from pronk.tree import TokenTree

WAYS = {0: 0.5, 1: 0.1, 2: 0.8}


def tree(*origin: tuple[str, int]) -> TokenTree:
    """``0 ┬ 1 ─ 2`` and ``0 ┴ 3 ─ 4``."""
    return TokenTree((9, 1, 2, 3, 4), (-1, 0, 1, 0, 3), origin=(("", 0), *origin))


def test_a_guess_counts_where_its_parent_was_right() -> None:
    rates = Rates("me", WAYS)
    rates.learn(tree(("me", 0), ("me", 2), ("me", 1), ("me", 2)), (1,))
    assert rates.offered == {0: 1.0, 2: 1.0, 1: 1.0}  # node 4's parent was not reached
    assert rates.taken == {0: 1.0}
    assert rates.rate(0) == pytest.approx((1 + 0.5 * 4) / 5)
    assert rates.rate(1) == pytest.approx(0.1 * 4 / 5)
    assert rates.rate(2) == pytest.approx(0.8 * 4 / 5)


def test_what_others_guessed_does_not_count() -> None:
    rates = Rates("me", WAYS)
    rates.learn(tree(("you", 0), ("me", 2), ("you", 1), ("you", 2)), (1, 2))
    assert (rates.offered, rates.taken) == ({2: 1.0}, {2: 1.0})
    rates.learn(TokenTree.chain([1, 2, 3]), (1, 2))
    assert (rates.offered, rates.taken) == ({2: 1.0}, {2: 1.0})


def test_nodes_that_may_not_be_accepted_do_not_count() -> None:
    rates = Rates("me", WAYS)
    rates.learn(TokenTree((9, 1), (-1, 0), (True, False), origin=(("", 0), ("me", 0))), ())
    assert rates.offered == {}


def test_rates_approach_what_happens_and_fade_when_nothing_does() -> None:
    rates = Rates("me", WAYS)
    one = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("me", 1)))
    for step in range(400):
        rates.learn(one, (1,) if step % 4 else ())
    assert rates.rate(1) == pytest.approx(0.71, abs=0.05)
    other = TokenTree((9, 1), (-1, 0), origin=(("", 0), ("me", 0)))
    for _ in range(400):
        rates.learn(other, ())
    assert rates.rate(1) == pytest.approx(0.1, abs=0.01)
    assert 0 < rates.rate(0) < 0.05
