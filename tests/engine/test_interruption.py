"""An exception at any point of a step, also one that nobody expects, leaves an engine that works.

All that was started is stopped, all blocks are free, and what comes later is what it would have been.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch

from checkpoints import MakeCheckpoint
from drafters.trees import TreeDrafter, oracle_trees
from engine.cases import PROMPTS, ask, assert_same, drafter, params, plain, text
from pronk.drafters import DraftContext, Outcome, Proposer
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.errors import CacheFullError
from pronk.llm import LLM
from pronk.models.program import Program
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.speculation.tree import TokenTree
from tiny_models import NullText, StrictAllocator, assert_idle, make_engine, make_request, run, samples, tiny_decoder


@dataclass
class Fuse:
    """Burns at its call number ``at``, once."""

    at: int
    calls: Iterator[int] = field(default_factory=lambda: count(1))
    burnt: bool = False

    def __call__(self) -> None:
        if next(self.calls) == self.at:
            self.burnt = True
            raise KeyboardInterrupt

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self()
            return function(*args, **kwargs)

        return wrapped

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self()
            return result

        return wrapped


@dataclass(eq=False)
class Tab:
    """A request's draft state: what :class:`Tabs` was told of it."""

    prompt: list[int]


@dataclass(frozen=True, eq=False)
class Tabs(Proposer[Tab]):
    """Guesses the answer; keeps account of the states that were started and not stopped; burns where it is told."""

    name = "tabs"

    trees: TreeDrafter
    open: list[Tab] = field(default_factory=list)
    fuses: dict[str, Fuse] = field(default_factory=dict)

    def start(self, prompt: Sequence[int]) -> Tab:
        self._burn("start")
        self.open.append(Tab(list(prompt)))
        return self.open[-1]

    def propose(self, contexts: Sequence[DraftContext[Tab]]) -> list[TokenTree]:
        self._burn("propose")
        assert all(context.state in self.open for context in contexts)
        return [self.trees.shape(self.trees.case(context, tuple(context.state.prompt))) for context in contexts]

    def observe(self, outcome: Outcome[Tab]) -> None:
        self._burn("observe")
        assert outcome.state in self.open

    def stop(self, state: Tab) -> None:
        self.open.remove(state)

    def _burn(self, verb: str) -> None:
        if verb in self.fuses:
            self.fuses[verb]()


@contextmanager
def burning(engine: Engine, proposer: Tabs, place: str, fuse: Fuse) -> Iterator[None]:
    """``fuse`` burns at a place of the step, while this lasts."""
    if place in ("start", "propose", "observe"):
        proposer.fuses[place] = fuse
        yield
        proposer.fuses.clear()
        return
    owner, name = {
        "write": (engine.cache, "write"),  # in the middle of the layers, by torch
        "compute": (Program, "run"),  # the kernels are through, and nobody has been told
        "forward": (engine.runner, "forward"),
        "prepare": (engine.cache, "prepare"),
        "commit": (engine.cache, "commit"),
        "schedule": (engine.scheduler, "schedule"),
        "choose": (Sampler, "advance"),
        "text": (NullText, "push"),
    }[place]
    with pytest.MonkeyPatch.context() as patch:
        wrap = fuse.before if place in ("choose", "text", "write") else fuse.after
        patch.setattr(owner, name, wrap(getattr(owner, name)))
        yield


PLACES = {
    "start": (1, 3),
    "propose": (1, 5),
    "observe": (1, 2, 6, 12),
    "write": (1, 2, 7, 18),
    "compute": (1, 2, 4, 9),
    "forward": (1, 2, 4, 9),
    "prepare": (1, 5, 20),
    "commit": (1, 2, 8, 30),
    "schedule": (1, 4),
    "choose": (1, 20, 60),
    "text": (1, 20, 45),
}


@pytest.mark.parametrize("place", PLACES)
def test_all_requests_are_given_up(place: str) -> None:
    """What the facade does: whatever is raised, every request of the call is aborted."""
    want, packed = plain(torch.float32, "penalties"), place != "write"
    engine, proposer = make_engine(tiny_decoder(packed=packed)), Tabs(drafter("oracle", want))  # type: ignore[arg-type]
    for at in PLACES[place]:
        requests = [ask(prompt, params("penalties", i), proposer) for i, prompt in enumerate(PROMPTS)]
        fuse = Fuse(at)
        with burning(engine, proposer, place, fuse), pytest.raises(KeyboardInterrupt):
            run(engine, requests)
        assert fuse.burnt
        for request in requests:
            engine.abort(request)
        assert_idle(engine)
        assert not proposer.open
    again = [ask(prompt, params("penalties", i), proposer) for i, prompt in enumerate(PROMPTS)]
    run(engine, again)
    if engine.exact:
        assert_same(again, want)
    assert [request.output for request in again] == [request.output for request in want]
    assert not proposer.open


