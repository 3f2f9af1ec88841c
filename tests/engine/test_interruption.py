"""KeyboardInterrupt at any point of a step: draft states are stopped, blocks are free, later texts
are unchanged.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from drafting.trees import TreeDrafter, oracle_trees
from engine.cases import PROMPTS, ask, assert_same, drafter, params, plain, step_until_ended, text
from engine.failing import Fuse
from pronk.base.arrays import FLOAT32
from pronk.base.errors import CacheFullError
from pronk.drafting import DraftContext, Outcome, Proposer
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.llm import LLM
from pronk.models.program import Program
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree
from tiny_models import (
    NullText,
    StrictAllocator,
    assert_idle,
    make_engine,
    make_request,
    run,
    samples,
    tiny_decoder,
)


@dataclass(eq=False)
class DraftState:
    prompt: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TrackingProposer(Proposer[DraftState]):
    """Proposes the trees of a drafter, keeps the list of open draft states, and raises by its
    fuses.
    """

    name = "tracking"

    trees: TreeDrafter
    open: list[DraftState] = field(default_factory=list)
    fuses: dict[str, Fuse] = field(default_factory=dict)

    def start(self, prompt: Sequence[int]) -> DraftState:
        self._burn("start")
        self.open.append(DraftState(tuple(prompt)))
        return self.open[-1]

    def propose(self, contexts: Sequence[DraftContext[DraftState]]) -> list[TokenTree]:
        self._burn("propose")
        assert all(context.state in self.open for context in contexts)
        return [
            self.trees.shape(self.trees.case(context, context.state.prompt)) for context in contexts
        ]

    def observe(self, outcome: Outcome[DraftState]) -> None:
        self._burn("observe")
        assert outcome.state in self.open

    def stop(self, state: DraftState) -> None:
        self.open.remove(state)

    def _burn(self, verb: str) -> None:
        if verb in self.fuses:
            self.fuses[verb]()


def interrupt(at: int) -> Fuse:
    return Fuse(at, error=KeyboardInterrupt)


@contextmanager
def burning(engine: Engine, proposer: TrackingProposer, place: str, fuse: Fuse) -> Iterator[None]:
    """Make ``fuse`` raise at one place of a step: in a proposer's method or in a function of the
    table below.
    """
    if place in ("start", "propose", "observe"):
        proposer.fuses[place] = fuse
        yield
        proposer.fuses.clear()
        return
    owner, name = {
        "compute": (Program, "run"),  # after the kernels, before their results are used
        "forward": (engine.runner, "forward"),
        "prepare": (engine.cache, "prepare"),
        "commit": (engine.cache, "commit_slots"),
        "schedule": (engine.scheduler, "schedule"),
        "choose": (Sampler, "advance"),
        "text": (NullText, "push"),
    }[place]
    with pytest.MonkeyPatch.context() as patch:
        wrap = fuse.before if place in ("choose", "text") else fuse.after
        patch.setattr(owner, name, wrap(getattr(owner, name)))
        yield


def tracking(want: Sequence[Request]) -> TrackingProposer:
    return TrackingProposer(drafter("oracle", want))  # type: ignore[arg-type]


def batch(proposer: TrackingProposer) -> list[Request]:
    return [ask(prompt, params("penalties", i), proposer) for i, prompt in enumerate(PROMPTS)]


PLACES = {
    "start": (1, 3),
    "propose": (1, 5),
    "observe": (1, 2, 6, 12),
    "compute": (1, 2, 4, 9),
    "forward": (1, 2, 4, 9),
    "prepare": (1, 5, 20),
    "commit": (1, 2, 8, 30),
    "schedule": (1, 4),
    "choose": (1, 20, 60),
    "text": (1, 20, 45),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("place", PLACES)
def test_all_requests_are_aborted_after_an_interrupt(place: str) -> None:
    """Interrupt steps at calls of a place, then abort all requests."""
    want = plain(FLOAT32, "penalties")
    engine = make_engine(tiny_decoder())
    proposer = tracking(want)
    for at in PLACES[place]:
        requests = batch(proposer)
        fuse = interrupt(at)
        with burning(engine, proposer, place, fuse), pytest.raises(KeyboardInterrupt):
            run(engine, requests)
        assert fuse.raised
        for request in requests:
            engine.abort(request)
        assert_idle(engine)
        assert not proposer.open
    again = batch(proposer)
    run(engine, again)
    if engine.exact:
        assert_same(again, want)
    assert [request.output for request in again] == [request.output for request in want]
    assert not proposer.open


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "place", [place for place in PLACES if place not in ("prepare", "schedule", "start")]
)
def test_other_requests_of_an_interrupted_step_go_on(place: str) -> None:
    """Interrupt steps at calls of a place, then abort one request."""
    want = plain(FLOAT32, "penalties")
    decoder = tiny_decoder()
    for at in PLACES[place]:
        engine = make_engine(decoder)
        proposer = tracking(want)
        requests = batch(proposer)
        with burning(engine, proposer, place, interrupt(at)), pytest.raises(KeyboardInterrupt):
            run(engine, requests)
        engine.abort(requests.pop(2))
        step_until_ended(engine, requests)
        for request, other in zip(requests, want[:2] + want[3:], strict=True):
            assert request.output == other.output
            engine.abort(request)
        assert_idle(engine)
        assert not proposer.open


def test_a_request_that_ended_in_an_interrupted_step_does_not_go_on() -> None:
    want = plain(FLOAT32, "temperature")
    engine = make_engine(tiny_decoder())
    proposer = tracking(want)
    requests = [ask(PROMPTS[i], params("temperature", i, 40), proposer) for i in (0, 1)]
    for request in requests:
        engine.add(request)
    while not any(request.ended for request in requests):
        fuse = proposer.fuses["observe"] = interrupt(1)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert fuse.raised
    proposer.fuses.clear()
    step_until_ended(engine, requests)
    for request, other in zip(requests, want, strict=False):
        engine.abort(request)
        assert request.output == other.output
    assert_idle(engine)


@pytest.mark.parametrize("at", [1, 4])
def test_more_signals_while_requests_are_aborted(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal interrupts a forward pass; another one interrupts each call of ``stop`` during the
    cleanup.
    """
    engine = make_engine(tiny_decoder())
    proposer = TrackingProposer(TreeDrafter(oracle_trees(1.0)))
    requests = batch(proposer)
    forward = engine.runner.forward
    stop = TrackingProposer.stop
    passes = count(1)

    def interrupted_forward(*args: Any) -> Any:
        if next(passes) == at:
            signal.raise_signal(signal.SIGINT)
        return forward(*args)

    def interrupted_stop(self: TrackingProposer, state: DraftState) -> None:
        signal.raise_signal(signal.SIGINT)
        stop(self, state)

    monkeypatch.setattr(engine.runner, "forward", interrupted_forward)
    monkeypatch.setattr(TrackingProposer, "stop", interrupted_stop)
    with pytest.raises(KeyboardInterrupt):
        engine.run(requests)
    assert not proposer.open
    assert_idle(engine)


