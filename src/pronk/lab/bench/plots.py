"""Plots of a benchmark's report, and of ``pronk explain``, as SVG text.

matplotlib is an optional dependency, imported at the first use. ``pyplot`` and its global state are
not used.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pronk.base.checks import require_extra
from pronk.lab.bench.document import ALL, SOUND, Figures, ModelResult, PassCost
from pronk.lab.bench.tables import task_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pronk.serving import Decision

_SETTINGS: dict[str, Any] = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "svg.fonttype": "none",  # keep text as text instead of outlines, for a small file
    "svg.hashsalt": "pronk",  # the same ids of SVG elements in every run
    "text.parse_math": False,  # a $ in a name does not start a formula
}
# Size of a plot in inches.
_WIDTH = 4.8
_HEIGHT = 2.8
_BAR_HEIGHT = 0.17  # height that a bar adds to a plot, in inches
_MAX_LABEL = 26  # maximum number of characters of a label
_REFERENCE: dict[str, Any] = {"color": "gray", "linestyle": "--"}


@dataclass(frozen=True)
class Plot:
    """One plot of the report, as SVG text for a light and for a dark page."""

    title: str
    caption: str
    light: str
    dark: str


def draw_plots(model: ModelResult) -> Iterator[Plot]:
    """Yield plots of speed-ups by temperature, and of the time of forward passes.

    A plot that would show plain decoding alone is left out. Needs matplotlib.
    """
    require_extra("report", "report", "matplotlib")
    styles: dict[str, Any] = {}
    for i, method in enumerate(dict.fromkeys(f.method for f in model.figures if not f.is_plain)):
        styles[method] = {"label": _shorten(method), "color": f"C{i % 10}"}
    # Seconds to read all weights from memory once, which no forward pass can beat; 0 if unknown.
    floor = 0.0
    if model.bandwidth and model.bandwidth.median:
        floor = model.pass_bytes / model.bandwidth.median
    for temperature in sorted(model.temperatures):
        shown = [f for f in model.figures if f.temperature == temperature and f.prompts]
        name = f"T = {temperature:g}" if temperature else "greedy"
        if any(not f.is_plain for f in shown):
            caption = (
                "Median over the repeats; a whisker is half their range. Left of the dashed line "
                "is slower. "
            )
            distinct = _distinct_tasks(shown)
            draw = partial(_draw_speedups, distinct, styles)
            yield _make_plot(f"Speed-up, {name}", f"{caption}Hatched: peers.", draw, len(distinct))
    if model.pass_cost:
        caption = (
            "Verifying more rows is almost free near the memory floor, the time to read the "
            "weights once."
        )
        draw = partial(_draw_pass_cost, model.pass_cost, floor)
        yield _make_plot("Time of a forward pass", caption, draw, 1)


def _distinct_tasks(figures: Sequence[Figures]) -> list[Figures]:
    """Return the figures without tasks that repeat the bars of a task before them.

    The only task has the figures of ``ALL``, and so has ``SOUND`` if no output was left out.
    """
    by_task: dict[str, list[Figures]] = {}
    for each in figures:
        by_task.setdefault(each.task, []).append(each)
    shown: list[list[tuple[Any, ...]]] = []
    distinct = list[Figures]()
    for task in sorted(by_task, key=lambda task: (task != ALL, task != SOUND)):
        bars = [(each.method, each.prompts, each.speedup) for each in by_task[task]]
        if bars not in shown:
            shown.append(bars)
            distinct += by_task[task]
    return distinct


def _make_figure(draw: Callable[[Axes], None], rows: int) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415 (an optional dependency)

    figure = Figure(figsize=(_WIDTH, max(_HEIGHT, 1 + _BAR_HEIGHT * rows)), layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    handles, labels = axes.get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))  # one entry per label
    if legend:
        figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=2)
    return figure


def _make_plot(title: str, caption: str, draw: Callable[[Axes], None], rows: int) -> Plot:
    make_figure = partial(_make_figure, draw, rows)
    light = _to_svg(make_figure, "default", transparent=True)
    dark = _to_svg(make_figure, "dark_background", transparent=True)
    return Plot(title, caption, light, dark)


def _to_svg(make_figure: Callable[[], Figure], theme: str, *, transparent: bool) -> str:
    """Draw a figure with a theme, independent of the user's settings of matplotlib."""
    from matplotlib import style  # noqa: PLC0415 (an optional dependency)

    buffer = io.StringIO()
    with style.context([theme, _SETTINGS], after_reset=True), warnings.catch_warnings():
        # Characters that matplotlib's font lacks do no harm: the browser draws the text of an SVG
        # file with its own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        make_figure().savefig(
            buffer, format="svg", transparent=transparent, metadata={"Date": None}
        )
    return buffer.getvalue()


