"""``benchmarks/gpu``: what a machine needs, and what the script reads from the tests' output."""

import runpy
import tomllib
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "gpu"


def test_entry_points_are_those_of_an_installation(tmp_path: Path) -> None:
    runpy.run_path(str(SCRIPTS / "prepare.py"))["write_entry_points"](tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    assert found.name == "pronk"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    want = {
        (group, name, target)
        for group, entries in project["entry-points"].items()
        for name, target in entries.items()
    }
    assert {(each.group, each.name, each.value) for each in found.entry_points} == want


def test_finished_tests_are_counted() -> None:
    lines = [
        "collected 4 items",
        "tests/gpu/test_walk.py::test_a PASSED                        [ 25%]",
        "tests/gpu/test_walk.py::test_b[float32] FAILED               [ 50%]",
        "tests/gpu/test_walk.py::test_c SKIPPED (no GPU)              [ 75%]",
        "tests/gpu/test_walk.py::test_d ",
    ]
    counts = runpy.run_path(str(SCRIPTS / "run.py"))["count_tests"](lines)
    assert counts == {"passed": 1, "failed": ["tests/gpu/test_walk.py::test_b[float32]"]}
