"""Processes of a model, and of a training, end by themselves when the process that started them
is killed.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import pytest

from waiting import eventually

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "pronk",
]
SERVE = ["serve", "--model", "pronk-tiny", "--workers", "2", "--threads", "1", "--port", "0"]


def processes(mark: str, name: str = "") -> list[int]:
    """Return the processes with ``mark`` in their environment and ``name`` in their command
    line.
    """
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark.encode() in (place / "environ").read_bytes()
            if marked and name.encode() in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def rank(process: int) -> int:
    """Return the rank that ``torchrun`` gave to a process."""
    (found,) = re.findall(
        rb"\0RANK=(\d+)\0", b"\0" + Path(f"/proc/{process}/environ").read_bytes() + b"\0"
    )
    return int(found)


@contextmanager
def started(command: Sequence[str], until: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a command, wait for a line that matches ``until``; yield its process and its mark."""
    mark = token_hex(8)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PRONK_TEST": mark},
    ) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if re.search(until, line):
                    break
            else:
                pytest.fail("".join(lines))
            yield process, mark
        finally:
            for each in processes(mark):
                os.kill(each, signal.SIGKILL)


def assert_all_end(mark: str) -> None:
    assert eventually(lambda: not processes(mark))


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["tree", pytest.param("tensor", marks=pytest.mark.slow)])
def test_spawned_workers_end_with_a_killed_driver(parallel: str) -> None:
    command = [sys.executable, "-m", "pronk", *SERVE, "--parallel", parallel]
    with started(command, "http://127") as (driver, mark):
        assert len(processes(mark)) == 2
        driver.kill()
        driver.wait()
        assert_all_end(mark)


@pytest.mark.parametrize("parallel", ["tree", "tensor"])
@pytest.mark.slow
def test_launched_workers_end_with_a_killed_driver(parallel: str) -> None:
    with started([*TORCHRUN, *SERVE, "--parallel", parallel], "http://127") as (_, mark):
        ranks = {
            rank(process): process
            for process in processes(mark, "pronk\0serve")
            if process_is_worker(process)
        }
        os.kill(ranks[0], signal.SIGKILL)
        assert_all_end(mark)


def process_is_worker(process: int) -> bool:
    """Return whether ``torchrun`` launched a process; its own command line has the words of the
    launched one.
    """
    return b"torch.distributed.run" not in Path(f"/proc/{process}/cmdline").read_bytes()


@pytest.mark.long
def test_all_ranks_end_with_a_killed_launcher() -> None:
    with started([*TORCHRUN, *SERVE], "http://127") as (launcher, mark):
        assert len(processes(mark)) == 3
        launcher.kill()
        launcher.wait()
        assert_all_end(mark)
