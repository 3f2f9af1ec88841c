"""``pronk bench --report DIR``: the figures of a benchmark as one HTML page that needs nothing else.

The page says in words what won, what lost and by how much, then shows tables and plots. It has no script, loads nothing
and is made for a phone first; see ``report.html.j2`` for its look and :mod:`pronk.bench.plots` for the plots.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from pronk.bench.document import ALL, SOUND, Document, Failure, Figures, ModelResult
from pronk.bench.formats import FILTERS
from pronk.bench.plots import Plot, draw_plots, import_matplotlib
from pronk.bench.styles import Key, Style, key_of, make_styles, task_name, temperature_name
from pronk.bench.verdict import Tile, Verdict, judge
from pronk.errors import OptionError
from pronk.files.atomic import replace_file

__all__ = ["check_report", "write_report"]


@dataclass(frozen=True)
class _Section:
    """A model, as the page shows it. ``figures`` are found by task, method and temperature."""

    model: ModelResult
    styles: dict[Key, Style]
    tasks: tuple[str, ...]
    temperatures: tuple[float, ...]
    figures: dict[tuple[str, Key, float], Figures]
    verdicts: tuple[tuple[Tile, tuple[str, ...]], ...]
    plots: tuple[Plot, ...]
    failures: dict[str, tuple[Failure, ...]]

    @property
    def overall(self) -> tuple[str, ...]:
        """The tasks that stand for all; without them, every task."""
        return tuple(task for task in self.tasks if task in {ALL, SOUND}) or self.tasks

    @property
    def single(self) -> tuple[str, ...]:
        """The other tasks."""
        return tuple(task for task in self.tasks if task not in self.overall)

    def has(self, task: str, key: Key) -> bool:
        """Whether a method has figures on a task, at any temperature."""
        return any((task, key, temperature) in self.figures for temperature in self.temperatures)


def write_report(document: Document, folder: Path) -> Path:
    """Write ``folder/index.html``, whole or not at all, and make the folder if need be.

    Args:
        document: the benchmark. The same document gives the same page, to the byte.
        folder: for the page.

    Returns:
        The page's path.

    Raises:
        OptionError: matplotlib is missing, or the folder cannot be written.
    """
    page = _render(document).encode("utf-8", "backslashreplace")
    target = folder / "index.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replace_file(target, shared=True) as file:
            file.write(page)
    except OSError as error:
        msg = f"report: expected a folder that can be written, found {folder} ({error.strerror or error}); name another"
        raise OptionError(msg) from error
    return target


def check_report(folder: Path) -> None:
    """Find out before a benchmark whether its page can be written.

    Raises:
        OptionError: matplotlib is missing, or ``folder`` is a file or in a place that cannot be written.
    """
    import_matplotlib()
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        msg = f"report: expected a folder that can be written, found {folder}; name another"
        raise OptionError(msg)


def _environment() -> Environment:
    """Return the environment of the page's template."""
    environment = Environment(
        loader=PackageLoader("pronk.bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS | {
        "task": task_name,
        "temperature": temperature_name,
        "verdict": lambda speed: "" if speed is None else judge(speed, "win", "", "loss"),
    }
    return environment


def _render(document: Document) -> str:
    styles = make_styles(f for model in document.models for f in model.figures)
    sections = [_make_section(model, styles, f"m{i}") for i, model in enumerate(document.models)]
    return _environment().get_template("report.html.j2").render(document=document, sections=sections)


def _make_section(model: ModelResult, styles: dict[Key, Style], prefix: str) -> _Section:
    keys = {key_of(f) for f in model.figures}
    mine = {key: style for key, style in styles.items() if key in keys}
    tasks = sorted(dict.fromkeys(f.task for f in model.figures), key=lambda task: (task != ALL, task != SOUND))
    temperatures = tuple(sorted({f.temperature for f in model.figures}))
    found = {(f.task, key_of(f), f.temperature): f for f in model.figures}
    verdicts = [Verdict(model.figures, mine, temperature) for temperature in temperatures]
    return _Section(
        model,
        mine,
        tuple(tasks),
        temperatures,
        found,
        tuple((verdict.tile(), verdict.paragraphs()) for verdict in verdicts),
        draw_plots(model, mine, prefix),
        _collect_failures(model, mine),
    )


def _collect_failures(model: ModelResult, styles: dict[Key, Style]) -> dict[str, tuple[Failure, ...]]:
    found = {f"Skipped prompts: {len(model.skipped)}": model.skipped} if model.skipped else {}
    for f in model.figures:
        # Those over all tasks are the tasks' again.
        if f.failures and (f.task not in {ALL, SOUND} or not any(g.task not in {ALL, SOUND} for g in model.figures)):
            where = f"{task_name(f.task)}, {temperature_name(f.temperature)}"
            found[f"Failures of {styles[key_of(f)].name}: {len(f.failures)} on {where}"] = f.failures
    return found
