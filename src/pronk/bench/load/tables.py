"""A load test's figures for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from pronk.bench.document import Range
from pronk.bench.grids import Grid
from pronk.bench.load.document import LoadDocument, LoadFigures, Summary, unique_levels
from pronk.bench.load.records import Targets
from pronk.bench.tables import make_table

__all__ = ["METRICS", "notes", "problems", "show"]

# Figures that are summaries: their names in the document and in tables, and what they mean.
METRICS = (
    ("ttft", "TTFT", "time to the first text"),
    ("tpot", "TPOT", "time per output token after the first"),
    ("gap", "gap", "between chunks, of one token or of several"),
    ("e2e", "E2E", "to the end of the answer"),
)

_EXPLANATION = (
    "Latencies in ms, from when a request was to be sent. TTFT: to the first text. TPOT: per output token after the "
    "first. gap: between chunks. E2E: to the end. tok/s: tokens of answers, ± half the range of the rounds. × first: "
    "over the first server's in the same round. S: tokens per pass of the model. good: share of the requests sent that "
    "were answered within all targets; good/s: how many of them a second."
)
_NOTHING = "–"
_CACHED = 0.1  # of the prompts, above which the time to the first text is another than that of new prompts
_BUSY = 0.25  # of one core, above which the client itself may be what is measured

_Column = tuple[str, Callable[[LoadFigures], str]]


def show(document: LoadDocument, console: Console) -> None:
    """Print the tables, and what they leave out."""
    for part in _parts(document):
        console.print(part)


def _parts(document: LoadDocument) -> Iterator[RenderableType]:
    if document.interrupted:
        yield Text("Interrupted: the figures are over what was measured until then.", style="yellow")
    yield Text("")
    for server in document.servers:
        yield Text.assemble((server.name, "bold"), (f"  {server.model} at {server.url}", "dim"))
    if document.figures:
        yield Padding(make_table(_throughput(document)), (1, 0))
        yield make_table(_latencies(document))
    if document.sustained:
        yield Text("")
    for name, rate in document.sustained.items():
        most = "at no rate measured" if rate is None else f"up to {rate:g} requests/s, of the rates measured"
        yield Text(f"{name}: nine of ten requests within {document.targets} {most}")
    yield Text(f"\n{_EXPLANATION}", style="dim")
    yield from (Text(line, style="yellow") for line in (*notes(document), *problems(document)))


def _throughput(document: LoadDocument) -> Grid:
    columns = list(_columns(document))
    blocks = []
    for level in unique_levels(document.figures):
        rows = [(f.server, *(cell(f) for _, cell in columns)) for f in document.figures if f.level == level]
        blocks.append((str(level), tuple(rows)))
    return Grid("throughput", tuple(name for name, _ in columns), tuple(blocks))


def _columns(document: LoadDocument) -> Iterator[_Column]:
    yield "done", lambda f: f"{f.answered}/{f.sent}"
    yield "req/s", lambda f: f"{f.requests_per_second.median:.2f}"
    yield "tok/s", lambda f: _spread(f.tokens_per_second)
    if len(document.servers) > 1:
        yield "× first", lambda f: _spread(f.ratio, 2)
    yield (
        "prompt\ntok/s",
        lambda f: _NOTHING if f.prompt_tokens_per_second is None else _plain(f.prompt_tokens_per_second),
    )
    yield "tokens\neach", lambda f: f"{f.tokens / f.answered:.0f}" if f.answered else _NOTHING
    if any(f.S is not None for f in document.figures):
        yield "S", lambda f: _NOTHING if f.S is None else f"{f.S:.2f}"
    if document.targets != Targets():
        yield "good", lambda f: _NOTHING if f.good is None else f"{f.good:.0%}"
        yield "good/s", lambda f: _NOTHING if f.goodput is None else f"{f.goodput.median:.2f}"


def _latencies(document: LoadDocument) -> Grid:
    several = len(document.servers) > 1
    blocks = []
    for name, title, meaning in METRICS:
        rows = [
            (f"{f.level}, {f.server}" if several else str(f.level), *_cells(getattr(f, name))) for f in document.figures
        ]
        blocks.append((f"{title} {meaning}", tuple(rows)))
    return Grid("ms", ("mean", "p50", "p90", "p95", "p99"), tuple(blocks))


def _cells(found: Summary | None) -> tuple[str, ...]:
    if found is None:
        return (_NOTHING,) * 5
    return tuple(_milliseconds(value) for value in (found.mean, found.p50, found.p90, found.p95, found.p99))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _spread(value: Range | None, digits: int = 1) -> str:
    return _NOTHING if value is None else f"{value.median:.{digits}f}±{value.spread:.{digits}f}"


def _plain(value: Range) -> str:
    return f"{value.median:.{1 if value.median < 100 else 0}f}"


def notes(document: LoadDocument) -> Iterator[str]:
    """What a reader has to know of how the figures came about, a line each."""
    for server in document.servers:
        if server.without:
            yield f"{server.name} refuses {', '.join(server.without)}; its requests do without."
        mine = [f for f in document.figures if f.server == server.name]
        counted = {kind: sum(f.counted.get(kind, 0) for f in mine) for kind in ("length", "chunks")}
        if counted["length"] or counted["chunks"]:
            ways = (
                f"answers cut at --max-tokens count as that many ({counted['length']} answers)"
                * bool(counted["length"]),
                f"each chunk{' of the others' * bool(counted['length'])} counts as one ({counted['chunks']} answers)"
                * bool(counted["chunks"]),
            )
            yield f"{server.name} does not say how many tokens it sent: {'; '.join(filter(None, ways))}."
        if (cached := sum(f.cached_tokens or 0 for f in mine)) > _CACHED * (
            read := sum(f.prompt_tokens or 0 for f in mine)
        ):
            yield (
                f"{server.name} had {cached / read:.0%} of the prompts' tokens in its cache; "
                "--unique gives it prompts that it has not seen."
            )
    for f in document.figures:
        if f.busy > _BUSY:
            yield (
                f"{f.server}, {f.level}: the client itself computed for {f.busy:.0%} of the time; "
                "the server may be faster than these figures."
            )


def problems(document: LoadDocument) -> Iterator[str]:
    """What went wrong, how often, and what the server said to the first of it; a line each."""
    for f in document.figures:
        for problem in f.problems:
            reason = f": {problem.reason}" if problem.reason else ""
            yield f"{f.server}, {f.level}: {problem.count} of {f.sent} requests failed, {problem.label}{reason}"
