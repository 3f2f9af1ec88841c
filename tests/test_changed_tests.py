"""Choice of the tests of ``make test-fast``."""

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from scripts import load_script


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """Return the module ``tools/changed_tests.py``."""
    return load_script("tools/changed_tests.py")


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("src/pronk/sampling/verify.py", ["tests/sampling/test_verify.py"]),
        ("src/pronk/server/pulls.py", ["tests/server/test_pulls.py"]),
        ("tests/engine/test_states.py", ["tests/engine/test_states.py"]),
        ("tools/wheels.py", []),
        ("benchmarks/shapes.py", ["tests/benchmarks/test_shapes.py"]),
        ("docs/gpu.md", ["tests/docs/test_commands.py", "tests/docs/test_pages.py"]),
        (
            "src/pronk/kernels/csrc/gemm.inc",
            ["tests/kernels/test_library.py", "tests/kernels/test_products.py"],
        ),
    ],
)
def test_tests_of_a_file(tool: ModuleType, changed: str, tests: list[str]) -> None:
    few = sorted(f"tests/{name}" for name in tool.FEW)
    assert tool.tests_of([changed]) == (tests or few)


def test_a_module_without_its_own_tests_has_those_that_import_it(tool: ModuleType) -> None:
    found = tool.tests_of(["src/pronk/server/settings.py"])
    assert "tests/server/test_pulls.py" in found


def test_every_module_has_tests(tool: ModuleType) -> None:
    few = sorted(f"tests/{name}" for name in tool.FEW)
    for path in tool.PACKAGE.rglob("*.py"):
        found = tool.tests_of([path.relative_to(tool.ROOT).as_posix()])
        assert found, path
        assert all((tool.ROOT / name).exists() for name in found), path
    assert all((tool.ROOT / name).exists() for name in few)


def test_changes_since_main(tool: ModuleType, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *identity, *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        git("add", name)

    git("init", "--initial-branch=main")
    write("kept", "0")
    write("changed", "0")
    git("commit", "--message=first")
    assert tool.changed_files(tmp_path) == []
    git("switch", "--create", "topic")
    write("committed", "0")
    git("commit", "--message=second")
    (tmp_path / "changed").write_text("1")
    (tmp_path / "new").write_text("1")
    git("switch", "main")
    write("later", "0")
    git("commit", "--message=on main", "--only", "later")
    git("switch", "topic")
    assert tool.changed_files(tmp_path) == ["changed", "committed", "new"]
