"""Measured costs of forward passes, on simulated processors with disturbances and changing
speed.
"""

import random
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest

from pronk.models.cost_model import CostCurve, CostModel, usual

Seconds = Callable[[int], float]


def by_memory(rows: int) -> float:
    """Return the seconds of a processor that reads the weights in the time of 3.5 rows."""
    return max(0.07, 0.02 * rows)


def disturbed(seconds: float, dice: random.Random) -> float:
    """Add 3 % noise, and double the time of one forward pass in seven."""
    return seconds * dice.lognormvariate(0.0, 0.03) * (2.0 if dice.random() < 1 / 7 else 1.0)


def learn_passes(
    model: CostModel,
    passes: Iterable[int],
    seconds: Seconds,
    dice: random.Random,
    context: int = 100,
) -> None:
    for rows in passes:
        model.learn(rows, context, disturbed(seconds(rows), dice))


def costs_of(model: CostModel, context: int = 100) -> CostCurve:
    costs = model.costs(context)
    assert costs is not None
    return costs


def largest_error(
    model: CostModel, seconds: Seconds, rows: Iterable[int], context: int = 100
) -> float:
    """Return the largest error of the costs, as a factor."""
    costs = costs_of(model, context)
    return max(max(costs.at(each) / seconds(each), seconds(each) / costs.at(each)) for each in rows)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 2.0), (3, 2.0), (4, 2.0), (5, 2.5), (8, 4.0), (64, 32.0)]
)
def test_few_rows_are_limited_by_memory_and_more_rows_by_arithmetic(
    rows: int, seconds: float
) -> None:
    assert CostCurve(2.0, 0.0, 0.25).at(rows) == pytest.approx(seconds)
    assert CostCurve(2.0, 0.0, 0.25, context=0.5).at(rows) == pytest.approx(seconds + 1.0)


@pytest.mark.parametrize("experts", [0.0, 0.6])
def test_a_table_has_the_seconds_of_each_number_of_rows(experts: float) -> None:
    curve = CostCurve(3.0, 0.4, 0.13, context=0.7, experts=experts, overlap=0.2)
    numbers = (1, 5, 2, 9, 300)
    assert curve.table(numbers) == [curve.at(rows) for rows in numbers]


@pytest.mark.parametrize(
    ("start", "slope"), [(0.0, 0.25), (0.85, 0.15), (0.5, 0.125), (-1.0, 0.125), (0.3, 0.55)]
)
def test_free_rows_and_the_seconds_of_a_further_row(start: float, slope: float) -> None:
    curve = CostCurve(3.0, start, slope, context=0.7)
    free = curve.free_rows
    assert curve.at(free) == pytest.approx(curve.at(1))
    assert curve.at(free + 1) > 1.001 * curve.at(1)
    assert curve.at(free + 2) - curve.at(free + 1) == pytest.approx(curve.row_seconds)


def test_without_a_slope_all_rows_are_free() -> None:
    curve = CostCurve(3.0, 0.9, 0.0)
    assert curve.free_rows > 100
    assert curve.row_seconds == 0.0


def test_the_prior_is_used_before_passes_with_several_rows() -> None:
    model = CostModel()
    for _ in range(3):
        model.learn(1, 0, 2.0)
    costs = costs_of(model, 0)
    assert [costs.at(rows) for rows in (1, 2, 11)] == pytest.approx([2.0, 2.3, 5.0])


def test_the_usual_value_is_the_lower_third() -> None:
    assert usual([5.0]) == 5.0
    assert usual([9.0, 1.0]) == 1.0
    assert usual([1.0, 9.0, 1.1, 9.0, 1.2, 1.3]) == 1.1
    assert usual([3.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0]) == 3.0


def test_costs_are_unknown_before_a_plain_pass() -> None:
    model = CostModel()
    assert model.costs(0) is None
    model.learn(4, 200, 0.08)
    assert model.costs(200) is None
    model.learn(4, 200, 0.08, plain=True)  # four requests without draft tokens
    assert model.costs(200) is not None
    model = CostModel()
    model.learn(1, 200, 0.08, plain=False)
    assert model.costs(200) is None
    model.learn(1, 200, 0.08)
    assert model.costs(200) is not None


