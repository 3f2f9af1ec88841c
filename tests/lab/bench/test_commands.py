"""Options of commands that load a model: ``--kernels``, ``--workers``, and the files of ``pronk
bench``.
"""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel.dealt import partition_randomly
from pronk import diagnosis
from pronk.cli.main import main
from pronk.kernels.library import CHOICES, candidates
from pronk.lab.bench import measure, render
from pronk.lab.bench.measure import Bench
from tiny_models import kernels

Run = Callable[..., tuple[int, str, str]]

COMMANDS = ("generate", "chat", "bench", "verify")
FEW = ("--limit", 1, "--repeats", 1, "--temperature", 0)
# Not the default of "auto", if there is another one. Half a minute passes on "portable", whose
# multiply-add is software, before pronk-tiny is measured.
OTHER_KERNELS = [each.name for each in candidates()][:2][-1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command on pronk-tiny, with little memory to read and few forward passes to time."""
    monkeypatch.setattr(diagnosis, "_BUFFER_BYTES", 2**20)
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    monkeypatch.setattr(measure, "ROWS", (1, 4))
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
def test_help_names_all_kernels(run: Run, command: str) -> None:
    _, out, _ = run(command, "--help")
    (_, rest) = out.split("--kernels")
    text = " ".join(rest.split("--budget")[0].split())
    assert all(choice in text for choice in CHOICES)


@pytest.mark.parametrize(
    "args",
    [("generate", "x"), ("chat",), ("bench", "--limit", "1"), ("verify", "--limit", "1")],
    ids=COMMANDS,
)
def test_unknown_kernels_are_refused(run: Run, args: tuple[str, ...]) -> None:
    code, out, err = run(*args, "--kernels", "sse")
    expected = (
        "kernels: expected one of auto, portable, avx2, avx512, avx512_bf16, amx, found 'sse'"
    )
    assert (code, out, err) == (2, "", f"pronk: error: {expected}\n")


@pytest.mark.parametrize("choice", ["auto", OTHER_KERNELS])
def test_the_figures_of_an_answer_name_the_kernels(run: Run, choice: str) -> None:
    used = kernels().name if choice == "auto" else choice
    asked = ("generate", "x =", "--max-tokens", 3, "--stats", "--kernels", choice)
    _, _, err = run(*asked)
    assert err.endswith(f" · kernels {used}\n")
    _, _, err = run(*asked, "--temperature", 1, "--seed", 5)
    assert err.endswith(f" · kernels {used} · seed 5\n")


def test_the_figures_of_a_chat_name_the_kernels(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/stats\n"))
    code, _, err = run("chat", "--max-tokens", 3, "--stats", "--kernels", OTHER_KERNELS)
    assert code == 0
    assert err.startswith("stopped after 3 tokens; --max-tokens sets another limit\n")
    assert [line.rsplit(" · ", 1)[-1] for line in err.splitlines()[1:]] == [
        f"kernels {OTHER_KERNELS}"
    ] * 2


def test_a_benchmark_names_the_kernels(run: Run, tmp_path: Path) -> None:
    for choice in ("auto", OTHER_KERNELS):
        used = kernels().name if choice == "auto" else choice
        code, out, _ = run(
            "bench", *FEW, "--max-tokens", 4, "--json", tmp_path / "out.json", "--kernels", choice
        )
        document = json.loads((tmp_path / "out.json").read_text())
        assert (code, document["arguments"]["kernels"], document["models"][0]["kernels"]) == (
            0,
            choice,
            used,
        )
        assert f"kernels {used}" in out


def test_a_verification_names_the_kernels(run: Run) -> None:
    few = (
        "--limit",
        1,
        "--samples",
        0,
        "--max-tokens",
        2,
        "--drafter",
        "prompt_lookup(min_ngram=1)",
    )
    _, out, _ = run("verify", *few, "--kernels", OTHER_KERNELS, "--json", "-")
    report = json.loads(out)
    assert (report["kernels"], report["exact"]) == (OTHER_KERNELS, True)


@pytest.mark.slow  # parallel/ tests the workers
@pytest.mark.parametrize("parallel", ["tree", pytest.param("tensor", marks=pytest.mark.slow)])
def test_a_benchmark_measures_the_time_in_workers(
    run: Run, tmp_path: Path, parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # chosen by measured cost, all rows of a small model may stay in one process
    partition_randomly(monkeypatch)
    options = ("--max-tokens", 12, "--budget", "all", "--threads", 1, "--drafter", "lookahead")
    target = tmp_path / "out.json"
    report = tmp_path / "report"
    code, out, err = run(
        "bench",
        *FEW,
        *options,
        "--workers",
        2,
        "--parallel",
        parallel,
        "--json",
        target,
        "--report",
        report,
    )
    assert code == 0, err
    document = json.loads(target.read_text())
    ((plain, drafting),) = [
        [each for each in one["figures"] if each["task"] == "all"] for one in document["models"]
    ]
    assert drafting["same"] == drafting["compared"] > 0
    assert 0.0 < drafting["waited"] < 1.0
    assert 0.0 < plain["waited"] < 1.0
    expected = f"2 workers ({parallel}), threads of each: 1"
    assert expected in " ".join(out.split())
    page = (report / "index.html").read_text()
    assert expected in page
    assert "waiting included" in page


@pytest.mark.parametrize(
    "owner", [render, pytest.param(Bench, marks=pytest.mark.slow)], ids=["show", "run"]
)
def test_figures_are_on_disk_before_a_failure(
    run: Run, tmp_path: Path, owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--json`` is complete although displaying the tables fails (``show``) or the measurement
    does (``run``).
    """
    path = tmp_path / "x.json"
    measure = Bench.run

    def fail(*args: Any) -> None:
        if owner is Bench:
            measure(*args)
        raise MemoryError

    monkeypatch.setattr(owner, "run" if owner is Bench else "show", fail)
    code, _, _ = run("bench", *FEW, "--max-tokens", 2, "--json", path)
    assert code == 1
    document = json.loads(path.read_text())
    assert document["models"][0]["figures"]
    assert document["interrupted"] == (owner is Bench)
