"""``pronk bench --report DIR``: the figures of a benchmark as one HTML page that needs nothing else.

The page says in words what won, what lost and by how much, then shows tables and plots. It has no script, loads nothing
and is made for a phone first; see ``report.html.j2`` for its look and :mod:`pronk.bench.plots` for the plots.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from pronk.bench.document import ALL, SOUND, Document, Failure, Figures, ModelResult, Range
from pronk.bench.looks import Key, Look, key_of, make_looks, task_name, temperature_name
from pronk.bench.plots import Plot, draw_plots, import_matplotlib
from pronk.errors import OptionError
from pronk.files.atomic import replace_file

__all__ = ["check_report", "write_report"]

_NOTHING = "–"
_SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class _Tile:
    """The figure of a temperature that is read first."""

    temperature: str
    value: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class _Section:
    """A model, as the page shows it. ``figures`` are found by task, method and temperature."""

    model: ModelResult
    looks: dict[Key, Look]
    tasks: tuple[str, ...]
    temperatures: tuple[float, ...]
    figures: dict[tuple[str, Key, float], Figures]
    verdicts: tuple[tuple[_Tile, tuple[str, ...]], ...]
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


def _render(document: Document) -> str:
    environment = Environment(
        loader=PackageLoader("pronk.bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": _count,
        "flat": _flat,
        "inflation": _inflation,
        "number": _number,
        "percent": _percent,
        "milliseconds": _milliseconds,
        "size": _size,
        "plus_minus": _plus_minus,
        "soft": _soft,
        "share": lambda share: f"{share:.2%}",
        "task": task_name,
        "temperature": temperature_name,
        "verdict": lambda speed: "" if speed is None else _verb(speed, "win", "", "loss"),
    }
    looks = make_looks(f for model in document.models for f in model.figures)
    sections = [_make_section(model, looks, f"m{i}") for i, model in enumerate(document.models)]
    return environment.get_template("report.html.j2").render(document=document, sections=sections)


def _make_section(model: ModelResult, looks: dict[Key, Look], prefix: str) -> _Section:
    keys = {key_of(f) for f in model.figures}
    mine = {key: look for key, look in looks.items() if key in keys}
    tasks = sorted(dict.fromkeys(f.task for f in model.figures), key=lambda task: (task != ALL, task != SOUND))
    temperatures = tuple(sorted({f.temperature for f in model.figures}))
    found = {(f.task, key_of(f), f.temperature): f for f in model.figures}
    verdicts = [_Verdict(model.figures, mine, temperature) for temperature in temperatures]
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


def _collect_failures(model: ModelResult, looks: dict[Key, Look]) -> dict[str, tuple[Failure, ...]]:
    found = {f"Skipped prompts: {len(model.skipped)}": model.skipped} if model.skipped else {}
    for f in model.figures:
        # Those over all tasks are the tasks' again.
        if f.failures and (f.task not in {ALL, SOUND} or not any(g.task not in {ALL, SOUND} for g in model.figures)):
            where = f"{task_name(f.task)}, {temperature_name(f.temperature)}"
            found[f"Failures of {looks[key_of(f)].name}: {len(f.failures)} on {where}"] = f.failures
    return found


class _Verdict:
    """What the figures at one temperature say, in words."""

    def __init__(self, figures: Sequence[Figures], looks: dict[Key, Look], temperature: float) -> None:
        self._all = [f for f in figures if f.temperature == temperature]
        self._looks = looks
        self._name = temperature_name(temperature)
        measured = sorted(
            ((f.speedup, f) for f in self._all if f.task == ALL and f.speedup), key=lambda pair: -pair[0].median
        )
        self._own = [pair for pair in measured if self._kind(pair[1]) == "own"]
        self._peers = [pair for pair in measured if self._kind(pair[1]) == "peer"]

    def tile(self) -> _Tile:
        """The best method's speed-up, against plain decoding and against the best peer."""
        if not self._own:
            return _Tile(self._name, _NOTHING, ("no drafter was measured",))
        speed, best = self._own[0]
        against = _verb(speed, "faster than plain decoding", "as fast as plain decoding", "slower than plain decoding")
        lines = [f"{self._label(best)}: {against}"]
        if self._peers and self._peers[0][0].median > 0:
            peer, figures = self._peers[0]
            lines.append(f"{speed.median / peer.median:.2f}× the best peer, {self._label(figures)}")
        return _Tile(self._name, f"{speed.median:.2f}×", tuple(lines))

    def paragraphs(self) -> tuple[str, ...]:
        """Plain words, the unpleasant ones included."""
        start = "With greedy decoding" if self._name == "greedy" else f"At {self._name}"
        parts = [
            self._against_plain(start) if self._own else [f"{start}, no drafter has a figure over all tasks."],
            self._against_peers(),
            self._sameness(),
            [*self._repetition(), *self._failures()],
        ]
        return tuple(filter(None, (" ".join(part) for part in parts)))

    def _against_plain(self, start: str) -> Iterable[str]:
        speed, best = self._own[0]
        name, times = self._label(best), f"{_plus_minus(speed)} times"
        over = f"over {best.prompts} of {best.asked} prompts"
        start, best_runs = f"{start}, ", f"the best, {name}, runs at {times} its speed, {over}."
        yield start + _verb(
            speed,
            f"{name} is the fastest drafter: {times} the speed of plain decoding, {over}.",
            f"no drafter is clearly faster than plain decoding: {best_runs}",
            f"every drafter loses to plain decoding: {best_runs}",
        )
        yield from self._by_task()
        # When the best one loses, all do, and that is said.
        rest = self._own[1:] if _verb(speed, "win", "tie", "") else []
        losers = [f"{self._label(f)} ({s.median:.2f})" for s, f in rest if _verb(s, "", "", "loss")]
        ties = [f"{self._label(f)} ({s.median:.2f})" for s, f in rest if _verb(s, "", "tie", "")]
        if losers:
            yield f"Slower than plain decoding: {_join(losers)}."
        if ties and _verb(speed, "win", "", ""):
            yield f"No clear difference from plain decoding: {_join(ties)}."

    def _by_task(self) -> Iterable[str]:
        best = self._own[0][1]
        mine = [f for f in self._all if key_of(f) == key_of(best) and f.task not in {ALL, SOUND}]
        tasks = sorted(((f.speedup, f.task) for f in mine if f.speedup), key=lambda pair: -pair[0].median)
        if len(tasks) < 2:
            return
        (most, top), (least, bottom) = tasks[0], tasks[-1]
        yield f"By task: from {least.median:.2f} times on {bottom} to {most.median:.2f} times on {top}."
        lost = [task for speed, task in tasks if _verb(speed, "", "", "loss")]
        if lost:
            yield f"It loses to plain decoding on {_join(lost)}."

    def _against_peers(self) -> Iterable[str]:
        if not self._peers:
            yield "No peer has figures to compare with."
            return
        peer, figures = self._peers[0]
        yield f"The best peer, {self._label(figures)}, runs at {_plus_minus(peer)} times plain decoding’s speed."
        if self._own and peer.median > 0 and self._own[0][0].median > 0:
            speed, best = self._own[0]
            ratio = speed.median / peer.median
            both = Range(ratio, ratio * (speed.spread / speed.median + peer.spread / peer.median))
            verb = _verb(both, "beats", "is level with", "loses to")
            yield f"{self._label(best)} {verb} it: {_plus_minus(both)} times its speed."

    def _sameness(self) -> Iterable[str]:
        counts = [
            (f, f.same, f.compared)
            for f in self._all
            if f.task == ALL and f.same is not None and f.compared and self._kind(f) != "plain"
        ]
        own = [(same, compared) for f, same, compared in counts if self._kind(f) == "own"]
        if own and all(same == compared for same, compared in own):
            yield f"Every drafter gave plain decoding’s tokens in all {sum(n for _, n in own)} outputs compared."
        differ = [f"{self._label(f)} in {n - same} of {n}{_near_ties(f)}" for f, same, n in counts if same < n]
        if differ:
            yield f"Other tokens than plain decoding’s, so not the same text at that speed: {_join(differ)}."

    def _repetition(self) -> Iterable[str]:
        plain = next((f for f in self._all if f.task == ALL and self._kind(f) == "plain"), None)
        if plain is None or not plain.repeated:
            return
        text = f"Of the 4-grams in plain decoding’s text {plain.repeated:.0%} repeat, which helps methods that copy"
        best = key_of(self._own[0][1]) if self._own else None
        for f in self._all:
            if f.task == SOUND and key_of(f) == best and f.speedup:
                text += f"; on the {f.prompts} prompts whose output does not loop, {self._label(f)} "
                text += f"is at {_plus_minus(f.speedup)}"
        yield f"{text}."

    def _failures(self) -> Iterable[str]:
        failed = [f"{self._label(f)} on {len(f.failures)}" for f in self._all if f.task == ALL and f.failures]
        if failed:
            yield f"Prompts that failed: {_join(failed)}."

    def _kind(self, figures: Figures) -> str:
        return self._looks[key_of(figures)].kind

    def _label(self, figures: Figures) -> str:
        return self._looks[key_of(figures)].name


