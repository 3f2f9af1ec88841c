"""Build pronk's wheels and source archive: ``make wheels``.

    make wheels                         # all of them, into dist/
    make wheels WHEELS="linux-x86_64"   # some

There is a wheel for each platform of the cross-compiler. The compiler is Zig's, from the wheel
``ziglang``, so that one Linux machine builds for all platforms. The Linux libraries need glibc 2.17
or newer and nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Platform(NamedTuple):
    """A target platform."""

    triple: str  # name for Zig
    machine: str  # processor, for ``build.py``
    system: str  # operating system, for ``build.py``
    tag: str  # tag of the wheel


PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.17", "x86_64", "linux", "manylinux_2_17_x86_64"),
    "linux-aarch64": Platform(
        "aarch64-linux-gnu.2.17", "aarch64", "linux", "manylinux_2_17_aarch64"
    ),
    "windows-x86_64": Platform("x86_64-windows-gnu", "x86_64", "win32", "win_amd64"),
    "macos-arm64": Platform("aarch64-macos", "aarch64", "darwin", "macosx_11_0_arm64"),
    "macos-x86_64": Platform("x86_64-macos", "x86_64", "darwin", "macosx_11_0_x86_64"),
}
SOURCE = "sdist"
MAX_SIZE = 48_000_000  # bytes of a wheel; the three heads have 38 million
# Files that every wheel has beside the Python sources.
FILES = (
    "py.typed",
    "heads/smollm2-135m-instruct-eagle3/model.safetensors",
    "heads/qwen2.5-coder-0.5b-instruct-eagle3/model.safetensors",
    "heads/qwen2.5-coder-1.5b-instruct-eagle3/model.safetensors",
    "server/page/index.html",
    "server/page/highlight.min.js",
    "server/page/highlight.LICENSE.txt",
)


def main() -> None:
    """Build the archives that the arguments name, by default all."""
    known = [*PLATFORMS, SOURCE]
    wanted = sys.argv[1:] or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        sys.exit(f"wheels: expected {', '.join(known)}; found {unknown[0]!r}")
    build = load_build()
    for number, name in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {name}", flush=True)
        environment = os.environ | {"PRONK_LIBRARY": ""}
        if name in PLATFORMS:
            platform = PLATFORMS[name]
            library = ROOT / "build" / name / build.library_name(platform.system)
            compiler = [sys.executable, "-m", "ziglang", "c++", "-target", platform.triple]
            target = build.BuildTarget(platform.machine, platform.system)
            build.build(library, compiler, target, extra=["-Werror"])
            environment["PRONK_LIBRARY"] = str(library)
            environment["PRONK_WHEEL_TAG"] = f"py3-none-{platform.tag}"
        kind = "--sdist" if name == SOURCE else "--wheel"
        command = [sys.executable, "-m", "build", kind, "--outdir", str(ROOT / "dist"), str(ROOT)]
        subprocess.check_output(command, env=environment)  # noqa: S603 - our own command
    for archive in sorted((ROOT / "dist").iterdir()):
        print(f"{archive.name}  {archive.stat().st_size / 1e6:.1f} MB")
        if archive.suffix == ".whl":
            check(archive)


def check(wheel: Path) -> None:
    """Exit with an error if a wheel is too large, lacks a file, or has the wrong libraries."""
    tag = wheel.stem.rpartition("-")[2]
    systems = {each.tag: each.system for each in PLATFORMS.values()}
    if tag not in systems:
        sys.exit(f"{wheel.name}: expected the tag of a platform, found {tag!r}")
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {Path(name).name for name in names if name.endswith((".so", ".dylib", ".dll"))}
    kernels = load_build().library_name(systems[tag])
    expected = {kernels, load_build().suffix_library(Path(kernels)).name}
    missing = [name for name in FILES if f"pronk/{name}" not in names]
    faults = [f"expected {name}, found no such file" for name in missing]
    if libraries != expected:
        faults.append(f"expected the libraries {sorted(expected)}, found {sorted(libraries)}")
    if wheel.stat().st_size > MAX_SIZE:
        faults.append(f"expected at most {MAX_SIZE / 1e6:.0f} MB")
    if faults:
        sys.exit(f"{wheel.name}: {'; '.join(faults)}")


def load_build() -> types.ModuleType:
    """Import the kernels' ``build.py`` without installing pronk."""
    path = ROOT / "src" / "pronk" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("pronk_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pronk_build"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
