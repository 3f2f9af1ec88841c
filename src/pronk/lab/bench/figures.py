"""Computation of a benchmark's result, the metrics of each method and task, from its records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import numpy as np

from pronk.lab.bench.document import (
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
from pronk.lab.bench.metrics import expected_tokens, inter_token_latencies, repeated_ngrams
from pronk.lab.bench.records import (
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
    with_models,
)
from pronk.serving import Stats, StepStats

# An output is a loop if a larger share of its 4-grams repeats earlier ones; natural text and code
# stay below this.
_LOOP_THRESHOLD = 0.5

_MAX_DEPTH = 16  # maximum length of ``Figures.acceptance``

# Samples ``[repeat][prompt]`` of the prompts that a method and plain decoding finished in all
# repeats.
Runs = list[list[Sample]]
RecordType = TypeVar("RecordType")


def _make_figures(
    method_samples: Sequence[Sample],
    plain_samples: Sequence[Sample],
    divergences: Sequence[DivergenceRecord],
    model: Model,
    bandwidth: Range | None,
    task: str,
) -> Figures:
    """Compute the metrics of one method on one task at one temperature.

    Without ``bandwidth`` (bytes per second of reading memory), ``over_floor`` is ``None``.
    """
    keys = list(dict.fromkeys(map(_key, method_samples)))
    repeats = range(1 + max(sample.repeat for sample in [*method_samples, *plain_samples]))
    by_method = _by_key(method_samples)
    by_plain = _by_key(plain_samples)
    finished = [
        key
        for key in keys
        if all((key, repeat) in by_method and (key, repeat) in by_plain for repeat in repeats)
    ]
    runs = [[by_method[key, repeat] for key in finished] for repeat in repeats]
    plain = [[by_plain[key, repeat] for key in finished] for repeat in repeats]
    first = method_samples[0]
    reason = "not measured in every repeat, or not by plain decoding"
    errors = {
        _key(sample): sample.error
        for sample in reversed(method_samples)
        if sample.error is not None
    }
    missing = [key for key in keys if key not in finished]
    failures = [Failure("/".join(key), errors.get(key, reason)) for key in missing]
    values: dict[str, Any] = {
        "task": task,
        "method": first.method,
        "engine": first.engine,
        "temperature": first.temperature,
        "prompts": len(finished),
        "asked": len(keys),
        "failures": tuple(failures),
    }
    if finished:
        shares = [repeated_ngrams(sample.tokens) for sample in runs[0]]
        values |= {
            "repeated": sum(shares) / len(shares),
            "degenerated": sum(s > _LOOP_THRESHOLD for s in shares),
        }
        values |= _speed(runs, plain) | _exactness(runs, plain, divergences)
        if all(sample.steps for samples in runs for sample in samples):
            values |= _acceptance(runs[0]) | _times(runs) | _costs(runs, plain, model, bandwidth)
    return Figures(**values)


def _make_range(values: Sequence[float]) -> Range:
    """Return the median of ``values``, at least one, and half of maximum minus minimum."""
    return Range(median(values), (max(values) - min(values)) / 2)


def _key(sample: Sample) -> tuple[str, str]:
    return sample.task, sample.id


def _by_key(samples: Sequence[Sample]) -> dict[tuple[tuple[str, str], int], Sample]:
    """Return the samples without an error, by (key of the prompt, repeat)."""
    return {(_key(sample), sample.repeat): sample for sample in samples if sample.error is None}


def _speed(runs: Runs, plain: Runs) -> dict[str, Any]:
    """Return the fields of Figures about speed and memory."""
    speeds = [_tokens_per_second(samples) for samples in runs]
    plain_speeds = [_tokens_per_second(samples) for samples in plain]
    samples = [sample for samples in runs for sample in samples]
    peaks = [sample.peak_memory for sample in samples if sample.peak_memory is not None]
    waited = [sample.waited for sample in samples if sample.waited is not None]
    speedups = [ours / theirs for ours, theirs in zip(speeds, plain_speeds, strict=True)]
    values: dict[str, Any] = {
        "tokens": _tokens(runs[0]),
        "tokens_per_second": _make_range(speeds),
        "speedup": _make_range(speedups),
        "peak_memory": max(peaks, default=None),
        "waited": sum(waited) / sum(sample.seconds for sample in samples) if waited else None,
    }
    if all(sample.ttft is not None for sample in samples):
        mean_ttfts = [sum(s.ttft or 0.0 for s in samples) / len(samples) for samples in runs]
        values["ttft"] = _make_range(mean_ttfts)
        latencies = [_seconds_per_later_token(samples) for samples in runs]
        plain_latencies = [_seconds_per_later_token(samples) for samples in plain]
        if all(seconds > 0 for seconds in (*latencies, *plain_latencies)):
            pairs = zip(latencies, plain_latencies, strict=True)
            values["decode_speedup"] = _make_range([theirs / ours for ours, theirs in pairs])
    return values


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)


def _tokens_per_second(samples: Sequence[Sample]) -> float:
    return _tokens(samples) / sum(sample.seconds for sample in samples)


def _seconds_per_later_token(samples: Sequence[Sample]) -> float:
    """Return the mean seconds per token, each sample's first step left out.

    0 if no later step has tokens.
    """
    tokens = 0
    for sample in samples:
        first_step_tokens = sample.steps[0].tokens if sample.steps else 1
        tokens += len(sample.tokens) - first_step_tokens
    if tokens <= 0:
        return 0.0
    return sum(sample.total_seconds - (sample.ttft or 0.0) for sample in samples) / tokens


def _exactness(runs: Runs, plain: Runs, divergences: Sequence[DivergenceRecord]) -> dict[str, Any]:
    """Return ``same``, ``compared`` and ``near_ties`` of Figures, or ``{}`` if nothing is compared.

    Nothing is compared for sampled outputs of a peer, which draws its own random numbers, nor for
    plain decoding with one repeat.
    """
    first = runs[0][0]
    is_sampled_peer = first.engine != "pronk" and first.temperature > 0
    if is_sampled_peer or (first.method == PLAIN and len(runs) == 1):
        return {}
    same = [
        all(run[i].tokens == sample.tokens for run in runs) for i, sample in enumerate(plain[0])
    ]
    differ = {_key(sample) for sample, equal in zip(runs[0], same, strict=True) if not equal}
    near_ties = 0
    for divergence in divergences:
        is_ours = (divergence.method, divergence.temperature) == (first.method, first.temperature)
        if is_ours and divergence.near_tie:
            near_ties += (divergence.task, divergence.id) in differ
    return {"same": sum(same), "compared": len(same), "near_ties": near_ties}


def _acceptance(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the fields of Figures about steps and draft tokens.

    ``samples`` are those of one repeat, because the counts are equal in all repeats. The last
    forward pass of the prefill generates a token and counts as a step: in plain decoding S = 1. The
    acceptance rates leave this step out unless it has draft tokens, which is possible only for a
    prompt of one token.
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
    """Return the calibration of the drafter's predictions (see ``Figures.trust``).

    One entry per bin that has draft tokens: mean predicted probability of acceptance, observed
    acceptance rate, number of draft tokens.
    """
    trusts = [sample.trust for sample in samples if sample.trust is not None]
    entries: list[tuple[float, float, int]] = []
    for bin_of_samples in zip(*trusts, strict=True):
        count, predicted, accepted = (sum(column) for column in zip(*bin_of_samples, strict=True))
        if count:
            entries.append((predicted / count, accepted / count, int(count)))
    return tuple(entries)


def _step_pairs(samples: Sequence[Sample]) -> Iterator[tuple[StepStats, StepStats]]:
    """Yield (previous step, step) for each step but a sample's first, which has the prefill."""
    for sample in samples:
        yield from pairwise(sample.steps or ())


