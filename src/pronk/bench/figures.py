"""Compute the result document of a benchmark from its records: the metrics of each method and task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import numpy as np

from pronk.bench.document import (
    ALL,
    SOUND,
    Document,
    Failure,
    Figures,
    Latency,
    ModelResult,
    PassCost,
    Range,
    Split,
)
from pronk.bench.metrics import expected_tokens, inter_token_latencies, repeated_ngrams
from pronk.bench.records import (
    PLAIN,
    Bandwidth,
    DivergenceRecord,
    End,
    Model,
    PassTime,
    PeerRecord,
    Record,
    Sample,
    Skip,
    Start,
)
from pronk.engine.stats import Stats, StepStats

# An output is a loop if a larger share of its 4-grams repeats earlier ones; natural text and code stay below this.
_LOOP_THRESHOLD = 0.5

# maximum length of ``Figures.acceptance``
_MAX_DEPTH = 16

Key = tuple[str, str]  # task and id of a prompt
RecordType = TypeVar("RecordType")


@dataclass(frozen=True)
class _Pairs:
    """Samples ``[repeat][prompt]`` of the prompts that method and plain decoding finished in all repeats."""

    method: list[list[Sample]]
    plain: list[list[Sample]]


def make_figures(
    method_samples: Sequence[Sample],
    plain_samples: Sequence[Sample],
    divergences: Sequence[DivergenceRecord],
    model: Model,
    bandwidth: Range | None,
    task: str,
) -> Figures:
    """Compute the metrics of one method at one temperature.

    There is at least one sample of the method, and plain decoding's samples are those of the same prompts. Divergences
    of other methods and prompts have no effect. ``bandwidth`` is in bytes per second; ``None`` leaves ``over_floor``
    out.
    """
    keys = list(dict.fromkeys(_key(sample) for sample in method_samples))
    pairs, failures = _pair(keys, method_samples, plain_samples)
    first = method_samples[0]
    values: dict[str, Any] = {
        "task": task,
        "method": first.method,
        "engine": first.engine,
        "temperature": first.temperature,
        "prompts": len(pairs.method[0]) if pairs.method else 0,
        "asked": len(keys),
        "failures": failures,
    }
    if values["prompts"]:
        values |= _speed(pairs) | _exactness(pairs, divergences) | _repetition(pairs.method[0])
        if all(sample.steps for samples in pairs.method for sample in samples):
            values |= _acceptance(pairs.method[0]) | _times(pairs) | _costs(pairs, model, bandwidth)
    return Figures(**values)


def _make_range(values: Sequence[float]) -> Range:
    """Return the median of one or more values, and half the distance from the smallest to the largest."""
    return Range(median(values), (max(values) - min(values)) / 2)


def _pair(keys: Sequence[Key], method: Sequence[Sample], plain: Sequence[Sample]) -> tuple[_Pairs, tuple[Failure, ...]]:
    repeats = range(1 + max(sample.repeat for sample in [*method, *plain]))
    by_key = [{(_key(s), s.repeat): s for s in samples if s.error is None} for samples in (method, plain)]
    errors = {_key(sample): sample.error for sample in reversed(method) if sample.error is not None}
    finished = [key for key in keys if all((key, r) in samples for samples in by_key for r in repeats)]
    missing = (key for key in keys if key not in finished)
    failures = (
        Failure("/".join(key), errors.get(key, "not measured in every repeat, or not by plain decoding"))
        for key in missing
    )
    method_runs, plain_runs = ([[samples[key, r] for key in finished] for r in repeats] for samples in by_key)
    return _Pairs(method_runs, plain_runs), tuple(failures)


def _key(sample: Sample) -> Key:
    return sample.task, sample.id


def _speed(pairs: _Pairs) -> dict[str, Any]:
    speeds, plain = ([_tokens(s) / sum(x.seconds for x in s) for s in side] for side in (pairs.method, pairs.plain))
    values: dict[str, Any] = {
        "tokens": _tokens(pairs.method[0]),
        "tokens_per_second": _make_range(speeds),
        "speedup": _make_range([ours / theirs for ours, theirs in zip(speeds, plain, strict=True)]),
    }
    samples = [sample for samples in pairs.method for sample in samples]
    peaks = [sample.peak_memory for sample in samples if sample.peak_memory is not None]
    if peaks:
        values["peak_memory"] = max(peaks)
    waited = [sample.waited for sample in samples if sample.waited is not None]
    if waited:
        values["waited"] = sum(waited) / sum(sample.seconds for sample in samples)
    if all(sample.ttft is not None for sample in samples):
        values["ttft"] = _make_range([sum(s.ttft or 0.0 for s in samples) / len(samples) for samples in pairs.method])
        decode_seconds = [[_per_token_after_first(s) for s in side] for side in (pairs.method, pairs.plain)]
        if all(seconds > 0 for side in decode_seconds for seconds in side):
            values["decode_speedup"] = _make_range(
                [theirs / ours for ours, theirs in zip(*decode_seconds, strict=True)]
            )
    return values


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)


def _per_token_after_first(samples: Sequence[Sample]) -> float:
    """Return the mean seconds per token without each sample's first step; 0 if no other step has tokens."""
    tokens = sum(len(s.tokens) - (s.steps[0].tokens if s.steps else 1) for s in samples)
    return sum(s.total_seconds - (s.ttft or 0.0) for s in samples) / tokens if tokens > 0 else 0.0


