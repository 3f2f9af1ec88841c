"""Levels of load as users write them, and arrivals by their law."""

from __future__ import annotations

import numpy as np
import pytest

from pronk.bench.load.levels import Level, parse_levels, poisson_arrivals
from pronk.errors import OptionError


def test_levels() -> None:
    levels = parse_levels("1, 2,2,8", "0.5,4")
    assert levels == (*(Level("closed", n) for n in (1, 2, 8)), Level("open", 0.5), Level("open", 4))
    assert list(map(str, levels)) == ["1 client", "2 clients", "8 clients", "0.5 requests/s", "4 requests/s"]


@pytest.mark.parametrize(
    ("concurrency", "rate", "found"),
    [
        ("1,x", None, "concurrency: .*'1,x'"),
        ("0", None, "concurrency: .* 0"),
        ("1.5", None, "concurrency: .* 1.5"),
        ("nan", None, "concurrency"),
        ("inf", None, "concurrency"),
        ("2000", None, "concurrency: .* 2000"),
        ("", None, "concurrency"),
        (None, "0", "rate: .* 0"),
        (None, "-1", "rate"),
        (None, "inf", "rate"),
        (None, "1;2", "rate"),
    ],
)
def test_mistakes(concurrency: str | None, rate: str | None, found: str) -> None:
    with pytest.raises(OptionError, match=found):
        parse_levels(concurrency, rate)


def test_gaps_are_exponential() -> None:
    """Their distribution function is ``1 - exp(-rate t)``: Kolmogorov's distance, at one in a thousand."""
    rate, count = 3.0, 20_000
    arrivals = poisson_arrivals(rate, count, seed=7, turn=0)
    gaps = np.sort(np.diff([0.0, *arrivals]))
    law = 1 - np.exp(-rate * gaps)
    steps = np.arange(count + 1) / count
    distance = max(np.abs(law - steps[1:]).max(), np.abs(law - steps[:-1]).max())
    assert distance < 1.95 / np.sqrt(count)


def test_counts_have_the_variance_of_their_mean() -> None:
    """What tells Poisson arrivals from regular ones, and from those that come in bunches."""
    arrivals = poisson_arrivals(5.0, 50_000, seed=1, turn=3)
    counts = np.bincount(np.array(arrivals).astype(int))[:-1]
    assert np.mean(counts) == pytest.approx(5, rel=0.02)
    assert np.var(counts) == pytest.approx(5, rel=0.06)


def test_one_pattern_at_every_rate() -> None:
    slow, fast = (poisson_arrivals(rate, 50, seed=7, turn=1) for rate in (0.5, 2.0))
    np.testing.assert_allclose(slow, 4 * np.array(fast))
    assert fast == poisson_arrivals(2.0, 50, seed=7, turn=1)
    assert fast != poisson_arrivals(2.0, 50, seed=7, turn=2)
    assert fast != poisson_arrivals(2.0, 50, seed=8, turn=1)
