"""Compile the kernels: ``python build.py [OUT] [FLAGS]`` with the system's compiler, or one for another platform.

Imports nothing of pronk and nothing that is not Python's own, because the installation runs it before either is there
(``hatch_build.py``). One shared library holds every instruction set that the target's architecture knows; each is a
file of its own with flags of its own, and ``pronk.cpp`` chooses between them when it runs.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SOURCES", "BuildError", "BuildTarget", "build", "find_compiler", "library_name"]

SOURCES = Path(__file__).parent / "csrc"

# No contraction: a product and a sum are fused where the source says so and nowhere else.
_FLAGS = ["-O2", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-math-errno"]
# Rows of activations are numbers to whoever computes them, and units of four bytes to whoever packs them.
_FLAGS += ["-fno-strict-aliasing"]
_FLAGS += ["-fvisibility=hidden", "-Wall", "-Wextra"]
# GCC 12 warns of its own headers' undefined vectors (GCC bug 105593); other compilers do not know the name.
_GCC_FLAGS = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]

_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
_X86 = {
    "isa_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512": _AVX512,
    "isa_vnni": [*_AVX512, "-mavx512vnni"],
    "isa_avx512_bf16": [*_AVX512, "-mavx512bf16"],
    "isa_amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
# Loops over lanes are the compiler's to vectorize.
_COMMON: dict[str, list[str]] = {"pronk": [], "suffix": [], "team": [], "isa_portable": ["-O3"]}


class BuildError(Exception):
    """There is no compiler, or it does not compile this."""


@dataclass(frozen=True)
class BuildTarget:
    """What the library is for.

    Attributes:
        machine: ``"x86_64"`` or ``"aarch64"``, as :func:`platform.machine` names them.
        system: ``"linux"``, ``"darwin"`` or ``"win32"``, as :data:`sys.platform` names them.
    """

    machine: str
    system: str

    @classmethod
    def here(cls) -> BuildTarget:
        """This machine."""
        machine = platform.machine().lower()
        return cls({"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine), sys.platform)

    @property
    def units(self) -> dict[str, list[str]]:
        """Source files, without their ending, and the flags of each."""
        return _COMMON | (_X86 if self.machine == "x86_64" else {})


def library_name(system: str = sys.platform) -> str:
    """The file's name on a system."""
    return {"darwin": "libpronk.dylib", "win32": "pronk.dll"}.get(system, "libpronk.so")


def find_compiler() -> list[str] | None:
    """The command of the system's C++ compiler: ``$CXX``, or the first of the usual names; ``None`` if it has none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return next(([found] for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build(
    out: Path, compiler: Sequence[str] | None = None, target: BuildTarget | None = None, extra: Sequence[str] = ()
) -> None:
    """Compile and link the library at ``out``, whole or not at all.

    Args:
        out: the file.
        compiler: its command; by default the system's.
        target: what ``compiler`` compiles for; by default this machine.
        extra: further flags, for compiling and linking: a sanitizer's, for example.

    Raises:
        BuildError: no compiler, or it fails; with the first line that says why.
    """
    target = target or BuildTarget.here()
    compiler = list(compiler or find_compiler() or ())
    if not compiler:
        msg = "expected a C++ compiler (c++, g++ or clang++, or CXX=…), found none"
        raise BuildError(msg)
    shared = ["-fPIC", "-pthread"] if target.system != "win32" else []
    flags = [*_FLAGS, *(_GCC_FLAGS if _is_gcc(compiler) else []), *shared]
    with tempfile.TemporaryDirectory() as folder:

        def compile_unit(unit: tuple[str, list[str]]) -> str:
            name, own = unit
            made = f"{folder}/{name}.o"
            _run([*compiler, *flags, *own, *extra, "-c", str(SOURCES / f"{name}.cpp"), "-o", made])
            return made

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_unit, sorted(target.units.items(), key=lambda unit: unit[0] in _COMMON)))
        linked = f"{folder}/{library_name(target.system)}"
        libraries = ["-lm", "-static-libgcc"] if target.system == "linux" and _is_gcc(compiler) else ["-lm"]
        strip = [] if "-g" in extra else ["-s"]
        _run([*compiler, "-shared", *shared, *strip, *extra, *objects, "-o", linked, *(libraries if shared else [])])
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(out.name + ".partial")
        shutil.copyfile(linked, partial)
        partial.replace(out)


def _is_gcc(compiler: Sequence[str]) -> bool:
    text = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
    return "Free Software Foundation" in text


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the user's compiler
    except OSError as error:
        msg = f"{command[0]}: {error.strerror}"
        raise BuildError(msg) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["failed"]
        msg = f"{command[0]}: {lines[0]}"
        raise BuildError(msg)


if __name__ == "__main__":
    try:
        named = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
        flags = [argument for argument in sys.argv[1:] if argument.startswith("-")]
        build(named[0] if named else Path(__file__).parent / library_name(), extra=flags)
    except BuildError as error:
        sys.exit(f"pronk: {error}")