def _shorten(name: str) -> str:
    """Cut the middle out of a long name, because the names of methods differ at start and end."""
    clean = "".join(c if c.isprintable() else " " for c in name)
    if len(clean) <= _MAX_LABEL:
        return clean
    return f"{clean[: _MAX_LABEL // 2]}…{clean[1 - _MAX_LABEL // 2 :]}"


def _draw_speedups(figures: Sequence[Figures], styles: Mapping[str, Any], axes: Axes) -> None:
    y = 0
    ticks = {}
    tasks = dict.fromkeys(f.task for f in figures)
    for task in sorted(tasks, key=lambda task: (task != ALL, task != SOUND)):
        rows = [f for f in figures if f.task == task and not f.is_plain]
        _draw_bars(axes, y, rows, styles, [f.speedup for f in rows])
        ticks[y + (len(rows) - 1) / 2] = _shorten(task_name(task))
        y += len(rows) + 1
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.axvline(1, **_REFERENCE)
    axes.set_xlabel("speed relative to plain decoding")


def _draw_bars(
    axes: Axes,
    first: int,
    figures: Sequence[Figures],
    styles: Mapping[str, Any],
    values: Sequence[Any],
) -> None:
    """Draw one bar with a whisker per method, from y = ``first`` on, downwards."""
    for y, (f, value) in enumerate(zip(figures, values, strict=True), first):
        hatch = "///" if f.engine != "pronk" else None
        style = styles[f.method] | {"ecolor": "gray", "hatch": hatch}
        bars = axes.barh(y, value.median, xerr=value.spread, **style)
        label = f"{value.median:.2f}" if value.median < 10 else f"{value.median:.0f}"
        axes.bar_label(bars, [label], padding=2, fontsize=8)
    axes.yaxis.set_inverted(True)


def _draw_pass_cost(costs: Sequence[PassCost], floor: float, axes: Axes) -> None:
    axes.plot([cost.rows for cost in costs], [1e3 * cost.seconds for cost in costs], "o-")
    if floor:
        axes.axhline(1e3 * floor, label=f"memory floor, {1e3 * floor:.3g} ms", **_REFERENCE)
    axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="rows in the forward pass", ylabel="ms")


def draw_steps(steps: Sequence[Decision]) -> str:
    """Return two plots of a request's steps as SVG text.

    The upper plot shows the tokens of each step by drafter, the lower one the allowance: the
    seconds that drafting may still lose.
    """
    return _to_svg(partial(_step_figure, steps), "default", transparent=False)


def _step_figure(steps: Sequence[Decision]) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415 (an optional dependency)

    figure = Figure(figsize=(_WIDTH, 1.6 * _HEIGHT), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    sources = [
        [step.verified.origin[node][0] for node in step.path] if step.verified.origin else []
        for step in steps
    ]
    x = range(1, len(steps) + 1)
    bottoms = [0] * len(steps)
    for source in dict.fromkeys(name for names in sources for name in names):
        heights = [names.count(source) for names in sources]
        upper.bar(x, heights, 0.9, bottoms, label=source)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    upper.bar(x, [1] * len(steps), 0.9, bottoms, color="lightgray", label="target model")
    upper.plot(x, [step.gain for step in steps], "k.", label="expected")
    upper.set_ylabel("tokens")
    lower.plot(x, [step.allowance for step in steps])
    lower.set(xlabel="step", ylabel="allowance in s")
    figure.legend(loc="outside upper left", ncols=2)
    return figure
