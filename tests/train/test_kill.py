"""A process that is killed at a random moment, and the same command again."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pronk.train.checkpoint import load_checkpoint
from pronk.train.teacher import Teacher
from train.tiny import draft_command, run_command, same_weights

# The command, which waits before step 36 for its end.
PROGRAM = """
import threading
from pronk.cli.main import main
from pronk.train.loop import Trainer
step, pause = Trainer._step, threading.Event()
def hold(trainer, progress, rate, stop, on_pass):
    while trainer.step == 35 and not stop():
        pause.wait(0.01)
    return step(trainer, progress, rate, stop, on_pass)
Trainer._step = hold
main()
"""
MORE = "--steps 40 --evaluate-every 15 --save-every 3 --num-tokens 0"


@pytest.fixture(scope="module")
def whole(corpus: Path, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_command(draft_command(teacher, corpus, folder, MORE))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_run_ends_with_the_weights_of_an_undisturbed_one(
    number: signal.Signals, corpus: Path, teacher: Teacher, whole: Path, tmp_path: Path
) -> None:
    command = draft_command(teacher, corpus, tmp_path, MORE)
    moment = random.Random()
    line = f"step {10 * moment.randint(1, 3)} "
    wait = moment.uniform(0, 0.1)
    words = [sys.executable, "-c", PROGRAM, "train", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(each.startswith(line) for each in process.stdout), "the process ended too soon"
        time.sleep(wait)
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode == (130 if number == signal.SIGTERM else -number), (line, wait)
    killed_at = load_checkpoint(tmp_path / "checkpoint.pt")["step"]
    assert 3 <= killed_at <= 40
    assert not (tmp_path / "export").exists()
    run_command(command)
    assert same_weights(tmp_path, whole), (line, wait)
    histories = [load_checkpoint(each / "checkpoint.pt")["history"] for each in (tmp_path, whole)]
    first, second = (
        [(h["step"], h["loss"], h["same"], h["valid"]) for h in history] for history in histories
    )
    assert first == second
