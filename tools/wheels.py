"""Build pronk's wheels: one per platform of the cross-compiler, and one without kernels.

    make wheels                         all of them, into dist/
    make wheels WHEELS="linux-x86_64"   some

The compiler is Zig's, from the wheel ``ziglang``, so that one Linux machine builds for all platforms. The Linux
libraries need glibc 2.17 or newer and nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Platform(NamedTuple):
    """A target platform: its name for Zig, its names for ``build.py``, and the tag of its wheel."""

    triple: str
    machine: str
    system: str
    tag: str


PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.17", "x86_64", "linux", "manylinux_2_17_x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.17", "aarch64", "linux", "manylinux_2_17_aarch64"),
    "windows-x86_64": Platform("x86_64-windows-gnu", "x86_64", "win32", "win_amd64"),
    "macos-arm64": Platform("aarch64-macos", "aarch64", "darwin", "macosx_11_0_arm64"),
    "macos-x86_64": Platform("x86_64-macos", "x86_64", "darwin", "macosx_11_0_x86_64"),
}
WITHOUT = "any"


def main() -> None:
    """Build the named wheels, or all."""
    wanted = sys.argv[1:] or [*PLATFORMS, WITHOUT]
    unknown = [name for name in wanted if name not in (*PLATFORMS, WITHOUT)]
    if unknown:
        sys.exit(f"wheels: expected {', '.join((*PLATFORMS, WITHOUT))}; found {unknown[0]!r}")
    build = load_build()
    for number, name in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {name}", flush=True)
        environment = os.environ | {"PRONK_LIBRARY": ""}
        if name != WITHOUT:
            platform = PLATFORMS[name]
            library = ROOT / "build" / name / build.library_name(platform.system)
            compiler = [sys.executable, "-m", "ziglang", "c++", "-target", platform.triple]
            build.build(library, compiler, build.BuildTarget(platform.machine, platform.system), extra=["-Werror"])
            environment |= {"PRONK_LIBRARY": str(library), "PRONK_WHEEL_TAG": f"py3-none-{platform.tag}"}
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(ROOT / "dist"), str(ROOT)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own
    for wheel in sorted((ROOT / "dist").glob("*.whl")):
        print(f"{wheel.name}  {wheel.stat().st_size / 1e6:.1f} MB")


def load_build() -> types.ModuleType:
    """Import ``build.py`` without installing pronk."""
    spec = importlib.util.spec_from_file_location("pronk_build", ROOT / "src" / "pronk" / "kernels" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pronk_build"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
