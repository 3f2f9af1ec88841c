"""``benchmarks/large_shapes.py`` measures a shape, and computes gains from the measured curve."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from recurrent_models import write_gguf

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def large_shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("large_shapes")


@pytest.mark.slow  # runs a whole benchmark
def test_a_small_shape_is_measured_and_others_are_kept(
    large_shapes: Any,
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = large_shapes.Dense(256, 1, 4, 2, 64, 512)
    tokenizer = write_gguf(checkpoint("qwen3_5_text"), tmp_path / "tokenizer.gguf")
    results = tmp_path / "results.json"
    monkeypatch.setattr(large_shapes, "SHAPES", {"small": small, "second": small})
    monkeypatch.setattr(large_shapes, "QWEN3_VOCABULARY", 1024)
    monkeypatch.setattr(large_shapes, "LONG", 900)
    for name in ("small", "second"):
        words = ["measure", name, str(tmp_path), str(results), "--tokenizer", str(tokenizer)]
        monkeypatch.setattr(sys, "argv", ["large_shapes.py", *words, "--threads=1", "--rounds=1"])
        large_shapes.main()
    assert [*json.loads(results.read_text())] == ["second", "small"]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["large_shapes.py", "table", str(results)])
    large_shapes.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| s")]
    assert [row.split(" | ")[0] for row in rows] == ["| shape", "| second", "| small", "| shape"]


def test_a_computed_gain(large_shapes: Any) -> None:
    """3 draft tokens and the next one take the time of 4 rows, and 3 times that of the head."""
    passes = [[(0.1, 1.0), (0.1, 1.0), (0.2, 1.0), (0.4, 1.0), (0.8, 1.0)]]
    found = {"took": {"passes": passes, "plain": [0.1], "bandwidth": [1e9]}}
    published = large_shapes.Published("EAGLE-3", 1000, 3, 2.5, "a test")
    shape = large_shapes.Dense(256, 1, 4, 2, 64, 512)
    head = (256 * 1000 + 12 * 256**2) * 4.5 / 8 / 1e9
    wanted = 2.5 * 0.1 / (0.2 + 3 * head)
    large_shapes.SHAPES["test"] = shape
    try:
        row = large_shapes.gain_row("test", found, published)
    finally:
        del large_shapes.SHAPES["test"]
    assert row.endswith(f" {wanted:.2f} |")
    curve = large_shapes.row_seconds(found)
    assert large_shapes.seconds_of(6, curve) == pytest.approx(0.3)
    assert large_shapes.seconds_of(8, curve) == 0.4
