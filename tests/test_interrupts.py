"""The guard around what Ctrl-C must not cut, when it strikes the guard itself."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from drafters.drafting import plain_output, watched
from drafters.from_draft.drafts import draft_folder
from models import make_request
from pronk.choosing.chooser import Guess
from pronk.choosing.params import SamplingParams
from pronk.drafters.shared.chain import Chain
from pronk.interrupts import interruptible, uninterrupted


def struck(reached: list[int]) -> None:
    with interruptible(), uninterrupted():
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
    with pytest.raises(KeyboardInterrupt), interruptible(), uninterrupted():
        sum(range(1000))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    reached: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        struck(reached)
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_is_installed_meanwhile_stays() -> None:
    def other(*_: Any) -> None:
        pass

    with interruptible():
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
    take = Chain.take

    def struck(chain: Chain, guess: Guess) -> None:
        take(chain, guess)
        lengths.append(len(chain))
        if len(chain) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "take", struck)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert lengths == [1, 2, 3]
    while engine.scheduler.running:
        engine.step()
    assert request.output == plain_output(request.prompt, request.params)
