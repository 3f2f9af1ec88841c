"""``pronk bench --server … --report DIR``: a load test as one HTML page that needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pronk.bench.load.document import LoadDocument, LoadFigures, unique_levels
from pronk.bench.load.plots import draw_load, server_styles
from pronk.bench.load.records import Targets
from pronk.bench.load.tables import METRICS, notes, problems
from pronk.bench.report import make_environment, write_page
from pronk.bench.styles import Style

__all__ = ["write_load_report"]


@dataclass(frozen=True)
class _Tile:
    """A server at the level at which most tokens came out."""

    style: Style
    best: LoadFigures
    sustained: str | None
    failed: int


def write_load_report(document: LoadDocument, folder: Path) -> Path:
    """Write ``folder/index.html``, whole or not at all, and make the folder if need be.

    Args:
        document: the load test. The same document gives the same page, to the byte.
        folder: for the page.

    Returns:
        The page's path.

    Raises:
        OptionError: matplotlib is missing, or the folder cannot be written.
    """
    styles = server_styles(server.name for server in document.servers)
    page = (
        make_environment()
        .get_template("load/report.html.j2")
        .render(
            document=document,
            styles=styles,
            tiles=[_make_tile(document, style) for style in styles.values() if _of(document, style)],
            levels=unique_levels(document.figures),
            metrics=METRICS,
            targets="" if document.targets == Targets() else str(document.targets),
            notes=list(notes(document)),
            problems=list(problems(document)),
            plots=draw_load(document, styles),
        )
    )
    return write_page(page, folder)


def _of(document: LoadDocument, style: Style) -> list[LoadFigures]:
    return [f for f in document.figures if f.server == style.name]


def _make_tile(document: LoadDocument, style: Style) -> _Tile:
    mine = _of(document, style)
    sustained = None
    if style.name in document.sustained:
        rate = document.sustained[style.name]
        sustained = "at none of the rates" if rate is None else f"up to {rate:g} requests a second, of the rates"
    best = max(mine, key=lambda f: f.tokens_per_second.median)
    return _Tile(style, best, sustained, sum(f.sent - f.answered for f in mine))
