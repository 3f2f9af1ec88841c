"""Equations 4, 5 and 7 of lookahead decoding, their fit, and the script that draws them."""

import importlib
import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.lab.bench.metrics import expected_tokens

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "papers"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS.parent))
    return importlib.import_module("lookahead")


def simulated(alpha: float, gamma: int, b: int, trials: int) -> float:
    """Return the mean tokens per step of the best of ``b`` random chains."""
    dice = random.Random(0)
    tokens = 0
    for _ in range(trials):
        lengths = [
            next((i for i in range(gamma) if dice.random() >= alpha), gamma) for _ in range(b)
        ]
        tokens += 1 + max(lengths)
    return tokens / trials


@pytest.mark.parametrize(
    ("alpha", "gamma", "b"), [(0.4, 4, 1), (0.4, 4, 15), (0.8, 3, 2), (0.1, 6, 30)]
)
def test_equation_5(script: Any, alpha: float, gamma: int, b: int) -> None:
    assert script.expected_best(alpha, gamma, b) == pytest.approx(
        simulated(alpha, gamma, b, 20_000), rel=0.02
    )
    assert script.expected_best(alpha, gamma, 1) == pytest.approx(expected_tokens(alpha, gamma))
    assert script.expected_best(0.0, gamma, b) == 1
    assert script.expected_best(1.0, gamma, b) == gamma + 1


def test_equation_7(script: Any) -> None:
    """One step in f gives E tokens, the others one; S grows with log W where N is large (the
    scaling law).
    """
    alpha = script.PAPER_ALPHA
    f = script.PAPER_F
    assert script.expected_lookahead(alpha, 1.0, 15, 5) == script.expected_best(alpha, 4, 15)
    assert script.expected_lookahead(alpha, f, 15, 5) == pytest.approx(
        1 + (script.expected_best(alpha, 4, 15) - 1) / f
    )
    doublings = [script.expected_lookahead(alpha, f, 2**power, 20) for power in range(3, 9)]
    gains = [second - first for first, second in pairwise(doublings)]
    assert max(gains) < 1.1 * min(gains)


def test_fit_finds_the_parameters(script: Any) -> None:
    points = [
        (w, n, script.expected_lookahead(0.425, 3.106, w, n))
        for n, ws in script.WINDOWS.items()
        for w in ws
    ]
    found = script.fit(points)
    assert found.alpha == pytest.approx(0.425, abs=1e-9)
    assert found.f == pytest.approx(3.106)
    assert found.unexplained < 1e-12
    dice = random.Random(1)
    noisy = script.fit([(w, n, s + dice.gauss(0, 0.02)) for w, n, s in points])
    assert noisy.alpha == pytest.approx(0.425, abs=0.1)
    assert 0 < noisy.unexplained < 0.2


def test_ranks(script: Any) -> None:
    ranks = importlib.import_module("measuring").ranks
    assert ranks([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert ranks([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert ranks([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert ranks([1, 1, 2], [5, 5, 9]) == pytest.approx(1)


@pytest.mark.slow  # runs a whole benchmark
def test_tables(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with few settings writes tables, figures and the plot."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(script, "WINDOWS", {3: (1, 4), 4: (2,)})
    monkeypatch.setattr(script, "FIGURE8", (1, 3))
    monkeypatch.setattr(script, "SWEEP", {"window": (2,), "ngram": (3,), "guesses": (1, 4)})
    rows = [
        {"task": task, "turns": [text]}
        for task, text in (("code", "def fib(n):"), ("chat", "Count to nine."))
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "lookahead.py",
        str(tiny_model()),
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "--per-suite",
        "1",
        "--wall",
    ]
    monkeypatch.setattr(
        sys,
        "argv",
        [*words, "--tokens", "24", "--temperatures", "0", "--out", str(tmp_path / "out")],
    )
    script.main()
    text = (tmp_path / "out.md").read_text()
    for part in script.PARTS.values():
        assert f"## {part.title}, T = 0.0" in text
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    per_pass = {spec: figures["per_pass"] for spec, figures in cell["drafters"].items()}
    assert per_pass["autoregressive"] == 1.0
    assert all(s >= 1.0 for s in per_pass.values())
    assert max(per_pass.values()) > 1.1
    assert "<svg" in (tmp_path / "out.svg").read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells"] == [cell]
