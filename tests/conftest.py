"""Fixtures of all tests: small checkpoints, written once per session, and their tokenizer."""

import os

# The libraries below read these at their import, and so do those of processes that tests start.
# Idle threads of OpenBLAS and OpenMP wait in busy loops, which take the processors from other tests.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# Without a GPU, Triton's kernels run in its interpreter, which is chosen at its first import.
if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 - before other imports
    os.environ["TRITON_INTERPRET"] = "1"

import gc
import gzip
import json
import logging
import signal
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from checkpoints import MakeCheckpoint, byte_tokenizer, make_checkpoint
from command_line import command  # noqa: F401 - a fixture
from covering import mark_further_cases
from pronk.checkpoint.hub.clone_models import TINY_MODEL
from pronk.kernels import library
from pronk.kernels.library import Kernels
from pronk.kernels.threads import set_threads
from pronk.models import choice, kernels, resolve
from pronk.models.kernels import load_kernels
from pronk.text.tokenizer import Tokenizer


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--kernels``, ``--library``, ``--schemas`` and ``--vocabularies``."""
    parser.addoption(
        "--kernels",
        default="auto",
        choices=library.CHOICES[:-1],
        help="instruction set of the kernels",
    )
    parser.addoption("--library", type=Path, help="file of the kernels")
    parser.addoption(
        "--schemas", type=Path, help="JSON lines, each with a JSON schema for the tests of guides"
    )
    parser.addoption(
        "--vocabularies",
        type=Path,
        help="folder with GGUF files, such as models/ of llama.cpp's source, whose ids are compared",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make slow tests of the cases that the marker ``few`` leaves out; long tests come first.

    The sanitizers check all cases: only some files run with them.

    The first process of ``make test`` begins with the long tests, most of which wait for other
    processes. The others take over its short tests, so that all end at about the same time.
    """
    if config.getoption("--library") is None:
        mark_further_cases(items)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Exempt the collected tests, a million objects, from garbage collection.

    Each full collection would take a second. The tests stay exempt: a server in this process, which
    freezes all objects and unfreezes them at its end, does neither.
    """
    gc.collect()
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        pytest.MonkeyPatch().setattr(gc, name, _do_nothing)


def _do_nothing(*_: object) -> None:
    """Take the place of a function whose result is not used."""


def pytest_configure(config: pytest.Config) -> None:
    """Use the kernels that the options ask for, and a model of the repository as the default.

    Files are not written through to the disk: a test can kill a process, but not lose the power, and
    a busy disk would hold all tests up.
    """
    pytest.MonkeyPatch().setattr(os, "fsync", _do_nothing)
    pytest.MonkeyPatch().setattr(resolve, "DEFAULT_MODEL", TINY_MODEL)
    tiny_models.asked = config.getoption("--kernels")
    path = config.getoption("--library")
    if path is not None:
        # raises if there is no such name
        pytest.MonkeyPatch().setattr(library, "installed_library", path.resolve)

    @wraps(kernels._passed_marker)
    def marker(_: Kernels) -> Path:
        """Take the place of the path of the marker of a passed self-check.

        Without ``--library``, the path cannot exist: no test may rely on the self-check of an
        earlier run, or leave a marker. A library of ``--library`` is its own marker: its self-check
        is a test, and would take ten seconds in each process.
        """
        return Path(os.devnull) / "marker" if path is None else path.resolve()

    pytest.MonkeyPatch().setattr(kernels, "_passed_marker", marker)
    if tiny_models.asked != "auto":

        @wraps(load_kernels.__wrapped__)
        def load(name: str = "auto", path: Path | None = None) -> Kernels:
            return load_kernels(tiny_models.asked if name == "auto" else name, path)

        for module in (kernels, choice):
            pytest.MonkeyPatch().setattr(module, "load_kernels", load)


# For each test, pytest adds handlers to all loggers that do not propagate, of which torch has 42.
for logger in logging.root.manager.loggerDict.values():
    if isinstance(logger, logging.Logger):
        logger.propagate = True
torch.set_num_threads(1)  # also for module-level set-up
set_threads(1, 1)
# A process that a shell starts in the background ignores SIGINT, which some tests raise.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Return a function ``checkpoint(family, **overrides)`` that makes a random checkpoint.

    Equal arguments give the same folder; tests must not write into it.
    """
    made: dict[str, Path] = {}

    def get(family: str, **overrides: Any) -> Path:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def is_sanitized(pytestconfig: pytest.Config) -> bool:
    """Return whether the kernels are those of ``--library``, such as a sanitized library.

    It takes as long for a few rows as the installed library for hundreds.
    """
    return pytestconfig.getoption("--library") is not None


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Return the byte-level BPE tokenizer of the small checkpoints."""
    return Tokenizer(byte_tokenizer(), special_tokens={"eos_token": "<|endoftext|>"})


@pytest.fixture(scope="session")
def schemas(pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """Return the schemas of the file of ``--schemas``; an empty list without the option."""
    path = pytestconfig.getoption("--schemas")
    if path is None:
        return []
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [
        found for line in data.splitlines() if isinstance(found := json.loads(line)["schema"], dict)
    ]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread unless a test sets more: several would only wait for each other."""
    set_threads(1, 1)
    yield
    torch.set_num_threads(1)
    set_threads(1, 1)