def _times(runs: Runs) -> dict[str, Any]:
    """Return the fields ``itl`` and ``split`` of Figures, over the tokens of all repeats."""
    latencies: list[float] = []
    samples = [sample for samples in runs for sample in samples]
    for sample in samples:
        steps = list(pairwise(sample.steps or ()))
        latencies += inter_token_latencies(
            [b.clock - a.clock for a, b in steps], [b.tokens for _, b in steps]
        )
    last = [sample.steps[-1] for sample in samples if sample.steps]
    total = sum(step.clock for step in last)
    draft = sum(step.draft_clock for step in last)
    target = sum(step.target_clock for step in last)
    return {
        "itl": Latency(*np.percentile(latencies, (50, 90, 99)).tolist()) if latencies else None,
        "split": Split(draft / total, target / total, max(0.0, total - draft - target) / total),
    }


def _costs(runs: Runs, plain: Runs, model: Model, bandwidth: Range | None) -> dict[str, Any]:
    """Return the fields of Figures about rows, pass time, drafting time, expected speed-up."""
    steps = [pair for samples in runs for pair in _step_pairs(samples)]
    plain_steps = [pair for samples in plain for pair in _step_pairs(samples)]
    if not steps or not plain_steps:
        return {}
    target_seconds = _mean_time(steps, lambda s: s.target_clock)
    plain_seconds = _mean_time(plain_steps, lambda s: s.target_clock)
    values: dict[str, Any] = {
        "rows_per_pass": sum(step.rows for _, step in steps) / len(steps),
        "verify_cost": target_seconds / plain_seconds,
    }
    if bandwidth is not None:
        # A forward pass reads the weights, and the KV cache of the prompt and, on average, of half
        # the output.
        cached = [(s.prompt_tokens + len(s.tokens) / 2) * s.batch for s in runs[0]]
        mean_cached = sum(cached) / len(cached)
        num_bytes = model.pass_bytes + model.kv_bytes_per_token * mean_cached
        values["over_floor"] = _mean_time(steps, lambda s: s.clock) * bandwidth.median / num_bytes
    shares = Stats(steps=[step for _, step in steps]).acceptance
    if shares:
        depths = [step.depth for _, step in steps]
        cost = _mean_time(steps, lambda s: s.draft_clock) * len(steps) / sum(depths) / plain_seconds
        expected = sum(expected_tokens(shares[0], depth) for depth in depths)
        values["cost_coefficient"] = cost
        values["expected_speedup"] = expected / sum(depth * cost + 1 for depth in depths)
    return values


