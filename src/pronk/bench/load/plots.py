"""The plots of a load test's page, in the look of :mod:`pronk.bench.plots`.

A panel for clients and one for requests a second, where both were measured: they do not share an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from pronk.bench.canvas import CARD, INK, make_axes, name_axes, note, to_svg
from pronk.bench.load.document import LoadDocument, LoadFigures, unique_levels
from pronk.bench.plots import Panel, Plot, drawing
from pronk.bench.styles import Style, take_turns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_load", "server_styles"]

_LOOPS = {"closed": "clients", "open": "requests per second, at random"}
_LINES = (("p50", (None, None)), ("p95", (5, 2.5)), ("p99", (1.5, 2)))
_MOST_TICKS = 8

_Draw = Callable[[Sequence[LoadFigures], dict[str, Style], LoadDocument], "tuple[Figure, str] | None"]


def server_styles(names: Iterable[str]) -> dict[str, Style]:
    """How servers look, the same in every plot and table."""
    return {name: take_turns(name, i) for i, name in enumerate(names)}


def draw_load(document: LoadDocument, styles: dict[str, Style]) -> tuple[Plot, ...]:
    """All plots for which there are figures.

    Raises:
        OptionError: matplotlib is missing.
    """
    plots = []
    with drawing():
        for name, title, draw in _PLOTS:
            parts = _by_level(document) if name == "ecdf" else _by_loop(document)
            panels = []
            for i, (part, figures) in enumerate(parts):
                drawn = draw(figures, styles, document)
                if drawn is not None:
                    panels.append(Panel(part, to_svg(drawn[0], f"{name}-{i}", f"{title}, {part}. {drawn[1]}")))
            if panels:
                plots.append(Plot(name, title, tuple(panels), tuple(styles.values())))
    return tuple(plots)


def _by_loop(document: LoadDocument) -> Iterator[tuple[str, list[LoadFigures]]]:
    for loop in _LOOPS:
        if figures := [f for f in document.figures if f.level.loop == loop]:
            yield f"{loop} loop", figures


def _by_level(document: LoadDocument) -> Iterator[tuple[str, list[LoadFigures]]]:
    for level in unique_levels(document.figures):
        yield str(level), [f for f in document.figures if f.level == level]


def _draw_throughput(
    figures: Sequence[LoadFigures], styles: dict[str, Style], document: LoadDocument
) -> tuple[Figure, str]:
    figure, axes = _over_load(figures, "tokens per second")
    for style, mine in _by_server(figures, styles):
        speeds = [f.tokens_per_second for f in mine]
        x, y = [f.level.value for f in mine], [speed.median for speed in speeds]
        axes.plot(x, y, color=style.color, marker=style.shape, markersize=6, linewidth=2, clip_on=False)
        if any(speed.spread for speed in speeds):
            spreads = [speed.spread for speed in speeds]
            axes.errorbar(x, y, yerr=spreads, color=style.color, linewidth=0, elinewidth=1.2, capsize=2.5)
    most = max(f.tokens_per_second.median + f.tokens_per_second.spread for f in document.figures)
    axes.set_ylim(0, 1.08 * most or 1)
    return figure, _tell(figures, lambda f: f"{f.tokens_per_second.median:.1f} tokens/s")


def _draw_goodput(
    figures: Sequence[LoadFigures], styles: dict[str, Style], _document: LoadDocument
) -> tuple[Figure, str] | None:
    if all(f.good is None for f in figures):
        return None
    figure, axes = _over_load(figures, "% within all targets")
    for style, mine in _by_server(figures, styles):
        shares = [100 * (f.good or 0) for f in mine]
        x = [f.level.value for f in mine]
        axes.plot(x, shares, color=style.color, marker=style.shape, markersize=6, linewidth=2, clip_on=False)
    axes.set_ylim(0, 104)
    axes.axhline(90, color=INK, linewidth=1.3)
    return figure, _tell(figures, lambda f: f"{f.good or 0:.0%} within all targets")


def _draw_latency(metric: str) -> _Draw:
    """A plot of one latency's percentiles over the load."""

    def draw(
        figures: Sequence[LoadFigures], styles: dict[str, Style], document: LoadDocument
    ) -> tuple[Figure, str] | None:
        known = [f for f in figures if getattr(f, metric) is not None]
        if not known:
            return None
        figure, axes = _over_load(figures, "milliseconds")
        for (style, mine), (name, dashes) in product(_by_server(known, styles), _LINES):
            y = [1e3 * getattr(getattr(f, metric), name) for f in mine]
            look = {"marker": style.shape, "markersize": 6} if name == "p50" else {"dashes": dashes}
            axes.plot([f.level.value for f in mine], y, color=style.color, linewidth=2, clip_on=False, **look)
        summaries = [getattr(f, metric) for f in document.figures]
        most = max(1e3 * summary.p99 for summary in summaries if summary)
        axes.set_ylim(0, 1.08 * most or 1)
        target = getattr(document.targets, metric, None)
        if target is not None and 1e3 * target < 1.08 * most:
            axes.axhline(1e3 * target, color=INK, linewidth=1.3)
            box = {"facecolor": CARD, "edgecolor": "none", "pad": 1}
            note(axes, f"target {1e3 * target:g}", (axes.get_xlim()[1], 1e3 * target), (0, 5), ha="right", bbox=box)
        return figure, _tell(known, lambda f: f"{1e3 * getattr(f, metric).p50:.3g} ms in the median")

    return draw


