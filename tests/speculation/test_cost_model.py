"""Measured costs of forward passes, on simulated processors with disturbances and changing speed."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from pronk.speculation.cost_model import CostCurve, CostModel

# Up to 4 rows cost the same; every 4 rows more add half a plain pass.
STEPS = CostCurve((1, 4, 8, 12, 64), (1.0, 1.0, 1.5, 2.0, 8.5))

Seconds = Callable[[int], float]


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        (1, 1.0),
        (3, 1.0),
        (4, 1.0),
        (5, 1.125),
        (8, 1.5),
        (9, 1.625),
        (12, 2.0),
        (38, 5.25),
        (64, 8.5),
        (128, 16.5),
        (2000, 250.5),
    ],
)
def test_cost_between_the_points_and_beyond(rows: int, seconds: float) -> None:
    assert STEPS.at(rows) == pytest.approx(seconds)


def test_the_cost_beyond_the_known_rows_is_infinite() -> None:
    costs = CostCurve((1, 4), (1.0, 2.0), slope=0.5, known=8)
    assert [costs.at(rows) for rows in (1, 4, 5, 8, 9)] == [1.0, 2.0, 2.5, 4.0, math.inf]


def by_memory(rows: int) -> float:
    """Return the seconds of a processor that reads the weights in the time of 3.5 rows."""
    return max(0.07, 0.02 * rows)


def disturbed(seconds: float, dice: random.Random) -> float:
    """Double the time of one forward pass in seven."""
    return seconds * dice.lognormvariate(0.0, 0.03) * (2.0 if dice.random() < 1 / 7 else 1.0)


def learn_passes(
    times: CostModel, passes: list[int], seconds: Seconds, dice: random.Random, context: int = 100
) -> None:
    for rows in passes:
        times.learn(rows, context, disturbed(seconds(rows), dice))


def largest_error(times: CostModel, seconds: Seconds, rows: list[int], context: int = 100) -> float:
    """Return the largest error of the costs, as a factor."""
    costs = times.costs(context)
    assert costs is not None
    return max(max(costs.at(each) / seconds(each), seconds(each) / costs.at(each)) for each in rows)


def test_costs_are_unknown_before_two_plain_passes() -> None:
    times = CostModel()
    assert times.costs(0) is None
    times.learn(200, 0, 4.0)
    assert times.costs(0) is None
    for _ in range(2):
        times.learn(4, 200, 0.08)
    assert times.costs(200) is None
    assert times.costs(200, plain=4) is not None
    assert times.costs(200, plain=6) is None
    times.learn(1, 200, 0.14)
    assert times.costs(200) is None  # one may have been disturbed
    times.learn(1, 200, 0.07)
    assert times.costs(200) is not None


def test_costs_after_one_prompt_and_two_plain_passes() -> None:
    times = CostModel()
    times.learn(200, 0, 1.3 * by_memory(200))
    learn_passes(times, [1, 1], by_memory, random.Random(1), context=200)
    assert largest_error(times, by_memory, [1, 4, 8, 16, 32, 64, 128]) < 1.7


def test_a_very_slow_first_prompt_does_not_make_few_rows_expensive() -> None:
    times = CostModel()
    times.learn(20, 0, 500.0)
    learn_passes(times, [1, 1], by_memory, random.Random(1), context=20)
    costs = times.costs(20)
    assert costs is not None
    assert costs.at(4) <= 2 * costs.at(1)
    assert costs.at(20) > 100


@pytest.mark.parametrize("seed", range(20))
def test_disturbances_are_ignored(seed: int) -> None:
    dice, times = random.Random(seed), CostModel()
    learn_passes(times, [dice.choice((1, 1, 4, 8, 12, 16)) for _ in range(150)], by_memory, dice)
    assert largest_error(times, by_memory, [1, 4, 8, 12, 16]) < 1.15


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("factor", [0.5, 1.5, 3.0])
def test_another_speed_is_followed_within_20_passes(factor: float, seed: int) -> None:
    """The estimates for 12 and 16 rows, which are not measured after the change, follow, too."""
    dice, times = random.Random(seed), CostModel()
    learn_passes(times, [dice.choice((1, 4, 8, 12, 16)) for _ in range(100)], by_memory, dice)
    learn_passes(times, [dice.choice((1, 4, 8)) for _ in range(20)], lambda rows: factor * by_memory(rows), dice)
    assert largest_error(times, lambda rows: factor * by_memory(rows), [1, 4, 8, 12, 16]) < 1.3


@pytest.mark.parametrize("seed", range(20))
def test_other_costs_are_followed(seed: int) -> None:
    """With half of the cores, computing takes twice as long, and reading weights does not."""
    dice, times = random.Random(seed), CostModel()
    slow = lambda rows: max(0.08, 0.04 * rows)  # noqa: E731
    learn_passes(times, [dice.choice((1, 4, 8, 12)) for _ in range(100)], by_memory, dice)
    before = largest_error(times, slow, [1, 4, 8, 12])
    learn_passes(times, [dice.choice((1, 4, 8, 12)) for _ in range(60)], slow, dice)
    assert largest_error(times, slow, [1, 4, 8, 12]) < 1.3
    assert before > 1.6


@pytest.mark.parametrize("measured", [(1,), (4,), (1, 4), (1, 1, 1, 8)])
def test_costs_of_unmeasured_rows_do_not_drift(measured: tuple[int, ...]) -> None:
    found = list[float]()
    for seed in range(9):
        dice, times = random.Random(seed), CostModel()
        learn_passes(times, [dice.choice((1, 4, 8, 12)) for _ in range(400)], by_memory, dice)
        for _ in range(240):
            times.learn(rows := dice.choice(measured), 100, by_memory(rows) * dice.lognormvariate(0.0, 0.15))
        found.append(largest_error(times, by_memory, [1, 4, 8, 12]))
    assert sorted(found)[len(found) // 2] < 1.35


def test_more_rows_never_take_less_time() -> None:
    dice = random.Random(0)
    for _ in range(50):
        times = CostModel()
        times.learn(1, 0, 1.0)
        times.learn(1, 0, 1.0)
        for _ in range(30):
            times.learn(dice.choice((1, 2, 3, 5, 8, 13, 40, 300)), 0, dice.uniform(0.5, 20.0))
        costs = times.costs(0)
        assert costs is not None
        seconds = [costs.at(rows) for rows in range(1, 400)]
        assert all(more >= less * (1 - 1e-12) for less, more in pairwise(seconds))


def test_costs_are_known_up_to_twice_the_measured_rows() -> None:
    times = CostModel()
    learn_passes(times, [1, 1], by_memory, random.Random(1))
    for most, rows in ((8, 8), (16, 12), (24, 24)):
        costs = times.costs(100)
        assert costs is not None
        assert costs.at(most) < math.inf
        assert costs.at(most + 1) == math.inf
        times.learn(rows, 100, 0.1)


@pytest.mark.parametrize(("measured", "lasts"), [(2, 32), (4, 64), (20, 256)])
def test_old_plain_passes_are_forgotten(measured: int, lasts: int) -> None:
    """The next step is plain, so that draft tokens are compared with current costs."""
    times = CostModel()
    for _ in range(measured):
        times.learn(1, 0, 1.0)
    passes = 0
    while times.costs(0) is not None:
        times.learn(8, 0, 2.0)
        passes += 1
    assert passes == lasts
    times.learn(1, 0, 1.0)
    assert times.costs(0) is not None


def test_costs_of_long_texts_start_with_those_of_short_ones() -> None:
    times = CostModel()
    for _ in range(10):
        times.learn(1, 100, 1.0)
        times.learn(8, 100, 2.0)
    initial = times.costs(5000)
    assert initial is not None
    assert initial.at(8) == pytest.approx(2.0)
    for _ in range(20):
        times.learn(1, 5000, 3.0)
        times.learn(8, 5000, 9.0)
    long, short = times.costs(5000), times.costs(100)
    assert long is not None
    assert short is not None
    assert (long.at(1), long.at(8)) == pytest.approx((3.0, 9.0), rel=0.1)
    assert (short.at(1), short.at(8)) == pytest.approx((1.0, 2.0))


def test_costs_of_the_later_layers() -> None:
    """The costs are a share of those of all layers until they are measured."""
    times = CostModel()
    for _ in range(10):
        times.learn(1, 0, 1.0)
        times.learn(8, 0, 3.0)
    whole = times.costs(0)
    assert whole is not None
    rest = times.rest(whole, 0.25)
    assert [rest.at(rows) for rows in (1, 8)] == pytest.approx([1.0, 2.5])
    for _ in range(9):
        times.learn_rest(0.25, 8, 0, 2.0)
    rest = times.rest(whole, 0.25)
    assert [rest.at(rows) for rows in (1, 8)] == pytest.approx([0.8, 2.0])
    assert times.costs(0) is whole


def test_the_least_gain_is_the_cost_of_a_row() -> None:
    costs = CostCurve((1, 8, 16), (1.0, 1.7, 2.5))
    assert costs.least_gain() == pytest.approx(0.1)
    assert costs.least_gain(2) == pytest.approx((2.5 - 1.1) / 7 / 1.1)
    assert CostCurve((1, 8), (1.0, 1.0)).least_gain() == 0.0
    assert CostCurve((1, 8), (1.0, 33.0)).least_gain() == 1.0
    assert CostCurve((1,), (1.0,), 0.1, known=7).least_gain() == 0.0


def test_plain_passes_are_measured_again_if_more_rows_take_less() -> None:
    times = CostModel()
    for _ in range(20):
        times.learn(1, 0, 1.0)
    for _ in range(20):
        times.learn(3, 0, 1.2)
        assert times.costs(0) is not None
    for _ in range(40):  # no plain pass for a while
        times.learn(3, 0, 1.2)
    before = times.costs(0)
    assert before is not None
    levels = times._by_context[0].levels
    levels[1].log += 0.5
    assert times.costs(0) is None
    times.learn(1, 0, 1.0)
    after = times.costs(0)
    assert after is not None
