"""The engine's tests in a copy of the repository from which the guests and their tests are
deleted.
"""

from pathlib import Path

import pytest

from engine_copy import copy_engine, engine_tests, run_tests

# Files whose tests run always: a drafter, the command line, requests of the engine, and rounding in
# the kernels. test_project.py looks for imports of guests in all files.
FEW = (
    "drafting/from_text/test_prompt_lookup.py",
    "cli/test_mistakes.py",
    "engine/test_request_factory.py",
    "kernels/test_rounding.py",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    copy_engine(folder)
    return folder


@pytest.mark.long
def test_some_tests_of_the_engine_pass(engine: Path) -> None:
    done = run_tests(engine, [f"tests/{name}" for name in FEW])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_all_tests_of_the_engine_pass(engine: Path) -> None:
    done = run_tests(engine, ["-n", "2", *engine_tests()])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
