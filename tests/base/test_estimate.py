"""Estimates of durations, on a clock of the test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pronk.base.estimate import TimeEstimate, duration_text


def said(updates: Sequence[tuple[float, float]], total: float) -> list[str]:
    """Return the lines after ``updates``: pairs of a time in seconds and the amount of work
    done.
    """
    lines: list[str] = []
    now = 0.0
    estimate = TimeEstimate(lines.append, "12 prompts × 3 methods", "--limit 1", lambda: now)
    for seconds, done in updates:
        now = seconds
        estimate.update(done, total)
    return lines


@pytest.mark.parametrize(
    ("updates", "total", "duration"),
    [
        ([(0, 0), (10, 1), (90, 9)], 36, "about 6 minutes"),  # the first part decides
        ([(0, 0), (30, 0), (40, 1)], 6, "about 60 seconds"),  # preparations do not count
        ([(5, 10), (15, 20)], 110, "about 2 minutes"),  # parts of an earlier run do not count
        ([(0, 0), (600, 1)], 24, "about 4 hours"),
    ],
)
def test_the_first_part_gives_the_duration(
    updates: Sequence[tuple[float, float]], total: float, duration: str
) -> None:
    assert said(updates, total) == [f"{duration} (12 prompts × 3 methods); shorter: --limit 1"]


@pytest.mark.parametrize(
    "updates", [[], [(0, 0)], [(0, 0), (5, 0)], [(0, 0), (0.1, 1)], [(0, 0), (9, 36)]]
)
def test_short_work_is_not_announced(updates: Sequence[tuple[float, float]]) -> None:
    assert said(updates, 36) == []


def test_the_first_part_can_be_larger() -> None:
    """A benchmark of three methods waits for each of them: the third one is slow."""
    lines: list[str] = []
    now = 0.0
    estimate = TimeEstimate(lines.append, "4 prompts", "--limit 1", lambda: now, first_part=3)
    for seconds, done in [(0, 0), (1, 1), (2, 2), (60, 3), (61, 4)]:
        now = seconds
        estimate.update(done, 12)
    assert lines == ["about 4 minutes (4 prompts); shorter: --limit 1"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (10, "10 seconds"),
        (89, "89 seconds"),
        (91, "2 minutes"),
        (5000, "83 minutes"),
        (7200, "2 hours"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
