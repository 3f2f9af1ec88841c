"""Whose threads compute, and what becomes of them in a forked child."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pronk.kernels import threads
from pronk.kernels.library import Kernels
from pronk.kernels.rounding import round_weights
from pronk.kernels.threads import lend_threads, num_threads, return_threads
from pronk.models.linear import KernelLinear, WeightLayout
from pronk.sampling.params import SamplingParams
from tiny_models import kernels, make_engine, make_request, tiny_decoder


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(work()))
    other.start()
    other.join()
    return found[0]


def test_while_an_engine_steps_the_threads_are_the_kernels_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run, _ = Kernels.run, kernels()  # which have been checked by now

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


def test_what_fails_in_a_step_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    torch.set_num_threads(2)
    engine = make_engine(tiny_decoder())
    engine.add(make_request([1, 2, 3], SamplingParams(max_tokens=3)))
    monkeypatch.setattr(Kernels, "run", fail)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert torch.get_num_threads() == num_threads() == 2


def test_one_within_the_other_and_one_that_was_never_given_back() -> None:
    torch.set_num_threads(3)
    lend_threads()
    lend_threads()
    assert (torch.get_num_threads(), num_threads()) == (1, 3)
    return_threads()
    assert num_threads() == 3
    lend_threads()  # an interruption leaves it like this
    torch.set_num_threads(2)  # the user's new setting
    assert num_threads() == 2
    lend_threads()
    assert (torch.get_num_threads(), num_threads()) == (1, 2)
    return_threads()
    assert torch.get_num_threads() == num_threads() == 2


def test_what_was_not_lent_is_not_given_back() -> None:
    torch.set_num_threads(2)
    assert in_a_thread(lambda: return_threads() or torch.get_num_threads()) == torch.get_num_threads() == 2


def test_a_thread_that_begins_meanwhile_has_the_setting_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_latest", 0)
    torch.set_num_threads(3)
    lend_threads()

    def other() -> tuple[int, int, int]:
        lend_threads()
        ours = num_threads()
        return_threads()
        return ours, num_threads(), torch.get_num_threads()

    assert in_a_thread(other) == (3, 3, 3)
    assert (torch.get_num_threads(), num_threads()) == (1, 3)
    return_threads()
    assert in_a_thread(torch.get_num_threads) == 3


FORK = """
import os, pathlib, signal, threading
import torch
from pronk.models.kernels import load_kernels
from pronk.models.linear import KernelLinear, Layout
torch.set_num_threads({threads})
linear = KernelLinear(load_kernels({kernels!r}, pathlib.Path({path!r})), torch.randn(512, 512), None, Layout())
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
def test_a_child_of_a_process_that_computes(count: int) -> None:
    script = FORK.format(threads=count, kernels=kernels().name, path=str(kernels().path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_packing_does_not_depend_on_the_threads() -> None:
    weight = round_weights(kernels(), torch.randn(70, 130), 8)
    packed = []
    for count in (1, 3):
        torch.set_num_threads(count)
        packed.append(KernelLinear(kernels(), weight, None, WeightLayout()).packed)
    assert torch.equal(packed[0].data, packed[1].data)
