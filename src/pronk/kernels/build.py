"""Compile the kernels and the suffix automaton: ``python build.py [OUT] [FLAGS]``.

``OUT`` is the path of the kernels' library; the suffix automaton's library is written beside it.
The module imports only the standard library, because the installation (``hatch_build.py``) runs it
before pronk and its dependencies are importable. Each instruction set has a source file and
compiler flags; ``dispatch.cpp`` selects one at run time.
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

SOURCES = Path(__file__).parent / "csrc"

# -ffp-contract=off: fused multiply-add only where the source has it, so that results do not depend
# on the compiler.
_FLAGS = [
    "-O2",
    "-std=c++17",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-fno-math-errno",
]
# -fno-strict-aliasing: the function pack_row_tile reads floats as 4-byte integers.
_FLAGS += ["-fno-strict-aliasing", "-fvisibility=hidden", "-Wall", "-Wextra"]
# GCC 12 warns about undefined vectors in its own headers (GCC bug 105593); other compilers lack the
# option.
_GCC_FLAGS = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]

_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
_X86 = {
    "isa_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx_vnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "isa_avx512": _AVX512,
    "isa_vnni": [*_AVX512, "-mavx512vnni"],
    "isa_avx512_bf16": [*_AVX512, "-mavx512bf16"],
    "isa_amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
_ARM = {"isa_dot": ["-march=armv8.2-a+dotprod"], "isa_i8mm": ["-march=armv8.2-a+dotprod+i8mm"]}
# Source files that a build for this processor alone leaves out, by the flag of ``/proc/cpuinfo``
# that the processor lacks, and the macro that removes them from ``dispatch.cpp``.
_OPTIONAL = {
    "avx512f": ("PRONK_WITHOUT_AVX512", ("isa_avx512", "isa_vnni", "isa_avx512_bf16", "isa_amx")),
    "avx_vnni": ("PRONK_WITHOUT_AVX_VNNI", ("isa_avx_vnni",)),
}
# At -O3 the compiler vectorizes the plain loops over vector lanes in isa_portable.
_COMMON: dict[str, list[str]] = {
    "dispatch": [],
    "forward": [],
    "pack": [],
    "thread_pool": [],
    "isa_portable": ["-O3"],
}
_SUFFIX_SOURCE = "suffix"


class BuildError(Exception):
    """No compiler was found, or it failed."""


@dataclass(frozen=True)
class BuildTarget:
    """Platform to compile for."""

    machine: str  # ``"x86_64"`` or ``"aarch64"``, as ``platform.machine`` names them
    system: str  # ``"linux"``, ``"darwin"`` or ``"win32"``, as ``sys.platform`` names them

    @classmethod
    def current(cls) -> BuildTarget:
        """Return the platform that this process runs on."""
        machine = platform.machine().lower()
        return cls({"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine), sys.platform)

    @property
    def source_flags(self) -> dict[str, list[str]]:
        """Compiler flags of each source file of the kernels, by file name without ``.cpp``."""
        return _COMMON | {"x86_64": _X86, "aarch64": _ARM}.get(self.machine, {})


def _left_out(target: BuildTarget) -> tuple[list[str], set[str]]:
    """Return the macros and the source files to leave out in a build for this processor alone."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return [], set()
    missing = [
        _OPTIONAL[flag] for flag in _OPTIONAL if target.machine == "x86_64" and flag not in flags
    ]
    return [f"-D{macro}" for macro, _ in missing], {
        source for _, sources in missing for source in sources
    }


def library_name(system: str = sys.platform) -> str:
    """Return the file name of the kernels' library on ``system``, a value of ``sys.platform``."""
    return {"darwin": "libpronk.dylib", "win32": "pronk.dll"}.get(system, "libpronk.so")


def suffix_library(kernels: Path) -> Path:
    """Return the path of the suffix automaton's library beside the kernels' library."""
    return kernels.with_stem(f"{kernels.stem}_suffix")