def test_a_refused_request_is_not_started() -> None:
    engine = make_engine(tiny_decoder(), num_blocks=20)
    proposer = TrackingProposer(TreeDrafter(oracle_trees(1.0)))
    fits, large = (
        make_request(text(0, size), SamplingParams(max_tokens=9), proposer) for size in (20, 900)
    )
    engine.add(fits)
    with pytest.raises(CacheFullError):
        engine.add(large)
    for request in (fits, large):
        engine.abort(request)
    assert_idle(engine)
    assert not proposer.open


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_aborted_requests_leave_in_any_order(steps: int) -> None:
    """Requests are aborted while they run, wait or read their prompt; some are samples, one is
    aborted twice.
    """
    engine = make_engine(tiny_decoder(), max_batch=3, prefill_chunk=64)
    proposer = TrackingProposer(TreeDrafter(oracle_trees(1.0)))
    options = SamplingParams(max_tokens=30, temperature=1.0, n=3, seed=2)
    requests: list[Request] = [
        *samples(text(1, 100), options, proposer),
        *samples(text(2, 30), options, proposer),
    ]
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


def test_an_exception_in_the_consumer_of_a_stream(checkpoint: MakeCheckpoint) -> None:
    """The exception ends one stream; another stream and later requests have the usual tokens."""
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
