"""How often guesses of a kind were right: what is counted together, and what is believed of few."""

import pytest

from pronk.speculation.acceptance_stats import AcceptanceStats


def test_of_few_the_prior_is_believed_and_of_many_the_counts() -> None:
    acceptance_stats = AcceptanceStats()
    assert acceptance_stats.rate("a", 1, 1, 0.0, 0.3) == pytest.approx(0.3)
    for number in range(1000):
        acceptance_stats.learn("a", 1, 1, 0.0, right=number % 4 == 0)
        if number == 0:
            assert acceptance_stats.rate("a", 1, 1, 0.0, 0.3) == pytest.approx((1 + 0.3 * 16) / 17)
    assert acceptance_stats.rate("a", 1, 1, 0.0, 0.3) == pytest.approx(0.25, abs=0.01)


def test_kinds_depths_and_temperatures_are_told_apart() -> None:
    acceptance_stats = AcceptanceStats()
    for _ in range(1000):
        acceptance_stats.learn("a", 1, 2, 0.7, right=True)
    assert acceptance_stats.rate("a", 1, 2, 0.7, 0.1) > 0.9
    assert acceptance_stats.rate("a", 1, 2, 1.0, 0.1) > 0.9  # alike
    for other in (("b", 1, 2, 0.7), ("a", 2, 2, 0.7), ("a", 1, 1, 0.7), ("a", 1, 2, 0.0), ("a", 1, 2, 1.5)):
        assert acceptance_stats.rate(*other, 0.1) == pytest.approx(0.1)
    assert acceptance_stats.rate("a", 1, 0, None, 0.1) > 0.9  # any
    acceptance_stats.learn("a", 1, 4, 0.7, right=True)
    assert (
        acceptance_stats.rate("a", 1, 9, 0.7, 0.1) == acceptance_stats.rate("a", 1, 4, 0.7, 0.1) > 0.1
    )  # deep ones are alike


def test_old_counts_fade() -> None:
    acceptance_stats = AcceptanceStats()
    for _ in range(20_000):
        acceptance_stats.learn("a", 1, 1, 0.0, right=True)
    for _ in range(8_000):
        acceptance_stats.learn("a", 1, 1, 0.0, right=False)
    assert acceptance_stats.rate("a", 1, 1, 0.0, 0.5) < 0.25
    ((offered, taken),) = acceptance_stats.counts.values()
    assert 0 <= taken <= offered <= 4096
