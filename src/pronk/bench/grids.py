"""A model's figures as rows of text, for terminals and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pronk.bench.document import ALL, SOUND, Document, Figures, ModelResult, Range

__all__ = ["EXPLANATION", "WORKERS", "Grid", "against_peers", "by_method", "by_task", "describe", "failures", "origin"]

EXPLANATION = (
    "× plain: tokens/s over plain decoding's, median and half the range of the repeats. S: tokens per pass of the "
    "model. α: share of the first guesses that were accepted. loops: share of repeated 4-grams, which flatters every "
    "method that copies; a prompt whose plain output is above {above} is left out of the last block. same: outputs "
    "equal to plain decoding's (* the others part at near ties; a peer that samples draws noise of its own). floor: "
    "time of a step over the time to read the weights and the cache once. wait: time between tokens, a step's shared "
    "by its tokens. c: time to draft a position, in plain passes. exp.: speed-up that α, the drafted depth and c let "
    "expect; after 1st: measured, without the first token.{workers} The harness took {harness} of the measured time."
)
# Where there are some.
WORKERS = (
    " GiB: of the process that asks; workers: share of the time that went into others that compute the model, and "
    "waiting for them."
)

_TITLES = {ALL: "all tasks", SOUND: "without loops"}
_NOTHING = "–"


@dataclass(frozen=True)
class Grid:
    """Blocks of rows under common columns; a row begins with its method.

    Attributes:
        corner: what the first column is about.
        columns: the others, a line break where a narrow column wants one.
        blocks: title and rows.
    """

    corner: str
    columns: tuple[str, ...]
    blocks: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]


def by_task(model: ModelResult, temperatures: Sequence[float] | None = None) -> Grid:
    """What each method gains on each task, the temperatures side by side; all of them unless some are given."""
    if temperatures is None:
        temperatures = list(dict.fromkeys(figures.temperature for figures in model.figures))
    columns = [name for t in temperatures for name in (f"× plain\nT = {t:g}", "S", "α", "loops")]
    blocks = []
    for task in dict.fromkeys(figures.task for figures in model.figures):
        here = [figures for figures in model.figures if figures.task == task and figures.temperature in temperatures]
        rows = []
        for method in dict.fromkeys(figures.method for figures in here):
            row = {figures.temperature: figures for figures in here if figures.method == method}
            cells = [cell for t in temperatures for cell in _gain(row.get(t))]
            rows.append((method, *cells, _same(list(row.values())), _prompts(list(row.values()))))
        if rows:
            blocks.append((_TITLES.get(task, task), tuple(rows)))
    return Grid("", (*columns, "same", "of"), tuple(blocks))


def by_method(model: ModelResult) -> Grid:
    """What each method costs, over all tasks."""
    names = "tokens\n/s|×\nfloor|TTFT\nms|wait ms\np50|\np99|c|exp.\n×|after\n1st ×|draft/\nhost %|\nGiB"
    overall = [figures for figures in model.figures if figures.task == ALL]
    several = any(figures.waited is not None for figures in overall)
    if several:
        names += "|work-\ners %"
    blocks = []
    for temperature in dict.fromkeys(figures.temperature for figures in overall):
        here = [figures for figures in overall if figures.temperature == temperature]
        rows = ((f.method, *_cost(f), *([_share(f.waited)] if several else ())) for f in here if f.prompts)
        blocks.append((f"T = {temperature:g}", tuple(rows)))
    return Grid(_TITLES[ALL], tuple(names.split("|")), tuple(blocks))


def _gain(figures: Figures | None) -> tuple[str, ...]:
    if figures is None or not figures.prompts:
        return (_NOTHING,) * 4
    share = _NOTHING if figures.repeated is None else f"{figures.repeated:.0%}"
    return _spread(figures.speedup), _number(figures.S), _number(figures.alpha), share


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


def _cost(f: Figures) -> Iterator[str]:
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


def describe(model: ModelResult, document: Document) -> str:
    """One line: the model, the machine, the floor."""
    parts = [f"{_count(model.parameters)} parameters", model.dtype]
    if model.kept is not None:
        parts.append(f"{model.kept}, {model.pass_bytes / 1e6:,.1f} MB a pass")
    parts.append(f"kernels {model.kernels}")
    parts += [document.threads, str(document.hardware.get("processor"))]
    if model.bandwidth is not None:
        speed = model.bandwidth
        parts.append(f"memory {speed.median / 1e9:.0f} ± {speed.spread / 1e9:.0f} GB/s")
        parts.append(f"floor {model.pass_bytes / speed.median * 1e3:.2f} ms a pass")
    if model.pass_cost:
        costs = ", ".join(f"{cost.rows}: {cost.ratio:.2f}" for cost in model.pass_cost)
        parts.append(f"a pass over n rows, in passes over one: {costs}")
    return " · ".join(parts)


def origin(model: ModelResult) -> str | None:
    """What an inflated model is, or ``None``."""
    if model.inflated is None:
        return None
    source, count = model.inflated.get("source"), _count(model.inflated.get("parameters"))
    return f"Real acceptance, simulated size: the function is that of {source} ({count} parameters)."


def against_peers(model: ModelResult) -> list[str]:
    """Our fastest method against the fastest peer over all tasks, a line per temperature."""
    lines = []
    # Over the same prompts: whoever failed at one is out.
    overall = [f for f in model.figures if f.task == ALL and f.tokens_per_second is not None and not f.failures]
    for temperature in dict.fromkeys(f.temperature for f in overall):
        sides = [
            [f for f in overall if f.temperature == temperature and (f.engine == "pronk") == ours]
            for ours in (True, False)
        ]
        if all(sides):
            own, peer = (max(side, key=_speed) for side in sides)
            share = _speed(own) / _speed(peer)
            lines.append(
                f"T = {temperature:g}: {own.method}, our fastest, runs at {share:.2f} times the speed of the fastest "
                f"peer, {peer.method}."
            )
    return lines


def _speed(figures: Figures) -> float:
    return 0.0 if figures.tokens_per_second is None else figures.tokens_per_second.median


def failures(model: ModelResult) -> list[tuple[str, str]]:
    """What failed, and why: one entry per method and reason."""
    prompts: dict[tuple[str, str], dict[str, None]] = {}
    for figures in model.figures:
        if figures.task == ALL:
            for each in figures.failures:
                prompts.setdefault((figures.method, each.reason), {})[each.id] = None
    return [(f"{method}, {_few(list(ids))}", reason) for (method, reason), ids in prompts.items()]


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _spread(value: Range | None) -> str:
    return _NOTHING if value is None else f"{value.median:.2f}±{value.spread:.2f}"


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value * 100:.1f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _count(value: object) -> str:
    """``9669440`` as ``9.7 M``."""
    if not isinstance(value, int):
        return "an unknown number of"
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.1f} M"
