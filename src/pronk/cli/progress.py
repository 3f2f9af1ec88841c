"""Progress bar and command line (for the model card) of the commands that write files."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

__all__ = ["Status", "command_line", "status_bar"]

# Arguments: label, units done, units in all (0 if unknown).
Status = Callable[[str, int, int], None]


def command_line(name: str, *words: str, **options: Any) -> str:
    """Return ``pronk NAME WORDS --option VALUE``; a list repeats its option, ``None`` omits it."""
    line = ["pronk", name, *words]
    for option, value in options.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        line += [word for each in values for word in (f"--{option.replace('_', '-')}", str(each))]
    return shlex.join(line)


@contextmanager
def status_bar(screen: Console) -> Iterator[Status]:
    """Show a progress bar on a terminal; without one the yielded function does nothing."""
    if not screen.is_terminal:
        yield lambda _what, _done, _total: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
