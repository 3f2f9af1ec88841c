"""Number of threads of the kernels, and the thread pool in a forked child."""

import subprocess
import sys
from typing import Any

import pytest

from pronk.base.errors import OptionError
from pronk.kernels.library import Kernels
from pronk.kernels.threads import num_threads, set_threads
from pronk.sampling.params import SamplingParams
from tiny_models import kernels, make_engine, make_request, tiny_decoder
from waiting import HUNG


def test_a_step_uses_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    # runs the self-check first
    run = Kernels.run
    _ = kernels()

    def watched(*arguments: Any) -> None:
        seen.append(arguments[3].threads)
        run(*arguments)

    monkeypatch.setattr(Kernels, "run", watched)
    engine = make_engine(tiny_decoder())
    engine.add(make_request([1, 2, 3], SamplingParams(max_tokens=8)))
    for threads in (3, 2):
        set_threads(threads, 1)
        engine.step()
        assert set(seen) == {threads}
        seen.clear()


def test_workers_share_the_processors() -> None:
    set_threads(7, 1)
    set_threads(None, 1)
    assert num_threads() == 7
    set_threads(None, 2, divide=False)
    assert num_threads() == 7
    set_threads(None, 2)
    assert num_threads() == 3
    set_threads(None, 64)
    assert num_threads() == 1
    set_threads(4, 2)
    assert num_threads() == 4


@pytest.mark.parametrize(
    ("threads", "workers", "name"),
    [(0, 1, "threads"), (4097, 1, "threads"), (None, 0, "workers"), (2, 65, "workers")],
)
def test_numbers_out_of_range_are_refused(threads: int | None, workers: int, name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}: expected "):
        set_threads(threads, workers)
    assert num_threads() == 1


FORK = """
import os, pathlib, signal, threading
import numpy as np
from pronk.kernels.threads import set_threads
from pronk.models.kernels import load_kernels
from pronk.models.linear import Linear, WeightLayout
set_threads({threads}, 1)
by, random = load_kernels({kernels!r}, pathlib.Path({path!r})), np.random.default_rng(0)
linear = Linear(by, random.standard_normal((512, 512), np.float32), None, WeightLayout(), None)
rows, going = random.standard_normal((64, 512), np.float32), True
want = linear.logits(rows)
def compute():
    while going:
        linear.logits(rows)
busy = threading.Thread(target=compute)
busy.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm({seconds})
        os._exit(0 if np.array_equal(linear.logits(rows), want) else 3)
    assert os.waitpid(child, 0)[1] == 0, "the child hangs, or computes something else"
going = False
busy.join()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.parametrize("count", [1, 2])
def test_fork_during_a_computation(count: int) -> None:
    script = FORK.format(
        threads=count, seconds=int(HUNG), kernels=kernels().name, path=str(kernels().path)
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=2 * HUNG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
