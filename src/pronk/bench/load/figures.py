"""Figures of what a load test measured: throughput by rounds, latencies by calls, goodput by targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from pronk.bench.document import Range
from pronk.bench.load.document import LoadDocument, LoadFigures, Problem, ServerFacts, Summary
from pronk.bench.load.measure import Found, LoadPlan
from pronk.bench.load.records import Call, Targets, Window
from pronk.bench.metrics import spread

__all__ = ["make_document", "make_figures", "summarize", "sustained_rates"]

# DistServe (Zhong et al.), section 2: goodput is the highest rate at which, say, 90 of 100 requests attain the targets.
_ATTAINED = 0.9


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean and percentiles; ``None`` of nothing."""
    if not values:
        return None
    return Summary(len(values), float(np.mean(values)), *map(float, np.percentile(values, (50, 90, 95, 99))))


def make_figures(windows: Sequence[Window], base: Sequence[Window], targets: Targets) -> LoadFigures:
    """The figures of one server at one level.

    Args:
        windows: its rounds, at least one, each with a call or more.
        base: those of the server that it is compared with, at the same level.
        targets: for goodput.
    """
    calls = tuple(call for window in windows for call in window.calls)
    fine = [call for call in calls if call.error is None]
    wanted = targets != Targets()
    prompt = _total(fine, lambda call: call.prompt_tokens)
    tokens, steps = sum(call.tokens for call in fine), _total(fine, lambda call: call.steps)
    return LoadFigures(
        server=windows[0].server,
        level=windows[0].level,
        rounds=len(windows),
        sent=len(calls),
        answered=len(fine),
        problems=_problems(calls),
        seconds=sum(window.seconds for window in windows),
        requests_per_second=_rate(windows, lambda _: 1),
        tokens_per_second=_rate(windows, lambda call: call.tokens),
        prompt_tokens_per_second=None if prompt is None else _rate(windows, lambda call: call.prompt_tokens or 0),
        ratio=_ratio(windows, base),
        **_latencies(fine),
        good=sum(map(targets.met_by, calls)) / len(calls) if wanted else None,
        goodput=_rate(windows, targets.met_by) if wanted else None,
        tokens=tokens,
        prompt_tokens=prompt,
        cached_tokens=_total(fine, lambda call: call.cached_tokens),
        counted=dict(Counter(call.counted for call in fine)),
        steps=steps,
        S=tokens / steps if steps else None,
        drafted=_total(fine, lambda call: call.drafted),
        accepted=_total(fine, lambda call: call.accepted),
        late=float(np.percentile([call.late for call in calls], 99)),
        busy=sum(window.busy for window in windows) / max(sum(window.seconds for window in windows), 1e-9),
        calls=calls,
    )


def _latencies(fine: Sequence[Call]) -> dict[str, Any]:
    return {
        "ttft": summarize([call.ttft for call in fine]),
        "tpot": summarize([call.tpot for call in fine if call.tpot is not None]),
        "gap": summarize([gap for call in fine for gap in call.gaps]),
        "e2e": summarize([call.e2e for call in fine]),
    }


def _total(calls: Sequence[Call], count: Callable[[Call], int | None]) -> int | None:
    """A sum over the calls; ``None`` unless all of them know it."""
    counts = [count(call) for call in calls]
    known = [value for value in counts if value is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _rate(windows: Sequence[Window], weight: Callable[[Call], float]) -> Range:
    """So much of what was answered a second: the median of the rounds, and half of their range."""
    return _range([_per_second(window, weight) for window in windows])


def _per_second(window: Window, weight: Callable[[Call], float]) -> float:
    return sum(weight(call) for call in window.calls if call.error is None) / max(window.seconds, 1e-9)


def _ratio(windows: Sequence[Window], base: Sequence[Window]) -> Range | None:
    speeds = {window.turn: _per_second(window, lambda call: call.tokens) for window in base}
    ratios = [
        _per_second(window, lambda call: call.tokens) / speeds[window.turn]
        for window in windows
        if speeds.get(window.turn)
    ]
    return _range(ratios) if ratios else None


def _range(values: Sequence[float]) -> Range:
    return Range(median(values), spread(values))


def _problems(calls: Iterable[Call]) -> tuple[Problem, ...]:
    found: dict[str, list[Call]] = {}
    for call in calls:
        if call.error is not None:
            found.setdefault(call.error, []).append(call)
    return tuple(Problem(label, len(failed), failed[0].reason) for label, failed in found.items())


def sustained_rates(figures: Iterable[LoadFigures]) -> dict[str, float | None]:
    """Server to the highest rate of an open loop at which nine of ten requests kept the targets, of those measured.

    ``None`` stands for a server that did at none of them; without targets, or without an open loop, there is nobody.
    """
    rates: dict[str, float | None] = {}
    for f in figures:
        if f.level.loop == "open" and f.good is not None:
            best = rates.setdefault(f.server, None)
            if f.good >= _ATTAINED:
                rates[f.server] = max(best or 0.0, f.level.value)
    return rates


def make_document(plan: LoadPlan, found: Found, *, interrupted: bool, **facts: Any) -> LoadDocument:
    """The document of what was measured.

    Args:
        plan: what was to be measured.
        found: what was.
        interrupted: whether it ended early.
        facts: when it was started, and the document's other facts about the client.
    """
    windows = [window for window in found.windows if window.calls]
    figures = []
    for level in plan.levels:
        here = [window for window in windows if window.level == level]
        base = [window for window in here if window.server == plan.servers[0].name]
        by_server = ([window for window in here if window.server == server.name] for server in plan.servers)
        figures += [make_figures(own, base, plan.targets) for own in by_server if own]
    servers = tuple(ServerFacts(s.server.name, s.server.url, s.model, s.without) for s in found.sessions)
    return LoadDocument(
        servers=servers,
        targets=plan.targets,
        interrupted=interrupted,
        figures=tuple(figures),
        sustained=sustained_rates(figures),
        **facts,
    )
