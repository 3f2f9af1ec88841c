"""What would have made the benchmark's figures wrong, or lost them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pronk.llm
from bench.bench_cases import Fake, Meter, pronk_tiny
from pronk.bench import render
from pronk.bench.measure import Bench, Options, Timer
from pronk.bench.prompts import Prompt
from pronk.bench.records import PLAIN, Sample, StepTrace
from pronk.cli.main import main

FEW = ("--max-tokens", "2", "--repeats", "1", "--temperature", "0", "--limit", "1")


def bench(*args: object) -> None:
    main(["bench", *FEW, *map(str, args)])


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load pronk-tiny once."""
    monkeypatch.setattr(pronk.llm, "LLM", lambda *_, **__: pronk_tiny())


def test_the_caches_are_warm_again_before_plain_decoding_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding, the first method of the first repeat, paid for the caches that measuring bandwidth emptied."""
    log: list[Any] = []
    llm, meter = pronk_tiny(), Meter()

    def logged(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            log.append((name, None))
            return original(*args, **more)

        return call

    monkeypatch.setattr(llm, "generate", logged("pass", llm.generate))
    monkeypatch.setattr(meter, "measure", logged("bandwidth", meter.measure))
    made = Bench(
        llm,
        [Fake(PLAIN, lambda _: [1], log)],
        Options(max_tokens=2, temperatures=(0.0,), repeats=1),
        bandwidth=meter,  # type: ignore[arg-type]
        trace=StepTrace(),
        timer=Timer(),
    )
    made.run({"task": [Prompt("a", "task", text="x = 1")]})
    assert [name for name, _ in log[-3:]] == ["bandwidth", "pass", PLAIN]


def test_a_batch_counts_the_prompts_that_are_in_it(tmp_path: Path) -> None:
    """Of a batch that --batch allows but that no prompts fill, the memory floor is not that of the whole one."""
    path, prompts = tmp_path / "x.jsonl", tmp_path / "mine.txt"
    prompts.write_text("x = 1\n")
    with pytest.raises(SystemExit):
        bench("--prompts", prompts, "--batch", 512, "--trace", path)
    samples = [row for row in map(json.loads, path.read_text().splitlines()) if row["kind"] == Sample.__name__.lower()]
    assert {row["batch"] for row in samples} == {1}


def test_figures_are_on_disk_before_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"

    def show(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(render, "show", show)
    with pytest.raises(SystemExit):
        bench("--json", path)
    assert json.loads(path.read_text())["models"]


@pytest.mark.slow
def test_figures_survive_a_failure_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, measure = tmp_path / "x.json", Bench.run

    def fail(*args: Any) -> None:
        measure(*args)
        raise MemoryError

    monkeypatch.setattr(Bench, "run", fail)
    with pytest.raises(SystemExit) as stop:
        bench("--json", path)
    assert stop.value.code == 1
    assert json.loads(path.read_text())["models"][0]["figures"]
    assert json.loads(path.read_text())["interrupted"]
