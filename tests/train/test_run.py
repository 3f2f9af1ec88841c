import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pronk.train.clock import Clock
from pronk.train.options import DataOptions
from pronk.train.run import Run, train_model
from train.tiny import TINY, InterruptingConsole, refusal, run_command, same_weights, shown


def test_interrupted_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, data_options: DataOptions, quiet: Console
) -> None:
    assert train_model(
        Run(tmp_path / "whole", "m", "command", quiet, Clock(None)), data_options, TINY
    )
    assert not train_model(
        Run(tmp_path / "parts", "m", "command", InterruptingConsole(quiet, "step 9 "), Clock(None)),
        data_options,
        TINY,
    )
    assert (tmp_path / "parts" / "latest" / "model.safetensors").exists()
    assert not (tmp_path / "parts" / "export").exists()
    assert train_model(
        Run(tmp_path / "parts", "m", "command", quiet, Clock(None)), data_options, TINY
    )
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    text = shown(quiet)
    assert "saved at step 9; the same command continues" in text
    assert "step 12" in text
    assert "tokens/s" in text


def test_command_trains_and_resumes(tmp_path: Path, corpus: Path) -> None:
    command = (
        f"lm --source {corpus / 'stories.jsonl'}=1 --out {tmp_path / 'run'} --hidden 32 --layers 1 "
        "--heads 2 "
        "--kv-heads 1 --mlp 32 --vocab 300 --positions 64 --steps 4 --batch 128 --micro 64 "
        "--length 32 "
        "--final-length 64 --threads 1"
    )
    assert "finished" in run_command(command)
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert "pronk train lm --source stories.jsonl=1 --out run --hidden 32" in card
    assert str(tmp_path) not in card
    summary = json.loads((tmp_path / "run" / "data" / "sources.json").read_text())
    origin = {"source": "stories", "origin": "owner/name@abc", "license": "MIT", "documents": 360}
    assert summary["origins"][0].items() > origin.items()
    assert "step" not in run_command(command)
    assert "expected lr = 0.003 as before, found 1.0" in refusal(f"{command} --lr 1")


def test_run_goes_on_with_other_intervals(
    tmp_path: Path, data_options: DataOptions, quiet: Console
) -> None:
    train_model(
        Run(tmp_path / "run", "m", "command", InterruptingConsole(quiet, "step 3 "), Clock(None)),
        data_options,
        TINY,
    )
    assert train_model(
        Run(tmp_path / "run", "m", "command", quiet, Clock(None)),
        data_options,
        replace(TINY, evaluate_every=2),
    )
