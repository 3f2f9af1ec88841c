"""``pronk doctor`` checks the kernels and estimates the speed of models."""

import json
from pathlib import Path

import pytest

from command_line import Command, assert_mistake
from pronk import diagnosis
from pronk.checkpoint.hub import digests
from pronk.diagnosis import Measured
from pronk.kernels.library import KernelsError, candidates
from pronk.testing import tiny_checkpoint

QUICK = Measured(bandwidth=40e9, products=900e9)


@pytest.fixture(autouse=True)
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what takes seconds: the measurements, and the self-check, which has its own tests."""
    monkeypatch.setattr(diagnosis, "measure", lambda _: QUICK)
    monkeypatch.setattr(diagnosis, "self_check", lambda _: None)


def test_a_sound_machine(command: Command, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "tiny")
    code, out, err = command("doctor", path, "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["kernels"] == {kernels.name: "ok" for kernels in candidates()}
    assert facts["faults"] == []
    (model,) = facts["models"]
    assert model["decoding_tokens_per_second"] == QUICK.bandwidth / model["bytes_per_token"]


def test_lines(command: Command, tmp_path: Path) -> None:
    code, out, err = command("doctor", tiny_checkpoint(tmp_path / "tiny"))
    assert (code, err) == (0, "")
    assert "\nmemory        40 GB/s\n" in out
    assert "portable: ok" in out
    assert "tiny" in out.splitlines()[-1]


def test_wrong_bits(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sound = digests.published_digests
    monkeypatch.setattr(
        diagnosis, "published_digests", lambda key: {"1": {**sound(key)["1"], "noise": "0" * 16}}
    )
    code, out, err = command("doctor", tiny_checkpoint(tmp_path / "tiny"))
    assert code == 1
    assert err.splitlines()[0] == (
        f"pronk: fault: {candidates()[0].name} kernels: other digests of noise"
    )
    assert "portable: other digests of noise" in out


def test_no_kernels(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KernelsError("found no compiled kernels at x; install pronk again")

    monkeypatch.setattr(diagnosis, "candidates", fail)
    code, out, err = command("doctor")
    assert code == 1
    assert err == "pronk: fault: found no compiled kernels at x; install pronk again\n"
    assert out.startswith("pronk ")


def test_a_damaged_model_is_a_row_of_its_own(command: Command, tmp_path: Path) -> None:
    sound = tiny_checkpoint(tmp_path / "sound")
    damaged = tiny_checkpoint(tmp_path / "damaged")
    (damaged / "config.json").write_text("{}")
    code, out, _ = command("doctor", damaged, sound, "--json")
    first, second = json.loads(out)["models"]
    assert code == 0
    assert "unknown architecture" in first["error"]
    assert second["bytes_per_token"] > 0


def test_an_unknown_model(command: Command) -> None:
    assert_mistake(command("doctor", "no/such-model"), "no/such-model")