@pytest.mark.parametrize("measured", [1, 20])
def test_old_plain_passes_are_measured_again(measured: int) -> None:
    model = CostModel()
    for _ in range(measured):
        model.learn(1, 0, 1.0)
    passes = 0
    while model.costs(0) is not None:
        model.learn(8, 0, 2.0)
        passes += 1
    assert passes == 256
    model.learn(1, 0, 1.0)
    assert model.costs(0) is not None


def assert_small(errors: Iterable[float], usual_limit: float, limit: float) -> None:
    """Check nine in ten errors by one limit, and all by another; two disturbed passes can meet in a
    short window.
    """
    ranked = sorted(errors)
    assert ranked[9 * len(ranked) // 10] < usual_limit
    assert ranked[-1] < limit


def test_disturbances_are_ignored() -> None:
    errors = list[float]()
    for seed in range(150):
        dice = random.Random(seed)
        model = CostModel()
        learn_passes(
            model, [dice.choice((1, 1, 4, 8, 12, 16)) for _ in range(150)], by_memory, dice
        )
        errors.append(largest_error(model, by_memory, [1, 4, 8, 12, 16]))
    assert_small(errors, 1.2, 1.8)


@pytest.mark.parametrize("factor", [0.5, 1.5, 3.0])
def test_another_speed_is_followed_within_20_passes(factor: float) -> None:
    """The estimates for 12 and 16 rows, which are not measured after the change, follow, too."""
    errors = list[float]()
    for seed in range(150):
        dice = random.Random(seed)
        model = CostModel()
        learn_passes(model, [dice.choice((1, 4, 8, 12, 16)) for _ in range(100)], by_memory, dice)
        learn_passes(
            model,
            [dice.choice((1, 4, 8)) for _ in range(20)],
            lambda rows: factor * by_memory(rows),
            dice,
        )
        errors.append(
            largest_error(model, lambda rows: factor * by_memory(rows), [1, 4, 8, 12, 16])
        )
    assert_small(errors, 1.3, 1.8)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_another_speed_is_followed_after_six_passes(factor: float) -> None:
    model = CostModel()
    for _ in range(50):
        model.learn(1, 0, 1.0)
    for _ in range(6):
        model.learn(1, 0, factor)
    assert costs_of(model, 0).at(1) == pytest.approx(factor)


def test_other_costs_are_followed() -> None:
    """With half of the cores, computing takes twice as long, and reading weights does not."""
    slow = lambda rows: max(0.08, 0.04 * rows)  # noqa: E731
    errors = list[float]()
    for seed in range(150):
        dice = random.Random(seed)
        model = CostModel()
        learn_passes(model, [dice.choice((1, 4, 8, 12)) for _ in range(100)], by_memory, dice)
        assert largest_error(model, slow, [1, 4, 8, 12]) > 1.6
        learn_passes(model, [dice.choice((1, 4, 8, 12)) for _ in range(60)], slow, dice)
        errors.append(largest_error(model, slow, [1, 4, 8, 12]))
    assert_small(errors, 1.3, 1.6)


@pytest.mark.parametrize("measured", [(1,), (4,), (1, 4), (1, 1, 1, 8)])
def test_costs_of_unmeasured_rows_do_not_drift(measured: tuple[int, ...]) -> None:
    found = list[float]()
    for seed in range(9):
        dice = random.Random(seed)
        model = CostModel()
        learn_passes(model, [dice.choice((1, 4, 8, 12)) for _ in range(400)], by_memory, dice)
        for _ in range(240):
            model.learn(
                rows := dice.choice(measured), 100, by_memory(rows) * dice.lognormvariate(0.0, 0.15)
            )
        found.append(largest_error(model, by_memory, [1, 4, 8, 12]))
    assert sorted(found)[len(found) // 2] < 1.35


@pytest.mark.parametrize("rows", [4, 16])
def test_passes_with_equal_rows_say_nothing_about_the_line(rows: int) -> None:
    """A batch of requests that always has the same size has unknown costs of one row."""
    model = CostModel()
    for _ in range(100):
        model.learn(rows, 0, 1.0, plain=True)
    costs = costs_of(model, 0)
    assert costs.at(rows) == pytest.approx(1.0)
    assert costs.row_seconds / costs.speed == pytest.approx(0.15)


def test_more_rows_never_take_less_time() -> None:
    dice = random.Random(0)
    for _ in range(50):
        model = CostModel()
        for _ in range(30):
            model.learn(
                dice.choice((1, 2, 3, 5, 8, 13, 40, 300)),
                dice.randrange(3000),
                dice.uniform(0.5, 20.0),
            )
        model.learn(1, 0, 1.0)
        for context in (0, 5000):
            seconds = [costs_of(model, context).at(rows) for rows in range(1, 400)]
            assert all(more >= less for less, more in pairwise(seconds))


def test_the_cost_of_cached_tokens_is_learned_over_many_requests() -> None:
    """Attention to 5,000 cached tokens takes half as long as reading the weights."""
    seconds = lambda rows, context: 0.07 * (max(1.0, rows / 3.5) + 0.0001 * context)  # noqa: E731
    errors = list[float]()
    for seed in range(20):
        dice = random.Random(seed)
        model = CostModel()
        for _ in range(12):
            context = dice.randrange(50, 6000)
            for _ in range(60):
                rows = dice.choice((1, 1, 4, 8))
                model.learn(rows, context, disturbed(seconds(rows, context), dice))
                context += 1 + rows // 4
        ratio = costs_of(model, 5000).at(1) / costs_of(model, 0).at(1)
        errors.append(max(ratio / 1.5, 1.5 / ratio))
    assert_small(errors, 1.15, 1.2)


def test_equal_contexts_give_cached_tokens_no_cost() -> None:
    model = CostModel()
    for number in range(200):
        model.learn(1, 1000 + number % 3, 1.0 + 0.1 * (number % 3))
    assert costs_of(model, 5000).at(1) < 1.2 * costs_of(model, 0).at(1)


def with_experts(overlap: float) -> CostCurve:
    """Return the true costs of a model of which experts are 0.8 of what a row reads; a row computes
    in 0.1.
    """
    return CostCurve(0.05, 0.2, 0.1, experts=0.8, overlap=overlap)


@pytest.mark.parametrize(("rows", "experts_read"), [(1, 1.0), (2, 1.75), (3, 2.3125), (200, 4.0)])
def test_rows_read_the_union_of_their_experts(rows: int, experts_read: float) -> None:
    """Of 8 experts, each row chooses 2: with a probability of 1/4 the same as another row."""
    curve = CostCurve(2.0, 0.0, 0.0, 0.5, experts=0.6, overlap=0.25)
    assert curve.at(rows) == pytest.approx(2.0 * (1.0 + 0.6 * (experts_read - 1.0) + 0.5))
    assert curve.at(rows, experts_read=1.5) == pytest.approx(2.0 * (1.3 + 0.5))
    # a dense model
    assert CostCurve(2.0, 0.0, 0.0, 0.5).at(rows, experts_read=1.5) == pytest.approx(3.0)
    assert curve.free_rows == 1


def learn_experts(
    model: CostModel, truth: CostCurve, passes: int, rows: tuple[int, ...], dice: random.Random
) -> None:
    for _ in range(passes):
        number = dice.choice(rows)
        expected = 1.0 + (truth.read_bytes(number) - 1.0) / truth.experts
        experts_read = (
            min(float(number), max(1.0, expected * dice.lognormvariate(0.0, 0.05)))
            if number > 1
            else 1.0
        )
        model.learn(
            number, 100, disturbed(truth.at(number, experts_read), dice), experts_read=experts_read
        )


def test_independent_choices_are_the_prior() -> None:
    model = CostModel(experts=0.8, overlap=0.125)
    for _ in range(9):
        model.learn(1, 0, 0.05, experts_read=1.0)
    costs = costs_of(model, 0)
    assert costs.at(1) == pytest.approx(0.05)
    assert costs.at(2) == pytest.approx(0.05 * (1.0 + 0.8 * 0.875))


@pytest.mark.parametrize("overlap", [0.05, 0.25, 0.6, 1.0])
def test_the_union_of_experts_is_learned(overlap: float) -> None:
    """The prior is that of independent choices, and passes show another overlap within a few
    passes.
    """
    truth = with_experts(overlap)
    errors = list[float]()
    for seed in range(100):
        model = CostModel(experts=0.8, overlap=0.125)
        learn_experts(model, truth, 30, (1, 1, 2, 4), random.Random(seed))
        errors.append(largest_error(model, truth.at, (1, 2, 3, 4)))
    assert_small(errors, 1.2, 1.8)


def test_passes_of_few_rows_show_the_arithmetic_of_more_rows_beside_experts() -> None:
    """Reading the experts hides the arithmetic of few rows; many rows touch all experts, and cost
    arithmetic.
    """
    truth = CostCurve(0.05, 0.0, 0.3, experts=0.8, overlap=0.5)
    errors = list[float]()
    for seed in range(100):
        model = CostModel(experts=0.8, overlap=0.125)
        learn_experts(model, truth, 80, (1, 1, 4, 12), random.Random(seed))
        errors.append(largest_error(model, truth.at, (1, 2, 4, 12, 16)))
    assert_small(errors, 1.2, 1.8)


def test_costs_do_not_sink_in_batches() -> None:
    """Passes that all have several rows keep the line, which begins near the cost of one row."""
    truth = CostCurve(0.005, 0.9, 0.14, experts=0.75, overlap=0.7)
    errors = list[float]()
    for seed in range(50):
        dice = random.Random(seed)
        model = CostModel(experts=0.75, overlap=0.125)
        learn_experts(model, truth, 40, (1, 1, 2, 5), dice)
        learn_experts(model, truth, 400, (4, 5, 8, 12), dice)
        model.learn(
            4, 100, truth.at(4), plain=True, experts_read=1.0 + (truth.read_bytes(4) - 1.0) / 0.75
        )
        errors.append(largest_error(model, truth.at, (4, 5, 8, 12)))
    assert_small(errors, 1.25, 1.5)


def learn_batches(model: CostModel, truth: CostCurve, states: float, dice: random.Random) -> None:
    """Record passes of 1 to 8 requests, each with its row and up to two draft tokens."""
    for _ in range(100):
        requests = dice.choice((1, 2, 4, 8))
        rows = requests * dice.choice((1, 1, 2, 3))
        seconds = truth.at(rows) + truth.speed * states * (requests - 1)
        model.learn(rows, 100 * requests, disturbed(seconds, dice), requests=requests)


def test_a_state_is_priced_by_request() -> None:
    """Draft rows of a batch read no states, so they are cheaper than those of further requests."""
    states = 0.3
    truth = CostCurve(0.05, 0.85, 0.05)
    errors = list[float]()
    for seed in range(100):
        model = CostModel(states=states)
        learn_batches(model, truth, states, random.Random(seed))
        for requests in (1, 4, 8):
            costs = model.costs(100 * requests, requests)
            assert costs is not None
            extra = truth.speed * states * (requests - 1)
            for rows in (requests, 2 * requests, 3 * requests):
                ratio = costs.at(rows) / (truth.at(rows) + extra)
                errors.append(max(ratio, 1.0 / ratio))
    assert_small(errors, 1.2, 2.1)


def test_states_change_nothing_for_one_request() -> None:
    model = CostModel(states=0.5)
    other = CostModel()
    for each in (model, other):
        learn_passes(each, [1, 1, 4, 8, 1, 2] * 5, by_memory, random.Random(0))
    assert costs_of(model) == costs_of(other)
    dearer = model.costs(100, 3)
    assert dearer is not None
    assert dearer.at(3) == pytest.approx(costs_of(model).at(3) + dearer.speed)
