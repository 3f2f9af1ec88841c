"""What the commands show: the generated text, figures, notes, a loading bar.

Text goes to standard output and nothing else does; figures, notes and bars go to standard error. Colour, bars
and figures appear on a terminal only, and there control characters in a model's output are shown, not obeyed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table

    from pronk.cli.options import Progress
    from pronk.engine.stats import Stats

__all__ = ["TerminalOutput", "stats_line"]

_GUESSED = Style(color="green")
_DIM = Style(dim=True)
_PLAIN = Style()
_CONTROL = {code: 0xFFFD for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


class TerminalOutput:
    """Standard output and error of one command.

    ``stats`` asks for figures (``True``), none (``False``) or figures on a terminal only (``None``).
    """

    def __init__(self, *, stats: bool | None = None, color_guesses: bool = False) -> None:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a character that the terminal lacks must not end the program
                stream.reconfigure(errors="replace")
        self._out = Console(highlight=False, soft_wrap=True)
        self._err = Console(highlight=False, soft_wrap=True, stderr=True)
        self._stats = self._err.is_terminal if stats is None else stats
        self.color_guesses = color_guesses
        self._fresh_line = True

    @property
    def interactive(self) -> bool:
        """Whether a person reads standard output."""
        return self._out.is_terminal

    def write(self, text: str, *, guessed: bool = False) -> None:
        """Generated text, as it comes."""
        self._write(text, _GUESSED if guessed and self.color_guesses else _PLAIN)

    def echo(self, prompt: str) -> None:
        """The prompt, in front of the text that continues it."""
        self._write(prompt, _DIM)

    def end_line(self) -> None:
        """Start a new line, unless one has just been started."""
        if not self._fresh_line:
            self._write("\n", _PLAIN)

    def say(self, text: str) -> None:
        """An answer to what the user asked of the program rather than of the model."""
        self._err.print(Text(text, style=_DIM))

    def note(self, text: str) -> None:
        """A remark to the user."""
        self._err.print(Text(text, style="yellow"))

    def table(self, table: Table) -> None:
        """A table, which is what was asked for."""
        self._out.print(table, soft_wrap=False)

    def paragraph(self, text: str) -> None:
        """A text of the program's own that was asked for."""
        self._out.print(Text(text), soft_wrap=False)

    def figures(self, text: str) -> None:
        """A line of figures, if figures are wanted."""
        if self._stats:
            self.say(text)

    def legend(self) -> None:
        """What the colours mean."""
        self._err.print(Text.assemble(("Green", _GUESSED), (" text was guessed, and confirmed by the model.", _DIM)))

    @contextmanager
    def loading(self) -> Iterator[Progress | None]:
        """A bar that the loader moves; ``None`` where nobody looks."""
        if not self._err.is_terminal:
            yield None
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (TextColumn("loading"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task("loading", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    def _write(self, text: str, style: Style) -> None:
        if not text:
            return
        if self.interactive:
            text = text.translate(_CONTROL)
        self._fresh_line = text.endswith("\n")
        if self.interactive:
            self._out.print(Segments([Segment(text, style)]), end="")
        else:
            sys.stdout.write(text)
        sys.stdout.flush()


def stats_line(stats: Stats, kernels: str, seed: int | None = None) -> str:
    """One line of figures about one answer, or about several; ``kernels`` say what computed it."""
    parts = [
        f"{stats.generated_tokens} tokens",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"S {stats.step_compression:.2f}",
        f"{stats.accepted} of {stats.drafted} guesses accepted",
    ]
    if len(stats.sources) > 1:
        parts.append(", ".join(f"{name} {each.accepted} of {each.drafted}" for name, each in stats.sources.items()))
    if stats.jumped:
        parts.append(f"{stats.jumped} tokens forced unasked")
    if stats.compile_seconds:
        parts.append(f"guide compiled in {1e3 * stats.compile_seconds:.0f} ms")
    parts.append(f"kernels {kernels}")
    if seed is not None:
        parts.append(f"seed {seed}")
    return " · ".join(parts)
