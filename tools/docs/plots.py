"""Plots of ``benchmarks/results`` as small SVG files, drawn by :mod:`blocks`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import geometric_mean
from textwrap import wrap
from typing import Any, NamedTuple

__all__ = ["PEERS", "PLOTS", "REAL", "REAL_ELSEWHERE", "faster_mode", "real_rows", "short_name"]

# Names of results of benchmarks/real.py.
REAL = "2026-11-real-avx512"
REAL_ELSEWHERE = "2026-11-real-avx2"
PLAIN = "autoregressive"
# Other engines: the beginning of the names of their methods, and the name in plots.
PEERS = {"llama": "llama.cpp", "openvino": "OpenVINO"}
# Sizes in pixels. WIDTH is that of a phone, whose browser then hardly shrinks the text; LABEL is
# the width of the names on the left.
WIDTH = 480
LABEL = 160
RIGHT = 44
BAR = 15
PAD = 11
NOTE_CHARACTERS = 68  # of a line below the bars
NOTE_STEP = 16  # between lines
COLOURS = ("#1f6feb", "#8bb4f8", "#8c959f", "#c4cbd3")
STYLE = """\
.paper { fill: #fff }
text { font: 14px system-ui, sans-serif; fill: #24292f }
.value, .tick, .note { font-size: 12px; fill: #57606a }
.value { paint-order: stroke; stroke: #fff; stroke-width: 4px }
.title { font-weight: 600 } .ours { font-weight: 600; fill: #24292f }
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
        left = LABEL + 100 * number
        parts.append(f'<rect x="{left}" y="34" width="11" height="11" fill="{COLOURS[number]}"/>')
        parts.append(f'<text class="tick" x="{left + 16}" y="44">{escape(name)}</text>')
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
    lines = note_lines(note, bottom + 38)
    return svg([*parts, *lines], bottom + 34 + NOTE_STEP * len(lines))


def note_lines(note: str, top: int) -> list[str]:
    """Return the lines of a note; ``top`` is the position of the first one."""
    lines = wrap(note, NOTE_CHARACTERS)
    return [
        f'<text class="note" x="12" y="{top + NOTE_STEP * number}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]


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
    return dict(sorted(found.items(), key=lambda pair: -pair[1]["auto"].get("speed", 0.0)))


def faster_mode(rows: Mapping[str, dict[str, Any]], engine: str) -> dict[str, Any]:
    """Return the row of the fastest mode of an engine, a key of ``PEERS``.

    An engine that was not measured, or cannot read the file, has a row without prompts.
    """
    modes = [row for method, row in rows.items() if method.startswith(engine)]
    return max(modes, key=lambda row: row.get("speed", 0.0), default={"prompts": 0})


def engine_of(method: str) -> str | None:
    """Return the key of ``PEERS`` to which a method belongs, or ``None`` for pronk's own."""
    return next((engine for engine in PEERS if method.startswith(engine)), None)


def equal_texts(results: Path, model: str, engine: str | None) -> str:
    """Return how many texts of an engine's drafting methods equal those of its plain decoding.

    The texts are those of all temperatures. Without such texts the result is empty.
    """
    rows = json.loads((results / f"{REAL}.json").read_text(encoding="utf-8"))
    own = [
        row
        for row in rows
        if (row["model"], row["group"]) == (model, "all")
        and engine_of(row["method"]) == engine
        and "equal" in row
    ]
    compared = sum(row["compared"] for row in own)
    equal = sum(row["equal"] for row in own)
    if not compared:
        return ""
    return f"✓ all {compared}" if equal == compared else f"{equal} of {compared}"


def real(results: Path) -> str:
    """Plot the tokens per second and the first token of engines on real models, with equal texts.

    A text is equal if it has the tokens of plain decoding by the same engine, at the same seed.
    """
    top = 56
    step = 20
    label = 118
    longest = 138  # of the bars
    first_column = label + longest + 106  # right ends of the columns
    last_column = WIDTH - 12
    parts = [f'<text class="tick" x="{label}" y="22">tokens/s, prompt included</text>']
    for x, lines in (
        (first_column, ("first", "token")),
        (last_column, ("equal texts", "if drafted")),
    ):
        for number, line in enumerate(lines):
            y = 22 + 15 * number
            parts.append(f'<text class="tick" x="{x}" y="{y}" text-anchor="end">{line}</text>')
    for model, rows in real_rows(results).items():
        shown = {"pronk": rows["auto"], "pronk, plain": rows[PLAIN]}
        shown |= {name: faster_mode(rows, engine) for engine, name in PEERS.items()}
        scale = longest / max(row.get("speed", 0) for row in shown.values())
        parts.append(f'<text class="title" x="12" y="{top}">{escape(short_name(model))}</text>')
        for number, (name, row) in enumerate(shown.items()):
            y = top + 10 + step * number
            kind = "ours" if name == "pronk" else "value"
            parts.append(f'<text class="{kind}" x="12" y="{y + 13}">{escape(name)}</text>')
            if not row["prompts"]:
                why = "cannot read this file" if "error" in row else "not measured"
                parts.append(f'<text class="value" x="{label}" y="{y + 13}">{why}</text>')
                continue
            width = scale * row["speed"]
            parts.append(
                f'<rect x="{label}" y="{y + 2}" width="{width:.1f}" height="{step - 6}" '
                f'fill="{COLOURS[number]}"/>'
            )
            parts.append(
                f'<text class="{kind}" x="{label + width + 6:.1f}" y="{y + 13}">'
                f"{row['speed']:.3g}</text>"
            )
            cells = {first_column: f"{row['first_token']:.2f} s"}
            if name != "pronk, plain":
                cells[last_column] = equal_texts(results, model, engine_of(row["method"]))
            parts += [
                f'<text class="{kind}" x="{x}" y="{y + 13}" text-anchor="end">{cell}</text>'
                for x, cell in cells.items()
                if cell
            ]
        top += 10 + step * len(shown) + 24
    note = note_lines(real_note(results), top)
    return svg([*parts, *note], top - 4 + NOTE_STEP * len(note))


def real_note(results: Path) -> str:
    """Return processor, threads, date and command of the results, and the engines' versions."""
    models = real_rows(results)
    rows = [row for methods in models.values() for row in methods.values()]
    first = rows[0]
    engines = dict.fromkeys(row["engine"] for row in rows if row.get("engine"))
    counts = sorted({methods["auto"]["prompts"] for methods in models.values()})
    prompts = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    parts = [
        f"{first['processor']}, {first['threads']} threads",
        first["date"],
        f"{prompts} prompts, T = 0",
        *engines,
        "benchmarks/real.py",
    ]
    return "; ".join(parts)


def short_name(model: str) -> str:
    """Return the name of a model without the suffixes of its file: ``qwen2.5-coder-0.5b``."""
    return re.sub(r"-(instruct|it|q\d).*|\.gguf$", "", Path(model).name)


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
        means = [mean(cell) for cell in result["cells"]]
        groups.append(Group(short_name(result["model"]), means))
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
