"""How the methods and tasks of a report look: names, colours, shapes; the same in every plot and table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pronk.bench.document import ALL, PLAIN, SOUND, Figures

__all__ = [
    "OWN",
    "Key",
    "Style",
    "key_of",
    "make_styles",
    "shorten",
    "task_name",
    "temperature_name",
]

Key = tuple[str, str]
# Okabe and Ito's colours, then Tol's, each told from its neighbours with any kind of colour blindness; peers are muted.
OWN = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #882255 #999933 #44aa99 #aa4499".split()
_PEERS = "#7d88ad #a68a6d #6f9c8b #a87f95 #9a9a6a".split()
_GREY = "#8a8a8a"
_SHAPES = "os^Dv"
_FILLED, _OPEN = "●■▲◆▼", "○□△◇▽"


@dataclass(frozen=True)
class Style:
    """How a method looks, throughout the page."""

    name: str
    label: str
    kind: str
    color: str
    glyph: str
    shape: str


def key_of(figures: Figures) -> Key:
    """What tells a method from all others: two engines may call theirs the same."""
    return figures.engine, figures.method


def temperature_name(temperature: float) -> str:
    """``greedy``, or the temperature."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def task_name(task: str) -> str:
    """As a heading."""
    return {ALL: "all tasks", SOUND: "all tasks, without outputs that loop"}.get(task, task)


def make_styles(figures: Iterable[Figures]) -> dict[Key, Style]:
    """One style per method, in the order of plain decoding, drafters, peers."""
    keys = sorted(dict.fromkeys(map(key_of, figures)), key=lambda key: (key[0] != "pronk", key[1] != PLAIN))
    seen = {"own": 0, "peer": 0}
    styles = {}
    for engine, method in keys:
        kind = "peer" if engine != "pronk" else "plain" if method == PLAIN else "own"
        named = method if engine == "pronk" or method.startswith(engine) else f"{engine} {method}"
        if kind == "plain":
            styles[engine, method] = Style(named, "plain", kind, _GREY, "●", "o")
            continue
        styles[engine, method] = _style(named, seen[kind], kind)
        seen[kind] += 1
    return styles


def _style(name: str, number: int, kind: str) -> Style:
    """Return the style of method ``number``, from 0, of its ``kind``: ``"own"`` or ``"peer"``."""
    colors, glyphs = (_PEERS, _OPEN) if kind == "peer" else (OWN, _FILLED)
    # Shape and colour take different turns, so that a colour that comes again has another shape.
    j = (number + number // len(colors)) % len(_SHAPES)
    return Style(name, shorten(name), kind, colors[number % len(colors)], glyphs[j], _SHAPES[j])


def shorten(name: str, most: int = 15) -> str:
    """A name, cut to at most the given number of characters."""
    # The middle goes: names differ in their first word, and in the options at their end.
    clean = "".join(c if c.isprintable() else " " for c in name)
    return clean if len(clean) <= most else f"{clean[: most // 2]}…{clean[-(most // 2) :]}"
