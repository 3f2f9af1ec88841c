"""``benchmarks/experts.py`` writes a mixture of experts and measures it."""

import importlib
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def test_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    words = [
        "experts.py",
        "--folder",
        str(tmp_path / "model"),
        "--hidden",
        "128",
        "--width",
        "64",
        "--layers",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", [*words, "--rounds", "3", "--tokens", "12", "--threads", "1"])
    importlib.import_module("experts").main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = report["passes"]["rows"]
    assert rows["1"]["experts"] == 1.0
    assert 1.0 < rows["2"]["experts"] < 2.0
    assert rows["2"]["experts"] < rows["8"]["experts"] <= 8.0
    # 4 of 32 experts; the embeddings have a common part
    assert 0.125 < report["passes"]["overlap"] < 0.9
    assert set(report["auto"]) == {"text", "right 0.0", "right 0.5", "right 0.8", "batch of 4"}
