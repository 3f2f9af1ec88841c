"""One method's figures, from its samples and plain decoding's on the same prompts."""

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

__all__ = ["Yardstick", "figures_of"]

# Positions that the curves of acceptance go to.
_POSITIONS = 16

Key = tuple[str, str]


@dataclass(frozen=True)
class Yardstick:
    """What figures are held against: the model's sizes, the memory's speed, and when an output counts as a loop."""

    model: Model
    bandwidth: Range | None
    degenerate_above: float


@dataclass(frozen=True)
class _Pairs:
    """The prompts that both finished in every repeat: the method's samples and plain decoding's, repeat by repeat."""

    own: list[list[Sample]]
    plain: list[list[Sample]]


def figures_of(
    own: Sequence[Sample],
    plain: Sequence[Sample],
    divergences: Sequence[DivergenceRecord],
    yardstick: Yardstick,
    task: str,
) -> Figures:
    """The figures of one method at one temperature.

    Args:
        own: its samples, at least one; all of one method and one temperature.
        plain: plain decoding's, of the same prompts.
        divergences: where outputs part from plain decoding's; those of other samples are ignored.
        yardstick: what to hold the figures against.
        task: the name they go by.
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
        values |= _speed(pairs) | _sameness(pairs, divergences) | _repetition(pairs.own[0], yardstick.degenerate_above)
        if all(sample.steps for samples in pairs.own for sample in samples):
            values |= _acceptance(pairs.own[0]) | _times(pairs) | _costs(pairs, yardstick)
    return Figures(**values)


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


def _range(values: Sequence[float]) -> Range:
    return Range(median(values), spread(values))


def _speed(pairs: _Pairs) -> dict[str, Any]:
    own, plain = ([_tokens(s) / sum(x.seconds for x in s) for s in side] for side in (pairs.own, pairs.plain))
    values: dict[str, Any] = {
        "tokens": _tokens(pairs.own[0]),
        "tokens_per_second": _range(own),
        "speedup": _range([ours / theirs for ours, theirs in zip(own, plain, strict=True)]),
    }
    peaks = [sample.peak_memory for samples in pairs.own for sample in samples if sample.peak_memory is not None]
    if peaks:
        values["peak_memory"] = max(peaks)
    waited = [sample.waited for samples in pairs.own for sample in samples if sample.waited is not None]
    if waited:
        values["waited"] = sum(waited) / sum(sample.seconds for samples in pairs.own for sample in samples)
    if all(sample.ttft is not None for samples in pairs.own for sample in samples):
        values["ttft"] = _range([sum(s.ttft or 0.0 for s in samples) / len(samples) for samples in pairs.own])
        after = [[_per_token_after_first(s) for s in side] for side in (pairs.own, pairs.plain)]
        if all(seconds > 0 for side in after for seconds in side):
            values["decode_speedup"] = _range([theirs / ours for ours, theirs in zip(*after, strict=True)])
    return values


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)


def _per_token_after_first(samples: Sequence[Sample]) -> float:
    """Seconds per token after the first step's; 0 if there is none."""
    tokens = sum(len(s.tokens) - (s.steps[0].tokens if s.steps else 1) for s in samples)
    return sum(s.total_seconds - (s.ttft or 0.0) for s in samples) / tokens if tokens > 0 else 0.0


def _sameness(pairs: _Pairs, divergences: Sequence[DivergenceRecord]) -> dict[str, Any]:
    """Outputs equal to plain decoding's in every repeat, plain decoding's own to its first.

    A peer draws noise of its own: only its greedy outputs can be compared.
    """
    first = pairs.own[0][0]
    if (first.engine != "pronk" and first.temperature > 0) or (first.method == PLAIN and len(pairs.own) == 1):
        return {}
    plain = pairs.plain[0]
    same = [all(own[i].tokens == plain[i].tokens for own in pairs.own) for i in range(len(plain))]
    parted = {_key(sample) for sample, equal in zip(pairs.own[0], same, strict=True) if not equal}
    ties = [d for d in divergences if (d.method, d.temperature) == (first.method, first.temperature) and d.near_tie]
    return {"same": sum(same), "compared": len(same), "near_ties": sum((d.task, d.id) in parted for d in ties)}


def _repetition(samples: Sequence[Sample], above: float) -> dict[str, Any]:
    shares = [repeated_ngrams(sample.tokens) for sample in samples]
    return {"repeated": sum(shares) / len(shares), "degenerated": sum(share > above for share in shares)}


