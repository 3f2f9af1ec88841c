"""Base classes of composite drafters, which wrap several drafters and combine their proposals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

from pronk.errors import OptionError
from pronk.speculation.proposer import Capabilities, DraftContext, Drafter, Outcome, Proposer, bind_proposer
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Composite", "CompositeProposer", "Parts"]

# State of a composite drafter for one request: the states of the wrapped drafters.
Parts = tuple[Any, ...]


@dataclass(frozen=True)
class Composite(Drafter):
    """Options of a composite drafter; ``parts`` are the wrapped drafters, in order of precedence."""

    parts: tuple[Drafter, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or not self.parts or not all(isinstance(p, Drafter) for p in self.parts):
            msg = f"{self.name}: parts: expected a tuple of drafters, found {self.parts!r}"
            raise OptionError(msg)

    def bind_parts(self, target: Target) -> tuple[Proposer[Any], ...]:
        """Bind each wrapped drafter to the target and return the proposers."""
        return tuple(bind_proposer(drafter, target) for drafter in self.parts)


@dataclass(frozen=True)
class _StopOnExit:
    """Callback for an ExitStack: call ``stop``, and suppress its error if another one is being raised."""

    proposer: Proposer[Any]
    state: Any

    def __call__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.proposer.stop(self.state)
        except Exception:
            if error is None:
                raise


class CompositeProposer(Proposer[Parts]):
    """Base of a composite drafter's proposer; ``parts`` are the proposers of the wrapped drafters."""

    def __init__(self, parts: Sequence[Proposer[Any]]) -> None:
        self.parts = tuple(parts)
        wrapped = [proposer.capabilities for proposer in self.parts]
        hidden = tuple(sorted({layer for each in wrapped for layer in each.hidden}))
        self.capabilities = Capabilities(
            hidden,
            logits=any(each.logits for each in wrapped),
            costs=any(each.costs for each in wrapped),
            proposes=any(each.proposes for each in wrapped),
            observes_all_steps=any(each.observes_all_steps for each in wrapped),
            self_budgeting=all(each.self_budgeting for each in wrapped),
        )
        self.models = tuple(model for proposer in self.parts for model in proposer.models)

    def bind(self, target: Target) -> Self:
        """Bind every wrapped proposer to the target and return itself."""
        for proposer in self.parts:
            proposer.bind(target)
        return self

    def start(self, prompt: Sequence[int]) -> Parts:
        """Start every wrapped proposer and return the states; after an error, stop the started ones."""
        with ExitStack() as started:
            states: list[Any] = []
            for proposer in self.parts:
                states.append(proposer.start(prompt))
                started.push(_StopOnExit(proposer, states[-1]))
            started.pop_all()
        return tuple(states)

    def observe(self, outcome: Outcome[Parts]) -> None:
        """Pass the outcome to every wrapped proposer; the verified tree may mix their draft tokens."""
        for proposer, own_state in zip(self.parts, outcome.state, strict=True):
            proposer.observe(replace(outcome, state=own_state))

    def on_preempt(self, state: Parts) -> None:
        """Release the KV blocks that the wrapped proposers hold for a preempted request."""
        for proposer, own_state in zip(self.parts, state, strict=True):
            proposer.on_preempt(own_state)

    def stop(self, state: Parts) -> None:
        """Stop every wrapped proposer in order, even if one raises an error; then raise the first error."""
        with ExitStack() as stops:
            for proposer, own_state in reversed([*zip(self.parts, state, strict=True)]):
                stops.push(_StopOnExit(proposer, own_state))

    def proposals(self, contexts: Sequence[DraftContext[Parts]]) -> Iterator[list[TokenTree]]:
        """Yield, for each wrapped proposer in order, its proposals for all contexts."""
        for index, proposer in enumerate(self.parts):
            yield proposer.propose([replace(context, state=context.state[index]) for context in contexts])
