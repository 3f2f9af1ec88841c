"""Metrics of one method, computed from its samples and plain decoding's samples for the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from pronk.bench.document import Failure, Figures, Latency, Range, Split
from pronk.bench.metrics import ctar_curve, expected_tokens, inter_token_latencies, repeated_ngrams, spread
from pronk.bench.records import PLAIN, DivergenceRecord, Model, Sample
from pronk.engine.stats import Stats, StepStats

__all__ = ["LOOP_THRESHOLD", "make_figures", "make_range"]

# An output with a larger share of repeated 4-grams counts as a loop; natural text and code stay below.
LOOP_THRESHOLD = 0.5

# Maximum number of draft positions in the acceptance curves.
_MAX_POSITIONS = 16

Key = tuple[str, str]


@dataclass(frozen=True)
class _Pairs:
    """Samples ``[repeat][prompt]`` of the prompts that both methods finished in every repeat."""

    own: list[list[Sample]]  # of the method
    plain: list[list[Sample]]  # of plain decoding


def make_figures(
    own: Sequence[Sample],
    plain: Sequence[Sample],
    divergences: Sequence[DivergenceRecord],
    model: Model,
    bandwidth: Range | None,
    task: str,
) -> Figures:
    """Compute the metrics of one method at one temperature.

    Args:
        own: samples of the method, at least one; all at the same temperature.
        plain: plain decoding's samples for the same prompts.
        divergences: differences from plain decoding; those of other methods and prompts are ignored.
        model: gives the bytes that a forward pass reads.
        bandwidth: bytes per second of reading memory; ``None`` leaves ``over_floor`` out.
        task: name of the task or aggregate that the samples belong to.
    """
    keys = list(dict.fromkeys(_key(sample) for sample in own))
    pairs, failures = _pair(keys, own, plain)
    first = own[0]
    values: dict[str, Any] = {
        "task": task,
        "method": first.method,
        "engine": first.engine,
        "temperature": first.temperature,
        "prompts": len(pairs.own[0]) if pairs.own else 0,
        "asked": len(keys),
        "failures": failures,
    }
    if values["prompts"]:
        values |= _speed(pairs) | _sameness(pairs, divergences) | _repetition(pairs.own[0])
        if all(sample.steps for samples in pairs.own for sample in samples):
            values |= _acceptance(pairs.own[0]) | _times(pairs) | _costs(pairs, model, bandwidth)
    return Figures(**values)


def make_range(values: Sequence[float]) -> Range:
    """Return the median and the spread of one or more values."""
    return Range(median(values), spread(values))


def _pair(keys: Sequence[Key], own: Sequence[Sample], plain: Sequence[Sample]) -> tuple[_Pairs, tuple[Failure, ...]]:
    repeats = range(1 + max(sample.repeat for sample in [*own, *plain]))
    done = [{(_key(s), s.repeat): s for s in samples if s.error is None} for samples in (own, plain)]
    errors = {_key(sample): sample.error for sample in reversed(own) if sample.error is not None}
    whole = [key for key in keys if all((key, r) in samples for samples in done for r in repeats)]
    missing = (key for key in keys if key not in whole)
    failures = (
        Failure("/".join(key), errors.get(key, "not measured in every repeat, or not by plain decoding"))
        for key in missing
    )
    mine, theirs = ([[samples[key, r] for key in whole] for r in repeats] for samples in done)
    return _Pairs(mine, theirs), tuple(failures)


def _key(sample: Sample) -> Key:
    return sample.task, sample.id


def _speed(pairs: _Pairs) -> dict[str, Any]:
    own, plain = ([_tokens(s) / sum(x.seconds for x in s) for s in side] for side in (pairs.own, pairs.plain))
    values: dict[str, Any] = {
        "tokens": _tokens(pairs.own[0]),
        "tokens_per_second": make_range(own),
        "speedup": make_range([ours / theirs for ours, theirs in zip(own, plain, strict=True)]),
    }
    samples = [sample for samples in pairs.own for sample in samples]
    peaks = [sample.peak_memory for sample in samples if sample.peak_memory is not None]
    if peaks:
        values["peak_memory"] = max(peaks)
    waited = [sample.waited for sample in samples if sample.waited is not None]
    if waited:
        values["waited"] = sum(waited) / sum(sample.seconds for sample in samples)
    if all(sample.ttft is not None for sample in samples):
        values["ttft"] = make_range([sum(s.ttft or 0.0 for s in samples) / len(samples) for samples in pairs.own])
        after = [[_per_token_after_first(s) for s in side] for side in (pairs.own, pairs.plain)]
        if all(seconds > 0 for side in after for seconds in side):
            values["decode_speedup"] = make_range([theirs / ours for ours, theirs in zip(*after, strict=True)])
    return values


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)


def _per_token_after_first(samples: Sequence[Sample]) -> float:
    """Return the seconds per token after the first step; 0 if the first step generated all tokens."""
    tokens = sum(len(s.tokens) - (s.steps[0].tokens if s.steps else 1) for s in samples)
    return sum(s.total_seconds - (s.ttft or 0.0) for s in samples) / tokens if tokens > 0 else 0.0


def _sameness(pairs: _Pairs, divergences: Sequence[DivergenceRecord]) -> dict[str, Any]:
    """Count the prompts whose outputs in all repeats equal plain decoding's output of the first repeat.

    A peer draws its own random numbers, so only greedy outputs of peers are compared.
    """
    first = pairs.own[0][0]
    if (first.engine != "pronk" and first.temperature > 0) or (first.method == PLAIN and len(pairs.own) == 1):
        return {}
    plain = pairs.plain[0]
    same = [all(own[i].tokens == plain[i].tokens for own in pairs.own) for i in range(len(plain))]
    differ = {_key(sample) for sample, equal in zip(pairs.own[0], same, strict=True) if not equal}
    ties = [d for d in divergences if (d.method, d.temperature) == (first.method, first.temperature) and d.near_tie]
    return {"same": sum(same), "compared": len(same), "near_ties": sum((d.task, d.id) in differ for d in ties)}


def _repetition(samples: Sequence[Sample]) -> dict[str, Any]:
    shares = [repeated_ngrams(sample.tokens) for sample in samples]
    return {"repeated": sum(shares) / len(shares), "degenerated": sum(share > LOOP_THRESHOLD for share in shares)}


def _acceptance(samples: Sequence[Sample]) -> dict[str, Any]:
    """Count verified and accepted draft tokens of one repeat; all repeats have the same counts.

    The prefill's last forward pass counts as a step, so that plain decoding has S = 1. The acceptance rates leave this
    step out unless it has draft tokens, which is possible for a prompt of one token only.
    """
    numbered = [pair for sample in samples for pair in enumerate(sample.steps or ())]
    drafting = [step for number, step in numbered if number or step.depth]
    accepted, shares = [step.accepted for step in drafting], Stats(steps=drafting).acceptance
    deepest = min(len(shares), _MAX_POSITIONS)
    return {
        "steps": len(numbered),
        "S": _tokens(samples) / len(numbered),
        "drafted": sum(step.drafted for step in drafting),
        "accepted": sum(accepted),
        "alpha": shares[0] if shares else None,
        "acceptance": tuple(shares[:_MAX_POSITIONS]),
        "trust": _calibration(samples),
        "ctar": tuple(ctar_curve(accepted, deepest)) if deepest else (),
    }


def _calibration(samples: Sequence[Sample]) -> tuple[tuple[float, float, int], ...]:
    """Return mean prediction, observed acceptance and number of draft tokens of each non-empty bin."""
    bins = [
        [sum(column) for column in zip(*one_bin, strict=True)]
        for one_bin in zip(*(s.trust for s in samples if s.trust is not None), strict=True)
    ]
    return tuple((predicted / count, accepted / count, int(count)) for count, predicted, accepted in bins if count)


def _step_pairs(samples: Sequence[Sample]) -> Iterator[tuple[StepStats, StepStats]]:
    """Yield (previous step, step) for all steps but the first one of a sample, which contains the prefill."""
    for sample in samples:
        yield from pairwise(sample.steps or ())


def _times(pairs: _Pairs) -> dict[str, Any]:
    """Return percentiles of inter-token latencies, and the split of the time."""
    waits: list[float] = []
    samples = [sample for samples in pairs.own for sample in samples]
    for sample in samples:
        steps = list(pairwise(sample.steps or ()))
        waits += inter_token_latencies([b.clock - a.clock for a, b in steps], [b.tokens for _, b in steps])
    values: dict[str, Any] = {}
    if waits:
        values["itl"] = Latency(*np.percentile(waits, (50, 90, 99)).tolist())
    last = [sample.steps[-1] for sample in samples if sample.steps]
    total, draft, target = (sum(getattr(s, name) for s in last) for name in ("clock", "draft_clock", "target_clock"))
    values["split"] = Split(draft / total, target / total, max(0.0, total - draft - target) / total)
    return values


def _costs(pairs: _Pairs, model: Model, bandwidth: Range | None) -> dict[str, Any]:
    """Return rows, verification and drafting costs of a forward pass, and the expected speed-up."""
    own = [pair for samples in pairs.own for pair in _step_pairs(samples)]
    plain = [pair for samples in pairs.plain for pair in _step_pairs(samples)]
    if not own or not plain:
        return {}
    target, base = _mean_time(own, lambda s: s.target_clock), _mean_time(plain, lambda s: s.target_clock)
    values: dict[str, Any] = {
        "rows_per_pass": sum(step.rows for _, step in own) / len(own),
        "verify_cost": target / base,
    }
    if bandwidth is not None:
        values["over_floor"] = _mean_time(own, lambda s: s.clock) * bandwidth.median / _bytes_read(pairs.own[0], model)
    shares = Stats(steps=[step for _, step in own]).acceptance
    if shares:
        depths = [step.depth for _, step in own]
        cost = _mean_time(own, lambda s: s.draft_clock) * len(own) / sum(depths) / base
        tokens = sum(expected_tokens(shares[0], depth) for depth in depths)
        values["cost_coefficient"] = cost
        values["expected_speedup"] = tokens / sum(depth * cost + 1 for depth in depths)
    return values


def _mean_time(steps: Sequence[tuple[StepStats, StepStats]], clock: Callable[[StepStats], float]) -> float:
    return sum(clock(step) - clock(before) for before, step in steps) / len(steps)


def _bytes_read(samples: Sequence[Sample], model: Model) -> float:
    """Return the bytes that a forward pass reads: weights, and the KV cache of half-finished outputs."""
    tokens = sum((sample.prompt_tokens + len(sample.tokens) / 2) * sample.batch for sample in samples) / len(samples)
    return model.pass_bytes + model.kv_bytes_per_token * tokens
