"""The steps of one text as a plot: what was to be expected of each, what came, and what guessing has gained so far.

Needs matplotlib, as :mod:`pronk.bench.plots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from pronk.bench.canvas import INK, MUTED, RC, SQUARE, make_axes, name_axes, to_svg
from pronk.bench.styles import OWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pronk.engine.decision_trace import Decision

__all__ = ["draw_steps"]

# The page of a report gives these their values; a file by itself has none.
_STYLE = (
    "<style>svg { --ink: #1a1a1a; --muted: #666; --grid: #e4e4e4; --card: #fff; background: var(--card); "
    "font-family: system-ui, sans-serif }</style>"
)


def draw_steps(steps: Sequence[Decision]) -> str:
    """An SVG file: above, the tokens of each step by who guessed them, with those expected; below, the gain in time.

    Args:
        steps: of one text.
    """
    import matplotlib as mpl  # noqa: PLC0415 (an optional dependency)

    with mpl.rc_context(RC):
        figure, axes = make_axes(1.4 * SQUARE, top=64)
        upper = axes
        place = axes.get_position()
        half = place.height * 0.55
        upper.set_position((place.x0, place.y0 + place.height - half, place.width, half))
        lower = figure.add_axes((place.x0, place.y0, place.width, place.height * 0.27), sharex=upper)
        _draw_tokens(upper, steps)
        _draw_gain(lower, upper, steps)
        svg = to_svg(figure, "steps", "Tokens of each step, by who guessed them, and what guessing has gained")
    return svg.replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" ', 1
    ).replace(">", f">{_STYLE}", 1)


def _draw_tokens(axes: Axes, steps: Sequence[Decision]) -> None:
    sources = list(dict.fromkeys(name for step in steps for name in _sources(step)))
    places, bottoms = range(1, len(steps) + 1), [0] * len(steps)
    for number, source in enumerate(sources):
        heights = [_sources(step).count(source) for step in steps]
        axes.bar(places, heights, 0.9, bottoms, color=OWN[number % len(OWN)], label=source)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    axes.bar(places, [1] * len(steps), 0.9, bottoms, color=MUTED, alpha=0.5, label="the model itself")
    axes.plot(places, [step.gain for step in steps], ".", color=INK, markersize=4, label="expected")
    axes.tick_params(labelbottom=False)
    axes.grid(visible=False, axis="x")
    name_axes(axes, "", "tokens")
    axes.legend(loc="lower left", bbox_to_anchor=(-0.14, 1.08), ncols=2, frameon=False, labelcolor=INK, fontsize=12)


def _draw_gain(axes: Axes, above: Axes, steps: Sequence[Decision]) -> None:
    gained = list(accumulate(_gained(step) for step in steps))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, length=0, pad=6, labelsize=12)
    axes.grid(color=above.get_ygridlines()[0].get_color(), linewidth=1, axis="y")
    axes.plot(range(1, len(steps) + 1), gained, color=OWN[0], linewidth=2)
    axes.axhline(0, color=MUTED, linewidth=1)
    name_axes(axes, "step", "plain steps gained")


def _sources(step: Decision) -> list[str]:
    origin = step.kept.origin
    return [] if origin is None else [origin[node][0] for node in step.path]


def _gained(step: Decision) -> float:
    """Plain steps: the tokens of a step, less what it took."""
    if step.plain is None or step.expected is None:
        return 0.0
    return len(step.tokens) - (step.expected + step.asking) / step.plain
