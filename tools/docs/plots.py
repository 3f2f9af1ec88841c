"""Plots of ``benchmarks/results`` as small SVG files, drawn by :mod:`blocks`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

__all__ = ["PLOTS", "REAL", "REAL_ELSEWHERE", "real_rows"]

# Names of results of benchmarks/real.py.
REAL = "2026-11-real-avx512"
REAL_ELSEWHERE = "2026-11-real-avx2"
ENGINES = {
    "auto": "pronk, auto",
    "autoregressive": "pronk, plain decoding",
    "llama_cpp": "llama.cpp",
    "openvino": "OpenVINO",
}
# Sizes in pixels; LABEL is the width of the names on the left.
WIDTH = 720
LABEL = 190
RIGHT = 60
BAR = 13
PAD = 10
COLOURS = ("#2f6feb", "#8bb4f8", "#b6bec8", "#d0d7de")
STYLE = """\
.paper { fill: #fff }
text { font: 13px system-ui, sans-serif; fill: #24292f }
.value, .tick, .note { font-size: 11px; fill: #57606a }
.value { paint-order: stroke; stroke: #fff; stroke-width: 4px }
.title { font-weight: 600 }
.grid { stroke: #d8dee4 } .one { stroke: #57606a; stroke-dasharray: 4 3 }
"""


class Group(NamedTuple):
    """A group of bars in a plot."""

    name: str
    values: Sequence[float | None]  # one per series; None has no bar


def bars(title: str, series: Sequence[str], groups: Sequence[Group], note: str) -> str:
    """Return the SVG file of groups of horizontal bars.

    A dashed line marks the value 1, the speed of plain decoding. ``note`` stands below the bars.
    """
    top = 62
    step = BAR * len(series) + PAD
    bottom = top + step * len(groups)
    largest = max(value for group in groups for value in group.values if value is not None)
    scale = (WIDTH - LABEL - RIGHT) / largest
    ticks = [tick / 4 for tick in range(int(largest * 4) + 1)]
    parts = [f'<text class="title" x="12" y="22">{escape(title)}</text>']
    for number, name in enumerate(series):
        x = LABEL + 150 * number
        parts.append(f'<rect x="{x}" y="34" width="11" height="11" fill="{COLOURS[number]}"/>')
        parts.append(f'<text class="tick" x="{x + 16}" y="44">{escape(name)}</text>')
    for tick in ticks:
        x = LABEL + scale * tick
        kind = "one" if tick == 1 else "grid"
        parts.append(
            f'<line class="{kind}" x1="{x:.1f}" y1="{top - 8}" x2="{x:.1f}" y2="{bottom}"/>'
        )
        if tick * 2 == int(tick * 2):
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" '
                f'text-anchor="middle">{tick:g}</text>'
            )
    for row, group in enumerate(groups):
        y = top + step * row
        middle = y + BAR * len(series) / 2 + 4
        parts.append(
            f'<text x="{LABEL - 10}" y="{middle:.1f}" text-anchor="end">{escape(group.name)}</text>'
        )
        for number, value in enumerate(group.values):
            if value is not None:
                width = scale * value
                place = y + BAR * number
                fill = COLOURS[number]
                parts.append(
                    f'<rect x="{LABEL}" y="{place}" width="{width:.1f}" height="{BAR - 2}" '
                    f'fill="{fill}"/>'
                )
                x = LABEL + width + 5
                parts.append(
                    f'<text class="value" x="{x:.1f}" y="{place + BAR - 3}">{value:.2f}</text>'
                )
    parts.append(f'<text class="note" x="12" y="{bottom + 38}">{escape(note)}</text>')
    return svg(parts, bottom + 50)


def svg(parts: Sequence[str], height: int) -> str:
    """Return an SVG file with elements on white paper, legible on light and dark pages."""
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<style>\n{STYLE}</style>",
        '<rect class="paper" width="100%" height="100%" rx="8"/>',
        *parts,
        "</svg>\n",
    ]
    return "\n".join(lines)


def real_rows(
    results: Path, group: str = "all", temperature: float = 0.0
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows of :data:`REAL` for a group of prompts, by model and method.

    The model with the highest speed comes first.
    """
    rows = json.loads((results / f"{REAL}.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if (row["group"], row["temperature"]) == (group, temperature):
            found.setdefault(row["model"], {})[row["method"]] = row
    return dict(sorted(found.items(), key=lambda pair: -pair[1]["auto"]["speed"]))


def faster_mode(rows: Mapping[str, dict[str, Any]], engine: str) -> dict[str, Any]:
    """Return the row of an engine's faster mode: plain decoding or, if measured, prompt lookup."""
    modes = [rows[method] for method in (engine, f"{engine}_prompt_lookup") if method in rows]
    return max(modes, key=lambda row: row.get("speed", 0.0))


def real(results: Path) -> str:
    """Plot the tokens per second of engines on real models, and their numbers of equal outputs.

    An output is equal if it has the tokens of pronk's plain decoding.
    """
    top = 32
    bar = 18
    title = "Tokens per second, prompt included, and outputs identical to pronk's plain decoding"
    parts = [f'<text class="title" x="12" y="22">{title}</text>']
    for model, rows in real_rows(results).items():
        shown = {name: faster_mode(rows, engine) for engine, name in ENGINES.items()}
        fastest = max(row.get("speed", 0) for row in shown.values())
        scale = (WIDTH - LABEL - 200) / fastest
        parts.append(f'<text class="title" x="12" y="{top + 16}">{escape(model)}</text>')
        for number, (name, row) in enumerate(shown.items()):
            y = top + 24 + bar * number
            label = name + ", prompt lookup" * row["method"].endswith("prompt_lookup")
            width = scale * row.get("speed", 0)
            text = "cannot read this file"
            if row["prompts"]:
                text = f"{row['speed']:.3g} tokens/s, {row['same']} of {row['prompts']} identical"
            parts.append(
                f'<text x="{LABEL - 10}" y="{y + 12}" text-anchor="end">{escape(label)}</text>'
            )
            parts.append(
                f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{bar - 3}" '
                f'fill="{COLOURS[number]}"/>'
            )
            parts.append(
                f'<text class="value" x="{LABEL + width + 5:.1f}" y="{y + 12}">{text}</text>'
            )
        top += 24 + bar * len(ENGINES) + 8
    return svg(parts, top + 4)


def methods(results: Path) -> str:
    """Plot the speed of each method relative to plain decoding, the fastest method first."""
    path = results / "2026-11-drafters-smollm2-avx512.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    speeds = [
        {row["method"]: row["over plain"] for row in cell["rows"]} for cell in result["cells"]
    ]
    names = sorted(speeds[0], key=lambda name: -speeds[0][name])
    groups = [Group(name, [each.get(name) for each in speeds]) for name in names]
    series = [f"T = {cell['temperature']}" for cell in result["cells"]]
    note = f"{result['model']}, {result['machine']}; Spec-Bench; benchmarks/drafter_table.py"
    return bars("Speed relative to plain decoding, by method", series, groups, note)


def policy(results: Path) -> str:
    """Plot the speeds of ``auto`` and the best single drafter over plain decoding, by suite."""
    path = results / "2026-11-policy-wall-smollm2-avx512.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    groups = list[Group]()
    for row in result["cells"][0]["rows"]:
        speeds = (row["auto over plain"][0], row["best over plain"][0])
        groups.append(Group(row["suite"].replace("_", " "), speeds))
    note = f"{result['model']}, {result['machine']}; T = 0, wall clock; benchmarks/policy.py --wall"
    series = ("auto", "best single drafter")
    return bars("Speed relative to plain decoding, by suite", series, groups, note)


def models(results: Path) -> str:
    """Plot the speed of ``auto`` relative to plain decoding, by model: means over the suites."""
    found = list[dict[str, Any]]()
    groups = list[Group]()
    for name in ("smollm2", "qwen05", "qwen15"):
        path = results / f"2026-11-policy-wall-{name}-avx512.json"
        result = json.loads(path.read_text(encoding="utf-8"))
        found.append(result)
        model = re.sub(r"-instruct.*", "", result["model"])
        groups.append(Group(model, [mean(cell) for cell in result["cells"]]))
    first = found[0]
    series = [f"T = {cell['temperature']}" for cell in first["cells"]]
    note = f"{first['machine']}; Spec-Bench, HumanEval, GSM8K; benchmarks/policy.py --wall"
    return bars("Speed of auto relative to plain decoding, by model", series, groups, note)


def mean(cell: dict[str, Any]) -> float:
    """Return the geometric mean of the speed of ``auto`` relative to plain decoding over suites."""
    return geometric_mean(row["auto over plain"][0] for row in cell["rows"])


PLOTS: dict[str, Callable[[Path], str]] = {
    "real.svg": real,
    "methods.svg": methods,
    "policy.svg": policy,
    "models.svg": models,
}