def _mean_time(
    steps: Sequence[tuple[StepStats, StepStats]], clock: Callable[[StepStats], float]
) -> float:
    """Return the mean seconds by which ``clock`` advances from the previous step to the step."""
    return sum(clock(step) - clock(before) for before, step in steps) / len(steps)


def summarize(records: Sequence[Record]) -> Document:
    """Compute all metrics from the records, which begin with a ``Start``."""
    start = records[0]
    assert isinstance(start, Start)
    end = records[-1] if isinstance(records[-1], End) else End(interrupted=True)
    by_model: dict[str, list[Record]] = {}
    for name, record in with_models(records[1:]):
        by_model.setdefault(name, []).append(record)
    return Document(
        **vars(start),
        degenerate_above=_LOOP_THRESHOLD,
        interrupted=end.interrupted,
        models=tuple(_model_result(group) for name, group in by_model.items() if name),
    )


def _select(records: Sequence[Record], record_type: type[RecordType]) -> list[RecordType]:
    return [record for record in records if isinstance(record, record_type)]


def _model_result(records: Sequence[Record]) -> ModelResult:
    model = _select(records, Model)[0]  # a resumed benchmark has several
    speeds = [record.bytes_per_second for record in _select(records, Bandwidth)]
    bandwidth = _make_range(speeds) if speeds else None
    times = _select(records, PassTime)
    pass_costs: list[PassCost] = []
    for rows in sorted({t.rows for t in times}):
        seconds = median([t.seconds for t in times if t.rows == rows])
        fewest_rows = pass_costs[0].seconds if pass_costs else seconds
        pass_costs.append(PassCost(rows, seconds, seconds / fewest_rows))
    skipped = {f"{skip.task}/{skip.id}": skip.reason for skip in _select(records, Skip)}
    return ModelResult(
        **vars(model),
        bandwidth=bandwidth,
        pass_cost=tuple(pass_costs),
        peers={peer.method: peer.notes for peer in _select(records, PeerRecord)},
        skipped=tuple(Failure(name, reason) for name, reason in skipped.items()),
        figures=tuple(_make_all_figures(records, model, bandwidth)),
    )


def _make_all_figures(
    records: Sequence[Record], model: Model, bandwidth: Range | None
) -> Iterator[Figures]:
    """Yield the metrics of each task (aggregates last), temperature and method, in this order."""
    samples = _select(records, Sample)
    divergences = _select(records, DivergenceRecord)
    plain = [s for s in samples if s.method == PLAIN]
    loops = {
        (*_key(s), s.temperature) for s in plain if repeated_ngrams(s.tokens) > _LOOP_THRESHOLD
    }
    tasks = {
        task: [s for s in samples if s.task == task]
        for task in dict.fromkeys(s.task for s in samples)
    }
    tasks |= {ALL: samples, SOUND: [s for s in samples if (*_key(s), s.temperature) not in loops]}
    for task, task_samples in tasks.items():
        for temperature in dict.fromkeys(s.temperature for s in samples):
            at_temperature = [s for s in task_samples if s.temperature == temperature]
            plain_samples = [s for s in at_temperature if s.method == PLAIN]
            for method in model.methods:
                method_samples = [s for s in at_temperature if s.method == method]
                if method_samples:
                    yield _make_figures(
                        method_samples, plain_samples, divergences, model, bandwidth, task
                    )