def find_compiler() -> list[str] | None:
    """Return the command of the system's C++ compiler, from ``$CXX`` or ``$PATH``, or ``None``."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return next(
        ([path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None
    )


def build(
    out: Path,
    compiler: Sequence[str] | None = None,
    target: BuildTarget | None = None,
    extra: Sequence[str] = (),
    *,
    native: bool = False,
) -> None:
    """Build the libraries of the kernels and of the suffix automaton; if one fails, write neither.

    Args:
        out: path of the kernels' library; the suffix automaton's is written to
            ``suffix_library(out)``.
        compiler: command of the compiler; by default the system's.
        target: platform that ``compiler`` compiles for; by default this machine.
        extra: further flags for compiling and linking, such as a sanitizer's.
        native: whether to build only the instruction sets of this processor, in less than half the
            time.

    Raises ``BuildError`` if there is no compiler, or it fails; the message has the first line of
    its error.
    """
    target = target or BuildTarget.current()
    compiler = list(compiler or find_compiler() or ())
    if not compiler:
        msg = "expected a C++ compiler (c++, g++ or clang++, or CXX=…), found none"
        raise BuildError(msg)
    shared = ["-fPIC", "-pthread"] if target.system != "win32" else []
    macros, left_out = _left_out(target) if native else ([], set())
    sources = {name: own for name, own in target.source_flags.items() if name not in left_out}
    version = subprocess.run(  # noqa: S603
        [*compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    is_gcc = "Free Software Foundation" in version
    flags = [*_FLAGS, *(_GCC_FLAGS if is_gcc else []), *shared, *macros]
    # does not know -march=armv8.2-a, which GCC needs
    if any(Path(part).name.startswith("zig") for part in compiler):
        renamed = ("-march=armv8.2-a", "-mcpu=generic+v8_2a")
        sources = {name: [flag.replace(*renamed) for flag in own] for name, own in sources.items()}
    libraries = [] if target.system == "win32" else ["-lm"]
    if is_gcc and target.system == "linux":
        libraries.append("-static-libgcc")
    # -s drops the symbol table, which a debugger (-g) needs.
    link = [
        *compiler,
        "-shared",
        *shared,
        *([] if any(flag.startswith("-g") for flag in extra) else ["-s"]),
        *extra,
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags_of = {name: [*own, *extra] for name, own in (sources | {_SUFFIX_SOURCE: []}).items()}
        _compile([*compiler, *flags], flags_of, folder)
        for library, names in ((suffix_library(out), [_SUFFIX_SOURCE]), (out, sorted(sources))):
            objects = [str(folder / f"{name}.o") for name in names]
            _run([*link, *objects, "-o", str(folder / library.name), *libraries])
        out.parent.mkdir(parents=True, exist_ok=True)
        for library in (suffix_library(out), out):
            partial = library.with_name(library.name + ".partial")
            shutil.copyfile(folder / library.name, partial)
            partial.replace(library)


def _compile(command: Sequence[str], source_flags: dict[str, list[str]], folder: Path) -> None:
    """Compile all source files in parallel, first ``isa_*`` (instruction sets), which take longest."""

    def compile_source(name: str) -> None:
        _run(
            [
                *command,
                *source_flags[name],
                "-c",
                str(SOURCES / f"{name}.cpp"),
                "-o",
                str(folder / f"{name}.o"),
            ]
        )

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        names = sorted(source_flags, key=lambda name: not name.startswith("isa_"))
        list(pool.map(compile_source, names))  # list() raises the first error of a compilation


def _run(command: Sequence[str]) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the user's compiler
    except OSError as error:
        msg = f"{command[0]}: {error.strerror}"
        raise BuildError(msg) from error
    if process.returncode:
        lines = process.stderr.splitlines() or ["failed"]
        reason = next((line for line in lines if "error" in line), lines[0])
        msg = f"{command[0]}: {reason}"
        raise BuildError(msg)


if __name__ == "__main__":
    try:
        paths = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
        flags = [argument for argument in sys.argv[1:] if argument.startswith("-")]
        build(paths[0] if paths else Path(__file__).parent / library_name(), extra=flags)
    except BuildError as error:
        sys.exit(f"pronk: {error}")
