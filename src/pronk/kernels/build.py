"""Compile the kernels and the suffix automaton: ``python build.py [OUT] [FLAGS]``.

``OUT`` is the path of the kernels' library. The library of the suffix automaton, which also merges
tokens of texts, is written beside it. Each instruction set has a source file and compiler flags;
``dispatch.cpp`` selects one at run time. The module imports only the standard library, because the
installation (``hatch_build.py``) runs it before pronk and its dependencies can be imported.
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

# -ffp-contract=off: the compiler uses fused multiply-add only where the source does, so that
# results do not depend on the compiler.
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
# GCC 12 warns about undefined vectors in its own headers (GCC bug 105593), and that calls with
# vectors differ between versions of GCC, although all such functions are inlined; other compilers
# lack the options.
_GCC_FLAGS = ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi"]

# -mprfchw: prefetches for writing; processors that lack them take the instruction as none.
_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mprfchw"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprfchw"]
_X86 = {
    "isa_avx2": _AVX2,
    "isa_avx_vnni": [*_AVX2, "-mavxvnni"],
    "isa_avx512": _AVX512,
    "isa_vnni": [*_AVX512, "-mavx512vnni"],
    "isa_avx512_bf16": [*_AVX512, "-mavx512bf16"],
    "isa_amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "isa_amx_int8": [*_AVX512, "-mamx-tile", "-mamx-int8"],
}
_ARM = {"isa_dot": ["-march=armv8.2-a+dotprod"], "isa_i8mm": ["-march=armv8.2-a+dotprod+i8mm"]}
# For a flag in ``/proc/cpuinfo`` that a processor may lack: source files that a build for this
# processor alone leaves out, and the macro that removes them from ``dispatch.cpp``.
_OPTIONAL = {
    "avx512f": (
        "PRONK_WITHOUT_AVX512",
        ("isa_avx512", "isa_vnni", "isa_avx512_bf16", "isa_amx", "isa_amx_int8"),
    ),
    "avx_vnni": ("PRONK_WITHOUT_AVX_VNNI", ("isa_avx_vnni",)),
}
# At -O3 the compiler vectorizes the plain loops over vector lanes in isa_portable and those over
# tokens in verify.
_COMMON: dict[str, list[str]] = {
    "dispatch": [],
    "forward": [],
    "pack": [],
    "thread_pool": [],
    "isa_portable": ["-O3"],
    "verify": ["-O3"],
}
_SUFFIX_SOURCES = ("merges", "suffix")


class BuildError(Exception):
    """No C++ compiler was found, or the compiler has failed."""


@dataclass(frozen=True)
class BuildTarget:
    """Platform to compile for.

    Attributes:
        machine: ``"x86_64"`` or ``"aarch64"``, as ``platform.machine`` names them on Linux.
        system: ``"linux"``, ``"darwin"`` or ``"win32"``, as ``sys.platform`` names them.
    """

    machine: str
    system: str

    @classmethod
    def current(cls) -> BuildTarget:
        """Return the platform of this process."""
        machine = platform.machine().lower()
        other_names = {"amd64": "x86_64", "arm64": "aarch64"}  # names on Windows and macOS
        return cls(other_names.get(machine, machine), sys.platform)

    @property
    def source_flags(self) -> dict[str, list[str]]:
        """Compiler flags of each source file of the kernels, by file name without ``.cpp``."""
        return _COMMON | {"x86_64": _X86, "aarch64": _ARM}.get(self.machine, {})


def _left_out(target: BuildTarget) -> tuple[list[str], set[str]]:
    """Return what a build for this processor alone leaves out.

    Returns:
        Compiler flags that define the macros of the instruction sets left out, and the names of
        their source files.
    """
    if target.machine != "x86_64":
        return [], set()
    try:
        processor_flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return [], set()
    macros: list[str] = []
    left_out: set[str] = set()
    for flag, (macro, sources) in _OPTIONAL.items():
        if flag not in processor_flags:
            macros.append(f"-D{macro}")
            left_out.update(sources)
    return macros, left_out


def library_name(system: str = sys.platform) -> str:
    """Return the file name of the kernels' library on ``system``, a value of ``sys.platform``."""
    return {"darwin": "libpronk.dylib", "win32": "pronk.dll"}.get(system, "libpronk.so")


def suffix_library(kernels: Path) -> Path:
    """Return the path of the suffix automaton's library beside the kernels' library."""
    return kernels.with_stem(f"{kernels.stem}_suffix")


def find_compiler() -> list[str] | None:
    """Return the command of the system's C++ compiler, of ``$CXX`` or in ``$PATH``, or ``None``."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            return [path]
    return None


def flags_for(compiler: Sequence[str], source_flags: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the flags of each source file in the words of a compiler, given those of GCC."""
    if not any(Path(part).name.startswith("zig") for part in compiler):
        return source_flags
    renamed = ("-march=armv8.2-a", "-mcpu=generic+v8_2a")
    return {name: [flag.replace(*renamed) for flag in own] for name, own in source_flags.items()}


def build(
    out: Path,
    compiler: Sequence[str] | None = None,
    target: BuildTarget | None = None,
    extra: Sequence[str] = (),
    *,
    native: bool = False,
) -> None:
    """Build the libraries of the kernels and of the suffix automaton; write both or none.

    Args:
        out: path of the kernels' library; the library of the suffix automaton is written to
            ``suffix_library(out)``.
        compiler: command of the compiler; by default the compiler of the system.
        target: platform that ``compiler`` compiles for; by default this machine.
        extra: further flags for compiling and linking, such as the flags of a sanitizer.
        native: whether to build only the instruction sets of this processor, in less than half the
            time.

    Raises:
        BuildError: there is no compiler, or it fails; the message has the first line of its error.
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
    sources = flags_for(compiler, sources)
    libraries = [] if target.system == "win32" else ["-lm"]
    if is_gcc and target.system == "linux":
        libraries.append("-static-libgcc")
    link = [*compiler, "-shared", *shared, *extra]
    is_debug_build = any(flag.startswith("-g") for flag in extra)
    if not is_debug_build:
        link.append("-s")  # drops the symbol table, which a debugger needs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source_flags = {name: [*own, *extra] for name, own in sources.items()}
        source_flags |= {name: list(extra) for name in _SUFFIX_SOURCES}
        _compile([*compiler, *flags], source_flags, folder)
        for library, names in ((suffix_library(out), _SUFFIX_SOURCES), (out, sorted(sources))):
            objects = [str(folder / f"{name}.o") for name in names]
            _run([*link, *objects, "-o", str(folder / library.name), *libraries])
        out.parent.mkdir(parents=True, exist_ok=True)
        for library in (suffix_library(out), out):
            partial = library.with_name(library.name + ".partial")
            shutil.copyfile(folder / library.name, partial)
            partial.replace(library)


def _compile(command: Sequence[str], source_flags: dict[str, list[str]], folder: Path) -> None:
    """Compile source files in parallel; write their object files to ``folder``.

    Args:
        command: the compiler, and the flags of all files.
        source_flags: further flags of each file, by its name without ``.cpp``.
        folder: folder of the object files.
    """

    def compile_source(name: str) -> None:
        source = str(SOURCES / f"{name}.cpp")
        output = str(folder / f"{name}.o")
        _run([*command, *source_flags[name], "-c", source, "-o", output])

    # The files of instruction sets take longest, so they come first.
    names = sorted(source_flags, key=lambda name: not name.startswith("isa_"))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_source, names))  # list() raises the first error of a compilation


def _run(command: Sequence[str]) -> None:
    """Run a compiler; raise a BuildError with the first line of its error if it fails."""
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
