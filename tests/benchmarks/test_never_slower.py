"""``benchmarks/never_slower.py`` on pronk-tiny."""

import subprocess
import sys
from pathlib import Path

from pronk.checkpoint.hub.clone_models import tiny_model
from waiting import HUNG

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "never_slower.py"


def test_cases_of_one_round(tmp_path: Path) -> None:
    out = tmp_path / "result"
    cases = ["one token", "right", "batch of 2"]
    command = [sys.executable, str(SCRIPT), str(tiny_model()), "--rounds", "1", "--threads", "1"]
    command += ["--out", str(out), "--cases", *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG, check=False)
    assert done.returncode == 0, done.stderr
    text = out.with_suffix(".md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [
        "one token",
        "right, then wrong",
        "batch of 2",
    ]
    for row in rows:
        _, quotient, bounds = row.strip("| ").split(" | ")
        low, high = bounds.split(" to ")
        assert 0.0 < float(low) <= float(quotient) <= float(high)
