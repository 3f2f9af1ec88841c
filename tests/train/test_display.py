"""Lines that a run shows, and when."""

import io
import time
from itertools import count

import pytest
from rich.console import Console

from pronk.train.clock import Clock
from pronk.train.display import TrainingDisplay, WritingDisplay
from train.tiny import shown


@pytest.mark.parametrize(
    ("total", "minutes", "tokens", "lines"),
    [
        (
            1000,
            None,
            [10, 60, 70, 1000],
            ["60 of 1000 tokens  5 tokens/s  3 min left", "1000 of 1000 tokens"],
        ),
        (  # the limit is earlier: a third of two minutes
            10**6,
            2.0,
            [10, 60, 110, 160],
            [
                "10 tokens",
                "60 tokens  5 tokens/s  20 s left",
                "110 tokens  5 tokens/s  10 s left",
                "160 tokens",
            ],
        ),
    ],
    ids=["tokens", "time"],
)
def test_a_line_for_every_twentieth(
    total: int,
    minutes: float | None,
    tokens: list[int],
    lines: list[str],
    quiet: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with WritingDisplay(quiet, total, None if minutes is None else Clock(minutes)) as display:
        for done in tokens:
            now[0] += 10
            display.show(done)
    assert shown(quiet).splitlines() == [f"written {line}" for line in lines]


def test_the_duration_of_a_run_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Console(file=io.StringIO(), width=120)
    with TrainingDisplay(quiet, steps=100) as display:
        minutes = count()
        monkeypatch.setattr(display._estimate, "_clock", lambda: 60.0 * next(minutes))
        for number in range(1, 5):
            display.show_pass(7, number, 4)
    assert shown(quiet) == "about 7 hours (100 steps); shorter: --minutes 10, --steps 100\n"


def test_no_duration_is_announced_beside_a_time_limit() -> None:
    quiet = Console(file=io.StringIO(), width=120)
    with TrainingDisplay(quiet, steps=100, shorter=None) as display:
        for number in range(1, 5):
            display.show_pass(7, number, 4)
    assert not shown(quiet)


def test_the_bar_shows_the_progress_within_a_step() -> None:
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True)
    with TrainingDisplay(terminal, steps=10) as display:
        display.show_pass(7, 3, 8)
        display.refresh()
    assert "step 7: 3 of 8 passes" in shown(terminal)
