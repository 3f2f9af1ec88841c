"""``pronk explain``: a table that can be read, numbers for programs, a plot; mistakes in one
line.
"""

import json
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from command_line import assert_mistake
from pronk.testing import tiny_checkpoint

PROMPT = "the cat and the dog and the cat and the dog and the cat and the"


@pytest.fixture
def run(command: Any, tmp_path: Path) -> Any:
    model = tiny_checkpoint(tmp_path / "model")
    options = ("--model", model, "--max-tokens", 30, "--ignore-eos", "--budget", "all")
    return partial(command, "explain", PROMPT, *options)


def test_a_table_and_a_paragraph(run: Any) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for word in ("step", "drafted", "gain / cost", "suffix", "recycling", "tokens per step"):
        assert word in out


def test_numbers(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("--json")
    assert code == 0
    found = json.loads(out)
    assert set(found) == {"completion", "summary", "speed", "regret", "drafters", "steps"}
    tokens = [token for step in found["steps"] for token in step["tokens"]]
    assert tokens == found["completion"]["token_ids"]
    verified = sum(len(step["verified"]["tokens"]) - 1 for step in found["steps"])
    assert verified == found["completion"]["stats"]["drafted"] > 0
    drafters = {each["drafter"] for step in found["steps"] for each in step["proposals"]}
    assert drafters == {"suffix", "recycling"}


def test_a_plot(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.svg"
    code, _, err = run("--plot", path)
    assert (code, err) == (0, "")
    root = ET.parse(path).getroot()
    assert root.tag.endswith("svg")
    text = "".join(root.itertext())
    assert "allowance in s" in text
    assert "target model" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--plot", "missing/folder/steps.svg"), "plot: expected a file in a folder that exists"),
        (("--drafter", "nobody"), "found 'nobody'"),
        (("--calibration", "."), "calibration: expected a file that pronk has written"),
        (("--max-tokens", "0"), "--max-tokens"),
    ],
)
def test_mistakes(run: Any, options: tuple[str, ...], message: str) -> None:
    pytest.importorskip("matplotlib")
    assert_mistake(run(*options), message)


def test_acceptance_statistics_are_kept(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert run("--calibration", path)[0] == 0
    counts = json.loads(path.read_text())["counts"]
    assert counts
    assert run("--calibration", path)[0] == 0
    again = json.loads(path.read_text())["counts"]
    assert sum(row[4] for row in again) > sum(row[4] for row in counts)
