"""A copy of the repository without the guests, in which the tests of the engine run.

The tests of a guest are in the folder of its name. :data:`WHOLE` lists the tests of the repository
as a whole, which need all guests.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path

from waiting import HUNG

ROOT = Path(__file__).parents[1]
# Packages that use the engine as a stranger's package would: only by the names that docs/api.md
# lists.
GUESTS = ("gpu", "lab", "parallel", "server", "train")
# Tests of the documents, benchmarks and examples, of clients of the server, and of the whole
# package.
WHOLE = (
    "benchmarks",
    "clients",
    "docs",
    "real",
    "test_engine_alone.py",
    "test_examples.py",
    "test_guests.py",
    "test_packaging.py",
    "test_planted_faults.py",
    "test_project.py",
    "test_public_names.py",
)


def engine_tests() -> list[str]:
    """Return the folders and files of the engine's tests, relative to the repository."""
    paths = [
        path
        for path in (ROOT / "tests").iterdir()
        if path.is_dir() or path.name.startswith("test_")
    ]
    names = {path.name for path in paths if path.name[0] not in "._"} - {*GUESTS, *WHOLE}
    return sorted(f"tests/{name}" for name in names)


def copy_engine(folder: Path) -> None:
    """Copy the repository's files and the built kernels into ``folder``, without the guests.

    Compiled modules are copied, too, with the times of their sources, by which they are valid: all
    tests need not be compiled again.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    built = (
        path.relative_to(ROOT).as_posix() for path in (ROOT / "src/pronk/kernels").glob("libpronk*")
    )
    left_out = tuple(f"{home}/{guest}/" for home in ("src/pronk", "tests") for guest in GUESTS)
    compiled = (path.relative_to(ROOT).as_posix() for path in _compiled_modules())
    for name in (*filter(None, listed.split("\0")), *built, *compiled):
        if not name.startswith(left_out) and (ROOT / name).exists():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    # The first package of this name on the path counts. This one registers no guest.
    metadata = folder / "src" / f"pronk-{distribution('pronk').version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        distribution("pronk").read_text("METADATA") or "", encoding="utf-8"
    )


def _compiled_modules() -> Iterator[Path]:
    for home in ("src", "tests"):
        for cache in (ROOT / home).rglob("__pycache__"):
            yield from cache.glob("*.pyc")


def run_tests(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest in the copy; return its exit code and its output."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=10 * HUNG,
        check=False,
    )
