"""The guard around what Ctrl-C must not cut, when it strikes the guard itself."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from drafters.drafting import plain_output, watched
from drafters.from_draft.drafts import draft_folder
from pronk.drafters.shared.chain import Chain
from pronk.interrupts import interruptible, uninterrupted
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import DraftToken
from tiny_models import make_request


def struck(reached: list[int]) -> None:
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        reached.append(sum(range(1000)))


@pytest.mark.parametrize("call", [1, 2], ids=["while it is installed", "while it is removed"])
def test_the_guard_survives_an_interruption_of_its_own(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes in the midst of installing or removing it is handed on, and afterwards it works as before."""
    install, calls = signal.signal, []

    def interrupted_there(number: int, handler: Any) -> Any:
        before = install(number, handler)
        calls.append(handler)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
            sum(range(1000))
        return before

    monkeypatch.setattr(signal, "signal", interrupted_there)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        sum(range(1000))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    reached: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        struck(reached)
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def struck_in_a_window(done: list[str]) -> None:
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


def struck_in_a_window_s_window(done: list[str]) -> None:
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
    [(struck_in_a_window, ["before", "after"]), (struck_in_a_window_s_window, ["before", "inner", "after"])],
)
def test_a_window_closes_when_it_is_struck(work: Callable[[list[str]], None], want: list[str]) -> None:
    """One signal strikes, in the window, and the ones after it wait until all is put in order."""
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work(done)
    assert done == want
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_only_takes_note() -> None:
    """It raises nothing, so that the window stays open and what comes next strikes as well."""
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


def test_a_handler_that_is_installed_meanwhile_stays() -> None:
    def other(*_: Any) -> None:
        pass

    with uninterrupted():
        signal.signal(signal.SIGINT, other)
    assert signal.getsignal(signal.SIGINT) is other
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_interrupted_chain_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the passes that a long draft has left."""
    engine, drafter = watched(f"draft_model(model={draft_folder(0.0)!r}, num_tokens=30)")
    request = make_request([1, 2, 3], SamplingParams(max_tokens=60), drafter)
    engine.add(request)
    engine.step()
    lengths = []
    take = Chain.append

    def struck(chain: Chain, guess: DraftToken) -> None:
        take(chain, guess)
        lengths.append(len(chain))
        if len(chain) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "append", struck)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert lengths == [1, 2, 3]
    while engine.scheduler.running:
        engine.step()
    assert request.output == plain_output(request.prompt, request.params)
