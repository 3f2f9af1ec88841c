"""A failure stays with its request: in a batch of eight something raises somewhere, and seven texts are what they were.

What raises in a request's processors or its text ends that request with the very error. What raises in its guesser
costs it the guesses, and not the text.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cases import params, text
from models import NullText, assert_idle, make_engine, make_request, tiny_decoder
from pronk.drafters import DraftContext, Guesser, Outcome
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.tree import TokenTree

PROMPTS = tuple(tuple(text(50 + seed, length)) for seed, length in enumerate((1, 9, 16, 33, 64, 70, 5, 40)))


class PlantedError(Exception):
    """What goes wrong."""


@dataclass
class Fuse:
    """Raises at its call number ``at``, and at each one after it if it is ``lasting``."""

    at: int
    lasting: bool = False
    calls: int = 0
    burnt: int = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at or (self.lasting and self.calls > self.at):
            self.burnt += 1
            raise PlantedError(self.at)


@dataclass
class Own:
    """A request's draft state: its answer, and what was heard of it."""

    prompt: tuple[int, ...]
    heard: int = 0


@dataclass(eq=False)
class Touchy(Guesser[Own]):
    """Knows most of the answers; raises in one verb, for one prompt or (``None``) whoever's turn it is."""

    texts: dict[tuple[int, ...], Sequence[int]]
    verb: str = ""
    victim: tuple[int, ...] | None = None
    fuse: Fuse = field(default_factory=lambda: Fuse(0))
    states: list[Own] = field(default_factory=list)
    stopped: list[Own] = field(default_factory=list)

    name = "touchy"

    def start(self, prompt: Sequence[int]) -> Own:
        self._burn("start", tuple(prompt))
        self.states.append(Own(tuple(prompt)))
        return self.states[-1]

    def propose(self, contexts: Sequence[DraftContext[Own]]) -> list[TokenTree]:
        trees = []
        for context in contexts:
            # It borrows the chooser as drafters do, and leaves it where it stands when it raises.
            with context.chooser.after(context.tokens[:1]):
                self._burn("propose", context.state.prompt)
            answer = self.texts[context.state.prompt][len(context.tokens) :][: min(4, context.max_depth)]
            wrong = (answer[0] + 1) % 7 if answer and answer[0] != 6 else 0
            chain = [context.tokens[-1], *answer]
            trees.append(TokenTree((*chain, wrong), (*range(-1, len(answer)), 0)) if answer else TokenTree.chain(chain))
        return trees

    def observe(self, outcome: Outcome[Own]) -> None:
        self._burn("observe", outcome.state.prompt)
        outcome.state.heard += 1

    def stop(self, state: Own) -> None:
        self.stopped.append(state)
        self._burn("stop", state.prompt)

    def _burn(self, verb: str, prompt: tuple[int, ...]) -> None:
        if verb == self.verb and self.victim in (None, prompt):
            self.fuse()


@dataclass
class TouchyProcessor:
    """Changes nothing; raises in one verb."""

    verb: str
    fuse: Fuse

    def mask(self, logits: Tensor) -> Tensor:
        self._burn("mask")
        return logits

    def advance(self, token: int) -> None:
        self._burn("advance")

    def rollback(self, count: int) -> None:
        self._burn("rollback")

    def _burn(self, verb: str) -> None:
        if verb == self.verb:
            self.fuse()


@dataclass
class TouchyText(NullText):
    """Raises in ``push`` or in ``flush``."""

    verb: str
    fuse: Fuse

    def push(self, token: int) -> tuple[str, str | None]:
        if self.verb == "push":
            self.fuse()
        return super().push(token)

    def flush(self) -> tuple[str, str | None]:
        if self.verb == "flush":
            self.fuse()
        return super().flush()


def options(index: int) -> Any:
    return params("all" if index % 2 else "temperature", index, max_tokens=22 + index)


@cache
def plain() -> tuple[Request, ...]:
    """Each prompt on its own, without guesses."""
    made = tuple(make_request(prompt, options(index)) for index, prompt in enumerate(PROMPTS))
    for request in made:
        finish(make_engine(tiny_decoder()), [request])
    return made