def _verb(speed: Range, win: str, tie: str, loss: str) -> str:
    """Which of the three is true of a ratio: a difference within the spread is none."""
    if abs(speed.median - 1) <= speed.spread:
        return tie
    return win if speed.median > 1 else loss


def _near_ties(figures: Figures) -> str:
    return f" ({figures.near_ties} at near ties)" if figures.near_ties else ""


def _join(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _plus_minus(value: Range | None) -> str:
    if value is None:
        return _NOTHING
    digits = 2 if abs(value.median) < 10 else 1 if abs(value.median) < 100 else 0
    return f"{value.median:,.{digits}f}{_SPACE}±{_SPACE}{value.spread:,.{digits}f}"


def _count(value: int) -> str:
    for unit, scale in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return str(value)


def _inflation(mark: dict[str, Any], parameters: int) -> str:
    small = mark.get("parameters")
    source = f"{mark.get('source', 'a smaller model')}" + (
        f" ({_count(small)} parameters)" if isinstance(small, int) else ""
    )
    return f"the text of {source} at the cost of {_count(parameters)} parameters."


def _number(value: float | None, digits: int = 2) -> str:
    return _NOTHING if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _milliseconds(value: float | None) -> str:
    return _NOTHING if value is None else f"{1e3 * value:,.{1 if value < 0.1 else 0}f}"


def _size(value: float | None) -> str:
    if value is None:
        return _NOTHING
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def _soft(text: str) -> Markup:
    """Names of methods are long: they may break behind an underscore or a bracket."""
    return Markup(re.sub(r"([_(,/=])(?=\w)", r"\1<wbr>", str(escape(text))))  # noqa: S704 (escaped before)


def _flat(value: Any, name: str = "") -> str:
    if name == "memory" and isinstance(value, int):
        return _size(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
