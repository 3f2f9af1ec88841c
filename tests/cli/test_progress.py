"""The expected duration of a command is one line on standard error, also without a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import count

import pytest
from rich.console import Console

from pronk.cli.progress import announce, status_bar


def minutes() -> Callable[[], float]:
    """Return a clock, each look at which takes a minute."""
    times = count(0.0, 60.0)
    return lambda: next(times)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_duration_is_announced_once(terminal: bool) -> None:
    screen = Console(file=io.StringIO(), width=120, force_terminal=terminal)
    with status_bar(screen) as bar:
        status = announce(screen, bar, "10 prompts", "--limit 1", minutes())
        for done in range(5):
            status("measuring", done, 10)
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue().count("about 10 minutes (10 prompts); shorter: --limit 1") == 1


def test_loading_is_not_a_part_of_the_work() -> None:
    screen = Console(file=io.StringIO(), width=120)
    status = announce(screen, lambda *_: None, "10 prompts", "--limit 1", minutes())
    for done in range(5):
        status("loading smollm2", done, 10)
        status("sorting", 0, 0)
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue() == ""
