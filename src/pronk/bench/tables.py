"""A benchmark's figures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pronk.bench.document import ALL, SOUND, Document, Figures, ModelResult, Range

__all__ = ["show"]

_TITLES = {ALL: "all tasks", SOUND: "without loops"}
_NOTHING = "–"
_FEW = 5


def show(document: Document, console: Console) -> None:
    """Print the tables of every model, and what they leave out."""
    if document.interrupted:
        console.print(Text("Interrupted: the figures are over what was measured until then.", style="yellow"))
    for model in document.models:
        for part in _model(model, document):
            console.print(part)


def _model(model: ModelResult, document: Document) -> Iterator[RenderableType]:
    yield Text(f"\n{model.name}", style="bold")
    yield Text(_describe(model, document), style="dim")
    if model.inflated is not None:
        source, shape = model.inflated.get("source"), model.inflated.get("parameters")
        note = f"Real acceptance, simulated size: the function is that of {source} ({_count(shape)} parameters)."
        yield Text(note, style="yellow")
    if model.figures:
        yield Padding(_by_task(model), (1, 0))
        yield _by_method(model)
    if model.pass_cost:
        costs = " · ".join(f"{cost.rows} {cost.ratio:.2f}" for cost in model.pass_cost)
        yield Text(f"\nA pass over n rows, in passes over one: {costs}")
    yield from _notes(model, document)


def _describe(model: ModelResult, document: Document) -> str:
    parts = [f"{_count(model.parameters)} parameters", model.dtype, f"{document.hardware.get('threads')} threads"]
    parts.append(str(document.hardware.get("processor")))
    if model.bandwidth is not None:
        speed = model.bandwidth
        parts.append(f"memory {speed.median / 1e9:.0f} ± {speed.spread / 1e9:.0f} GB/s")
        parts.append(f"floor {model.pass_bytes / speed.median * 1e3:.2f} ms a pass")
    return " · ".join(parts)


def _table(title: str, *columns: str) -> Table:
    """A table whose first column folds and whose figures never do."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column(title, overflow="fold", min_width=12)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _by_task(model: ModelResult) -> Table:
    temperatures = list(dict.fromkeys(figures.temperature for figures in model.figures))
    columns = [name for t in temperatures for name in (f"× plain\nT = {t:g}", "S", "α", "loops")]
    table = _table("", *columns, "same", "of")
    for task in dict.fromkeys(figures.task for figures in model.figures):
        table.add_row(Text(_TITLES.get(task, task), style="bold cyan"))
        here = [figures for figures in model.figures if figures.task == task]
        for method in dict.fromkeys(figures.method for figures in here):
            row = {figures.temperature: figures for figures in here if figures.method == method}
            cells = [cell for t in temperatures for cell in _cells(row.get(t))]
            table.add_row(Text(f"  {method}"), *cells, _same(list(row.values())), _prompts(list(row.values())))
    return table


def _cells(figures: Figures | None) -> tuple[str, ...]:
    if figures is None or not figures.prompts:
        return (_NOTHING,) * 4
    return _spread(figures.speedup), _number(figures.S), _number(figures.alpha), _share(figures.repeated)


def _same(row: Sequence[Figures]) -> str:
    """Outputs equal to plain decoding's over all temperatures; a star where the rest are near ties."""
    compared = [figures for figures in row if figures.compared is not None]
    if not compared:
        return ""
    same, total = sum(f.same or 0 for f in compared), sum(f.compared or 0 for f in compared)
    star = "*" if same < total and all((f.same or 0) + (f.near_ties or 0) == f.compared for f in compared) else ""
    return f"{same}/{total}{star}"


def _prompts(row: Sequence[Figures]) -> str:
    done, asked = min(f.prompts for f in row), max(f.asked for f in row)
    return str(done) if done == asked else f"{done}/{asked}"


def _by_method(model: ModelResult) -> Table:
    names = "tokens\n/s|×\nfloor|TTFT\nms|wait ms\np50|\np99|c|exp.\n×|after\n1st ×|draft/\nhost %|\nGiB"
    table = _table("all tasks", *names.split("|"))
    for temperature in dict.fromkeys(figures.temperature for figures in model.figures):
        table.add_row(Text(f"T = {temperature:g}", style="bold cyan"))
        for figures in _all(model):
            if figures.temperature == temperature and figures.prompts:
                table.add_row(Text(f"  {figures.method}"), *_details(figures))
    return table


def _details(f: Figures) -> Iterator[str]:
    yield _NOTHING if f.tokens_per_second is None else f"{f.tokens_per_second.median:.1f}"
    yield _number(f.over_floor)
    yield _NOTHING if f.ttft is None else _milliseconds(f.ttft.median)
    for wait in (None, None) if f.itl is None else (f.itl.p50, f.itl.p99):
        yield _NOTHING if wait is None else _milliseconds(wait)
    yield _NOTHING if f.cost_coefficient is None else f"{f.cost_coefficient:.3f}"
    yield _number(f.expected_speedup)
    yield _NOTHING if f.decode_speedup is None else _number(f.decode_speedup.median)
    yield _NOTHING if f.split is None else f"{f.split.draft * 100:.0f}/{f.split.host * 100:.0f}"
    yield _NOTHING if f.peak_memory is None else f"{f.peak_memory / 2**30:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _notes(model: ModelResult, document: Document) -> Iterator[Text]:
    above = f"{document.degenerate_above:.0%}"
    yield Text(
        f"\nloops: share of repeated 4-grams, which flatters every method that copies; a prompt whose plain output is "
        f"above {above} is left out of the last block. same: outputs equal to plain decoding's (* the others part at "
        "near ties). wait: time between tokens, a step's shared by its tokens. c: time to draft a position, in plain "
        "passes. exp.: speed-up that α, the drafted depth and c let expect; after 1st: measured without the first "
        "token.",
        style="dim",
    )
    yield from _listed(f"{len(model.skipped)} prompts were skipped", [(f.id, f.reason) for f in model.skipped])
    failures = [(f"{figures.method}, {each.id}", each.reason) for figures in _all(model) for each in figures.failures]
    yield from _listed(f"{len(failures)} measurements failed", failures)


def _all(model: ModelResult) -> list[Figures]:
    return [figures for figures in model.figures if figures.task == ALL]


def _listed(title: str, entries: Sequence[tuple[str, str]]) -> Iterator[Text]:
    if not entries:
        return
    yield Text(f"{title}:", style="yellow")
    for name, reason in entries[:_FEW]:
        yield Text(f"  {name}: {reason}")
    if len(entries) > _FEW:
        yield Text(f"  … and {len(entries) - _FEW} more, in the document that --json writes")


def _spread(value: Range | None) -> str:
    return _NOTHING if value is None else f"{value.median:.2f}±{value.spread:.2f}"


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _count(value: object) -> str:
    """``9669440`` as ``9.7 M``."""
    if not isinstance(value, int):
        return "an unknown number of"
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.1f} M"
