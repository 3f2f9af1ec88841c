"""The plots of a benchmark's report: static SVG, to be put inside the page.

They are drawn for a phone: a unit of their ``viewBox`` is about one pixel of a screen 390 pixels wide, and what would
be a wide plot is a tall one. Ink, grid and background are the page's CSS variables, so that a dark page has dark plots;
the text stays text, in the page's font.

Needs matplotlib, which only this module knows of and imports late. ``pyplot`` and its global state are not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from pronk.bench.canvas import (
    CARD,
    INK,
    LABELS,
    MUTED,
    RC,
    SQUARE,
    Bar,
    Point,
    double,
    draw_bars,
    label,
    make_axes,
    name_axes,
    note,
    scatter,
    to_svg,
)
from pronk.bench.document import ALL, SOUND, Figures, ModelResult, Range
from pronk.bench.styles import OWN, Key, Style, key_of, task_name, temperature_name
from pronk.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Plot", "draw_plots", "import_matplotlib"]


_PARTS = (("target", "#43506b", "#ffffff"), ("draft", "#94a9c9", "#101010"), ("host", "#d3dae5", "#101010"))


@dataclass(frozen=True)
class Panel:
    """One SVG, and what it is for: a temperature, or nothing."""

    name: str
    svg: str


@dataclass(frozen=True)
class Plot:
    """A figure of the page: panels side by side, and the styles that the reader needs explained."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    legend: tuple[Style, ...]


_Drawn = tuple["Figure", str, Iterable[Style]] | None