def finish(engine: Engine, requests: Sequence[Request]) -> None:
    """Run to the end, whatever it is."""
    for request in requests:
        engine.add(request)
    for _ in range(500):
        engine.step()
        if all(request.ended for request in requests):
            assert_idle(engine)
            return
    raise AssertionError("the requests do not end")


def batch(guesser: Touchy) -> list[Request]:
    return [make_request(prompt, options(index), guesser) for index, prompt in enumerate(PROMPTS)]


def touchy(**given: Any) -> Touchy:
    return Touchy({tuple(request.prompt): request.tokens for request in plain()}, **given)


def assert_as_plain(requests: Sequence[Request], *, but: Sequence[int] = ()) -> None:
    for index, (request, want) in enumerate(zip(requests, plain(), strict=True)):
        if index not in but:
            assert request.error is None
            assert (request.output, request.finish_reason) == (want.output, want.finish_reason)
            assert request.logprobs == want.logprobs


def assert_heard(guesser: Touchy, requests: Sequence[Request], *, but: Sequence[int] = ()) -> None:
    """Of every step of a neighbour its guesser has heard, and every state was given back once."""
    heard = {state.prompt: state.heard for state in guesser.states}
    for index, request in enumerate(requests):
        if index not in but:
            assert heard[tuple(request.prompt)] == len(request.stats.steps)
    counts = Counter(id(state) for state in guesser.stopped)
    assert counts == Counter(id(state) for state in guesser.states)


def test_nothing_raises() -> None:
    guesser = touchy()
    requests = batch(guesser)
    finish(make_engine(tiny_decoder()), requests)
    assert_as_plain(requests)
    assert_heard(guesser, requests)
    assert sum(request.stats.accepted for request in requests) > 60
    assert sum(request.stats.moved for request in requests) == 0


@pytest.mark.parametrize("verb", ["mask", "advance", "rollback"])
def test_processors_that_raise(verb: str) -> None:
    dice, burnt = random.Random(verb), 0
    for _ in range(12):
        guesser, fuse, victim = touchy(), Fuse(dice.randrange(1, 6 if verb == "rollback" else 40)), dice.randrange(8)
        requests = batch(guesser)
        chooser = requests[victim].chooser
        chooser.processors, chooser.kernels = (*chooser.processors, TouchyProcessor(verb, fuse)), None
        finish(make_engine(tiny_decoder()), requests)
        assert_as_plain(requests, but=[victim])
        assert_heard(guesser, requests, but=[victim])
        burnt += bool(fuse.burnt)
        want = plain()[victim].output
        assert requests[victim].output == want[: len(requests[victim].output)]
        assert isinstance(requests[victim].error, PlantedError) == bool(fuse.burnt)
        assert fuse.burnt or requests[victim].output == want
    assert burnt > 4


@pytest.mark.parametrize("verb", ["push", "flush"])
def test_texts_that_raise(verb: str) -> None:
    dice = random.Random(verb)
    for _ in range(8):
        guesser, victim = touchy(), dice.randrange(8)
        fuse = Fuse(dice.randrange(1, 16) if verb == "push" else 1)
        requests = batch(guesser)
        requests[victim].text = TouchyText(verb, fuse)
        finish(make_engine(tiny_decoder()), requests)
        assert_as_plain(requests, but=[victim])
        assert_heard(guesser, requests, but=[victim])
        assert fuse.burnt == 1
        assert isinstance(requests[victim].error, PlantedError)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("verb", ["start", "propose", "observe", "stop"])
