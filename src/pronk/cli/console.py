"""Terminal output of the commands: generated text, statistics, notes, progress bars.

Standard output receives the generated text only; statistics, notes and bars go to standard error.
Colours, bars and statistics appear on a terminal only. On a terminal, U+FFFD replaces control
characters in generated text.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rich import filesize
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from pronk.cli.progress import status_bar
from pronk.cli.wrap import WordWrap

if TYPE_CHECKING:
    from rich.table import Table

    from pronk.cli.options import Progress
    from pronk.engine.stats import Stats
    from pronk.llm import LLM
    from pronk.sampling.params import SamplingParams

_DRAFTED = Style(color="green")
_DIM = Style(dim=True)
_PLAIN = Style()
_UNLIMITED = 4096  # width, in characters, of a table whose lines are not wrapped
# Table for str.translate: every control character except tab and newline becomes U+FFFD.
_CONTROL = {code: 0xFFFD for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


class TerminalOutput:
    """Standard output and standard error of a command.

    Args:
        stats: whether to show statistics; by default, only on a terminal.
        color_drafts: whether accepted draft tokens are green on a terminal.
    """

    def __init__(self, *, stats: bool | None = None, color_drafts: bool = False) -> None:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # "?" for characters that the encoding lacks
        self._out = Console(highlight=False, soft_wrap=True)
        self._err = Console(highlight=False, soft_wrap=True, stderr=True)
        self._stats = self._err.is_terminal if stats is None else stats
        self.color_drafts = color_drafts
        self._fresh_line = True
        self._wrap = WordWrap()
        self._in_thoughts = False  # whether the text printed last is a thought

    @property
    def interactive(self) -> bool:
        """Whether standard output is a terminal."""
        return self._out.is_terminal

    def write(self, text: str, *, drafted: bool = False, is_thought: bool = False) -> None:
        """Print a piece of generated text; on a terminal, lines break between words.

        Thoughts are dimmed on a terminal, and stand between two tags elsewhere.
        """
        if is_thought != self._in_thoughts:
            tags = ("", "\n\n") if self.interactive else ("<think>\n", "\n</think>\n\n")
            self._write(tags[0] if is_thought else tags[1], _PLAIN)
            self._in_thoughts = is_thought
        style = _DRAFTED if drafted and self.color_drafts else _PLAIN
        self._write(text, style + _DIM if is_thought else style)

    def echo(self, prompt: str) -> None:
        """Print the prompt, dimmed."""
        self._write(prompt, _DIM)

    def end_line(self) -> None:
        """Start a new line, unless the cursor is at the beginning of a line.

        Thoughts that were cut off are ended before.
        """
        if self._in_thoughts and not self.interactive:
            self._write("\n</think>", _PLAIN)
        self._in_thoughts = False
        self._print(self._wrap.flush(self._out.width))
        if not self._fresh_line:
            self._write("\n", _PLAIN)

    def say(self, text: str) -> None:
        """Print a message of the program, dimmed, on standard error.

        On a terminal, long messages are wrapped between words.
        """
        self._err.print(Text(text, style=_DIM), soft_wrap=not self._err.is_terminal)

    def note(self, text: str) -> None:
        """Print a notice as :meth:`say` does, but in yellow."""
        self._err.print(Text(text, style="yellow"), soft_wrap=not self._err.is_terminal)

    def fits(self, table: Table) -> bool:
        """Return whether a table is not wider than the terminal; True without a terminal."""
        if not self.interactive:
            return True
        unlimited = self._out.options.update(width=_UNLIMITED)
        return self._out.measure(table, options=unlimited).maximum <= self._out.width

    def result(self, part: Table | Text, *, one_line_rows: bool = False) -> None:
        """Print a table or text of the command's result on standard output.

        With ``one_line_rows``, each row of a table is one line without a terminal, so that programs
        such as ``grep`` find whole rows.
        """
        if one_line_rows and not self.interactive:
            self._out.width = _UNLIMITED
        self._out.print(part, soft_wrap=False)

    def wrap(self, text: str, indent: int) -> list[str]:
        """Return the lines of a text that is wrapped to the terminal's width.

        Further lines are indented by ``indent`` spaces. Without a terminal, there is one line.
        """
        width = self._out.width if self.interactive else _UNLIMITED
        return textwrap.wrap(text, width, subsequent_indent=" " * indent)

    def facts(self, pairs: Iterable[tuple[str, str]], label_width: int) -> None:
        """Print pairs of a label and a text as a result, in two columns.

        The first column has ``label_width`` characters. Without a terminal, a pair is one line.
        """
        for label, text in pairs:
            for line in self.wrap(f"{label:{label_width}}{text}", label_width):
                self.result(Text(line), one_line_rows=True)

    def figures(self, text: str) -> None:
        """Print a line of statistics if statistics are on."""
        if self._stats:
            self.say(text)

    def legend(self) -> None:
        """Print the meaning of the colour of draft tokens."""
        legend = Text.assemble(("Green", _DRAFTED), (" tokens are accepted draft tokens.", _DIM))
        self._err.print(legend)

    @contextmanager
    def transfer(self, label: str) -> Iterator[Progress]:
        """Show the progress of a download within the block, and yield its update function.

        A terminal shows a bar; otherwise, one line is printed. The function takes the number of
        bytes so far and in all.
        """
        if not self._err.is_terminal:
            said: list[int] = []

            def say_once(_done: int, total: int) -> None:
                if not said and total:
                    said.append(total)
                    self.say(f"downloading {label}, {filesize.decimal(total)}")

            yield say_once
            return
        with status_bar(self._err, "DownloadColumn") as bar:
            yield partial(bar, label)

    @contextmanager
    def loading(self) -> Iterator[Progress | None]:
        """Show a progress bar within the block, while the model loads.

        Yield the update function of the bar, or ``None`` without a terminal.
        """
        with status_bar(self._err, "DownloadColumn") as bar:
            yield partial(bar, "loading") if self._err.is_terminal else None

    def _write(self, text: str, style: Style) -> None:
        if not text:
            return
        self._fresh_line = text.endswith("\n")
        if self.interactive:
            self._print(self._wrap.push(text.translate(_CONTROL), style, self._out.width))
        else:
            sys.stdout.write(text)
        sys.stdout.flush()

    def _print(self, parts: Iterable[tuple[str, Style]]) -> None:
        """Print the parts of a text on the terminal."""
        self._out.print(Segments([Segment(text, style) for text, style in parts]), end="")


def prepare(
    load: Callable[..., LLM],
    request: Callable[[], SamplingParams],
    screen: TerminalOutput,
    prompt: str | None = None,
    suffix: str | None = None,
) -> tuple[LLM, SamplingParams]:
    """Build the sampling parameters of a command, then load the model with a progress bar.

    Errors of the parameters and of the prompt are raised before the weights are loaded.

    Args:
        load: function that loads the model; it takes the update function of the bar, and
            ``check``, as :class:`pronk.llm.LLM` does.
        request: function that builds the sampling parameters from the user's options.
        screen: output of the command.
        prompt: prompt of the command, if it has one.
        suffix: text after the place to fill, if the command fills in the middle.
    """
    with screen.loading() as progress:
        params = request()
        llm = load(progress, check=lambda factory: factory.check(prompt, params, suffix))
        return llm, params


def stats_line(stats: Stats, kernels: str, seed: int | None = None) -> str:
    """Return a line of statistics.

    Args:
        stats: statistics of one request, or of several.
        kernels: name of the kernels in use.
        seed: seed of the request, if it sampled.
    """
    parts = [
        f"{stats.generated_tokens} tokens",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"{stats.step_compression:.2f} tokens per forward pass",
        f"{stats.accepted} of {stats.drafted} draft tokens accepted",
    ]
    if len(stats.sources) > 1:
        by_drafter = [
            f"{name} {stat.accepted} of {stat.drafted}" for name, stat in stats.sources.items()
        ]
        parts.append(", ".join(by_drafter))
    if stats.jumped:
        parts.append(f"{stats.jumped} tokens forced by the guide")
    if stats.compile_seconds:
        parts.append(f"guide compiled in {1e3 * stats.compile_seconds:.0f} ms")
    parts.append(f"kernels {kernels}")
    if seed is not None:
        parts.append(f"seed {seed}")
    return " · ".join(parts)
