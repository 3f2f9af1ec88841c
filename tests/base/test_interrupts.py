"""Deferral of Ctrl-C: signals within the guard, within interruptible blocks, and in a long
draft.
"""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from drafting.drafting import plain_output, watched
from drafting.from_draft.drafts import draft_folder
from pronk.base.interrupts import interruptible, uninterrupted
from pronk.drafting.shared.chain import Chain
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import DraftToken
from tiny_models import make_request


def interrupt_an_uninterrupted_block(reached: list[int]) -> None:
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        reached.append(sum(range(1000)))


@pytest.mark.parametrize("call", [1, 2], ids=["while it is installed", "while it is removed"])
def test_a_signal_while_the_guard_is_installed_or_removed(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal raises KeyboardInterrupt, and the next ``uninterrupted`` block defers signals as
    usual.
    """
    install = signal.signal
    calls = []

    def interrupted_install(number: int, handler: Any) -> Any:
        before = install(number, handler)
        calls.append(handler)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
            sum(range(1000))
        return before

    monkeypatch.setattr(signal, "signal", interrupted_install)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        sum(range(1000))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    reached: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_an_uninterrupted_block(reached)
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupt_in_a_block(done: list[str]) -> None:
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("before")
        try:
            with interruptible():
                done.append("never")
        finally:
            signal.raise_signal(signal.SIGINT)
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
            done.append("after")


def interrupt_between_blocks(done: list[str]) -> None:
    with uninterrupted(), interruptible():
        try:
            with uninterrupted():
                with interruptible():
                    done.append("before")
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("never")
        finally:
            done.append("after")


@pytest.mark.parametrize(
    ("work", "want"),
    [
        (interrupt_in_a_block, ["before", "after"]),
        (interrupt_between_blocks, ["before", "inner", "after"]),
    ],
)
def test_after_an_interrupt_later_signals_are_deferred(
    work: Callable[[list[str]], None], want: list[str]
) -> None:
    """The first signal raises in the interruptible block; later ones wait until clean-up is
    done.
    """
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work(done)
    assert done == want
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_does_not_raise() -> None:
    """The interruptible block continues, and later signals in it are delivered at once, too."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        with uninterrupted():
            with interruptible():
                for count in (1, 2):
                    signal.raise_signal(signal.SIGINT)
                    assert len(noted) == count
            signal.raise_signal(signal.SIGINT)
            assert len(noted) == 2
        assert len(noted) == 3
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_set_by_the_block_stays() -> None:
    def other(*_: Any) -> None:
        pass

    with uninterrupted():
        signal.signal(signal.SIGINT, other)
    assert signal.getsignal(signal.SIGINT) is other
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_interrupted_chain_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's remaining forward passes for a chain of 30 tokens are skipped."""
    engine, drafter = watched(f"draft_model(model={draft_folder(0.0)!r}, num_tokens=30)")
    request = make_request([1, 2, 3], SamplingParams(max_tokens=60), drafter)
    engine.add(request)
    engine.step()
    lengths = []
    append = Chain.append

    def interrupting_append(chain: Chain, draft_token: DraftToken) -> None:
        append(chain, draft_token)
        lengths.append(len(chain))
        if len(chain) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "append", interrupting_append)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert lengths == [1, 2, 3]
    while engine.scheduler.running:
        engine.step()
    assert request.output == plain_output(request.prompt, request.params)
