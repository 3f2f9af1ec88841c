"""A batch of eight requests, and a proposer, a logits processor and a text stream that raise at a
given call.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from engine.cases import params, text
from pronk.base.arrays import Array
from pronk.drafting import DraftContext, Outcome, Proposer
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.sampling.tree import TokenTree
from tiny_models import NullText, assert_idle, make_engine, make_request, tiny_decoder

PROMPTS = tuple(
    tuple(text(50 + seed, length)) for seed, length in enumerate((1, 9, 16, 33, 64, 70, 5, 40))
)


class PlantedError(Exception):
    pass


@dataclass
class Fuse:
    """Raises an error at call number ``at`` and, if ``lasting``, at each later call."""

    at: int
    lasting: bool = False
    error: type[BaseException] = PlantedError
    calls: int = 0
    raised: int = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at or (self.lasting and self.calls > self.at):
            self.raised += 1
            raise self.error(self.at)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that it may raise before its call."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self()
            return function(*args, **kwargs)

        return wrapped

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that it may raise after its call."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self()
            return result

        return wrapped


@dataclass
class DraftState:
    """A request's draft state, with the number of observed steps."""

    prompt: tuple[int, ...]
    observed: int = 0


@dataclass(eq=False)
class FailingProposer(Proposer[DraftState]):
    """Proposes mostly right tokens; raises in method ``verb``, for the prompt ``victim`` or
    (``None``) for all.
    """

    texts: dict[tuple[int, ...], Sequence[int]]
    verb: str = ""
    victim: tuple[int, ...] | None = None
    fuse: Fuse = field(default_factory=lambda: Fuse(0))
    states: list[DraftState] = field(default_factory=list)
    stopped: list[DraftState] = field(default_factory=list)

    name = "failing"

    def start(self, prompt: Sequence[int]) -> DraftState:
        self._burn("start", tuple(prompt))
        self.states.append(DraftState(tuple(prompt)))
        return self.states[-1]

    def propose(self, contexts: Sequence[DraftContext[DraftState]]) -> list[TokenTree]:
        trees = []
        for context in contexts:
            # As in real drafters, an error may leave the sampler with tokens ahead of the text.
            with context.sampler.after(context.tokens[:1]):
                self._burn("propose", context.state.prompt)
            answer = self.texts[context.state.prompt][len(context.tokens) :][
                : min(4, context.max_depth)
            ]
            wrong = (answer[0] + 1) % 7 if answer and answer[0] != 6 else 0
            chain = [context.tokens[-1], *answer]
            trees.append(
                TokenTree((*chain, wrong), (*range(-1, len(answer)), 0))
                if answer
                else TokenTree.chain(chain)
            )
        return trees

    def observe(self, outcome: Outcome[DraftState]) -> None:
        self._burn("observe", outcome.state.prompt)
        outcome.state.observed += 1

    def stop(self, state: DraftState) -> None:
        self.stopped.append(state)
        self._burn("stop", state.prompt)

    def _burn(self, verb: str, prompt: tuple[int, ...]) -> None:
        if verb == self.verb and self.victim in (None, prompt):
            self.fuse()


@dataclass
class FailingProcessor:
    """Changes nothing; raises in method ``verb``."""

    verb: str
    fuse: Fuse

    def mask(self, logits: Array) -> Array:
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
class FailingText(NullText):
    """Raises in method ``verb``: ``push`` or ``flush``."""

    verb: str
    fuse: Fuse

    def push(self, token: int, *, is_end: bool = False) -> tuple[str, str | None]:
        if self.verb == "push":
            self.fuse()
        return super().push(token, is_end=is_end)

    def flush(self) -> tuple[str, str | None]:
        if self.verb == "flush":
            self.fuse()
        return super().flush()


def options(index: int) -> Any:
    return params("all" if index % 2 else "temperature", index, max_tokens=22 + index)


@cache
def plain() -> tuple[Request, ...]:
    """Return the finished requests of plain decoding, each alone."""
    made = tuple(make_request(prompt, options(index)) for index, prompt in enumerate(PROMPTS))
    for request in made:
        finish(make_engine(tiny_decoder()), [request])
    return made


def finish(engine: Engine, requests: Sequence[Request]) -> None:
    """Run requests until each has ended or failed."""
    for request in requests:
        engine.add(request)
    for _ in range(500):
        engine.step()
        if all(request.ended for request in requests):
            assert_idle(engine)
            return
    raise AssertionError("the requests do not end")


def batch(proposer: FailingProposer) -> list[Request]:
    return [make_request(prompt, options(index), proposer) for index, prompt in enumerate(PROMPTS)]


def failing_proposer(**given: Any) -> FailingProposer:
    return FailingProposer({tuple(request.prompt): request.tokens for request in plain()}, **given)


def assert_as_plain(requests: Sequence[Request], *, but: Sequence[int] = ()) -> None:
    for index, (request, want) in enumerate(zip(requests, plain(), strict=True)):
        if index not in but:
            assert request.result.error is None
            assert (request.output, request.result.finish_reason) == (
                want.output,
                want.result.finish_reason,
            )
            assert request.result.logprobs == want.result.logprobs


def assert_observed(
    proposer: FailingProposer, requests: Sequence[Request], *, but: Sequence[int] = ()
) -> None:
    """Check that the proposer observed every step, except for some requests, and that each state
    was stopped once.
    """
    observed = {state.prompt: state.observed for state in proposer.states}
    for index, request in enumerate(requests):
        if index not in but:
            assert observed[tuple(request.prompt)] == len(request.stats.steps)
    counts = Counter(id(state) for state in proposer.stopped)
    assert counts == Counter(id(state) for state in proposer.states)
