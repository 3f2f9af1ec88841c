"""Every script in ``examples/`` runs on pronk-tiny."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import load_script

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> Callable[[str | None], None]:
    main: Callable[[str | None], None] = load_script(f"examples/{name}.py").main
    return main


def test_all_examples_are_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "generate", "stream", "batch", "draft_model", "guided", "trained_drafters",
    }  # fmt: skip


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    load("generate")(None)
    out = capsys.readouterr().out
    assert out.startswith("def mean(values):")
    assert "passes: S = " in out


def test_stream(capsys: pytest.CaptureFixture[str]) -> None:
    load("stream")(None)
    assert capsys.readouterr().out.strip()


def test_batch(capsys: pytest.CaptureFixture[str]) -> None:
    load("batch")(None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.endswith("the same tokens") for line in lines)


def test_guided(capsys: pytest.CaptureFixture[str]) -> None:
    load("guided")(None)
    ticket, passes, *shares = capsys.readouterr().out.splitlines()
    assert "'severity': '" in ticket
    fewer, more = (int(word) for word in passes.split() if word.isdigit())
    assert fewer < 0.7 * more
    assert len(shares) == 3


def test_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    load("draft_model")(None)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["draft_model", "threshold", "cape", "staged"]
    assert all(float(line[1]) > 1 for line in lines)


def test_trained_drafters(capsys: pytest.CaptureFixture[str]) -> None:
    load("trained_drafters")(None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(float(line.split(" tokens")[0].split()[-1]) > 1.0 for line in lines)