def _draw_ecdf(
    figures: Sequence[LoadFigures], styles: dict[str, Style], document: LoadDocument
) -> tuple[Figure, str] | None:
    if all(f.ttft is None for f in figures):
        return None
    everywhere = [1e3 * call.ttft for f in document.figures for call in f.calls if call.error is None]
    figure, axes = make_axes(200)
    for style, mine in _by_server(figures, styles):
        for f in mine:
            values = sorted(1e3 * call.ttft for call in f.calls if call.error is None)
            shares = [100 * (i + 1) / len(values) for i in range(len(values))]
            if values:
                x = [values[0], *values, max(everywhere)]
                axes.step(x, [0, *shares, 100], where="post", color=style.color, linewidth=2, label=style.name)
    _logarithmic(axes, max(min(everywhere), 1e-3), max(everywhere))
    axes.set_ylim(0, 104)
    name_axes(axes, "milliseconds to the first text", "% of the answers")
    return figure, _tell(figures, lambda f: f"half within {1e3 * f.ttft.p50:.3g} ms" if f.ttft else "no answer")


def _over_load(figures: Sequence[LoadFigures], y: str) -> tuple[Figure, Axes]:
    """Axes whose levels stand where their logarithm does, with a tick each, or as many as there is room for."""
    figure, axes = make_axes(220)
    values = sorted({f.level.value for f in figures})
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    shown = values[:: 1 + (len(values) - 1) // _MOST_TICKS]
    axes.set_xticks(shown, [f"{value:g}" for value in shown])
    margin = max(1.06, (values[-1] / values[0]) ** 0.04)
    axes.set_xlim(values[0] / margin, values[-1] * margin)
    name_axes(axes, _LOOPS[figures[0].level.loop], y)
    return figure, axes


def _logarithmic(axes: Axes, least: float, most: float) -> None:
    """An axis of milliseconds; the ticks are plain numbers."""
    low, high = least / 1.1, max(most, 1.5 * least) * 1.1
    axes.set_xscale("log")
    axes.minorticks_off()
    steps = (1, 2, 5) if high < 100 * low else (1, 3) if high < 1000 * low else (1,)
    ticks = [step * 10.0**power for power in range(-3, 8) for step in steps]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(shown, [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in shown])
    axes.set_xlim(low, high)


def _by_server(figures: Sequence[LoadFigures], styles: dict[str, Style]) -> Iterator[tuple[Style, list[LoadFigures]]]:
    for name, style in styles.items():
        if mine := sorted((f for f in figures if f.server == name), key=lambda f: f.level.value):
            yield style, mine


def _tell(figures: Iterable[LoadFigures], what: Callable[[LoadFigures], str]) -> str:
    return "; ".join(f"{f.server} at {f.level}: {what(f)}" for f in figures)


_PLOTS: tuple[tuple[str, str, _Draw], ...] = (
    ("throughput", "Throughput", _draw_throughput),
    ("goodput", "Goodput", _draw_goodput),
    ("ttft", "Time to the first text", _draw_latency("ttft")),
    ("tpot", "Time per output token after the first", _draw_latency("tpot")),
    ("e2e", "To the end of the answer", _draw_latency("e2e")),
    ("ecdf", "How long the first text took, answer by answer", _draw_ecdf),
)
