"""Print the tests of the files that differ from main: ``pytest $(python tools/changed_tests.py)``.

Tests mirror ``src/pronk``. A module without a test file of its name has those that import it, or
those of its folder. ``make test-fast`` runs them; ``make test`` runs all tests.
"""

import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PACKAGE = ROOT / "src" / "pronk"
# Printed if no file differs, or no test belongs to those that do: verification, a drafter, the
# engine, a server's API, the command line and a kernel.
FEW = (
    "sampling/test_verify.py",
    "drafting/from_text/test_prompt_lookup.py",
    "engine/test_request_factory.py",
    "server/test_errors.py",
    "cli/test_mistakes.py",
    "kernels/test_rounding.py",
)
KERNELS = ("kernels/test_library.py", "kernels/test_products.py")  # of the sources in C++
DOCUMENTS = ("docs/test_pages.py", "docs/test_commands.py")


def git(*arguments: str, folder: Path = ROOT) -> list[str]:
    """Return the lines that a command of git prints."""
    command = ["git", *arguments]
    printed = subprocess.check_output(command, cwd=folder, text=True)  # noqa: S603 - only git
    return printed.splitlines()


def changed_files(folder: Path = ROOT) -> list[str]:
    """Return the files that differ from the last common commit with main, new files included.

    Args:
        folder: the repository.
    """
    branches = git("branch", "--all", "--format=%(refname:short)", folder=folder)
    main = next((name for name in ("main", "origin/main") if name in branches), "HEAD")
    (base,) = git("merge-base", "HEAD", main, folder=folder)
    new = git("ls-files", "--others", "--exclude-standard", folder=folder)
    return sorted({*git("diff", "--name-only", base, folder=folder), *new})


def tests_of(files: Iterable[str]) -> list[str]:
    """Return the test files for changed files; both relative to the repository."""
    found = {path for name in files for path in _tests_of_file(ROOT / name)}
    few = {TESTS / name for name in FEW}
    return sorted(path.relative_to(ROOT).as_posix() for path in found or few)


def _tests_of_file(file: Path) -> Iterator[Path]:
    if file.is_relative_to(TESTS):
        if file.name.startswith("test_") and file.suffix == ".py" and file.exists():
            yield file
    elif file.is_relative_to(PACKAGE / "kernels" / "csrc"):
        yield from (TESTS / name for name in KERNELS)
    elif file.is_relative_to(PACKAGE):
        yield from _tests_of_module(file.relative_to(PACKAGE))
    elif file.suffix == ".md":
        yield from (TESTS / name for name in DOCUMENTS)
    else:  # a script of tools/, benchmarks/ or examples/
        name = f"test_{file.stem}.py"
        places = (TESTS / file.relative_to(ROOT).parent / name, TESTS / name)
        yield from (path for path in places if path.exists())


def _tests_of_module(file: Path) -> list[Path]:
    """Return the tests of a file of the package; ``file`` is relative to it."""
    mirrored = TESTS / file.parent / f"test_{file.stem}.py"
    if mirrored.exists():
        return [mirrored]
    module = ".".join(("pronk", *file.with_suffix("").parts))
    importing = [
        path for path, source in _test_sources().items() if f"from {module} import" in source
    ]
    if importing:
        return importing
    folder = TESTS / file.parent
    while not any(folder.glob("test_*.py")):
        folder = folder.parent
    return [*folder.glob("test_*.py")]


@cache
def _test_sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}


if __name__ == "__main__":
    print(*tests_of(changed_files()))
