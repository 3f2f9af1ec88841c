"""The tests find planted faults: with each one in a copy of the package, a few tests must fail.

``pytest -m slow tests/test_planted_faults.py`` takes minutes. Without ``-m slow``, only the table
is checked.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from planted_faults import FAULTS, Fault
from server.browsing import CHROMIUM
from waiting import HUNG

FAULT_HUNG = 45  # HUNG of tests with a fault, in seconds
TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGE = ROOT / "src" / "pronk"

# Runs pytest on the package in the folder ``sys.argv[1]``, which PYTHONPATH puts first.
RUN_TESTS = """
import sys
import pronk, pytest
assert pronk.__file__.startswith(sys.argv[1]), f"found {pronk.__file__}"
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with a copy of the package, its libraries included; delete it at the end."""
    shutil.copytree(PACKAGE, tmp_path / "src" / "pronk")
    for name in ("models", "pyproject.toml"):  # so that the package finds the repository's models
        (tmp_path / name).symlink_to(ROOT / name)
    yield tmp_path
    shutil.rmtree(tmp_path / "src")


def is_in_kernels(fault: Fault) -> bool:
    return "/csrc/" in fault.file


def build_kernels(clone: Path) -> None:
    """Build the copy's kernels; without optimization and with few sizes of tiles, in seconds."""
    program = clone / "src" / "pronk" / "kernels" / "build.py"
    subprocess.run([sys.executable, str(program), "-O0", "-DPRONK_FEW_TILES"], check=True)


def plant(fault: Fault, clone: Path) -> None:
    """Replace the text of a fault in the copy; build the kernels if their source has changed."""
    path = clone / "src" / "pronk" / fault.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(fault.right, fault.wrong), encoding="utf-8")
    if is_in_kernels(fault):
        build_kernels(clone)


def run_tests(
    nodes: Iterable[str], clone: Path, hung: float = HUNG
) -> subprocess.CompletedProcess[str]:
    """Run tests, given by their files or node ids, on the package in ``clone`` until one fails.

    ``hung`` is :data:`waiting.HUNG` of the tests.
    """
    package = str(clone / "src")
    options = ["-x", "-p", "no:cacheprovider", *(str(TESTS / node) for node in nodes)]
    return subprocess.run(
        [sys.executable, "-c", RUN_TESTS, package, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": package, "PRONK_TESTS_HUNG": str(hung)},
        capture_output=True,
        text=True,
        timeout=3 * HUNG,
        check=False,
    )


def summary(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of pytest, such as ``1 failed, 4 passed in 2.31s``."""
    lines = done.stdout.splitlines() or [""]
    return lines[-1]


def end_of_output(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.stdout[-4000:]}\n{done.stderr[-1000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_the_suite_finds_the_fault(fault: Fault, clone: Path) -> None:
    if fault.file.startswith("server/page/") and CHROMIUM is None:
        pytest.skip("expected Chromium, found none; set $CHROMIUM")
    plant(fault, clone)
    done = run_tests(fault.tests.split(), clone, FAULT_HUNG)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, end_of_output(done)
    assert re.search(r"\b1 failed\b", summary(done)), end_of_output(done)


@pytest.mark.slow
@pytest.mark.parametrize("rebuilt", [False, True])
def test_without_a_fault_the_same_tests_pass(clone: Path, rebuilt: bool) -> None:
    faults = [fault for fault in FAULTS if is_in_kernels(fault) == rebuilt]
    if rebuilt:
        build_kernels(clone)
    nodes = sorted({node for fault in faults for node in fault.tests.split()})
    done = run_tests(nodes, clone)
    assert done.returncode == pytest.ExitCode.OK, end_of_output(done)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_faults_fit_the_source(fault: Fault) -> None:
    """The text to replace occurs once, and the tests exist: the table follows changes of both."""
    source = (PACKAGE / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.right) == 1
    for node in fault.tests.split():
        file, _, name = node.partition("::")
        assert f"def {name}" in (TESTS / file).read_text(encoding="utf-8")


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
