"""Progress bar, expected duration of a command, and handling of Ctrl-C."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from pronk.base.estimate import TimeEstimate

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130  # exit code after Ctrl-C

# Function that updates a progress bar: label, finished units of work, all units of work (0 if
# unknown).
Status = Callable[[str, int, int], None]


@contextmanager
def interruptible(note: str) -> Iterator[None]:
    """On Ctrl-C, print ``note`` on standard error and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        from rich.console import Console
        from rich.text import Text

        Console(highlight=False, soft_wrap=True, stderr=True).print(Text(note, style="yellow"))
        raise typer.Exit(INTERRUPTED) from None


def announce(
    screen: "Console",
    status: Status,
    work: str,
    shorter: str,
    clock: Callable[[], float] = time.monotonic,
    *,
    first_part: float = 0.0,
) -> Status:
    """Return a function that calls ``status`` and prints the expected duration of the work once.

    The duration is printed after the first part of the work; parts whose label begins with
    ``loading`` do not count. ``work``, ``shorter``, ``clock`` and ``first_part`` are the arguments
    of :class:`~pronk.base.estimate.TimeEstimate`.
    """
    from rich.text import Text

    def say(line: str) -> None:
        screen.print(Text(line, style="dim"), soft_wrap=True)

    estimate = TimeEstimate(say, work, shorter, clock, first_part=first_part)

    def update(label: str, done: int, total: int) -> None:
        status(label, done, total)
        if total and not label.startswith("loading"):
            estimate.update(done, total)

    return update


@contextmanager
def status_bar(screen: "Console", amount: str = "TaskProgressColumn") -> Iterator[Status]:
    """Show a progress bar within the block, and yield its update function.

    Without a terminal, the function does nothing. ``amount`` is the name of the column class of
    :mod:`rich.progress` that shows the finished work: a percentage by default.
    """
    if not screen.is_terminal:
        yield lambda _label, _done, _total: None
        return
    from rich import progress
    from rich.text import Text

    class Amount(getattr(progress, amount)):  # type: ignore[misc]
        def render(self, task: progress.Task) -> Text:
            return Text() if task.total is None else super().render(task)

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), Amount())
    with progress.Progress(
        *columns, progress.TimeRemainingColumn(), console=screen, transient=True
    ) as bar:
        task = bar.add_task("loading", total=None)
        shown = "loading"

        def update(label: str, done: int, total: int) -> None:
            nonlocal shown
            # Draw a new label at once: its part of the work may end before the next refresh.
            bar.update(
                task, description=label, completed=done, total=total or None, refresh=label != shown
            )
            shown = label

        yield update
