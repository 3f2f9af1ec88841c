"""Division of threads between torch and the kernels, and the thread pool in a forked child."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pronk.kernels import threads
from pronk.kernels.library import Kernels
from pronk.kernels.threads import dedicate_threads, num_threads, restore_threads
from pronk.sampling.params import SamplingParams
from tiny_models import kernels, make_engine, make_request, tiny_decoder


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(work()))
    other.start()
    other.join()
    return found[0]


def test_kernels_have_the_threads_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run, _ = Kernels.run, kernels()  # runs the self-check first

    def watched(*arguments: Any) -> None:
        seen.append((torch.get_num_threads(), num_threads(), arguments[3].threads))
        run(*arguments)

    monkeypatch.setattr(Kernels, "run", watched)
    torch.set_num_threads(3)
    engine = make_engine(tiny_decoder())
    engine.add(make_request([1, 2, 3], SamplingParams(max_tokens=3)))
    engine.step()
    assert set(seen) == {(1, 3, 3)}
    assert torch.get_num_threads() == num_threads() == 3


def test_a_failed_step_returns_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    torch.set_num_threads(2)
    engine = make_engine(tiny_decoder())
    engine.add(make_request([1, 2, 3], SamplingParams(max_tokens=3)))
    monkeypatch.setattr(Kernels, "run", fail)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert torch.get_num_threads() == num_threads() == 2


def test_nested_and_unrestored_dedication() -> None:
    torch.set_num_threads(3)
    dedicate_threads()
    dedicate_threads()
    assert (torch.get_num_threads(), num_threads()) == (1, 3)
    restore_threads()
    assert num_threads() == 3
    dedicate_threads()  # without restore_threads(), as after an interrupt
    torch.set_num_threads(2)  # a later setting by the user
    assert num_threads() == 2
    dedicate_threads()
    assert (torch.get_num_threads(), num_threads()) == (1, 2)
    restore_threads()
    assert torch.get_num_threads() == num_threads() == 2


def test_restoring_without_a_saved_setting_does_nothing() -> None:
    torch.set_num_threads(2)
    assert in_a_thread(lambda: restore_threads() or torch.get_num_threads()) == torch.get_num_threads() == 2


def test_a_python_thread_started_meanwhile_has_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_latest_count", 0)
    torch.set_num_threads(3)
    dedicate_threads()

    def other() -> tuple[int, int, int]:
        dedicate_threads()
        ours = num_threads()
        restore_threads()
        return ours, num_threads(), torch.get_num_threads()

    assert in_a_thread(other) == (3, 3, 3)
    assert (torch.get_num_threads(), num_threads()) == (1, 3)
    restore_threads()
    assert in_a_thread(torch.get_num_threads) == 3


FORK = """
import os, pathlib, signal, threading
import torch
from pronk.models.kernels import load_kernels
from pronk.models.linear import KernelLinear, WeightLayout
torch.set_num_threads({threads})
linear = KernelLinear(load_kernels({kernels!r}, pathlib.Path({path!r})), torch.randn(512, 512), None, WeightLayout())
rows, want, going = torch.randn(64, 512), None, True
want = linear.logits(rows)
def compute():
    while going:
        linear.logits(rows)
busy = threading.Thread(target=compute)
busy.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if torch.equal(linear.logits(rows), want) else 3)
    assert os.waitpid(child, 0)[1] == 0, "the child hangs, or computes something else"
going = False
busy.join()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.parametrize("count", [1, 2])
def test_fork_during_a_computation(count: int) -> None:
    script = FORK.format(threads=count, kernels=kernels().name, path=str(kernels().path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
