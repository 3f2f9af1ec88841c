"""Compute the result document of a benchmark from its records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from pronk.bench.document import ALL, SOUND, Document, Failure, Figures, ModelResult, PassCost, Range
from pronk.bench.figures import LOOP_THRESHOLD, make_figures, make_range
from pronk.bench.metrics import repeated_ngrams
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

__all__ = ["summarize"]

RecordType = TypeVar("RecordType")


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
        degenerate_above=LOOP_THRESHOLD,
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
    bandwidth = make_range(speeds) if speeds else None
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
    loops = {_sample_key(s) for s in samples if s.method == PLAIN and repeated_ngrams(s.tokens) > LOOP_THRESHOLD}
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
