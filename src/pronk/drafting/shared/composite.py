"""Base classes of composite drafters, which wrap several drafters and combine their proposals."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from pronk.base.errors import OptionError
from pronk.drafting.proposer import Capabilities, Drafter, Outcome, Proposer, bind_proposer
from pronk.drafting.target import Target

# State of a composite drafter for one request: the state of each wrapped drafter, in order, then perhaps its own.
States = tuple[Any, ...]


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

    def for_adapter(self) -> Self | None:
        """Return the composite of the parts for an adapter, if one of the parts keeps texts of other requests."""
        own = [drafter.for_adapter() for drafter in self.parts]
        parts = tuple(each or drafter for each, drafter in zip(own, self.parts, strict=True))
        return replace(self, parts=parts) if any(own) else None


class CompositeProposer(Proposer[States]):
    """Base of a composite drafter's proposer; ``parts`` are the proposers of the wrapped drafters."""

    def __init__(self, parts: Sequence[Proposer[Any]]) -> None:
        self.parts = tuple(parts)
        wrapped = [proposer.capabilities for proposer in self.parts]
        hidden = tuple(sorted({layer for capabilities in wrapped for layer in capabilities.hidden}))
        self.capabilities = Capabilities(
            hidden,
            logits=any(capabilities.logits for capabilities in wrapped),
            proposes=any(capabilities.proposes for capabilities in wrapped),
            observes_all_steps=any(capabilities.observes_all_steps for capabilities in wrapped),
            self_budgeting=all(capabilities.self_budgeting for capabilities in wrapped),
        )
        self.models = tuple(model for proposer in self.parts for model in proposer.models)

    def bind(self, target: Target) -> Self:
        for proposer in self.parts:
            proposer.bind(target)
        return self

    def start(self, prompt: Sequence[int]) -> States:
        """Start every wrapped proposer and return the states; after an error, stop the started ones."""
        states: list[Any] = []
        try:
            for proposer in self.parts:
                states.append(proposer.start(prompt))  # noqa: PERF401 - the started ones are stopped after an error
        except BaseException:
            with suppress(Exception):
                self.stop(tuple(states))
            raise
        return tuple(states)

    def observe(self, outcome: Outcome[States]) -> None:
        for proposer, part_state in zip(self.parts, outcome.state, strict=False):
            proposer.observe(outcome.with_state(part_state))

    def on_preempt(self, state: States) -> None:
        for proposer, part_state in zip(self.parts, state, strict=False):
            proposer.on_preempt(part_state)

    def stop(self, state: States) -> None:
        """Stop every wrapped proposer in order, even if one raises an error; then raise the first error."""
        errors = []
        for proposer, part_state in zip(self.parts, state, strict=False):  # fewer states after an error in ``start``
            try:
                proposer.stop(part_state)
            except Exception as error:  # noqa: BLE001 - raised after the other proposers have stopped
                errors.append(error)
        if errors:
            raise errors[0]
