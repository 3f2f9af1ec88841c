"""Make pronk ready on a machine without a network, where it cannot be installed.

    python benchmarks/gpu/prepare.py build/site
    PYTHONPATH=src:build/site python benchmarks/gpu/run.py results.jsonl

The kernels for the processor are compiled if they do not exist. The folder gets the names and entry
points of pronk, by which Python finds its devices and drafters.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "pronk" / "kernels"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to add to PYTHONPATH")
    options = parser.parse_args()
    if not (KERNELS / "libpronk.so").exists():
        subprocess.run([sys.executable, KERNELS / "build.py"], check=True)  # noqa: S603
    write_entry_points(options.folder)


def write_entry_points(folder: Path) -> None:
    """Write what an installation writes: a folder with pronk's version and entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = read_version()
    metadata = folder / f"pronk-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: pronk\nVersion: {version}\n", encoding="utf-8"
    )
    lines = list[str]()
    for group, entries in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {target}" for name, target in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_version() -> str:
    """Return pronk's ``__version__``, without an import of pronk."""
    source = (ROOT / "src" / "pronk" / "__init__.py").read_text(encoding="utf-8")
    line = next(line for line in source.splitlines() if line.startswith("__version__"))
    return line.partition("=")[2].strip().strip('"')


if __name__ == "__main__":
    main()