@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("prepare", "schedule", "start")])
def test_the_others_go_on(place: str) -> None:
    """One request is given up, and those that were in the same step are none the worse."""
    want, decoder = plain(torch.float32, "penalties"), tiny_decoder(packed=place != "write")
    for at in PLACES[place]:
        engine, proposer = make_engine(decoder), Tabs(drafter("oracle", want))  # type: ignore[arg-type]
        requests = [ask(prompt, params("penalties", i), proposer) for i, prompt in enumerate(PROMPTS)]
        with burning(engine, proposer, place, Fuse(at)), pytest.raises(KeyboardInterrupt):
            run(engine, requests)
        engine.abort(requests.pop(2))
        while any(request.finish_reason is None for request in requests):
            engine.step()
        for request, other in zip(requests, want[:2] + want[3:], strict=True):
            assert request.output == other.output
            engine.abort(request)
        assert_idle(engine)
        assert not proposer.open


def test_a_request_that_ended_in_an_interrupted_step_does_not_go_on() -> None:
    want = plain(torch.float32, "temperature")
    engine, proposer = make_engine(tiny_decoder()), Tabs(drafter("oracle", want))  # type: ignore[arg-type]
    first, second = (ask(PROMPTS[i], params("temperature", i, 40), proposer) for i in (0, 1))
    for request in (first, second):
        engine.add(request)
    while first.finish_reason is None and second.finish_reason is None:
        fuse = proposer.fuses["observe"] = Fuse(1)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert fuse.burnt
    proposer.fuses.clear()
    while first.finish_reason is None or second.finish_reason is None:
        engine.step()
    for request, other in ((first, want[0]), (second, want[1])):
        engine.abort(request)
        assert request.output == other.output
    assert_idle(engine)


@pytest.mark.parametrize("at", [1, 4])
def test_a_second_signal_while_all_is_given_up(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one strikes a pass; others come with every state that is given back."""
    engine, proposer = make_engine(tiny_decoder()), Tabs(TreeDrafter(oracle_trees(1.0)))
    requests = [ask(prompt, params("greedy", i), proposer) for i, prompt in enumerate(PROMPTS)]
    forward, stop, passes = engine.runner.forward, Tabs.stop, count(1)

    def struck(*args: Any) -> Any:
        if next(passes) == at:
            signal.raise_signal(signal.SIGINT)
        return forward(*args)

    def struck_again(self: Tabs, state: Tab) -> None:
        signal.raise_signal(signal.SIGINT)
        stop(self, state)

    monkeypatch.setattr(engine.runner, "forward", struck)
    monkeypatch.setattr(Tabs, "stop", struck_again)
    with pytest.raises(KeyboardInterrupt):
        engine.run(requests)
    assert not proposer.open
    assert_idle(engine)


def test_a_refused_request_is_not_started() -> None:
    engine, proposer = make_engine(tiny_decoder(), num_blocks=20), Tabs(TreeDrafter(oracle_trees(1.0)))
    fits, large = (make_request(text(0, size), SamplingParams(max_tokens=9), proposer) for size in (20, 900))
    engine.add(fits)
    with pytest.raises(CacheFullError):
        engine.add(large)
    for request in (fits, large):
        engine.abort(request)
    assert_idle(engine)
    assert not proposer.open


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_aborted_requests_leave_in_any_order(steps: int) -> None:
    """Running, waiting, half through its prompt, or one of several samples; twice does no harm."""
    engine = make_engine(tiny_decoder(), max_batch=3, prefill_chunk=64)
    proposer = Tabs(TreeDrafter(oracle_trees(1.0)))
    options = SamplingParams(max_tokens=30, temperature=1.0, n=3, seed=2)
    requests: list[Request] = [*samples(text(1, 100), options, proposer), *samples(text(2, 30), options, proposer)]
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        engine.step()
    for request in [requests[i] for i in (4, 0, 5, 1, 3, 2, 0)]:
        engine.abort(request)
    assert_idle(engine)
    assert not proposer.open


def consume(llm: LLM, options: SamplingParams) -> None:
    for number, _ in enumerate(llm.stream("for i in", options)):
        if number == 5:
            raise KeyboardInterrupt


def test_a_consumer_of_a_stream_that_gives_up(checkpoint: MakeCheckpoint) -> None:
    """The facade stays usable after an exception in whoever reads a stream, beside another stream that goes on."""
    llm = LLM(checkpoint("llama"), drafter="prompt_lookup(min_ngram=1)", threads=1)
    llm.engine.cache.allocator.__class__ = StrictAllocator
    options = SamplingParams(max_tokens=40, ignore_eos=True)
    want = llm.generate("for i in", options).token_ids
    other = llm.stream("def add(a, b):", options)
    got = [next(other).token_id]
    with pytest.raises(KeyboardInterrupt):
        consume(llm, options)
    got += [piece.token_id for piece in other]
    assert got == llm.generate("def add(a, b):", options).token_ids
    assert llm.generate("for i in", options).token_ids == want
    assert_idle(llm.engine)
