"""Acceptance estimated from the draft's confidence and its measured bias."""

import random

import pytest

from drafters.helpers import outcome_of
from pronk.speculation.acceptance_stats import AcceptanceStats
from pronk.speculation.calibration import Calibration
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.tree import TokenTree


def verify(calibration: Calibration, confidences: list[float], accepted: int, source: str = "draft_model") -> None:
    """Learn from a chain of which the first ``accepted`` draft tokens were accepted."""
    origin = (("", 0), *((source, Calibration("").origin(each)[1]) for each in confidences))
    tree = TokenTree(tuple(range(len(origin))), tuple(range(-1, len(origin) - 1)), origin=origin)
    calibration.learn(outcome_of(tree, tuple(range(1, accepted + 1))))


def rate(calibration: Calibration, confidence: float) -> float:
    return calibration.rate(calibration.origin(confidence))


def test_the_first_estimate_is_the_confidence() -> None:
    fresh = Calibration("draft_model")
    for confidence in (0.001, 0.25, 0.5, 0.9, 0.999):
        assert rate(fresh, confidence) == pytest.approx(confidence)
    assert 0 < rate(fresh, 0.0) < 0.01
    assert 0.99 < rate(fresh, 1.0) < 1


def test_one_draft_token_changes_all_estimates() -> None:
    calibration = Calibration("draft_model")
    verify(calibration, [0.3], 1)
    assert calibration.bias == pytest.approx(0.25 * 0.7)
    assert rate(calibration, 0.9) > 0.9
    for _ in range(12):
        verify(calibration, [0.3], 1)
    assert rate(calibration, 0.3) > 0.6
    for _ in range(1000):
        verify(calibration, [0.3], 1)
    assert calibration.bias <= 4


def test_draft_tokens_below_rejected_ones_do_not_count() -> None:
    reached, more = Calibration("draft_model"), Calibration("draft_model")
    verify(reached, [0.5, 0.5], 1)
    verify(more, [0.5, 0.5, 0.9, 0.9], 1)
    assert reached == more
    verify(more, [0.5], 0, source="another")
    assert reached == more


@pytest.mark.parametrize("off", [-1.5, 0.0, 1.5])
def test_the_bias_is_found(off: float) -> None:
    """The acceptance odds are the draft's odds times a factor, which the estimate follows."""
    dice, calibration, truth = random.Random(0), Calibration("draft_model"), Calibration("draft_model", off)
    errors = []
    for step in range(600):
        confidence = dice.uniform(0.05, 0.95)
        if step > 100:
            errors.append(rate(calibration, confidence) - rate(truth, confidence))
        verify(calibration, [confidence], int(dice.random() < rate(truth, confidence)))
    assert abs(sum(errors) / len(errors)) < 0.03
    assert sum(map(abs, errors)) / len(errors) < 0.12


def test_estimates_use_the_shared_statistics() -> None:
    """Other requests' acceptance of 0.9, at a confidence near 0.5 and depth 1, changes no other estimate."""
    acceptance_stats, dice = AcceptanceStats(), random.Random(0)
    for _ in range(4):
        teacher = Calibration("draft_model", known=SharedAcceptance(acceptance_stats))
        for _ in range(40):
            verify(teacher, [dice.uniform(0.5, 0.6)], int(dice.random() < 0.9))
    known, alone = Calibration("draft_model", known=SharedAcceptance(acceptance_stats)), Calibration("draft_model")
    assert rate(alone, 0.55) == pytest.approx(0.55)
    assert 0.8 < known.rate(known.origin(0.55), 1) < 0.95
    assert known.rate(known.origin(0.55), 2) == pytest.approx(0.55)  # no statistics at depth 2
    assert rate(known, 0.25) == pytest.approx(0.25)
    assert 0 < rate(known, 0.001) < rate(known, 0.999) < 1
    another = Calibration("another", known=SharedAcceptance(acceptance_stats))
    assert another.rate(another.origin(0.55), 1) == pytest.approx(0.55)
