"""Arm's processors in an emulator, a compiler for them, and a Python with pronk built for them.

Whole programs need the folder that ``make arm`` fills.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

from pronk.kernels.build import BuildTarget, build, library_name
from waiting import HUNG

ROOT = Path(__file__).parents[1]
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
# Emulated processors, and the tiles of quantized weights that they get: without dot products, with
# them, and with 8-bit matrix products.
PROCESSORS = {"cortex-a57": "portable", "cortex-a76": "dot", "max": "i8mm"}
TARGET = BuildTarget("aarch64", "linux")
SYSTEM = ROOT / "build" / "arm"  # what tools/arm_python.py downloads


def find_cross_compiler(libc: str) -> list[str]:
    """Return the command of a C++ compiler for 64-bit Arm, or an empty list.

    Args:
        libc: the C library for Zig, ``"musl"`` for static programs or ``"gnu"`` for shared libraries.
            The cross compiler of GCC has its own, which serves both.
    """
    gcc = shutil.which("aarch64-linux-gnu-g++")
    if gcc:
        return [gcc]
    zig = shutil.which("zig")
    return [zig, "c++", "-target", f"aarch64-linux-{libc}"] if zig else []


def why_no_programs() -> str | None:
    """Return why whole programs cannot run on this machine; ``None`` if they can."""
    if EMULATOR is None or not find_cross_compiler("gnu"):
        return "expected qemu-aarch64, and aarch64-linux-gnu-g++ or zig, found no such commands"
    if not SYSTEM.is_dir():
        return f"expected an arm64 Python in {SYSTEM}, found none; make arm"
    return None


def install(folder: Path, flags: Sequence[str] = ()) -> None:
    """Make ``folder`` a clone of the repository whose kernels are built for Arm.

    Args:
        folder: an empty folder.
        flags: further flags of the compiler.
    """
    source = folder / "src"
    others = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "src" / "pronk", source / "pronk", ignore=others)
    library = source / "pronk" / "kernels" / library_name(TARGET.system)
    build(library, find_cross_compiler("gnu"), TARGET, flags)
    for name in ("models", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    installed = distribution("pronk")  # guests are found by its entry points
    metadata = source / f"pronk-{installed.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (metadata / name).write_text(installed.read_text(name) or "", encoding="utf-8")


def run_python(
    clone: Path,
    processor: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run the arm64 Python with the pronk of ``clone``; return its output.

    Args:
        clone: folder of :func:`install`. It is the home of the program, too, whose caches stay in
            it.
        processor: a key of ``PROCESSORS``.
        arguments: arguments of Python.
        environment: further environment variables.
    """
    path = os.pathsep.join([str(clone / "src"), str(SYSTEM / "packages")])
    own = {"PATH": os.defpath, "HOME": str(clone), "PYTHONPATH": path, **(environment or {})}
    root = SYSTEM / "root"
    python = str(root / "usr" / "bin" / "python3")
    command = [str(EMULATOR), "-cpu", processor, "-L", str(root), python, *arguments]
    done = subprocess.run(
        command, env=own, capture_output=True, text=True, check=False, timeout=60 * HUNG
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
