"""Random requests have the same outputs with other instruction sets and another NumPy dispatch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import equal_outputs
from pronk.kernels.library import candidates
from waiting import HUNG

ROOT = Path(__file__).parents[1]
WIDEST = candidates(bits="portable")[0].name
# the narrowest one with fused multiply-add: in software it takes about ten times as long
NARROWEST = [each.name for each in candidates(bits="portable") if each.name != "portable"][-1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    equal_outputs.write_models(made)
    return made


def dispatched() -> list[str]:
    """Return the instruction sets of this processor that NumPy has functions for."""
    numpy = np._core._multiarray_umath  # type: ignore[attr-defined]
    return [name for name in numpy.__cpu_dispatch__ if numpy.__cpu_features__[name]]


def run(
    folder: Path, kernels: str, disabled: Sequence[str], seed: int, count: int
) -> dict[str, Any]:
    """Return what ``equal_outputs.py`` prints in a process of its own."""
    environment = os.environ | {
        "NPY_DISABLE_CPU_FEATURES": " ".join(disabled),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    }
    arguments = [str(folder), kernels, str(seed), str(count)]
    command = [sys.executable, str(ROOT / "tests" / "equal_outputs.py"), *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60 * HUNG
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert not {*found["numpy"]} & {*disabled}
    return found


def compare(runs: Mapping[str, dict[str, Any]], count: int) -> None:
    """Compare what ``equal_outputs.py`` prints about ``count`` requests on several machines."""
    ((first_name, first), *others) = runs.items()
    assert len(first["digests"]) == count
    assert len({*first["digests"]}) > 0.9 * count
    counts = first["counts"]
    assert 0 < counts["accepted"] < counts["drafted"]
    assert all(counts[name] > 0 for name in ("guided", "adapted", "cached"))
    for name, found in others:
        different = [
            number
            for number, digests in enumerate(zip(first["digests"], found["digests"], strict=True))
            if len({*digests}) > 1
        ]
        assert different == [], (first_name, name)


def check(
    folder: Path, machines: Sequence[tuple[str, Sequence[str]]], seed: int, count: int
) -> None:
    """Compare the outputs of ``count`` requests in processes with kernels and disabled dispatch."""
    runs = {str(machine): run(folder, *machine, seed, count) for machine in machines}
    compare(runs, count)


def test_random_requests(folder: Path) -> None:
    others = dispatched()
    if not NARROWEST or (NARROWEST == [WIDEST] and not others):
        pytest.skip("expected two instruction sets, found one")
    check(folder, [(WIDEST, ()), (NARROWEST[0], others)], seed=2, count=30)


@pytest.mark.slow
def test_many_random_requests(folder: Path) -> None:
    names = {WIDEST, *NARROWEST}
    machines = [(name, disabled) for name in sorted(names) for disabled in ([], dispatched())]
    check(folder, machines, seed=3, count=1000)
