"""Guests are found by their entry points; a missing or broken one is an error of one line."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from pronk import guests
from pronk.errors import OptionError
from pronk.guests import load_guest
from pronk.torch.backend import TorchBackend


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder of modules that can be imported; they are forgotten afterwards."""
    known = {*sys.modules}
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in {*sys.modules} - known:
        del sys.modules[name]


def register(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Register one entry point, ``guest``, of the group of backends."""
    entry = EntryPoint("guest", value, "pronk.backends")
    found = {("pronk.backends", "guest"): [entry]}
    monkeypatch.setattr(guests, "entry_points", lambda *, group, name: found.get((group, name), []))


def test_the_guests_of_the_wheel_are_registered() -> None:
    assert load_guest("pronk.backends", "torch", "device") is TorchBackend


def test_a_package_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "stranger.py").write_text("def make(device, dtype):\n    return device\n")
    register(monkeypatch, "stranger:make")
    assert load_guest("pronk.backends", "guest", "device")("tpu", None) == "tpu"


@pytest.mark.parametrize(
    ("code", "value", "message"),
    [
        (
            "",
            "lost_package:make",
            "device: expected lost_package, found none; install lost_package again",
        ),
        (
            "import lost_library",
            "stranger:make [torch]",
            "device: expected lost_library, found none; run pip install '.[torch]' in a clone of pronk",
        ),
        (
            "raise ImportError('libcuda.so: not found')",
            "stranger:make",
            "device: expected stranger that can be imported, found 'libcuda.so: not found'; install stranger again",
        ),
    ],
    ids=["missing", "lacks an extra", "broken"],
)
def test_a_guest_that_cannot_be_imported(
    code: str, value: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "stranger.py").write_text(code)
    register(monkeypatch, value)
    with pytest.raises(OptionError) as error:
        load_guest("pronk.backends", "guest", "device")
    assert str(error.value) == message


def test_an_unregistered_guest() -> None:
    with pytest.raises(OptionError) as error:
        load_guest("pronk.backends", "abacus", "device")
    found = "expected a package that registers abacus in pronk.backends, found none; install pronk again"
    assert str(error.value) == f"device: {found}"
