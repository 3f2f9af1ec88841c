"""Progress of a training run: bars on a terminal, lines elsewhere, and the expected duration."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from pronk.base import TimeEstimate
from pronk.train.clock import TEXT_BY, Clock
from pronk.train.loop import Report

PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
# Pattern of a figure's name, which has a subject and a measure: "on-policy KL 2" has the subject
# "on-policy" (a text), and "greedy CTAR(1)" the subject "greedy" (a decoding method).
_FIGURE = re.compile(r"(?P<subject>.+?) (?P<measure>(KL|same|alpha|CTAR|S)\b.*)")


class _Bar(Progress):
    """A progress bar; it is hidden if the console is not a terminal."""

    what = "training"

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn(self.what),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
        )
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._task = self.add_task(self.what, total=1.0, left="")

    def _show(self, share: float, lines: list[str], left: str) -> None:
        self.update(self._task, completed=share, left=left)
        for line in lines:
            self.console.print(line, **PLAIN)


class WritingDisplay(_Bar):
    """Progress of writing the target's own text: a bar, and a line every 5 %.

    The text has ``total`` tokens, or fewer if the time limit of ``clock`` ends the writing.
    """

    what = "writing"

    def __init__(self, console: Console, total: int, clock: Clock | None = None) -> None:
        super().__init__(console)
        self._total = total
        self._clock = clock
        self._start = time.monotonic()
        self._began = self._start
        self._first: int | None = None  # tokens that existed when progress was first shown
        self._twentieths = 0

    def show(self, done: int) -> None:
        """Show that ``done`` tokens of the text exist, in this run and before it was resumed."""
        now = time.monotonic()
        if self._first is None:
            # The speed counts only tokens that this process has seen being generated.
            self._first = done
            self._began = now
        speed = (done - self._first) / max(now - self._began, 1e-9)
        seconds = (self._total - done) / speed if speed else inf
        share = done / max(1, self._total)
        of = f" of {self._total}"
        if self._clock is not None and self._clock.has_limit:
            seconds = min(seconds, max(0.0, self._clock.seconds_left(TEXT_BY)))
            of = ""
            share = max(share, (now - self._start) / max(now - self._start + seconds, 1e-9))
        left = f"{_duration(seconds)} left" if speed and 0 < seconds < inf else ""
        line = f"written {done}{of} tokens" + (f"  {speed:.0f} tokens/s  {left}" if left else "")
        twentieths = int(20 * share)
        self._show(share, [line] if twentieths > self._twentieths else [], left)
        self._twentieths = twentieths


class TrainingDisplay(_Bar):
    """Progress of training: a bar, and lines of figures."""

    _left = ""  # remaining time as the last report showed it

    def __init__(
        self, console: Console, steps: int, shorter: str | None = "--minutes 10, --steps 100"
    ) -> None:
        """Show a bar at 0 of ``steps`` steps.

        The expected duration is printed with the options ``shorter``, by which it is shorter. With
        ``None`` it is not printed: a time limit ends the run.
        """
        super().__init__(console)
        self._steps = steps
        self._first_step = 0
        self._estimate = None
        if shorter is not None:
            self._estimate = TimeEstimate(self._say, f"{steps} steps", shorter)

    def _say(self, line: str) -> None:
        self.console.print(line, **PLAIN)

    def show(self, news: Report) -> None:
        """Show the figures of the report ``news``, and the remaining time."""
        seconds_left = news.seconds * (1 - news.progress) / max(news.progress, 1e-9)
        left = f"{_duration(seconds_left)} left"
        parts = [f"step {news.step}", f"{news.progress:6.1%}", f"loss {news.loss:.4f}"]
        if news.same:
            parts.append("same " + " ".join(f"{each:.2f}" for each in news.same))
        parts += [
            f"lr {news.rate:.2e}",
            f"norm {news.norm:.2f}",
            f"{news.tokens / 1e6:.2f} M tokens",
            f"{news.speed:.0f} tokens/s",
            left,
        ]
        self._show(news.progress, ["  ".join(parts), *figure_lines(news.valid)], left)
        self._left = left

    def show_pass(self, step: int, done: int, passes: int) -> None:
        """Show progress within a step: ``done`` of its ``passes`` forward passes are done."""
        self._first_step = self._first_step or step
        if self._estimate is not None:
            self._estimate.update(step - self._first_step + done / passes, self._steps)
        within = f"step {step}: {done} of {passes} passes"
        self.update(self._task, left=f"{within}, {self._left}" if self._left else within)


def figure_lines(figures: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each subject of the figures, such as a validation text, with its figures."""
    lines: dict[str, list[str]] = {}
    for name, value in figures.items():
        match = _FIGURE.fullmatch(name)
        subject = match["subject"] if match else name
        measure = match["measure"] if match else "loss"
        lines.setdefault(subject, []).append(f"{measure} {value:.3f}")
    for subject, values in lines.items():
        yield f"  valid {subject}  {'  '.join(values)}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
