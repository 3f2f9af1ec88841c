"""``pronk bench --workers``: the same tokens, with what the others of a model take."""

import json
from pathlib import Path

import pytest

from bench.test_kernels_option import Run
from bench.test_kernels_option import run as run  # noqa: PLC0414 - a fixture
from parallel.dealt import deal_by_chance


@pytest.mark.parametrize("parallel", ["tree", "tensor"])
def test_a_benchmark_says_what_workers_take(
    run: Run, tmp_path: Path, parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deal_by_chance(monkeypatch)  # by costs, nothing of so small a model might be dealt
    few = ("--limit", 1, "--max-tokens", 12, "--repeats", 1, "--temperature", 0, "--budget", "all", "--threads", 1)
    own = ("--drafter", "lookahead", "--workers", 2, "--parallel", parallel)
    target, report = tmp_path / "out.json", tmp_path / "report"
    code, out, err = run("bench", *few, *own, "--json", target, "--report", report)
    assert code == 0, err
    document = json.loads(target.read_text())
    ((plain, guessing),) = [[each for each in one["figures"] if each["task"] == "all"] for one in document["models"]]
    assert guessing["same"] == guessing["compared"] > 0
    assert 0.0 < guessing["waited"] < 1.0
    assert 0.0 < plain["waited"] < 1.0  # of the prompt, if nothing else
    said = f"2 workers ({parallel}), threads of each: 1"
    assert said in " ".join(out.split())
    page = (report / "index.html").read_text()
    assert said in page
    assert "waiting included" in page
