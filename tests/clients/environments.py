"""Environments of clients, each with the newest version of one package of pip or npm."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
CLOSED = "http://127.0.0.1:9"  # no server listens at the discard port
# Clients have no network but this machine, and none of their variables comes from outside.
OFFLINE = {
    "HTTP_PROXY": CLOSED,
    "HTTPS_PROXY": CLOSED,
    "NO_PROXY": "127.0.0.1,localhost",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "AIDER_ANALYTICS": "false",
    "DO_NOT_TRACK": "1",
}
# File of an environment with the name and version of its package, which tools/docs/client_versions.py reads.
VERSION_FILE = "version.json"
PASSED_ON = ("PATH", "LANG", "LC_ALL", "SSL_CERT_FILE")
SECONDS = 300


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the folder in which its programs run."""

    folder: Path
    home: Path

    @property
    def commands(self) -> Path:
        """Folder of the commands of the installed packages."""
        return self.folder / "bin"

    @property
    def packages(self) -> Path:
        """Folder of the installed packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def run(
        self,
        command: str,
        *arguments: str,
        text: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command of the environment with ``text`` as its input; return its output."""
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        done = subprocess.run(
            [str(self.commands / command), *arguments],
            input=text,
            env={**passed, **OFFLINE, "HOME": str(self.home), **(variables or {})},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        printed = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{printed}"
        return done.stdout

    def ask(self, program: str, url: str, key: str) -> dict[str, Any]:
        """Run a program of ``programs/`` with a server's address and API key; return its facts."""
        output = self.run("python", str(PROGRAMS / program), url, key)
        facts: dict[str, Any] = json.loads(output.splitlines()[-1])
        return facts


def install(requirement: str, cache: Path, home: Path, *, lends_torch: bool = False) -> Environment:
    """Return the environment of a requirement at its newest version.

    The test is skipped if the requirement cannot be installed. Environments are kept in ``cache``
    for later runs, one per requirement and version of Python. With ``lends_torch``, the environment
    uses the PyTorch of this one: a second copy would take gigabytes.
    """
    name = "".join(character if character.isalnum() else "_" for character in requirement)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    made = Environment(cache / f"{name}-{version}", home)
    with _alone(cache / "lock"):
        if not (made.commands / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(made.folder)], check=True)
        if lends_torch:
            _lend_torch(made)
        done = subprocess.run(
            [
                str(made.commands / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--upgrade",
                requirement,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[0] if errors else "another error of pip"
        pytest.skip(f"expected {requirement} from the package index, found {reason}")
    package = requirement.partition("[")[0]
    ask = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    _store_version(made.folder, package, made.run("python", "-c", ask).strip())
    return made


@dataclass(frozen=True)
class Program:
    """A command of a package of npm, and the folder in which it runs."""

    path: Path
    home: Path

    def run(self, *arguments: str, variables: Mapping[str, str]) -> str:
        """Run the command without input; return its output."""
        done = subprocess.run(
            [str(self.path), *arguments],
            env={**OFFLINE, "PATH": os.environ["PATH"], "HOME": str(self.home), **variables},
            cwd=self.home,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def install_program(package: str, command: str, cache: Path, home: Path) -> Program:
    """Return a command of a package of npm at its newest version.

    The test is skipped if the package cannot be installed. The package is kept in ``cache``.
    """
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("expected npm, found none")
    folder = cache / command
    folder.mkdir(exist_ok=True)
    with _alone(cache / "lock"):
        # The current folder may have a folder of the package's name, which npm would install.
        done = subprocess.run(
            [npm, "install", "--prefix", str(folder), package],
            capture_output=True,
            text=True,
            cwd=home,
            check=False,
        )
    if done.returncode != 0:
        pytest.skip(f"expected {package} from the package index, found an error of npm")
    modules = folder / "node_modules"
    facts = json.loads((modules / package / "package.json").read_text(encoding="utf-8"))
    _store_version(folder, package, facts["version"])
    return Program(modules / ".bin" / command, home)


def _store_version(folder: Path, package: str, version: str) -> None:
    (folder / VERSION_FILE).write_text(json.dumps([package, version]), encoding="utf-8")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process installs an environment."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lend_torch(made: Environment) -> None:
    """Link the PyTorch of this environment into another one."""
    own = Path(sysconfig.get_paths()["purelib"])
    for pattern in ("torch", "torchgen", "functorch", "torch-*.dist-info"):
        for path in own.glob(pattern):
            there = made.packages / path.name
            if not there.exists():
                there.symlink_to(path)
