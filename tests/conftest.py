"""Fixtures for everyone: small checkpoints, written once per session, and the tokenizer that fits them."""

import gzip
import json
import signal
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

import quick_noise
import tiny_models
from checkpoints import MakeCheckpoint, byte_tokenizer, make_checkpoint
from pronk.kernels import library
from pronk.kernels.library import Kernels
from pronk.models import kernels
from pronk.models.kernels import load_kernels
from pronk.sampling import noise, sampler
from pronk.tokenization.tokenizer import Tokenizer


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--kernels=avx2``: a lower instruction set than the processor's; ``--library``: another file, a sanitizer's."""
    parser.addoption("--kernels", default="auto", choices=library.CHOICES[:-1], help="what the tests compute with")
    parser.addoption("--library", type=Path, help="the file of the kernels")
    parser.addoption("--schemas", type=Path, help="more JSON schemas for guides to fit: JSON lines with a schema each")


def pytest_configure(config: pytest.Config) -> None:
    """Whoever asks for the best kernels gets those that the tests ask for."""
    tiny_models.asked, path = config.getoption("--kernels"), config.getoption("--library")
    if path is not None:
        library.installed = path.resolve
    if tiny_models.asked != "auto":

        @wraps(load_kernels.__wrapped__)
        def load(choice: str = "auto", path: Path | None = None) -> Kernels:
            return load_kernels(tiny_models.asked if choice == "auto" else choice, path)

        kernels.load_kernels = load


torch.set_num_threads(1)  # for what is set up before the first test, too
# A shell that starts the tests in the background lets them ignore Ctrl-C, which some of them are about.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """``checkpoint(family, **overrides)``: a folder that nobody may write into."""
    made: dict[str, Path] = {}

    def get(family: str, **overrides: Any) -> Path:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE with as many ids as the small checkpoints have."""
    return Tokenizer(byte_tokenizer(), special_tokens={"eos_token": "<|endoftext|>"})


@pytest.fixture(scope="session")
def schemas(pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """Those of the file that was given; none, if none was."""
    path = pytestconfig.getoption("--schemas")
    if path is None:
        return []
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [found for line in data.splitlines() if isinstance(found := json.loads(line)["schema"], dict)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread unless a test asks for more: the models are so small that threads only wait for each other."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def quickly_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise, sooner: for tests that draw with thousands of seeds from a small vocabulary."""
    for module in (noise, sampler):
        monkeypatch.setattr(module, "gumbel_noise", quick_noise.gumbel_noise)
