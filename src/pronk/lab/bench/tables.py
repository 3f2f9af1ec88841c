"""Tables, headers and footnotes of a benchmark's result, for terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pronk.base.arrays import KV_DTYPES
from pronk.lab.bench.document import ALL, SOUND, Document, Figures, ModelResult

_MISSING = "–"
# More rows are never less work: where a forward pass takes less than this fraction of the time of a
# pass over one row, other programs have disturbed the measurement.
_NOISE = 0.95

_GLOSSARY = {
    "× plain": "tokens/s over plain decoding's, median ± half the range of the repeats",
    "S": "mean tokens per forward pass of the model",
    "α": "acceptance rate of the first draft token",
    "loops": (
        "share of repeated 4-grams, which flatters every method that copies; a prompt whose plain "
        "output is above {above:.0%} is left out of the last block"
    ),
    "same": (
        "outputs equal to plain decoding's (* the others part at near ties; a peer that samples "
        "draws random numbers of its own)"
    ),
    "of": "number of prompts",
    "floor": "time of a step over the time to read the weights and the KV cache once",
    "wait": "time between tokens; the tokens of a step share its time",
    "c": "time to draft one position, in plain forward passes",
    "exp.": "speed-up expected from α, the draft depth and c",
    "after 1st": "measured speed-up without the first token",
    "draft/host": "share of the time in the drafter, and outside of drafter and model",
}
_WORKERS = {
    "GiB": "memory of the main process",
    "workers": "share of the time in the other processes of the model, waiting included",
}


@dataclass(frozen=True)
class Table:
    """A table: one or more blocks of rows with the same columns."""

    # Headings of the columns after the first, which has the methods; line breaks keep them narrow.
    columns: tuple[str, ...]
    # Pairs (title, rows); the first cell of a row is the method.
    blocks: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]


def explain(document: Document) -> dict[str, str]:
    """Return the meaning of each column of the tables, by the column's heading."""
    terms = _GLOSSARY | (_WORKERS if document.arguments.get("workers", 1) > 1 else {})
    return {
        name: meaning.format(above=document.degenerate_above) for name, meaning in terms.items()
    }


def speed_table(
    model: ModelResult,
    temperatures: Sequence[float] | None = None,
    tasks: Sequence[str] | None = None,
) -> Table:
    """Return speed-up, acceptance and exactness of each method by task.

    Each temperature has its own columns. ``None`` selects all temperatures or all tasks.
    """
    if temperatures is None:
        temperatures = model.temperatures
    columns: list[str] = []
    for temperature in temperatures:
        columns += [f"× plain\nT = {temperature:g}", "S", "α", "loops"]
    blocks = []
    for task in dict.fromkeys(f.task for f in model.figures if tasks is None or f.task in tasks):
        selected = [f for f in model.figures if f.task == task and f.temperature in temperatures]
        rows = []
        for method in dict.fromkeys(f.method for f in selected):
            figures = {f.temperature: f for f in selected if f.method == method}
            cells = [cell for t in temperatures for cell in _speed_cells(figures.get(t))]
            finished = min(f.prompts for f in figures.values())
            asked = max(f.asked for f in figures.values())
            num_prompts = str(finished) if finished == asked else f"{finished}/{asked}"
            rows.append((method, *cells, _exactness_cell(figures.values()), num_prompts))
        if rows:
            blocks.append((task_name(task), tuple(rows)))
    return Table((*columns, "same", "of"), tuple(blocks))


def cost_table(model: ModelResult, tasks: Sequence[str] = (ALL,)) -> Table:
    """Return throughput, latencies and costs of each method by task and temperature."""
    shown = [f for f in model.figures if f.task in tasks]
    columns = [*_COSTS]
    if any(f.waited is not None for f in shown):
        columns.append(("work-\ners %", _waited_cell))
    blocks = []
    for task in dict.fromkeys(f.task for f in shown):
        for temperature in dict.fromkeys(f.temperature for f in shown):
            selected = [
                f for f in shown if (f.task, f.temperature) == (task, temperature) and f.prompts
            ]
            rows = tuple((f.method, *(cell(f) for _, cell in columns)) for f in selected)
            title = f"T = {temperature:g}"
            blocks.append((title if task == ALL else f"{task_name(task)}, {title}", rows))
    return Table(tuple(heading for heading, _ in columns), tuple(blocks))


def task_name(task: str) -> str:
    """Return the title of a task or aggregate."""
    return {ALL: "all tasks", SOUND: "without loops"}.get(task, task)


def _speed_cells(figures: Figures | None) -> tuple[str, ...]:
    if figures is None or figures.speedup is None or figures.repeated is None:
        return (_MISSING,) * 4
    gain = f"{figures.speedup.median:.2f}±{figures.speedup.spread:.2f}"
    return gain, _number(figures.S), _number(figures.alpha), f"{figures.repeated:.0%}"


def _exactness_cell(row: Iterable[Figures]) -> str:
    """Format ``7/8`` for 7 of 8 equal outputs, ``7/8*`` if near ties explain all unequal ones."""
    compared = [figures for figures in row if figures.compared is not None]
    if not compared:
        return ""
    same = sum(f.same or 0 for f in compared)
    total = sum(f.compared or 0 for f in compared)
    explained = all((f.same or 0) + (f.near_ties or 0) == f.compared for f in compared)
    star = "*" if same < total and explained else ""
    return f"{same}/{total}{star}"


