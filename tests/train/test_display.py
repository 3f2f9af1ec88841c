"""Lines that a run shows, and when."""

import io
import time

import pytest
from rich.console import Console

from pronk.train.clock import Clock
from pronk.train.display import WritingDisplay


def lines(quiet: Console) -> list[str]:
    assert isinstance(quiet.file, io.StringIO)
    return quiet.file.getvalue().splitlines()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: moment[0])
    return moment


def write(display: WritingDisplay, now: list[float], tokens: list[int]) -> None:
    with display:
        for done in tokens:
            now[0] += 10
            display.show(done)


def test_twentieths_of_the_tokens(quiet: Console, now: list[float]) -> None:
    write(WritingDisplay(quiet, 1000), now, [10, 60, 70, 1000])
    assert lines(quiet) == [
        "written 60 of 1000 tokens  5 tokens/s  188 s left".replace("188 s", "3 min"),
        "written 1000 of 1000 tokens",
    ]


def test_twentieths_of_the_time(quiet: Console, now: list[float]) -> None:
    """Where the time will be over first: a third of two minutes, of which 40 seconds."""
    write(WritingDisplay(quiet, 10**6, Clock(2.0)), now, [10, 60, 110, 160])
    assert lines(quiet) == [
        "written 10 tokens",
        "written 60 tokens  5 tokens/s  20 s left",
        "written 110 tokens  5 tokens/s  10 s left",
        "written 160 tokens",
    ]
