"""A benchmark's figures for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pronk.bench.document import Document, ModelResult
from pronk.bench.grids import EXPLANATION, WORKERS, Grid, against_peers, by_method, by_task, describe, failures, origin

__all__ = ["show", "to_markdown"]

_INTERRUPTED = "Interrupted: the figures are over what was measured until then."
_FEW = 5

# Temperatures that fit beside each other in 80 columns.
_ABREAST = 2


def show(document: Document, console: Console) -> None:
    """Print the tables of every model, and what they leave out."""
    if document.interrupted:
        console.print(Text(_INTERRUPTED, style="yellow"))
    for model in document.models:
        for part in _model(model, document):
            console.print(part)


def _model(model: ModelResult, document: Document) -> Iterator[RenderableType]:
    yield Text(f"\n{model.name}", style="bold")
    yield Text(describe(model, document), style="dim")
    if (note := origin(model)) is not None:
        yield Text(note, style="yellow")
    if model.figures:
        temperatures = list(dict.fromkeys(figures.temperature for figures in model.figures))
        for first in range(0, len(temperatures), _ABREAST):
            yield Padding(make_table(by_task(model, temperatures[first : first + _ABREAST])), (1, 0))
        yield make_table(by_method(model))
        yield from (Text(line) for line in ("", *against_peers(model)))
        yield Text(_explanation(document), style="dim")
    yield from _listed(f"skipped, {len(model.skipped)} in all", [(f.id, f.reason) for f in model.skipped])
    yield from _listed("failed", failures(model))


def _explanation(document: Document) -> str:
    return EXPLANATION.format(
        above=f"{document.degenerate_above:.0%}",
        harness=f"{document.harness_share:.2%}",
        workers=WORKERS if document.arguments.get("workers", 1) > 1 else "",
    )


def make_table(grid: Grid) -> Table:
    """A grid for a terminal. The first column folds, figures never do."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column(grid.corner, overflow="fold", min_width=12)
    for column in grid.columns:
        table.add_column(column, justify="right", no_wrap=True)
    for title, rows in grid.blocks:
        table.add_row(Text(title, style="bold cyan"))
        for method, *cells in rows:
            table.add_row(Text(f"  {method}"), *cells)
    return table


def _listed(title: str, entries: Sequence[tuple[str, str]]) -> Iterator[Text]:
    if not entries:
        return
    yield Text(f"{title}:", style="yellow")
    for name, reason in entries[:_FEW]:
        yield Text(f"  {name}: {reason}")
    if len(entries) > _FEW:
        yield Text(f"  … and {len(entries) - _FEW} more, in the document that --json writes")


def to_markdown(document: Document) -> str:
    """The same tables as Markdown, for a README or a report."""
    lines = [f"*{_INTERRUPTED}*", ""] if document.interrupted else []
    for model in document.models:
        lines += [f"### {_escape(model.name)}", "", _escape(describe(model, document)), ""]
        if (note := origin(model)) is not None:
            lines += [f"**{_escape(note)}**", ""]
        for grid in (by_task(model), by_method(model)) if model.figures else ():
            lines += [*_rows(grid), ""]
        lines += [f"- {_escape(line)}" for line in against_peers(model)]
        for peer, notes in model.peers.items():
            said = ", ".join(f"{name} {value}" for name, value in notes.items())
            lines.append(_escape(f"- {peer}: {said}"))
        lines += [_escape(f"- skipped: {skip.id}: {skip.reason}") for skip in model.skipped[:_FEW]]
        lines += [f"- skipped: {len(model.skipped)} prompts in all"] if len(model.skipped) > _FEW else []
        lines += [_escape(f"- failed: {name}: {reason}") for name, reason in failures(model)[:_FEW]]
        lines.append("")
    return "\n".join([*lines, _escape(_explanation(document)), ""])


def _rows(grid: Grid) -> Iterator[str]:
    heads = [grid.corner, "method", *(column.replace("\n", " ").strip() for column in grid.columns)]
    yield _row(heads)
    yield _row(["---", "---", *["--:"] * len(grid.columns)])
    for title, rows in grid.blocks:
        for number, cells in enumerate(rows):
            yield _row([title if number == 0 else "", *cells])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escape, cells))} |"


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("_", "\\_")
