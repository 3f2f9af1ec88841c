import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from torch import equal
from typer.testing import CliRunner

from pronk.cli.train.main import app
from pronk.errors import PronkError
from pronk.train.options import DataOptions
from pronk.train.run import run
from train.tiny import TINY, InterruptingConsole


def test_interrupted_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, data_options: DataOptions, quiet: Console
) -> None:
    assert run(data_options, TINY, tmp_path / "whole", "m", "command", quiet)
    assert not run(data_options, TINY, tmp_path / "parts", "m", "command", InterruptingConsole(quiet, "step 9 "))
    assert (tmp_path / "parts" / "latest" / "model.safetensors").exists()
    assert not (tmp_path / "parts" / "export").exists()
    assert run(data_options, TINY, tmp_path / "parts", "m", "command", quiet)
    whole, parts = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "parts"))
    assert all(equal(whole[name], parts[name]) for name in whole)
    assert isinstance(quiet.file, io.StringIO)
    text = quiet.file.getvalue()
    assert "saved at step 9; the same command continues" in text
    assert "step 12" in text
    assert "tokens/s" in text


def test_command_trains_and_resumes(tmp_path: Path, corpus: Path) -> None:
    command = (
        f"lm --source {corpus / 'stories.jsonl'}=1 --out {tmp_path / 'run'} --hidden 32 --layers 1 --heads 2 "
        "--kv-heads 1 --mlp 32 --vocab 300 --positions 64 --steps 4 --batch 128 --micro 64 --length 32 "
        "--final-length 64 --threads 1"
    ).split()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "finished" in result.output
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert "pronk train lm --source stories.jsonl=1 --out run --hidden 32" in card
    assert str(tmp_path) not in card
    summary = json.loads((tmp_path / "run" / "data" / "sources.json").read_text())
    assert summary["origins"][0] == {
        "source": "stories", "origin": "owner/name@abc", "license": "MIT", "documents": 360,
        "bytes": summary["origins"][0]["bytes"],
    }  # fmt: skip
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert "step" not in again.output
    other = CliRunner().invoke(app, [*command, "--lr", "1"])
    assert isinstance(other.exception, PronkError)
    assert "expected lr = 0.003 as before, found 1.0" in str(other.exception)


@pytest.mark.parametrize("weight", ["x", "0"])
def test_command_names_a_bad_source(tmp_path: Path, weight: str) -> None:
    result = CliRunner().invoke(app, ["lm", "--source", f"python={weight}", "--out", str(tmp_path)])
    assert isinstance(result.exception, PronkError)
    assert f"found 'python={weight}'" in str(result.exception)


def test_run_goes_on_with_other_intervals(tmp_path: Path, data_options: DataOptions, quiet: Console) -> None:
    run(data_options, TINY, tmp_path / "run", "m", "command", InterruptingConsole(quiet, "step 3 "))
    assert run(data_options, replace(TINY, evaluate_every=2), tmp_path / "run", "m", "command", quiet)