def test_guessers_that_raise_for_one_request(verb: str, *, lasting: bool, caplog: pytest.LogCaptureFixture) -> None:
    dice, burnt = random.Random(verb), 0
    for _ in range(6):
        victim = dice.randrange(8)
        fuse = Fuse(1 if verb in ("start", "stop") else dice.randrange(1, 9), lasting)
        guesser = touchy(verb=verb, victim=PROMPTS[victim], fuse=fuse)
        requests = batch(guesser)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            finish(make_engine(tiny_decoder()), requests)
        assert_as_plain(requests)
        # Asked alone after it has raised among others, it may have thought better of it.
        recovered = verb == "propose" and not lasting
        assert_heard(guesser, requests, but=[] if recovered else [victim])
        burnt += bool(fuse.burnt)
        said = requests[victim].stats.draft_error
        assert (said is None) == (recovered or not fuse.burnt)
        assert said is None or said.startswith("PlantedError: ")
        assert [record.getMessage() for record in caplog.records] == (
            [] if said is None else [f"touchy: {said}; the request goes on without guesses"]
        )
        assert all(each.stats.draft_error is None for each in requests if each is not requests[victim])
        if said is not None and verb == "start":
            assert requests[victim].stats.drafted == 0
    assert burnt >= 4


def test_a_guesser_that_raises_for_everybody() -> None:
    guesser = touchy(verb="propose", fuse=Fuse(9, lasting=True))
    requests = batch(guesser)
    finish(make_engine(tiny_decoder()), requests)
    assert_as_plain(requests)
    assert all(request.stats.draft_error for request in requests)
    assert sum(request.stats.drafted for request in requests) > 0


@pytest.mark.parametrize("wrong", ["root", "fewer", "none", "nothing"])
def test_proposals_that_are_none(wrong: str) -> None:
    class Wrong(Touchy):
        def propose(self, contexts: Sequence[DraftContext[Own]]) -> Any:
            trees = super().propose(contexts)
            if wrong == "root":
                return [TokenTree.chain([(tree.tokens[0] + 1) % 7, 3]) for tree in trees]
            return {"fewer": trees[1:], "none": None, "nothing": [None] * len(trees)}[wrong]

    guesser = Wrong(touchy().texts)
    requests = batch(guesser)
    finish(make_engine(tiny_decoder()), requests)
    assert_as_plain(requests)
    errors = [request.stats.draft_error for request in requests]
    assert all(errors)
    if wrong == "root":
        assert all("drafter touchy: expected a tree below token " in str(error) for error in errors)


def test_everything_at_once() -> None:
    """Many of the eight fail in different ways, at different times, while new ones come in."""
    dice = random.Random(5)
    for _ in range(10):
        guesser = touchy(verb=dice.choice(["propose", "observe"]), fuse=Fuse(dice.randrange(5, 60), lasting=False))
        requests, failing = batch(guesser), dice.sample(range(8), 4)
        fuses = {index: Fuse(dice.randrange(1, 14)) for index in failing}
        for index in failing[:2]:
            requests[index].text = TouchyText("push", fuses[index])
        for index in failing[2:]:
            chooser, verb = requests[index].chooser, dice.choice(["mask", "advance"])
            chooser.processors, chooser.kernels = (*chooser.processors, TouchyProcessor(verb, fuses[index])), None
        finish(make_engine(tiny_decoder(), max_batch=dice.choice((3, 8))), requests)
        assert_as_plain(requests, but=failing)
        for index in failing:
            assert isinstance(requests[index].error, PlantedError) == bool(fuses[index].burnt)


def test_numbers_that_overflow_end_one_request_alone() -> None:
    """A row of NaN in one request's logits, as a damaged cache would give."""
    engine, requests = make_engine(tiny_decoder()), batch(touchy())
    forward = engine.runner.forward

    def damaged(jobs: Any, collect: Any = frozenset()) -> Any:
        result = forward(jobs, collect)
        for job, logits in zip(jobs, result.logits, strict=True):
            if job.segment.table is requests[3].table and len(requests[3].output) == 5:
                logits.fill_(torch.nan)
        return result

    engine.runner.forward = damaged  # type: ignore[method-assign]
    longer = [replace(each.params, max_tokens=30) for each in requests[3:4]]
    requests[3] = make_request(PROMPTS[3], longer[0])
    finish(engine, requests)
    assert_as_plain(requests, but=[3])
    assert "expected finite logits" in str(requests[3].error)
