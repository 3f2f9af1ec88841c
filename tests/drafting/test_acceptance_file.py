"""The calibration file: saved, loaded, and refused if it belongs to another model or is damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from pronk import LLM, OptionError, SamplingParams
from pronk.testing import tiny_checkpoint

TEXT = "the cat and the dog and the cat and the dog and the cat"
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model")


def test_statistics_survive_a_restart(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    first = LLM(model, calibration=path, budget="all")
    assert first.calibration.stats is not None
    assert not first.calibration.stats.counts
    text = first.generate(TEXT, PARAMS).text
    assert first.calibration.stats.counts
    assert not path.exists()
    first.calibration.save()
    again = LLM(model, calibration=str(path), budget="all")
    assert again.calibration.stats is not None
    assert again.calibration.stats.counts == first.calibration.stats.counts
    assert again.generate(TEXT, PARAMS).text == text
    stored = json.loads(path.read_text())
    assert set(stored) == {"format", "model", "counts"}
    assert all(isinstance(row[0], str) and len(row) == 6 for row in stored["counts"])


def test_calibration_can_be_disabled(model: Path) -> None:
    llm = LLM(model, calibration=False, budget="all")
    llm.generate(TEXT, PARAMS)
    assert llm.calibration.stats is None
    llm.calibration.save()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found | {"model": "another"}, "found another; give each model its own"),
        (lambda found: found | {"format": "pronk-calibration/1"}, "expected a file of the format"),
        (
            lambda found: found | {"counts": [["suffix", 1, 1, 0, 2.0, 3.0]]},
            "expected a file of the format",
        ),
        (
            lambda found: found | {"counts": [["suffix", 1, 1, 0, 4097.0, 1.0]]},
            "expected a file of the format",
        ),
        (
            lambda found: found | {"counts": [["suffix", True, 1, 0, 2.0, 1.0]]},
            "expected a file of the format",
        ),
        (
            lambda found: found | {"counts": [["suffix", 1, 1, 0, float("nan"), 1.0]]},
            "expected a file of the format",
        ),
        (
            lambda found: found | {"counts": [[["suffix"], 1, 1, 0, 2.0, 1.0]]},
            "expected a file of the format",
        ),
        (
            lambda found: found | {"counts": [["suffix", 1, 1, 0, 10**400, 1.0]]},
            "expected a file of the format",
        ),
        (lambda _: [1], "expected a file of the format"),
    ],
)
def test_foreign_and_damaged_files_are_refused(
    model: Path, tmp_path: Path, change: Any, message: str
) -> None:
    path = tmp_path / "calibration.json"
    LLM(model, calibration=path).calibration.save()
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(OptionError, match=message):
        LLM(model, calibration=path)


def test_other_files_and_missing_folders_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path):
        with pytest.raises(OptionError, match="expected a file that pronk has written"):
            LLM(model, calibration=path)
    with pytest.raises(OptionError, match="expected a file in a folder that exists"):
        LLM(model, calibration=tmp_path / "missing" / "file")
    (tmp_path / "folder").mkdir()
    llm = LLM(model, calibration=tmp_path / "folder" / "file")
    (tmp_path / "folder").rmdir()
    with pytest.raises(OptionError, match="expected a place to write to"):
        llm.calibration.save()


@pytest.mark.parametrize("given", ["x" * 300, "", 1, ["file"]])
def test_invalid_paths_are_refused(model: Path, given: Any) -> None:
    with pytest.raises(OptionError, match=r"^calibration: expected a "):
        LLM(model, calibration=given)
