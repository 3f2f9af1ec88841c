"""``survey.py``, ``mistral.py`` and ``half_precision.py`` of ``benchmarks/papers`` on pronk-tiny."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pronk.checkpoint.hub.clone_models import clone_model, tiny_model
from pronk.engine.stats import StepStats

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "papers"
Load = Callable[[str], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS.parent))
    return importlib.import_module


def test_speed_of_each_quarter_of_a_text(load: Load) -> None:
    """Eight tokens after the first: one a second, or in two steps of four tokens and two seconds."""

    def done(tokens: int, seconds: float) -> Any:
        steps = [StepStats(1, 0, 0, 0, 1, 0.0, 0.0, 5.0)]
        for number in range(1, 1 + 8 // tokens):
            clock = 5.0 + seconds * number
            steps.append(StepStats(4, 3, 3, 3, tokens, 0.0, 0.0, clock))
        return SimpleNamespace(stats=SimpleNamespace(steps=steps))

    survey = load("survey")
    assert survey.marks(done(1, 1.0)) == [5.0, 7.0, 9.0, 11.0, 13.0]
    assert survey.marks(done(4, 2.0)) == [5.0, 6.0, 7.0, 8.0, 9.0]
    assert survey.step_figures(done(4, 2.0), done(1, 1.0)) == [
        "4.00",
        "3.0",
        "2.00",
        "2.00, 2.00, 2.00, 2.00",
    ]


def test_survey(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = load("survey")
    monkeypatch.setattr(survey, "PROMPTS", {"Index: A B C": (1.90, 1.32, 1.49, 0.97)})
    monkeypatch.setattr(survey, "BATCHES", (1, 2))
    monkeypatch.setattr(survey, "PAPER_MILLISECONDS", (70, 220))
    monkeypatch.setattr(survey, "ROWS", (1, 2))
    monkeypatch.setattr(survey, "ROUNDS", 1)
    monkeypatch.setattr(survey, "FORM_SEEDS", 1)
    draft = str(clone_model("pronk-tiny-draft"))
    words = [str(tiny_model()), "--draft", draft, "--tokens", "12", "--threads", "1"]
    survey.main([*words, "--out", str(tmp_path / "out")])
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    tables = {cell["part"]: cell["table"] for cell in cells}
    threshold = [line.split(" | ") for line in tables["threshold"].splitlines()[4:]]
    assert [row[0] for row in threshold] == [
        "| plain decoding",
        "| threshold",
        "| 1 draft token",
        "| 8 draft tokens",
        "| 16 draft tokens",
    ]
    assert [row[-1] for row in threshold[1:]] == ["1.44 |", "1.00 |", "1.13 |", "0.73 |"]
    assert threshold[0][1:3] == ["1.00", "0.0"]
    assert all(float(row[1]) >= 1.0 for row in threshold)
    assert tables["batches"].splitlines()[2].startswith("| 1 | ")
    assert tables["rows"].splitlines()[2].endswith(" | 1.00 |")
    *_, whole, paper = tables["forced"].splitlines()
    _, written, own, *_ = whole.split(" | ")
    assert 0 < int(own) < int(written)
    assert paper == "| the survey's | 41 | 11 | 73% |  |"


def test_survey_without_a_draft_model(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load("survey").main([str(tiny_model()), "threshold"])
    assert "threshold: expected --draft MODEL, found none" in capsys.readouterr().err


def test_mistral(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["mistral.py", "--length", "544", "--window", "64", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "out")])
    load("mistral").main()
    text = (tmp_path / "out.md").read_text()
    full, small, window = json.loads((tmp_path / "out.json").read_text())["measurements"]
    assert [full["window"], small["window"], window["window"]] == [None, 64, 64]
    assert [full["chunk"], small["chunk"], window["chunk"]] == [512, 512, 64]
    assert full["decoding"] > 4 * window["decoding"]
    assert full["peak"] >= small["peak"] > window["peak"] >= window["decoding"]
    assert "| window of 64 | 512 | " in text
    assert "Full attention over the window: " in text


@pytest.mark.slow  # seconds of transformers' generation
def test_half_precision(load: Load, tmp_path: Path) -> None:
    script = load("half_precision")
    assert script.parted([[1, 2], [3], []], [[1, 2], [4], []]) == 1
    rows = [{"task": task, "turns": ["def fib(n):"]} for task in ("qa", "rag")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(tiny_model()), "--prompts", str(tmp_path / "p.jsonl"), "--suites", "qa"]
    script.main([*words, "--tokens", "12", "--out", str(tmp_path / "out")])
    document = json.loads((tmp_path / "out.json").read_text())
    found = {name: count for name, count, _ in document["counts"]}
    assert len(found) == 7
    assert {count for name, count in found.items() if name.startswith("pronk")} == {0}
    assert {count for name, count in found.items() if "float32:" in name} == {0}
    assert "1 prompts, at most 12 tokens each" in (tmp_path / "out.md").read_text()
