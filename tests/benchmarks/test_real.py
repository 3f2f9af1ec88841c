"""``benchmarks/real.py`` measures, continues and shows; its rows follow from the samples."""

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Self

import pytest

from pronk.engine.stats import StepStats
from pronk.lab.bench.records import (
    Finished,
    Model,
    PeerRecord,
    Record,
    Sample,
    Start,
    write_trace,
)
from scripts import load_script

PLAIN = Sample("gsm8k", "a", "autoregressive", "pronk", 0.0, 1, 0, 4.0, 4.0, 5, (1, 2, 3), 1.0)


@pytest.fixture(scope="module")
def real() -> ModuleType:
    return load_script("benchmarks/real.py")


@pytest.mark.long
@pytest.mark.slow  # runs a whole benchmark
def test_a_benchmark_of_a_small_model(
    real: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "toy"
    words = [
        "real.py",
        "pronk-tiny",
        "--out",
        str(out),
        "--minutes",
        "0",
        "--max-tokens",
        "6",
        "--threads",
        "1",
        "--limit",
        "2",
    ]
    words += ["--drafter", "prompt_lookup", "--peer", "none"]
    monkeypatch.setattr(sys, "argv", words)
    real.main()
    rows = json.loads(out.with_suffix(".json").read_text())
    plain, lookup = (
        next(
            row
            for row in rows
            if (row["group"], row["temperature"], row["method"]) == ("all", 0.0, method)
        )
        for method in ("autoregressive", "prompt_lookup")
    )
    # the limit ends every call after its first prompt
    assert plain["prompts"] == lookup["prompts"] == 1
    assert (plain["speedup"], plain["tokens_per_pass"]) == (1.0, 1.0)
    assert lookup["equal"] == lookup["compared"] == 1
    assert "equal" not in plain
    shown = "--minutes 0 --limit 2 --max-tokens 6 --threads 1 --drafter prompt_lookup --peer none"
    command = f"python benchmarks/real.py pronk-tiny --out OUT {shown}"
    assert f"```sh\n{command}\n```" in out.with_suffix(".md").read_text()
    assert "| plain decoding |" in out.with_suffix(".md").read_text()
    traces = [
        tmp_path / f"toy.pronk-tiny.{temperature}.trace.jsonl" for temperature in ("0", "0.7")
    ]
    monkeypatch.setattr(sys, "argv", words)
    real.main()  # goes on with other prompts
    assert [real.num_finished(trace) for trace in traces] == [2, 2]
    measured = [samples_of(trace) for trace in traces]
    assert "models: 1, temperatures: 2, prompts: 2; at most 0 min" in capsys.readouterr().err
    real.main()  # has no more prompts
    assert [samples_of(trace) for trace in traces] == measured


def samples_of(trace: Path) -> list[str]:
    """Return the lines of a trace that are samples."""
    return [line for line in trace.read_text().splitlines() if '"sample"' in line]


def test_rows(real: ModuleType) -> None:
    step = StepStats(1, 0, 0, 0, 1, 0.0, 0.0, 0.0)
    plain = Sample(
        "gsm8k",
        "a",
        "autoregressive",
        "pronk",
        0.0,
        1,
        0,
        4.0,
        4.0,
        5,
        (1, 2, 3, 4),
        1.0,
        (step,) * 4,
    )
    ours = Sample(
        "gsm8k",
        "a",
        "x",
        "pronk",
        0.0,
        1,
        0,
        2.0,
        2.0,
        5,
        (1, 2, 3, 5),
        1.0,
        (step,) * 2,
        peak_memory=7,
    )
    figures = real.figures([(ours, plain)])
    assert figures == {
        "prompts": 1, "speed": 2.0, "speed_after_first": 3.0, "speedup": 2.0, "speedup_after_first": 3.0,
        "first_token": 1.0, "tokens_per_pass": 2.0, "peak_memory": 7,
    }  # fmt: skip
    assert [real.group_of(task) for task in ("gsm8k", "humaneval", "code_edit", "mt_bench")] == [
        "chat", "code", "copy", "chat",
    ]  # fmt: skip


def options(**values: object) -> argparse.Namespace:
    """Return options of the script, with defaults where ``values`` has none."""
    usual = {"peer": None, "drafter": None, "peer_python": [], "max_tokens": 8}
    return argparse.Namespace(minutes=1.0, threads=None, **usual | values)


def named(command: list[str], option: str) -> list[str]:
    """Return the values of an option in the words of a command."""
    return [value for word, value in pairwise(command) if word == option]


def test_peers_draft_at_temperature_0_only(real: ModuleType, tmp_path: Path) -> None:
    given = options(peer_python=["openvino=/opt/python"])
    words = [
        real.bench_command("model.gguf", tmp_path / "p", temperature, tmp_path / "t", given)
        for temperature in (0.0, 0.7)
    ]
    assert tuple(named(words[0], "--peer")) == real.PEERS
    assert named(words[1], "--peer") == ["llama_server", "openvino"]
    assert named(words[1], "--peer-python") == ["openvino=/opt/python"]
    assert [named(each, "--temperature") for each in words] == [["0.0"], ["0.7"]]
    # an interpreter of an engine that is not measured would be refused
    given.peer = ["llama_server", "openvino_prompt_lookup"]
    warm = real.bench_command("model.gguf", tmp_path / "p", 0.7, tmp_path / "t", given)
    assert (named(warm, "--peer"), named(warm, "--peer-python")) == (["llama_server"], [])


def trace_of(temperature: float, samples: list[Sample]) -> list[Record]:
    """Return a trace of these samples, of pronk and a server in two modes."""
    arguments = {
        "model": ["/models/some-1b.gguf"],
        "temperature": [temperature],
        "minutes": 1.0,
        "max_tokens": 3,
        "threads": None,
        "drafter": ["auto"],
        "peer": ["llama_server", "llama_server_ngram_mod"],
        "peer_python": [],
    }
    methods = tuple(dict.fromkeys(sample.method for sample in samples))
    start = Start("2026-11-30T00:00:00", arguments, {}, {"processor": "X", "threads": 2})
    model = Model("/models/some-1b.gguf", 1, 1, 1, "float32", 64, methods, load_seconds=2.0)
    notes = {"llama-server": "version: 1 (build 7)", "load_seconds": "0.50"}
    peers = [PeerRecord(name, notes) for name in methods if name.startswith("llama")]
    finished = [Finished("gsm8k", "a", ("a",))]
    return [start, model, *peers, *samples, *finished]


def test_rows_of_two_temperatures(real: ModuleType) -> None:
    def ask(method: str, tokens: tuple[int, ...], engine: str = "llama_server") -> Sample:
        return replace(PLAIN, method=method, engine=engine, tokens=tokens)

    cold = trace_of(
        0.0,
        [
            PLAIN,
            ask("auto", (1, 2, 3), "pronk"),
            ask("llama_server", (1, 2, 4)),
            ask("llama_server_ngram_mod", (1, 2, 5)),
        ],
    )
    warm = trace_of(0.7, [replace(PLAIN, temperature=0.7)])
    rows = real.summarize([cold, warm])
    assert {row["model"] for row in rows} == {"some-1b.gguf"}
    found = {(row["temperature"], row["method"]): row for row in rows if row["group"] == "all"}
    assert list(found) == [
        (0.0, "autoregressive"),
        (0.0, "auto"),
        (0.0, "llama_server"),
        (0.0, "llama_server_ngram_mod"),
        (0.7, "autoregressive"),
    ]
    assert "equal" not in found[0.0, "llama_server"]  # the plain decoding of its engine
    assert found[0.0, "auto"]["equal"] == 1
    # compared with its own engine's plain decoding, not with pronk's
    assert found[0.0, "llama_server_ngram_mod"]["compared"] == 1
    assert found[0.0, "llama_server_ngram_mod"]["equal"] == 0
    assert found[0.0, "llama_server"]["load"] == 0.5
    page = real.markdown(rows)
    assert page.count("T = 0.7") == 1
    assert "version: 1 (build 7)" in page
    assert "/models" not in page


class FakeProcess:
    """A benchmark that finishes a prompt between two looks at its trace, and then ends."""

    def __init__(self, trace: Path, prompts: int, ends_by: list[int]) -> None:
        self.trace = trace
        self.left = prompts
        self.ends_by = ends_by
        self.signals: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        if self.left and timeout is not None:
            self.left -= 1
            with self.trace.open("a") as file:
                file.write('{"kind": "finished"}\n')
            raise subprocess.TimeoutExpired("pronk", timeout)
        return self.ends_by.pop() if self.ends_by else 0

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.left = 0


def test_every_finished_prompt_is_reported(
    real: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = tmp_path / "trace"
    trace.write_text('{"kind": "finished"}\n')  # of an earlier call
    times = iter(range(0, 1000, 60))
    monkeypatch.setattr(real.time, "monotonic", lambda: next(times))
    process = FakeProcess(trace, 3, ends_by=[3])
    monkeypatch.setattr(real.subprocess, "Popen", lambda *_, **__: process)
    assert real.run(["pronk"], trace, 4, "[1/1] x") == 3
    assert capsys.readouterr().err.splitlines() == [
        "real: [1/1] x: 2 of 4 prompts; the others: about 2 minutes",
        "real: [1/1] x: 3 of 4 prompts; the others: about 60 seconds",
        "real: [1/1] x: 4 of 4 prompts",
    ]


def test_an_interruption_reaches_the_benchmark(real: ModuleType, tmp_path: Path) -> None:
    process = FakeProcess(tmp_path / "trace", 9, ends_by=[130])
    assert real.interrupted(process) == 130
    assert process.signals == [signal.SIGINT]


def test_finished_prompts_are_kept_after_an_interruption(
    real: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_command: list[str], trace: Path, *_: object) -> int:
        write_trace(trace, trace_of(0.0, [PLAIN]))
        return 130

    monkeypatch.setattr(real, "run", stop)
    words = ["real.py", "some-1b.gguf", "--out", str(tmp_path / "out"), "--limit", "1"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        real.main()
    assert ended.value.code == 130
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["prompts"] for row in rows if row["group"] == "all"] == [1]
