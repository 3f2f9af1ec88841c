"""What other choices would have saved, by hand-made steps and by a slow count over simulated
ones.
"""

import random

import pytest
from tests.drafting.simulation import COSTS, Source, World, always

from pronk.drafting.regret import Regret


def test_without_steps_nothing_is_known() -> None:
    regret = Regret()
    assert regret.best_drafter is None
    assert regret.against_drafter is None
    assert regret.against_steps is None
    assert regret.to_dict() == {
        "best_drafter": None,
        "against_drafter": None,
        "against_steps": None,
    }


def test_ratios_compare_the_speed_with_that_of_other_choices() -> None:
    regret = Regret(seconds=8.0)
    regret.add_step(2.0, {"copy": 3.0, "draft": -1.0}, 4.0)
    # Plain decoding would have taken 10 seconds, copy alone 7, the best choices 6.
    assert regret.best_drafter == "copy"
    assert regret.against_drafter == pytest.approx(7 / 8)
    assert regret.against_steps == pytest.approx(6 / 8)
    other = Regret(seconds=2.0)
    other.add_step(-1.0, {"copy": -1.0, "draft": 4.5}, -3.0)
    regret.add(other)
    assert regret.best_drafter == "draft"
    assert regret.against_drafter == pytest.approx((10.0 + 1.0 - 3.5) / 10)
    assert regret.against_steps == pytest.approx((10.0 + 1.0 - 4.0) / 10)


def test_plain_decoding_is_the_best_choice_if_no_drafter_saves_time() -> None:
    regret = Regret(seconds=10.0)
    regret.add_step(-2.0, {"wrong": -2.0}, -1.0)
    assert regret.best_drafter is None
    assert regret.against_drafter == pytest.approx(0.8)
    assert regret.against_steps == pytest.approx(0.8)


def test_a_ratio_of_no_time_is_unknown() -> None:
    regret = Regret(seconds=1.0)
    regret.add_step(0.0, {"copy": 1.0}, 2.0)
    assert regret.against_drafter is None
    assert regret.against_steps is None


def test_a_right_and_cheap_drafter_leaves_little_regret() -> None:
    world = World(random.Random(1))
    sources = [Source(world, "copy", 0.01, always(0.95), 6)]
    request = world.request(sources)
    world.decode([request], sources, 300)
    assert request.ledger.regret.best_drafter == "copy"
    for ratio in (request.ledger.regret.against_drafter, request.ledger.regret.against_steps):
        assert ratio is not None
        assert 0.85 < ratio < 1.01


def test_the_saved_seconds_are_those_of_the_cost_model() -> None:
    """Each step's savings, counted once more from the trees and the texts."""
    world = World(random.Random(2))
    sources = [
        Source(world, "good", 0.02, always(0.8), 4),
        Source(world, "poor", 0.05, always(0.2), 3),
    ]
    requests = [world.request(sources), world.request(sources, 40)]
    world.decode(requests, sources, 200)
    total = Regret()
    for request in requests:
        total.add(request.ledger.regret)
        assert (
            request.ledger.regret.best_steps
            >= max(0.0, *request.ledger.regret.drafters.values()) - 1e-9
        )
        assert request.ledger.regret.best_steps >= request.ledger.regret.saved - 1e-9
    assert total.seconds == pytest.approx(world.ledger.elapsed)
    assert set(total.drafters) == {"good", "poor"}


def test_one_step_by_hand() -> None:
    """One drafter that costs nothing proposes two tokens; both are right."""
    world = World()
    sources = [Source(world, "copy", 0.0, always(1.0), 2)]
    request = world.request(sources)
    world.decode([request], sources, 5)
    request.ledger.regret = Regret()
    world.decode([request], sources)
    assert world.num_draft_tokens[-1] == 2
    regret = request.ledger.regret
    saved = 2 * COSTS.at(1) - (COSTS.at(3) - COSTS.at(1))
    assert regret.seconds == pytest.approx(COSTS.at(3))
    assert (regret.saved, regret.drafters["copy"], regret.best_steps) == pytest.approx(
        (saved, saved, saved)
    )
