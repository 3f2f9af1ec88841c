from itertools import pairwise

import pytest

from pronk.train.optim import Schedule
from pronk.train.options import LoopOptions


def test_progress_is_the_further_of_steps_and_time() -> None:
    options = LoopOptions(steps=100)
    schedule = Schedule(options, 1.0)
    assert schedule.progress(50, 6.0) == 0.5
    assert schedule.progress(50, 45.0) == 0.75
    assert schedule.progress(50, 90.0) == 1.0
    assert Schedule(options, None).progress(50, 1e9) == 0.5


def test_rate_warms_up_and_ends_at_the_floor() -> None:
    schedule = Schedule(LoopOptions(steps=1000, warmup=10, rate=2.0, floor=0.1), None)
    rates = [schedule.rate(step, step / 1000) for step in range(1001)]
    assert rates[0] == pytest.approx(2.0 / 11)
    assert max(rates) == pytest.approx(2.0, rel=1e-3)
    assert all(a < b for a, b in pairwise(rates[:11]))
    assert all(a > b for a, b in pairwise(rates[11:]))
    assert rates[-1] == pytest.approx(0.2)
