"""Wheels: their files, libraries and size; the workflows try each platform's wheel."""

import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from scripts import load_script

ROOT = Path(__file__).parents[1]
LINUX = ("pronk/kernels/libpronk.so", "pronk/kernels/libpronk_suffix.so")


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    """Return the module ``tools/wheels.py``."""
    return load_script("tools/wheels.py")


def wheel(folder: Path, tag: str, *names: str, size: int = 0) -> Path:
    path = folder / f"pronk-1.0-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
        archive.writestr("pronk/large", bytes(size))
    return path


def test_files_of_wheels_exist(wheels: ModuleType) -> None:
    assert all((ROOT / "src" / "pronk" / name).is_file() for name in wheels.FILES)


@pytest.mark.parametrize(
    ("tag", "libraries"),
    [
        ("manylinux_2_17_x86_64", LINUX),
        ("manylinux_2_17_aarch64", LINUX),
        ("win_amd64", ("pronk/kernels/pronk.dll", "pronk/kernels/pronk_suffix.dll")),
        (
            "macosx_11_0_arm64",
            ("pronk/kernels/libpronk.dylib", "pronk/kernels/libpronk_suffix.dylib"),
        ),
    ],
)
def test_faults_of_a_wheel(
    wheels: ModuleType, tag: str, libraries: tuple[str, ...], tmp_path: Path
) -> None:
    files = [f"pronk/{name}" for name in wheels.FILES]
    wheels.check(wheel(tmp_path, tag, *files, *libraries))
    with pytest.raises(SystemExit, match=r"expected heads/.*, found no such file"):
        wheels.check(wheel(tmp_path, tag, files[0], *files[2:], *libraries))
    for found in (
        set[str](),
        {*LINUX} - {*libraries} or {"pronk/kernels/pronk.dll"},
        {"pronk/kernels/libpronk.so"},
    ):
        with pytest.raises(SystemExit, match="expected the libraries"):
            wheels.check(wheel(tmp_path, tag, *files, *found))
    with pytest.raises(SystemExit, match="expected at most 48 MB"):
        wheels.check(wheel(tmp_path, tag, *files, *libraries, size=wheels.MAX_SIZE))


def test_unknown_names_are_refused(wheels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["wheels.py", "linux-riscv"])
    with pytest.raises(SystemExit, match=r"expected linux-x86_64, .*, sdist; found 'linux-riscv'"):
        wheels.main()
