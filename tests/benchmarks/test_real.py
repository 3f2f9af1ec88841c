"""``benchmarks/real.py`` measures, continues and shows; its rows follow from the samples."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pronk.engine.stats import StepStats
from pronk.lab.bench.records import Sample
from scripts import load_script


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
    trace = tmp_path / "toy.pronk-tiny.trace.jsonl"
    monkeypatch.setattr(sys, "argv", words)
    real.main()  # goes on with other prompts
    assert trace.read_text().count('"kind": "finished"') == 2
    measured = trace.read_text()
    assert "models: 1, prompts of each: 2; at most 0 minutes" in capsys.readouterr().err
    real.main()  # has no more prompts
    assert [line for line in trace.read_text().splitlines() if '"sample"' in line] == [
        line for line in measured.splitlines() if '"sample"' in line
    ]


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
