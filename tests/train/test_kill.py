"""A process that is killed in the middle of whatever it is doing, and the same command again."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from pronk.cli.train.main import app
from pronk.train.checkpoint import load_checkpoint
from pronk.train.teacher import Teacher
from train.tiny import draft_command

STEPS = 40


@pytest.fixture(scope="module")
def command(corpus: Path, teacher: Teacher) -> Callable[[Path], list[str]]:
    return lambda out: draft_command(
        teacher, corpus, out, f"--steps {STEPS} --evaluate-every 15 --save-every 3 --num-tokens 0"
    )


@pytest.fixture(scope="module")
def whole(command: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert CliRunner().invoke(app, command(folder)).exit_code == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_run_ends_with_the_weights_of_an_undisturbed_one(
    number: signal.Signals, command: Callable[[Path], list[str]], whole: Path, tmp_path: Path
) -> None:
    moment = random.Random()
    line, wait = f"step {10 * moment.randint(1, 3)} ", moment.uniform(0, 0.1)
    words = [sys.executable, "-c", "from pronk.cli.main import main; main()", "train", *command(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(each.startswith(line) for each in process.stdout), "the process ended too soon"
        time.sleep(wait)
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode == (130 if number == signal.SIGTERM else -number), (line, wait)
    killed_at = load_checkpoint(tmp_path / "checkpoint.pt")["step"]
    assert 3 <= killed_at <= STEPS
    assert not (tmp_path / "export").exists()
    assert CliRunner().invoke(app, command(tmp_path)).exit_code == 0
    mine, theirs = (load_file(each / "export" / "model.safetensors") for each in (tmp_path, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine), (line, wait)
    histories = [load_checkpoint(each / "checkpoint.pt")["history"] for each in (tmp_path, whole)]
    first, second = ([(h["step"], h["loss"], h["same"], h["valid"]) for h in history] for history in histories)
    assert first == second
