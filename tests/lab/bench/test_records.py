"""Trace files: records survive a round trip, and other files are refused."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from lab.bench.bench_cases import model, sample, start, steps
from pronk.base.errors import OptionError
from pronk.engine.stats import StepStats
from pronk.lab.bench.records import (
    Bandwidth,
    DivergenceRecord,
    End,
    PassTime,
    PeerRecord,
    Record,
    Sample,
    Skip,
    Trace,
    read_trace,
)

EVERY: list[Record] = [
    start(arguments={"seed": 7, "model": ["a"], "data": None}),
    model("autoregressive", "x(y=1)", inflated={"source": "Grüße", "parameters": 3}),
    PeerRecord("openvino", {"openvino": "2026.1", "error": 'said "no"\n'}),
    Bandwidth(1.5e10),
    PassTime(8, 0.1),
    Skip("a", "code", "too long"),
    sample(
        "x",
        steps=steps((1, 0, 0, 0, 1, 0.0, 0.1, 0.2), (5, 4, 3, 2, 3, 0.1, 0.3, 0.4)),
        ttft=0.2,
        peak_memory=5,
    ),
    sample("x", error="out of memory", tokens=()),
    sample("openvino", engine="openvino"),
    DivergenceRecord("code", "a", "x", 0.8, 3, None, near_tie=False),
    DivergenceRecord("code", "b", "x", 0.0, 3, 0.25, near_tie=True),
    End(interrupted=False),
]


def save(path: Path, records: list[Record]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        trace = Trace(file=file)
        for record in records:
            trace.add(record)
        assert trace.records == records
    return path


def test_records_survive_a_round_trip(tmp_path: Path) -> None:
    read = read_trace(save(tmp_path / "t.jsonl", EVERY))
    assert read == EVERY
    assert [type(record) for record in read] == [type(record) for record in EVERY]
    (sample,) = [record for record in read if isinstance(record, Sample) and record.steps]
    assert [type(step) for step in sample.steps or ()] == [StepStats, StepStats]
    assert isinstance(sample.tokens, tuple)


def test_traces_without_kernels_were_computed_by_torch(tmp_path: Path) -> None:
    path = save(tmp_path / "t.jsonl", [EVERY[0], model(kernels="avx2")])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[1].pop("kernels") == "avx2"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_trace(path)[1] == model(kernels="torch")


def test_records_are_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with path.open("w", encoding="utf-8") as file:
        trace = Trace(file=file)
        trace.add(EVERY[0])
        trace.add(EVERY[1])
        assert read_trace(path) == EVERY[:2]


def test_the_complete_records_of_a_truncated_trace_are_read(tmp_path: Path) -> None:
    whole = save(tmp_path / "t.jsonl", EVERY).read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == 10]
    path = tmp_path / "cut.jsonl"
    for size in (ends[5], ends[5] + 1, ends[5] + 2, ends[6] - 1, len(whole) - 2):
        path.write_bytes(whole[:size])
        count = sum(end <= size for end in ends)  # a line without its newline is complete
        assert read_trace(path) == EVERY[:count]


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "bandwidth", "bytes_per_sec',
        "7",
        '{"kind": "nonsense"}',
        '{"bytes_per_second": 1}',
        '{"kind": "bandwidth"}',
        '{"kind": "bandwidth", "bytes_per_second": 1.0, "more": 2}',
        '{"kind": "sample", "task": "code", "id": "a", "steps": [[1, 2]]}',
        '{"kind": "model", "methods": 5}',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = save(tmp_path / "t.jsonl", EVERY)
    lines = path.read_text().splitlines()
    lines[3] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(OptionError, match=r"t\.jsonl, line 4: expected"):
        read_trace(path)


def test_a_damaged_line_of_a_truncated_trace_is_named(tmp_path: Path) -> None:
    """The complete records after the damage must not be lost silently."""
    path = save(tmp_path / "t.jsonl", EVERY)
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:-5]
    path.write_text("\n".join(lines)[:-5])
    with pytest.raises(OptionError, match=r"t\.jsonl, line 4: expected"):
        read_trace(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for text in (
        "",
        "\n",
        '{"prompt": "x"}\n',
        '{"kind": "bandwidth", "bytes_per_second": 1.0}\n',
        '{"kind": "sta',
    ):
        path.write_text(text)
        with pytest.raises(OptionError, match=r"t\.jsonl"):
            read_trace(path)
    with pytest.raises(OptionError, match="none"):
        read_trace(tmp_path / "none.jsonl")


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "t.jsonl", EVERY)
    first, *rest = path.read_text().splitlines()
    first = json.dumps(json.loads(first) | {"format": "pronk-bench/99"})
    path.write_text("\n".join([first, *rest]) + "\n")
    with pytest.raises(OptionError, match=r"format pronk-bench/\d+, found pronk-bench/99"):
        read_trace(path)


def test_an_old_trace_stays_until_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("old\n")
    with path.open("a", encoding="utf-8") as file:
        trace = Trace(file=file)
        assert path.read_text() == "old\n"
        for record in EVERY:
            trace.add(record)
    assert read_trace(path) == EVERY


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_trace_and_keeps_the_records() -> None:
    with Path("/dev/full").open("r+", encoding="utf-8") as file:
        trace = Trace([EVERY[0]], file)
        with pytest.raises(
            OptionError,
            match=r"^trace: expected room for a record, found No space left on device after 2",
        ):
            trace.add(EVERY[1])
        trace.add(EVERY[-1])
        assert trace.records == [EVERY[0], EVERY[1], EVERY[-1]]
        with suppress(OSError):
            file.close()
