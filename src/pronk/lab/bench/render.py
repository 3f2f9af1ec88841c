"""Result of a benchmark as tables on a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from pronk.lab.bench.document import Document, ModelResult
from pronk.lab.bench.tables import (
    Table,
    cost_table,
    describe,
    explain,
    failures,
    inflation_note,
    speed_table,
)

_INTERRUPTED = "Interrupted: the figures are over the prompts that were measured until then."
_MAX_ENTRIES = 5  # maximum length of a list of skipped prompts or of failures

_TEMPERATURES_PER_TABLE = 2  # number of temperatures whose columns fit a terminal of 80 characters


def show(document: Document, console: Console) -> None:
    """Print tables, skipped prompts and failures of every model."""
    if document.interrupted:
        console.print(Text(_INTERRUPTED, style="yellow"))
    for model in document.models:
        for renderable in _render_model(model, document):
            console.print(renderable)


def _render_model(model: ModelResult, document: Document) -> Iterator[RenderableType]:
    yield Text(f"\n{model.name}", style="bold")
    yield Text(describe(model, document), style="dim")
    if (note := inflation_note(model)) is not None:
        yield Text(note, style="yellow")
    if model.figures:
        temperatures = model.temperatures
        for first in range(0, len(temperatures), _TEMPERATURES_PER_TABLE):
            shown = temperatures[first : first + _TEMPERATURES_PER_TABLE]
            yield Padding(_to_rich(speed_table(model, shown)), (1, 0))
        yield _to_rich(cost_table(model))
        yield Text("\n" + _footnote(document), style="dim")
    skipped = [(failure.id, failure.reason) for failure in model.skipped]
    yield from _list_entries(f"skipped, {len(skipped)} in all", skipped)
    yield from _list_entries("failed", failures(model))


def _footnote(document: Document) -> str:
    terms = ". ".join(f"{name}: {meaning}" for name, meaning in explain(document).items())
    return f"{terms}."


def _to_rich(table: Table) -> RichTable:
    """Convert a table to a rich table; long names of methods wrap, numbers never do."""
    rich_table = RichTable(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    rich_table.add_column("", overflow="fold", min_width=12)
    for column in table.columns:
        rich_table.add_column(column, justify="right", no_wrap=True)
    for title, rows in table.blocks:
        rich_table.add_row(Text(title, style="bold cyan"))
        for method, *cells in rows:
            rich_table.add_row(Text(f"  {method}"), *cells)
    return rich_table


def _list_entries(title: str, entries: Sequence[tuple[str, str]]) -> Iterator[Text]:
    if not entries:
        return
    yield Text(f"{title}:", style="yellow")
    for name, reason in entries[:_MAX_ENTRIES]:
        yield Text(f"  {name}: {reason}")
    more = len(entries) - _MAX_ENTRIES
    if more > 0:
        yield Text(f"  … and {more} more, in the document that --json writes")


def to_markdown(document: Document) -> str:
    """Return the tables, skipped prompts and failures as Markdown, with the peers' settings."""
    lines = [f"*{_INTERRUPTED}*", ""] if document.interrupted else []
    for model in document.models:
        lines += [f"### {_escape(model.name)}", "", _escape(describe(model, document)), ""]
        if (note := inflation_note(model)) is not None:
            lines += [f"**{_escape(note)}**", ""]
        if model.figures:
            lines += [*_markdown_rows(speed_table(model)), ""]
            lines += [*_markdown_rows(cost_table(model)), ""]
        for peer, notes in model.peers.items():
            settings = ", ".join(f"{name} {value}" for name, value in notes.items())
            lines.append(_escape(f"- {peer}: {settings}"))
        for skip in model.skipped[:_MAX_ENTRIES]:
            lines.append(_escape(f"- skipped: {skip.id}: {skip.reason}"))
        if len(model.skipped) > _MAX_ENTRIES:
            lines.append(f"- skipped: {len(model.skipped)} prompts in all")
        for name, reason in failures(model)[:_MAX_ENTRIES]:
            lines.append(_escape(f"- failed: {name}: {reason}"))
        lines.append("")
    return "\n".join([*lines, _escape(_footnote(document)), ""])


def _markdown_rows(table: Table) -> Iterator[str]:
    headings = [column.replace("\n", " ").strip() for column in table.columns]
    yield _markdown_row(["", "method", *headings])
    yield _markdown_row(["---", "---", *["--:"] * len(table.columns)])
    for title, rows in table.blocks:
        for number, cells in enumerate(rows):
            yield _markdown_row([title if number == 0 else "", *cells])


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escape, cells))} |"


def _escape(text: str) -> str:
    return (
        " ".join(text.split())
        .replace("|", "\\|")
        .replace("*", "\\*")
        .replace("<", "&lt;")
        .replace("_", "\\_")
    )