def _acceptance(samples: Sequence[Sample]) -> dict[str, Any]:
    """What was guessed and what became of it; the same in every repeat.

    The pass that ends the prompt counts as a step, so that plain decoding has S = 1. Unless the prompt is a single
    token, nobody could guess in it, so it is left out of what is said of guesses.
    """
    numbered = [pair for sample in samples for pair in enumerate(sample.steps or ())]
    guessing = [step for number, step in numbered if number or step.depth]
    accepted, shares = [step.accepted for step in guessing], Stats(steps=guessing).acceptance
    deepest = min(len(shares), _POSITIONS)
    return {
        "steps": len(numbered),
        "S": _tokens(samples) / len(numbered),
        "drafted": sum(step.drafted for step in guessing),
        "accepted": sum(accepted),
        "alpha": shares[0] if shares else None,
        "acceptance": tuple(shares[:_POSITIONS]),
        "trust": _trust(samples),
        "ctar": tuple(ctar_curve(accepted, deepest)) if deepest else (),
    }


def _trust(samples: Sequence[Sample]) -> tuple[tuple[float, float, int], ...]:
    """What was said of guesses, beside what came of them, where there were any."""
    tenths = [
        [sum(column) for column in zip(*same, strict=True)]
        for same in zip(*(s.gain_stats for s in samples if s.gain_stats is not None), strict=True)
    ]
    return tuple(
        (said / draft_tokens, right / draft_tokens, int(draft_tokens))
        for draft_tokens, said, right in tenths
        if draft_tokens
    )


def _later(samples: Sequence[Sample]) -> Iterator[tuple[StepStats, StepStats]]:
    """The steps after a sample's first, which has the prompt in it, each with the one before."""
    for sample in samples:
        yield from pairwise(sample.steps or ())


def _times(pairs: _Pairs) -> dict[str, Any]:
    """Waits between tokens, and where the time went."""
    waits: list[float] = []
    for sample in (sample for samples in pairs.own for sample in samples):
        steps = list(pairwise(sample.steps or ()))
        waits += inter_token_latencies([b.clock - a.clock for a, b in steps], [b.tokens for _, b in steps])
    values: dict[str, Any] = {}
    if waits:
        values["itl"] = Latency(*np.percentile(waits, (50, 90, 99)).tolist())
    last = [sample.steps[-1] for samples in pairs.own for sample in samples if sample.steps]
    total, draft, target = (sum(getattr(s, name) for s in last) for name in ("clock", "draft_clock", "target_clock"))
    values["split"] = Split(draft / total, target / total, max(0.0, total - draft - target) / total)
    return values


def _costs(pairs: _Pairs, yardstick: Yardstick) -> dict[str, Any]:
    """A pass against plain decoding's pass and the memory floor, drafting against both, and what that lets expect."""
    own = [pair for samples in pairs.own for pair in _later(samples)]
    plain = [pair for samples in pairs.plain for pair in _later(samples)]
    if not own or not plain:
        return {}
    target, base = _mean(own, lambda s: s.target_clock), _mean(plain, lambda s: s.target_clock)
    values: dict[str, Any] = {
        "rows_per_pass": sum(step.rows for _, step in own) / len(own),
        "verify_cost": target / base,
    }
    if yardstick.bandwidth is not None:
        values["over_floor"] = _mean(own, lambda s: s.clock) / _floor(pairs.own[0], yardstick)
    shares = Stats(steps=[step for _, step in own]).acceptance
    if shares:
        depths = [step.depth for _, step in own]
        cost = _mean(own, lambda s: s.draft_clock) * len(own) / sum(depths) / base
        tokens = sum(expected_tokens(shares[0], depth) for depth in depths)
        values["cost_coefficient"] = cost
        values["expected_speedup"] = tokens / sum(depth * cost + 1 for depth in depths)
    return values


def _mean(steps: Sequence[tuple[StepStats, StepStats]], clock: Callable[[StepStats], float]) -> float:
    return sum(clock(step) - clock(before) for before, step in steps) / len(steps)


def _floor(samples: Sequence[Sample], yardstick: Yardstick) -> float:
    """Seconds to read, once, the weights and the keys and values of half-way through the outputs."""
    assert yardstick.bandwidth is not None
    model = yardstick.model
    read = sum((sample.prompt_tokens + len(sample.tokens) / 2) * sample.batch for sample in samples) / len(samples)
    return (model.pass_bytes + model.kv_bytes_per_token * read) / yardstick.bandwidth.median
