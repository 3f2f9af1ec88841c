"""Two processes on the CPU, with the environment of processes that ``torchrun`` starts.

They are forks: new interpreters would import torch. ``torchrun`` itself starts processes in
``parallel/test_trees.py``.
"""

import json
import multiprocessing
import os
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from parallel.test_lost_driver import assert_all_end, processes, started
from pronk.base.errors import OptionError
from pronk.cli.main import main
from pronk.train import run as train_run
from pronk.train.checkpoint import load_checkpoint
from pronk.train.corpus.answers import AnswersWriter, read_answers
from pronk.train.distributed import ProcessGroup, join_processes, local_device
from pronk.train.own_text import answers_header, write_answers
from pronk.train.teacher import Teacher
from train.kinds import Start
from train.tiny import draft_command, run_command, same_weights


def run_process(rank: int, port: int, folder: Path, words: list[str]) -> None:
    """Train as the process of a rank that ``torchrun`` has started.

    Its output and its checks are written into files.
    Before it trains, parameter 0 has a gradient everywhere, 1 in one process, 2 in none.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in place.items()})

    @contextmanager
    def check(device: str) -> Iterator[ProcessGroup]:
        with join_processes(device) as processes:
            module = nn.ParameterList([torch.zeros(2), torch.zeros(3, 1), torch.zeros(1)])
            module[0].grad = torch.tensor([1.0, 10.0]) * (rank + 1)
            if rank == 1:
                module[1].grad = torch.full((3, 1), 7.0)
            processes.sum_gradients(module)
            found = {
                "count": processes.count,
                "device": local_device("cuda"),
                "gradients": [None if p.grad is None else p.grad.tolist() for p in module],
                "gathered": processes.gather([[10 * i + rank, rank] for i in range(2)]),
                "any": [processes.is_any_true(rank == 1), processes.is_any_true(False)],
                "agree": processes.agree(f"from {rank}"),
                "watched": "pronk-parent" in [thread.name for thread in threading.enumerate()],
            }
            (folder / f"{rank}.json").write_text(json.dumps(found))
            yield processes

    train_run.join_processes = check  # type: ignore[assignment]
    with (folder / f"{rank}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        main(words)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def answers(teacher: Teacher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "own.answers"
    header = answers_header(teacher.llm, [], 20, 3)
    write_answers(
        teacher.llm,
        lambda number: [f"What does number {number} see?"],
        header,
        path,
        tokens=1500,
        batch=16,
        progress=lambda _: None,
    )
    return path


@pytest.fixture(scope="module")
def sibling(answers: Path) -> Path:
    """Return the same dialogues as those of another model."""
    header, dialogues = read_answers(answers)
    path = answers.with_name("sibling.answers")
    AnswersWriter(path, replace(header, target="s.gguf", weights="0" * 16)).append(dialogues)
    return path


MORE = "--steps 6 --evaluate-every 3 --num-tokens 2"


@pytest.fixture(scope="module")
def together(
    corpus: Path, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The folder and the output of a run of two processes."""
    folder = tmp_path_factory.mktemp("together")
    return folder, train_together(folder, draft_command(teacher, corpus, folder / "run", MORE))


def train_together(folder: Path, command: list[str]) -> str:
    """Run a command of ``pronk train`` in two processes; return what both have printed."""
    words = ["train", *command]
    port = free_port()
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=run_process, args=(rank, port, folder, words)) for rank in range(2)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        for child in children:
            child.start()
    for child in children:
        child.join()
    output = "".join((folder / f"{rank}.txt").read_text() for rank in range(2))
    assert [child.exitcode for child in children] == [0, 0], output
    return output


def test_processes_agree(together: tuple[Path, str]) -> None:
    first, second = (json.loads((together[0] / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (first.pop("device"), second.pop("device")) == ("cuda:0", "cuda:1")
    assert first == second
    assert first == {
        "count": 2,
        "gradients": [[3.0, 30.0], [[7.0]] * 3, None],
        "gathered": [[0, 0], [1, 1], [10, 0], [11, 1]],
        "any": [True, False],
        "agree": "from 0",
        "watched": True,  # each process ends with its parent; parallel/test_lost_driver.py kills it
    }


def test_two_processes_train_as_one(
    together: tuple[Path, str], corpus: Path, teacher: Teacher, tmp_path: Path
) -> None:
    folder, output = together
    run_command(draft_command(teacher, corpus, tmp_path / "run", MORE))
    # A sum of two gradients has one order only, so the bits are equal.
    assert same_weights(folder / "run", tmp_path / "run")
    states = [load_checkpoint(each / "run" / "checkpoint.pt") for each in (folder, tmp_path)]
    compared = [
        [(h["loss"], h["same"], h["norm"], h["valid"]) for h in state["history"]]
        for state in states
    ]
    assert compared[0] == compared[1]
    assert len(compared[0]) == 2
    assert compared[0][0][2] > 0
    assert (
        output.count("finished: ")
        == output.count("step 6 ")
        == output.count("reading sources")
        == 1
    )


def test_one_process_copies_the_answers(
    answers: Path, sibling: Path, teacher: Teacher, tmp_path: Path
) -> None:
    command = (
        f"eagle3 --model {teacher.folder} --out {tmp_path / 'run'} --batch 128 --micro 64 "
        "--length 64 --depth 1 --draft-vocab 150 --mlp 24 --threads 1 --num-tokens 0 --epochs 0.1 "
        f"--data {answers} --other-data {sibling}"
    )
    output = train_together(tmp_path, command.split())
    assert output.count("finished: ") == 1
    copies = [*(tmp_path / "run" / "data").glob("other-*")]
    assert [read_answers(copy) for copy in copies] == [read_answers(sibling)]


def test_passes_of_a_step_are_shared_evenly(start: Start) -> None:
    assert [list(ProcessGroup(rank, 2).own_passes(4)) for rank in (0, 1)] == [[0, 2], [1, 3]]
    message = (
        r"batch: expected a multiple of micro times the processes, 128 × 3 tokens, found 256; "
        r"change --batch or"
    )
    with pytest.raises(OptionError, match=message):
        start("lm", processes=ProcessGroup(0, 3))


def test_a_single_process_is_not_distributed() -> None:
    with join_processes("cpu") as processes:
        assert processes == ProcessGroup(0, 1)
        assert processes.is_main
    assert local_device("cuda") == "cuda"


@pytest.mark.slow
def test_all_processes_end_when_torchrun_is_killed(
    corpus: Path, teacher: Teacher, tmp_path: Path
) -> None:
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "pronk",
    ]
    command = draft_command(
        teacher, corpus, tmp_path / "run", "--steps 100000 --evaluate-every 10 --num-tokens 0"
    )
    with started([*start, "train", *command], "^step ") as (launcher, mark):
        assert len(processes(mark)) >= 3
        launcher.kill()
        launcher.wait()
        assert_all_end(mark)
