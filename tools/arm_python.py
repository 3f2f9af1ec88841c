"""Put an arm64 Python of Debian, with what pronk imports, into a folder: ``make arm``.

    python tools/arm_python.py build/arm

``build/arm/root`` then has Debian's packages, the root of ``qemu-aarch64 -L``, and
``build/arm/packages`` has those of PyPI. The system's own packages stay as they are. Needed are
``apt-get``, ``dpkg-deb``, the keys of Debian's archive, and ``pip``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PYTHON = "3.11"  # version of bookworm's package python3
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCE = f"deb [signed-by={KEYS}] http://deb.debian.org/debian bookworm main\n"
# libstdc++6 is for NumPy.
DEBIAN_PACKAGES = ("python3", "libstdc++6")
GLIBC = 36  # minor version of bookworm's glibc 2
OLDEST_GLIBC = 17  # the oldest one that wheels for arm64 name


def main() -> None:
    """Fill the folder of the argument, unless it exists."""
    if len(sys.argv) != 2:
        sys.exit("arm_python: expected a folder; python tools/arm_python.py build/arm")
    folder = Path(sys.argv[1]).absolute()
    if folder.exists():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        install_debian_packages(partial / "root", partial / "apt")
        install_python_packages(partial / "packages")
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"arm_python: expected packages for arm64, found an error: {error}")
    shutil.rmtree(partial / "apt")
    partial.rename(folder)


def run(command: Sequence[str]) -> None:
    """Run a command; raise ``CalledProcessError`` if it fails."""
    subprocess.run(command, check=True)  # noqa: S603 - our own commands


def install_debian_packages(root: Path, state: Path) -> None:
    """Unpack ``DEBIAN_PACKAGES`` and what they need into ``root``.

    Args:
        root: folder that becomes the root of an arm64 system.
        state: folder for the lists and archives of ``apt-get``, which uses no others.
    """
    archives = state / "archives"
    for folder in (root, state / "lists" / "partial", archives / "partial"):
        folder.mkdir(parents=True)
    installed = state / "status"
    installed.touch()
    sources = state / "sources.list"
    sources.write_text(SOURCE, encoding="utf-8")
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",  # the folder may be closed to apt's own user
        "Dir::State": state,
        "Dir::State::status": installed,
        "Dir::Cache": state,
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
    }
    options = [f"--option={name}={value}" for name, value in settings.items()]
    apt = ["apt-get", "--quiet=2", "--yes", *options]
    run([*apt, "update"])
    install = [*apt, "install", "--download-only", "--no-install-recommends"]
    run([*install, *DEBIAN_PACKAGES])
    for archive in archives.glob("*.deb"):
        run(["dpkg-deb", "--extract", str(archive), str(root)])


def install_python_packages(folder: Path) -> None:
    """Unpack pronk's dependencies, and those of guides, into ``folder``."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["guided"]]
    versions = range(OLDEST_GLIBC, GLIBC + 1)
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in versions]
    options = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:", *platforms]
    options += [f"--python-version={PYTHON}", f"--target={folder}"]
    options += [f"--constraint={PROJECT / 'constraints.txt'}"]
    run([sys.executable, "-m", "pip", "install", *options, *needed])


if __name__ == "__main__":
    main()