def _exactness(pairs: _Pairs, divergences: Sequence[DivergenceRecord]) -> dict[str, Any]:
    """Return ``same``, ``compared`` and ``near_ties`` of Figures, or ``{}`` if nothing is compared.

    Not compared: sampled outputs of a peer, which draws its own random numbers, and plain decoding with one repeat.
    """
    first = pairs.method[0][0]
    if (first.engine != "pronk" and first.temperature > 0) or (first.method == PLAIN and len(pairs.method) == 1):
        return {}
    plain = pairs.plain[0]
    same = [all(run[i].tokens == plain[i].tokens for run in pairs.method) for i in range(len(plain))]
    differ = {_key(sample) for sample, equal in zip(pairs.method[0], same, strict=True) if not equal}
    ties = [d for d in divergences if (d.method, d.temperature) == (first.method, first.temperature) and d.near_tie]
    return {"same": sum(same), "compared": len(same), "near_ties": sum((d.task, d.id) in differ for d in ties)}


def _repetition(samples: Sequence[Sample]) -> dict[str, Any]:
    shares = [repeated_ngrams(sample.tokens) for sample in samples]
    return {"repeated": sum(shares) / len(shares), "degenerated": sum(share > _LOOP_THRESHOLD for share in shares)}


def _acceptance(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the fields of Figures about steps and draft tokens, from one repeat: all have equal counts.

    The last forward pass of the prefill generates a token and counts as a step: in plain decoding S = 1. The acceptance
    rates leave this step out unless it has draft tokens, which is possible only for a prompt of one token.
    """
    numbered_steps = [pair for sample in samples for pair in enumerate(sample.steps or ())]
    draft_steps = [step for number, step in numbered_steps if number or step.depth]
    shares = Stats(steps=draft_steps).acceptance
    return {
        "steps": len(numbered_steps),
        "S": _tokens(samples) / len(numbered_steps),
        "drafted": sum(step.drafted for step in draft_steps),
        "accepted": sum(step.accepted for step in draft_steps),
        "alpha": shares[0] if shares else None,
        "acceptance": tuple(shares[:_MAX_DEPTH]),
        "trust": _calibration(samples),
    }


def _calibration(samples: Sequence[Sample]) -> tuple[tuple[float, float, int], ...]:
    """Return (mean prediction, acceptance rate, number of draft tokens) of each bin with draft tokens."""
    bins = [
        [sum(column) for column in zip(*one_bin, strict=True)]
        for one_bin in zip(*(s.trust for s in samples if s.trust is not None), strict=True)
    ]
    return tuple((predicted / count, accepted / count, int(count)) for count, predicted, accepted in bins if count)


def _step_pairs(samples: Sequence[Sample]) -> Iterator[tuple[StepStats, StepStats]]:
    """Yield (previous step, step) for each step but a sample's first one, which contains the prefill."""
    for sample in samples:
        yield from pairwise(sample.steps or ())


def _times(pairs: _Pairs) -> dict[str, Any]:
    """Return the fields ``itl`` (percentiles over tokens of all repeats) and ``split`` of Figures."""
    latencies: list[float] = []
    samples = [sample for samples in pairs.method for sample in samples]
    for sample in samples:
        steps = list(pairwise(sample.steps or ()))
        latencies += inter_token_latencies([b.clock - a.clock for a, b in steps], [b.tokens for _, b in steps])
    values: dict[str, Any] = {}
    if latencies:
        values["itl"] = Latency(*np.percentile(latencies, (50, 90, 99)).tolist())
    last = [sample.steps[-1] for sample in samples if sample.steps]
    total, draft, target = (sum(getattr(s, name) for s in last) for name in ("clock", "draft_clock", "target_clock"))
    values["split"] = Split(draft / total, target / total, max(0.0, total - draft - target) / total)
    return values


def _costs(pairs: _Pairs, model: Model, bandwidth: Range | None) -> dict[str, Any]:
    """Return the fields of Figures about costs: rows, pass time, drafting time, expected speed-up."""
    steps = [pair for samples in pairs.method for pair in _step_pairs(samples)]
    plain_steps = [pair for samples in pairs.plain for pair in _step_pairs(samples)]
    if not steps or not plain_steps:
        return {}
    target_seconds = _mean_time(steps, lambda s: s.target_clock)
    plain_seconds = _mean_time(plain_steps, lambda s: s.target_clock)
    values: dict[str, Any] = {
        "rows_per_pass": sum(step.rows for _, step in steps) / len(steps),
        "verify_cost": target_seconds / plain_seconds,
    }
    if bandwidth is not None:
        num_bytes = _bytes_read(pairs.method[0], model)
        values["over_floor"] = _mean_time(steps, lambda s: s.clock) * bandwidth.median / num_bytes
    shares = Stats(steps=[step for _, step in steps]).acceptance
    if shares:
        depths = [step.depth for _, step in steps]
        cost = _mean_time(steps, lambda s: s.draft_clock) * len(steps) / sum(depths) / plain_seconds
        tokens = sum(expected_tokens(shares[0], depth) for depth in depths)
        values["cost_coefficient"] = cost
        values["expected_speedup"] = tokens / sum(depth * cost + 1 for depth in depths)
    return values


def _mean_time(steps: Sequence[tuple[StepStats, StepStats]], clock: Callable[[StepStats], float]) -> float:
    return sum(clock(step) - clock(before) for before, step in steps) / len(steps)


def _bytes_read(samples: Sequence[Sample], model: Model) -> float:
    """Return the mean bytes that a forward pass reads: weights, KV cache of prompt and half the output."""
    tokens = sum((sample.prompt_tokens + len(sample.tokens) / 2) * sample.batch for sample in samples) / len(samples)
    return model.pass_bytes + model.kv_bytes_per_token * tokens


@dataclass
class _Section:
    """A model, and the records that follow it, up to the next model."""

    model: Model
    records: list[Record] = field(default_factory=list)

    def select(self, record_type: type[RecordType]) -> list[RecordType]:
        return [record for record in self.records if isinstance(record, record_type)]


def summarize(records: Sequence[Record]) -> Document:
    """Compute all metrics from the records, the first of which is a :class:`~pronk.bench.records.Start`."""
    start = records[0]
    assert isinstance(start, Start)
    end = records[-1] if isinstance(records[-1], End) else End(interrupted=True)
    return Document(
        **vars(start),
        degenerate_above=_LOOP_THRESHOLD,
        interrupted=end.interrupted,
        models=tuple(_model_result(section) for section in _sections(records)),
    )


def _sections(records: Iterable[Record]) -> list[_Section]:
    sections: dict[str, _Section] = {}
    section: _Section | None = None
    for record in records:
        if isinstance(record, Model):  # a resumed benchmark has several of one model
            section = sections.setdefault(record.name, _Section(record))
        elif section is not None:
            section.records.append(record)
    return [*sections.values()]


def _model_result(section: _Section) -> ModelResult:
    speeds = [record.bytes_per_second for record in section.select(Bandwidth)]
    bandwidth = _make_range(speeds) if speeds else None
    skipped = {f"{skip.task}/{skip.id}": skip.reason for skip in section.select(Skip)}
    return ModelResult(
        **vars(section.model),
        bandwidth=bandwidth,
        pass_cost=_pass_costs(section.select(PassTime)),
        peers={peer.method: peer.notes for peer in section.select(PeerRecord)},
        skipped=tuple(Failure(name, reason) for name, reason in skipped.items()),
        figures=tuple(_make_all_figures(section, bandwidth)),
    )


def _pass_costs(times: Sequence[PassTime]) -> tuple[PassCost, ...]:
    seconds = {rows: median([t.seconds for t in times if t.rows == rows]) for rows in sorted({t.rows for t in times})}
    return tuple(PassCost(rows, duration, duration / seconds[min(seconds)]) for rows, duration in seconds.items())


def _make_all_figures(section: _Section, bandwidth: Range | None) -> Iterator[Figures]:
    """Yield the metrics of each task (aggregates last), temperature and method, in this order."""
    model, samples = section.model, section.select(Sample)
    loops = {_sample_key(s) for s in samples if s.method == PLAIN and repeated_ngrams(s.tokens) > _LOOP_THRESHOLD}
    tasks = {task: [s for s in samples if s.task == task] for task in dict.fromkeys(s.task for s in samples)}
    tasks |= {ALL: samples, SOUND: [s for s in samples if _sample_key(s) not in loops]}
    divergences = section.select(DivergenceRecord)
    for task, task_samples in tasks.items():
        for temperature in dict.fromkeys(s.temperature for s in samples):
            at_temperature = [s for s in task_samples if s.temperature == temperature]
            plain_samples = [s for s in at_temperature if s.method == PLAIN]
            for method in model.methods:
                method_samples = [s for s in at_temperature if s.method == method]
                if method_samples:
                    yield make_figures(method_samples, plain_samples, divergences, model, bandwidth, task)


def _sample_key(sample: Sample) -> tuple[str, str, float]:
    return sample.task, sample.id, sample.temperature