def _waited_cell(figures: Figures) -> str:
    return _number(None if figures.waited is None else figures.waited * 100, 1)


def _number(value: float | None, digits: int = 2) -> str:
    return _MISSING if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return _MISSING
    digits = 1 if seconds < 0.1 else 0
    return f"{seconds * 1e3:.{digits}f}"


# Heading of a column, and the function that formats its cells.
_COSTS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    (
        "tokens\n/s",
        lambda f: _number(f.tokens_per_second.median if f.tokens_per_second else None, 1),
    ),
    ("×\nfloor", lambda f: _number(f.over_floor)),
    ("TTFT\nms", lambda f: _milliseconds(f.ttft.median if f.ttft else None)),
    ("wait ms\np50", lambda f: _milliseconds(f.itl.p50 if f.itl else None)),
    ("\np99", lambda f: _milliseconds(f.itl.p99 if f.itl else None)),
    ("c", lambda f: _number(f.cost_coefficient, 3)),
    ("exp.\n×", lambda f: _number(f.expected_speedup)),
    ("after\n1st ×", lambda f: _number(f.decode_speedup.median if f.decode_speedup else None)),
    (
        "draft/\nhost %",
        lambda f: f"{f.split.draft * 100:.0f}/{f.split.host * 100:.0f}" if f.split else _MISSING,
    ),
    ("\nGiB", lambda f: _number(None if f.peak_memory is None else f.peak_memory / 2**30)),
)


def describe(model: ModelResult, document: Document) -> str:
    """Return one line about the model and the machine.

    Its memory floor is the time to read all weights from memory once.
    """
    parts = [f"{_count(model.parameters)} parameters", model.dtype]
    storage = []
    if model.weights not in ("", model.dtype) and model.weight_bits is not None:
        storage.append(f"{model.weights}: {model.weight_bits:.2f} bits a weight")
    if model.kv_dtype in KV_DTYPES:
        storage.append(f"cache {model.kv_dtype}")
    if storage:
        parts.append(f"{', '.join(storage)}, {model.pass_bytes / 1e6:,.1f} MB a forward pass")
    threads = document.hardware.get("threads")
    workers = document.arguments.get("workers", 1)
    several = (
        f"{workers} workers ({document.arguments.get('parallel')}), threads of each: {threads}"
    )
    parts += [f"kernels {model.kernels}", f"{threads} threads" if workers == 1 else several]
    parts.append(str(document.hardware.get("processor")))
    if model.bandwidth is not None and model.bandwidth.median > 0:
        speed = model.bandwidth
        parts.append(f"memory {speed.median / 1e9:.0f} ± {speed.spread / 1e9:.0f} GB/s")
        parts.append(f"floor {model.pass_bytes / speed.median * 1e3:.2f} ms a forward pass")
    if model.pass_cost:
        costs = ", ".join(f"{cost.rows}: {cost.ratio:.2f}" for cost in model.pass_cost)
        parts.append(f"a forward pass over n rows, relative to one row: {costs}")
        if min(cost.ratio for cost in model.pass_cost) < _NOISE:
            parts.append(
                "these times are noise: more rows took less time; measure on a quieter machine"
            )
    return " · ".join(parts)


def result_sentence(model: ModelResult) -> str:
    """Return one sentence that says how fast the fastest drafter is over all prompts.

    Peers are not compared; the speeds of all temperatures are.
    """
    candidates = [
        (figures.speedup, figures)
        for figures in model.figures
        if figures.task == ALL and figures.engine == "pronk" and not figures.is_plain
    ]
    measured = [(speedup, figures) for speedup, figures in candidates if speedup is not None]
    if not measured:
        return f"{model.name}: no drafter was measured against plain decoding."
    speedup, best = max(measured, key=lambda pair: pair[0].median)
    where = f"at temperature {best.temperature:g}, over {best.prompts} prompts"
    ratio = f"{speedup.median:.2f} ± {speedup.spread:.2f} times the speed of plain decoding"
    if speedup.median <= 1:
        slower = "no drafter is faster than plain decoding"
        return f"{model.name}: {slower}; {best.method} has {ratio} {where}."
    return f"{model.name}: {best.method} has {ratio} {where}."


def inflation_note(model: ModelResult) -> str | None:
    """Return a note about a small model that was padded to a large shape.

    It names the small model, and is ``None`` for a model that was not padded.
    """
    if model.inflated is None:
        return None
    source = model.inflated.get("source")
    count = _count(model.inflated.get("parameters"))
    return (
        f"Real acceptance, simulated size: the function is that of {source} ({count} parameters)."
    )


def failures(model: ModelResult) -> list[tuple[str, str]]:
    """Return pairs (method with its failed prompts, reason of the failure), one per reason."""
    prompts: dict[tuple[str, str], dict[str, None]] = {}
    for figures in model.figures:
        if figures.task == ALL:
            for failure in figures.failures:
                prompts.setdefault((figures.method, failure.reason), {})[failure.id] = None
    entries = []
    for (method, reason), (first, *others) in prompts.items():
        more = f" and {len(others)} more" if others else ""
        entries.append((f"{method}, {first}{more}", reason))
    return entries


def _count(value: object) -> str:
    """Format ``9669440`` as ``9.7 M``."""
    if not isinstance(value, int):
        return "an unknown number of"
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.1f} M"
