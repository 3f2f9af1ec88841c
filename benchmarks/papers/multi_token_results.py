"""Means, intervals, tables and plots of the multi-token experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pronk.base.files.atomic import write_json
from pronk.base.files.results import save_result
from pronk.lab.bench.machine import describe_hardware

__all__ = [
    "Interval",
    "Line",
    "by_group",
    "cost",
    "draw",
    "interval",
    "markdown",
    "measured",
    "paired",
    "seeds_of",
    "write_report",
]

# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom: factors of the half-widths of 95 %
# intervals.
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Result = dict[str, Any]


@dataclass(frozen=True)
class Interval:
    """Mean of several seeds, and its 95 % interval."""

    mean: float
    half: float  # half the width of the interval; infinite for one seed
    count: int  # number of seeds

    def text(self, scale: float = 100, digits: int = 1) -> str:
        """Return ``mean ± half`` in units of ``1 / scale``."""
        half = "?" if math.isinf(self.half) else f"{scale * self.half:.{digits}f}"
        return f"{scale * self.mean:.{digits}f} ± {half}"


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of some values and its 95 % interval by Student's t."""
    count = len(values)
    if count < 2:
        return Interval(fmean(values), math.inf, count)
    quantile = _QUANTILES[min(count - 2, len(_QUANTILES) - 1)]
    return Interval(fmean(values), quantile * stdev(values) / math.sqrt(count), count)


def by_group(results: Iterable[Result], *keys: str) -> dict[tuple[Any, ...], list[Result]]:
    """Return the results in groups of equal values of ``keys``, by these values."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result[key] for key in keys), []).append(result)
    return groups


def paired(
    results: Sequence[Result], value: Callable[[Result], float], *keys: str
) -> dict[tuple[Any, ...], dict[int, Interval]]:
    """Return the mean difference to the model with n = 1 of the same seed, by ``keys`` and n.

    Only finished models count.
    """
    differences: dict[tuple[Any, ...], dict[int, Interval]] = {}
    finished = [result for result in results if result["finished"]]
    for key, group in by_group(finished, *keys).items():
        plain = {result["seed"]: value(result) for result in group if result["n"] == 1}
        for (n,), several in by_group(group, "n").items():
            with_plain = [result for result in several if result["seed"] in plain]
            found = [value(result) - plain[result["seed"]] for result in with_plain]
            if n > 1 and found:
                differences.setdefault(key, {})[n] = interval(found)
    return differences


def seeds_of(group: Sequence[Result]) -> str:
    """Return the number of seeds in a row of the table, and the progress of unfinished models."""
    rest = [f"{result['step'] / result['steps']:.0%}" for result in group if not result["finished"]]
    number = str(len(measured(group)))
    if not rest:
        return number
    stopped = f"stopped at {', '.join(rest)}"
    if len(rest) == len(group):
        return f"{number}, {stopped}"
    return f"{number} ({len(rest)} more {stopped})"


def measured(group: Sequence[Result]) -> Sequence[Result]:
    """Return the results of finished models, or all results while no model is finished.

    A mean over finished and unfinished models would mix numbers of steps.
    """
    return [result for result in group if result["finished"]] or group


def cost(results: Iterable[Result]) -> str:
    """Return the processor time of all models as text."""
    seconds = sum(result["cpu_seconds"] for result in results)
    return f"{seconds / 3600:.2f} CPU-hours"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in lines)


@dataclass(frozen=True)
class Line:
    """A curve of a plot."""

    panel: str  # title of the panel with the curve
    label: str
    points: Sequence[tuple[float, Interval]]  # x, and mean with interval
    finished: bool = True  # whether all models are finished; otherwise the curve is dashed


def draw(
    path: Path, lines: Sequence[Line], x: str, y: str, title: str, scale: str = "linear"
) -> None:
    """Draw curves with error bars as an SVG file, with a panel for each ``Line.panel``.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib as mpl  # noqa: PLC0415 - the only use

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "pronk"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    panels = list(dict.fromkeys(line.panel for line in lines))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.4 * rows), squeeze=False, sharey=True
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        for line in lines:
            if line.panel != panel:
                continue
            places = [place for place, _ in line.points]
            means = [each.mean for _, each in line.points]
            halves = [0.0 if math.isinf(each.half) else each.half for _, each in line.points]
            label = line.label if line.finished else f"{line.label} (unfinished)"
            style = "o-" if line.finished else "o--"
            axis.errorbar(places, means, halves, fmt=style, markersize=3, label=label, capsize=3)
        if y == "accuracy":
            # The interval of two seeds may be wider than the range of all values.
            axis.set_ylim(-0.02, 1.02)
        axis.set_xscale(scale)
        if scale == "log":  # the measured places instead of powers of ten, whose labels overlap
            ticks = sorted({place for line in lines for place, _ in line.points})
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
        axis.set_title(panel, fontsize=9)
        axis.set_xlabel(x)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel(y)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write_report(
    out: Path,
    name: str,
    text: str,
    results: Sequence[Any],
    settings: Mapping[str, Any],
    lines: Sequence[Line] = (),
) -> str:
    """Write the report of an experiment; return its text with a link to the plot.

    Args:
        out: folder of the files.
        name: name of the files ``name.json``, ``name.md`` and, with ``lines``, ``name.svg``.
        text: tables in Markdown.
        results: results of the models, for the JSON file.
        settings: options of the experiment, and ``x``, ``y``, ``title`` and ``scale`` of the plot.
        lines: curves of the plot.
    """
    out.mkdir(parents=True, exist_ok=True)
    machine = describe_hardware("cpu")
    document = {
        "experiment": name,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": machine,
        "settings": dict(settings),
        "results": list(results),
    }
    write_json(out / f"{name}.json", document, indent=1)
    if lines:
        plot = {key: settings[key] for key in ("x", "y", "title", "scale")}
        draw(out / f"{name}.svg", lines, **plot)
        text += f"\n![{settings['title']}]({name}.svg)\n"
    processors = {each.get("processor", machine["processor"]) for each in results}
    about = f"{', '.join(sorted(processors))}, {document['date']}."
    head = f"# Multi-token prediction: {settings['title']}\n\n{about}\n\n"
    save_result("out", out / f"{name}.md", head + text)
    return text
