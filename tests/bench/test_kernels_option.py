"""``--kernels`` of every command that loads a model, and where what computed is said."""

import io
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from pronk.bench import machine, passes
from pronk.cli.main import main
from pronk.kernels.library import CHOICES, KernelsError
from tiny_models import kernels

Run = Callable[..., tuple[int, str, str]]

COMMANDS = ("generate", "chat", "bench", "verify")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command on pronk-tiny, with little memory to read and few passes to time."""
    monkeypatch.setattr(machine, "_BUFFER_BYTES", 2**20)
    monkeypatch.setattr(passes, "_ROUNDS", 1)
    monkeypatch.setattr(passes, "ROWS", (1, 4))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([*map(str, args)])
        out, err = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, out, err

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_names_all_of_them(run: Run, command: str) -> None:
    _, out, _ = run(command, "--help")
    (_, rest) = out.split("--kernels")
    text = " ".join(rest.split("--budget")[0].split())
    assert all(choice in text for choice in CHOICES)


@pytest.mark.parametrize(
    "args", [("generate", "x"), ("chat",), ("bench", "--limit", "1"), ("verify", "--limit", "1")], ids=COMMANDS
)
def test_others_are_refused(run: Run, args: tuple[str, ...]) -> None:
    code, out, err = run(*args, "--kernels", "sse")
    expected = "kernels: expected auto, portable, avx2, avx512, avx512_bf16, amx, torch; found 'sse'"
    assert (code, out, err) == (2, "", f"pronk: error: {expected}\n")


@pytest.mark.parametrize("choice", ["auto", "portable", "torch"])
def test_the_figures_of_an_answer_say_what_computed(run: Run, choice: str) -> None:
    used = kernels().name if choice == "auto" else choice
    asked = ("generate", "x =", "--max-tokens", 3, "--stats", "--kernels", choice)
    _, _, err = run(*asked)
    assert err.endswith(f" · kernels {used}\n")
    _, _, err = run(*asked, "--temperature", 1, "--seed", 5)
    assert err.endswith(f" · kernels {used} · seed 5\n")


def test_so_do_those_of_a_chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/stats\n"))
    code, _, err = run("chat", "--max-tokens", 3, "--stats", "--kernels", "portable")
    assert code == 0
    assert [line.rsplit(" · ", 1)[-1] for line in err.splitlines()] == ["kernels portable"] * 2


def test_a_benchmark_says_what_computed_its_models(run: Run, tmp_path: Path) -> None:
    few = ("--limit", 1, "--max-tokens", 4, "--repeats", 1, "--temperature", 0, "--json", tmp_path / "out.json")
    for choice in ("auto", "portable"):
        used = kernels().name if choice == "auto" else choice
        code, out, _ = run("bench", *few, "--kernels", choice)
        document = json.loads((tmp_path / "out.json").read_text())
        assert (code, document["arguments"]["kernels"], document["models"][0]["kernels"]) == (0, choice, used)
        assert f"kernels {used}" in out


@pytest.mark.parametrize(("choice", "exact"), [("portable", True), ("torch", False)])
def test_a_verification_says_what_it_verified(run: Run, choice: str, *, exact: bool) -> None:
    few = ("--limit", 1, "--samples", 0, "--max-tokens", 2, "--drafter", "prompt_lookup(min_ngram=1)")
    _, out, _ = run("verify", *few, "--kernels", choice, "--json")
    report = json.loads(out)
    assert (report["kernels"], report["exact"]) == (choice, exact)


def test_where_there_are_none_torch_computes_and_the_user_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: str) -> None:
        raise KernelsError("found no compiled kernels")

    monkeypatch.setattr("pronk.models.kernels.load_kernels", none)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _, _, err = run("generate", "x =", "--max-tokens", 3, "--stats")
    assert err.startswith("pronk: warning: found no compiled kernels; torch computes instead")
    assert err.endswith(" · kernels torch\n")
