"""Axes, labels and bars of the report's plots, and their way from matplotlib into the page as SVG.

Ink, grid and background are drawn in colours of their own, which become the page's CSS variables.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from pronk.bench.document import ALL, Figures, Range
from pronk.bench.styles import Key, Style, key_of, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "CARD",
    "GRID",
    "INK",
    "LABELS",
    "MUTED",
    "RC",
    "SQUARE",
    "Bar",
    "Point",
    "double",
    "draw_bars",
    "label",
    "make_axes",
    "name_axes",
    "note",
    "scatter",
    "to_svg",
]

# Drawn in these, then replaced by the page's variables.
INK, MUTED, GRID, CARD = "#010203", "#040506", "#070809", "#0a0b0c"
_BACKGROUND: Any = {"facecolor": CARD, "edgecolor": "none", "pad": 1}  # of text that lines run into
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", CARD: "var(--card)"}
_WIDTH = 340
LABELS = 122  # of the width, for the names beside bars
_RIGHT = 12
# The height that is as long as the width between the usual margins.
SQUARE = _WIDTH - 40 - _RIGHT
_START = (4 - LABELS) / (_WIDTH - LABELS - _RIGHT)  # where headings start, in widths of the axes
_PITCH, _HEADING = 19, 30
_TEXT, _SMALL = 14, 13
RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pronk",  # the same ids in every run
    "text.parse_math": False,  # a $ in a name is a $
    "font.size": _TEXT,
    "hatch.linewidth": 1.6,
    "hatch.color": "edge",
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Bar:
    """A bar: whose, how long with its spread, and what is written behind it; ``None`` is not measured."""

    style: Style
    value: Range | None
    text: str


Point = tuple[Figures, float, float]


def to_svg(figure: Figure, prefix: str, alt: str) -> str:
    """The figure as an element of the page; its ids begin with ``prefix``, and ``alt`` says what it shows."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    body = buffer.getvalue().split("</defs>", 1)[1]  # the first has a style for every element of the page
    used = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', body))
    body = re.sub(r' id="([\w.-]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", body)
    body = re.sub(r'(url\(|xlink:href=")#', rf"\1#{prefix}-", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r'(fill|stroke)="(#[0-9a-f]{6})"', r'style="\1: \2"', body)  # an attribute cannot have a variable
    body = re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})", lambda m: m[1] + _VARIABLES.get(m[2], m[2]), body)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(alt)}">{body.strip()}'


def make_axes(height: float, *, left: float = 40, top: float = 28, bottom: float = 44) -> tuple[Figure, Axes]:
    """Axes of a height, and margins around them, in units of the page."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an optional dependency)

    total = height + top + bottom
    figure = Figure(figsize=(_WIDTH / 72, total / 72))
    axes = figure.add_axes((left / _WIDTH, bottom / total, (_WIDTH - left - _RIGHT) / _WIDTH, height / total))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, length=0, pad=6, labelsize=_SMALL)
    axes.grid(color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    return figure, axes


def name_axes(axes: Axes, x: str, y: str = "") -> None:
    """What the axes mean."""
    axes.set_xlabel(x, color=MUTED, fontsize=_SMALL, labelpad=5)
    # Read without turning the head, and without taking width from the plot.
    axes.text(-0.12, 1.04, y, transform=axes.transAxes, color=MUTED, fontsize=_SMALL)


def note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """A text beside a point."""
    axes.annotate(text, at, offset, textcoords="offset points", **{"fontsize": _SMALL, "color": INK, **style})


def label(axes: Axes, y: float, style: Style) -> None:
    """A method's name, left of its bar."""
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center_baseline"}
    axes.text(-0.03, y, style.label, color=INK, fontsize=_SMALL, **place)


def double(axes: Axes, least: float, most: float) -> None:
    """Numbers of rows: each step to the right doubles them."""
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    ticks = [2**i for i in range(14) if least / 1.5 <= 2**i <= most * 1.5]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlim(least / 1.15, max(most, least * 2) * 1.15)


def draw_bars(
    groups: Sequence[tuple[str, list[Bar]]], axis: str, line: tuple[float, str] | None, most: float
) -> Figure:
    """Bars below each other in groups, with an optional vertical line: where, and what it says."""
    figure, axes = make_axes(sum(_HEADING * bool(name) + _PITCH * len(bars) for name, bars in groups), left=LABELS)
    axes.set(xlim=(0, 1.25 * most or 1), yticks=[])
    name_axes(axes, axis)
    y = 0.0
    for heading, bars in groups:
        if heading:
            style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "weight": "bold", "bbox": _BACKGROUND}
            axes.text(_START, y + _HEADING - 9, shorten(heading, 45), color=INK, **style)
            y += _HEADING
        for bar in bars:
            _draw_bar(axes, y + _PITCH / 2, bar)
            y += _PITCH
    axes.set_ylim(y, 0)
    if line:
        axes.axvline(line[0], color=INK, linewidth=1.3)
        side = "left" if line[0] < 0.4 * most else "right" if line[0] > 0.9 * most else "center"
        axes.text(line[0], -7, line[1], color=INK, ha=side, fontsize=_SMALL)
    return figure


def _draw_bar(axes: Axes, y: float, bar: Bar) -> None:
    label(axes, y, bar.style)
    value = bar.value
    if value is None:
        note(axes, bar.text, (0, y), (5, 0), color=MUTED, va="center_baseline")
        return
    fill: dict[str, Any] = {"facecolor": bar.style.color}
    if bar.style.kind == "peer":
        fill |= {"facecolor": CARD, "edgecolor": bar.style.color, "hatch": "////"}
    axes.barh(y, value.median, height=_PITCH - 6, **fill)
    if value.spread:
        axes.errorbar(value.median, y, xerr=value.spread, color=INK, linewidth=1.2, capsize=2.5)
    note(axes, bar.text, (value.median + value.spread, y), (5, 0), va="center_baseline", bbox=_BACKGROUND, zorder=3)


def scatter(axes: Axes, points: Sequence[Point], styles: dict[Key, Style]) -> list[Style]:
    """Small and pale for a task, large for all tasks."""
    for f, x, y in sorted(points, key=lambda point: point[0].task == ALL):
        style, whole = styles[key_of(f)], f.task == ALL
        size, alpha = (10, 1) if whole else (6, 0.6)
        edge = CARD if whole else "none"
        axes.plot(
            x, y, style.shape, color=style.color, markersize=size, alpha=alpha, markeredgecolor=edge, clip_on=False
        )
    drawn = {key_of(f) for f, _, _ in points}
    return [style for key, style in styles.items() if key in drawn]