def import_matplotlib() -> ModuleType:
    """The library that draws.

    Raises:
        OptionError: it is missing.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 (an optional dependency)
    except ImportError as error:
        msg = f"report: expected matplotlib, found none ({error}); pip install 'pronk[report]'"
        raise OptionError(msg) from error
    return mpl


@contextmanager
def drawing() -> Iterator[None]:
    """The look of the page's plots, whatever the user's own settings are.

    Raises:
        OptionError: matplotlib is missing.
    """
    mpl = import_matplotlib()
    with mpl.rc_context(), warnings.catch_warnings():
        # A reader's font may well have what the font that measures the text has not.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(RC)
        yield


def draw_plots(model: ModelResult, styles: dict[Key, Style], prefix: str) -> tuple[Plot, ...]:
    """All plots of a model for which there are figures.

    Args:
        model: what was measured.
        styles: of :func:`make_styles`.
        prefix: of every id in the SVGs, one per model, so that ids are unique in the page.

    Raises:
        OptionError: matplotlib is missing.
    """
    by_temperature = [
        (temperature_name(t), [f for f in model.figures if f.temperature == t])
        for t in sorted({f.temperature for f in model.figures})
    ]
    plots = []
    with drawing():
        for name, title, draw in _PLOTS:
            parts = by_temperature if draw is not _draw_pass_cost else [("", [])]
            panels: list[Panel] = []
            legend: dict[Style, None] = {}
            for i, (part, figures) in enumerate(parts):
                drawn = draw(figures, styles, model)
                if drawn is not None:
                    alt = f"{title}{part and ', '}{part}. {drawn[1]}"
                    panels.append(Panel(part, to_svg(drawn[0], f"{prefix}-{name}-{i}", alt)))
                    legend |= dict.fromkeys(drawn[2])
            if panels:
                plots.append(Plot(name, title, tuple(panels), tuple(legend)))
    return tuple(plots)


def _most(values: Iterable[float], ranges: Iterable[Range | None]) -> float:
    """Of all temperatures, so that the panels of a plot have the same scale."""
    return max([*values, *(each.median + each.spread for each in ranges if each)])


def _draw_speedups(figures: Sequence[Figures], styles: dict[Key, Style], model: ModelResult) -> _Drawn:
    groups: dict[str, list[Bar]] = {}
    tasks = sorted(dict.fromkeys(f.task for f in figures), key=lambda task: (task != ALL, task != SOUND))
    for task in tasks:
        mine = {key_of(f): f.speedup for f in figures if f.task == task}
        for key, style in styles.items():
            if key in mine and style.kind != "plain":
                speed = mine[key]
                text = (
                    "no figure"
                    if speed is None
                    else f"{speed.median:.2f}×{' slower' * (speed.median + speed.spread < 1)}"
                )
                bar = Bar(style, speed, text)
                groups.setdefault(task_name(task), []).append(bar)
    if all(bar.value is None for bars in groups.values() for bar in bars):
        return None
    alt = "; ".join(f"{bar.style.name} {bar.text}" for bar in next(iter(groups.values())))
    most = _most([1.0], (f.speedup for f in model.figures))
    return draw_bars(list(groups.items()), "times plain decoding’s speed", (1, "plain"), most), alt, ()


def _draw_throughput(figures: Sequence[Figures], styles: dict[Key, Style], model: ModelResult) -> _Drawn:
    bars = []
    for style, f in _over_all(figures, styles):
        if f.tokens_per_second:
            speed = f.tokens_per_second
            bars.append(Bar(style, speed, f"{speed.median:,.{1 if speed.median < 100 else 0}f}"))
    if not bars:
        return None
    floor = model.bandwidth.median / model.pass_bytes if model.bandwidth and model.pass_bytes else 0
    alt = "; ".join(f"{bar.style.name} {bar.text} tokens/s" for bar in bars)
    line = None
    if floor:
        line = (floor, f"memory floor {floor:,.0f}")
        alt += f"; memory floor {floor:,.0f}"
    most = _most([floor], (f.tokens_per_second for f in model.figures if f.task == ALL))
    return draw_bars([("", bars)], "tokens per second", line, most), alt, ()


def _draw_ctar(figures: Sequence[Figures], styles: dict[Key, Style], _model: ModelResult) -> _Drawn:
    curves = [(style, f.ctar) for style, f in _over_all(figures, styles) if f.ctar]
    if not curves:
        return None
    figure, axes = make_axes(230)
    for style, shares in curves:
        x = range(1, len(shares) + 1)
        percent = [100 * share for share in shares]
        axes.plot(x, percent, color=style.color, marker=style.shape, markersize=5.5, linewidth=2, clip_on=False)
    most = max(len(shares) for _, shares in curves)
    axes.set(ylim=(0, 100), xlim=(0.8, max(most, 2) + 0.2), xticks=range(1, most + 1, 1 + most // 12))
    name_axes(axes, "w: guesses in a row", "% of the steps")
    alt = "; ".join(f"{style.name} {shares[0]:.0%} at w = 1" for style, shares in curves)
    return figure, alt, [style for style, _ in curves]


def _draw_trust(figures: Sequence[Figures], styles: dict[Key, Style], _model: ModelResult) -> _Drawn:
    curves = [(style, f.gain_stats) for style, f in _over_all(figures, styles) if f.gain_stats]
    if not curves:
        return None
    figure, axes = make_axes(SQUARE)
    axes.plot([0, 100], [0, 100], color=MUTED, dashes=(4, 3))
    most = max(draft_tokens for _, tenths in curves for _, _, draft_tokens in tenths)
    for style, tenths in curves:
        x, y = ([100 * each[i] for each in tenths] for i in (0, 1))
        axes.plot(x, y, color=style.color, linewidth=1.5, alpha=0.6, clip_on=False)
        sizes = [12 + 110 * each[2] / most for each in tenths]
        axes.scatter(x, y, s=sizes, color=style.color, marker=style.shape, clip_on=False, zorder=3)
    axes.set(xlim=(0, 100), ylim=(0, 100))
    name_axes(axes, "% said to be right", "% right")
    alt = "; ".join(f"{style.name} off by {_off(tenths):.0%} in the mean" for style, tenths in curves)
    return figure, alt, [style for style, _ in curves]


def _off(tenths: Sequence[tuple[float, float, int]]) -> float:
    """How far what was said is from what came, in the mean of the guesses."""
    draft_tokens = sum(each[2] for each in tenths)
    return sum(abs(said - right) * count for said, right, count in tenths) / draft_tokens


def _draw_rows(figures: Sequence[Figures], styles: dict[Key, Style], model: ModelResult) -> _Drawn:
    def points(figures: Sequence[Figures]) -> list[Point]:
        return [(f, f.rows_per_pass, f.S) for f in figures if f.rows_per_pass and f.S and f.task != SOUND]

    here, everywhere = points(figures), points(model.figures)
    if all(styles[key_of(f)].kind == "plain" for f, _, _ in here):
        return None
    figure, axes = make_axes(250)
    high = 1.12 * max(s for _, _, s in everywhere)
    double(axes, min(1.0, *(rows for _, rows, _ in everywhere)), max(rows for _, rows, _ in everywhere))
    axes.set_ylim(min(1.0, *(s for _, _, s in everywhere)) - 0.04 * high, high)
    line = [2 ** (i / 8) for i in range(112)]
    axes.plot(line, line, color=MUTED, dashes=(4, 3))
    note(axes, "every row accepted", (high, high), (6, -4), va="top", color=MUTED)
    name_axes(axes, "rows per pass", "S: tokens per pass")
    alt = "; ".join(
        f"{styles[key_of(f)].name} {s:.2f} tokens of {rows:.1f} rows" for f, rows, s in here if f.task == ALL
    )
    return figure, alt, scatter(axes, here, styles)


def _draw_expected(figures: Sequence[Figures], styles: dict[Key, Style], model: ModelResult) -> _Drawn:
    def points(figures: Sequence[Figures]) -> list[Point]:
        # What is expected says nothing of the prompt's time, so it is held against the speed after the first token.
        return [
            (f, f.expected_speedup, f.decode_speedup.median)
            for f in figures
            if f.expected_speedup is not None and f.decode_speedup and f.task != SOUND
        ]

    here = points(figures)
    if not here:
        return None
    figure, axes = make_axes(SQUARE)
    values = [value for _, x, y in points(model.figures) for value in (x, y)] + [1.0]
    margin = 0.08 * (max(values) - min(values)) + 0.05
    low, high = min(values) - margin, max(values) + margin
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.plot([low, high], [low, high], color=MUTED, dashes=(4, 3))
    axes.axhline(1, color=INK, linewidth=1.3)
    name_axes(axes, "expected speed-up", "measured speed-up")
    alt = "; ".join(f"{styles[key_of(f)].name} {x:.2f} expected, {y:.2f} measured" for f, x, y in here if f.task == ALL)
    return figure, alt, scatter(axes, here, styles)


def _draw_split(figures: Sequence[Figures], styles: dict[Key, Style], _model: ModelResult) -> _Drawn:
    rows = [(style, f.split) for style, f in _over_all(figures, styles) if f.split]
    if not rows:
        return None
    figure, axes = make_axes(26 * len(rows), left=LABELS, top=6)
    for y, (style, split) in enumerate(rows):
        start = 0.0
        for part, color, ink in _PARTS:
            share = 100 * getattr(split, part)
            axes.barh(y, share, left=start, height=0.7, facecolor=color, edgecolor=CARD, linewidth=1)
            if share >= 12:
                middle = start + share / 2
                note(axes, f"{share:.0f}%", (middle, y), (0, 0), color=ink, ha="center", va="center_baseline")
            start += share
        label(axes, y, style)
    axes.set(xlim=(0, 100), ylim=(len(rows) - 0.5, -0.5), yticks=[])
    name_axes(axes, "% of the time")
    alt = "; ".join(f"{style.name} {s.target:.0%} target, {s.draft:.0%} draft, {s.host:.0%} host" for style, s in rows)
    return figure, alt, [Style(name, name, "part", color, "■", "s") for name, color, _ in _PARTS]


def _draw_pass_cost(_figures: Sequence[Figures], _styles: dict[Key, Style], model: ModelResult) -> _Drawn:
    costs = sorted((cost.rows, 1e3 * cost.seconds) for cost in model.pass_cost)
    if not costs:
        return None
    figure, axes = make_axes(230)
    x, y = zip(*costs, strict=True)
    double(axes, x[0], x[-1])
    axes.plot(x, y, color=INK, marker="o", markersize=6, linewidth=2, clip_on=False)
    alt = "; ".join(f"{rows} rows {cost:.3g} ms" for rows, cost in costs)
    if model.bandwidth and model.bandwidth.median > 0:
        floor = 1e3 * model.pass_bytes / model.bandwidth.median
        axes.axhline(floor, color=OWN[1], linewidth=1.8, dashes=(5, 3))
        note(axes, f"memory floor {floor:.3g} ms", (axes.get_xlim()[1], floor), (0, -5), va="top", ha="right")
        alt += f"; memory floor {floor:.3g} ms"
    axes.set_ylim(0, None)
    name_axes(axes, "rows in the pass", "milliseconds")
    return figure, alt, ()


def _over_all(figures: Sequence[Figures], styles: dict[Key, Style]) -> list[tuple[Style, Figures]]:
    mine = {key_of(f): f for f in figures if f.task == ALL}
    return [(style, mine[key]) for key, style in styles.items() if key in mine]


_PLOTS: tuple[tuple[str, str, Callable[..., _Drawn]], ...] = (
    ("speedup", "Speed-up", _draw_speedups),
    ("floor", "Tokens per second and the memory floor", _draw_throughput),
    ("split", "Where the time goes", _draw_split),
    ("rows", "Tokens for the rows paid", _draw_rows),
    ("ctar", "Guesses accepted in a row", _draw_ctar),
    ("trust", "What guesses were said to be, and were", _draw_trust),
    ("expected", "Expected and measured speed-up", _draw_expected),
    ("cost", "What a pass costs", _draw_pass_cost),
)
