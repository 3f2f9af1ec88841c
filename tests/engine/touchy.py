"""A batch of eight requests, and a guesser, a processor and a text that raise when they are told to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from engine.cases import params, text
from pronk.drafters import DraftContext, Outcome, Proposer
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.speculation.tree import TokenTree
from tiny_models import NullText, assert_idle, make_engine, make_request, tiny_decoder

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
class Touchy(Proposer[Own]):
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
            with context.sampler.after(context.tokens[:1]):
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


def batch(proposer: Touchy) -> list[Request]:
    return [make_request(prompt, options(index), proposer) for index, prompt in enumerate(PROMPTS)]


def touchy(**given: Any) -> Touchy:
    return Touchy({tuple(request.prompt): request.tokens for request in plain()}, **given)


def assert_as_plain(requests: Sequence[Request], *, but: Sequence[int] = ()) -> None:
    for index, (request, want) in enumerate(zip(requests, plain(), strict=True)):
        if index not in but:
            assert request.error is None
            assert (request.output, request.finish_reason) == (want.output, want.finish_reason)
            assert request.logprobs == want.logprobs


def assert_heard(proposer: Touchy, requests: Sequence[Request], *, but: Sequence[int] = ()) -> None:
    """Of every step of a neighbour its guesser has heard, and every state was given back once."""
    heard = {state.prompt: state.heard for state in proposer.states}
    for index, request in enumerate(requests):
        if index not in but:
            assert heard[tuple(request.prompt)] == len(request.stats.steps)
    counts = Counter(id(state) for state in proposer.stopped)
    assert counts == Counter(id(state) for state in proposer.states)
