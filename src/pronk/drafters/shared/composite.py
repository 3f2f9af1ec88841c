"""Base classes of composite drafters, which combine the proposals of several drafters (their parts)."""

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

# State of a composite drafter for one request: the state of each part.
Parts = tuple[Any, ...]


@dataclass(frozen=True)
class Composite(Drafter):
    """Options of a composite drafter; ``parts`` are the combined drafters, in order of precedence."""

    parts: tuple[Drafter, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or not self.parts or not all(isinstance(p, Drafter) for p in self.parts):
            msg = f"{self.name}: parts: expected a tuple of drafters, found {self.parts!r}"
            raise OptionError(msg)

    def bind_parts(self, target: Target) -> tuple[Proposer[Any], ...]:
        """Bind each part to the target and return the proposers."""
        return tuple(bind_proposer(part, target) for part in self.parts)


@dataclass(frozen=True)
class _StopPart:
    """Exit callback that stops a part. An error that already unwinds the stack hides an error of ``stop``."""

    part: Proposer[Any]
    state: Any

    def __call__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.part.stop(self.state)
        except Exception:
            if error is None:
                raise


class CompositeProposer(Proposer[Parts]):
    """Base of a composite drafter's proposer; ``parts`` are the proposers of its parts."""

    def __init__(self, parts: Sequence[Proposer[Any]]) -> None:
        self.parts = tuple(parts)
        part_capabilities = [part.capabilities for part in self.parts]
        hidden = tuple(sorted({layer for each in part_capabilities for layer in each.hidden}))
        self.capabilities = Capabilities(
            hidden,
            logits=any(each.logits for each in part_capabilities),
            costs=any(each.costs for each in part_capabilities),
            proposes=any(each.proposes for each in part_capabilities),
            observes_all_steps=any(each.observes_all_steps for each in part_capabilities),
            self_budgeting=all(each.self_budgeting for each in part_capabilities),
        )
        self.models = tuple(model for part in self.parts for model in part.models)

    def bind(self, target: Target) -> Self:
        """Bind every part to the target and return itself."""
        for part in self.parts:
            part.bind(target)
        return self

    def start(self, prompt: Sequence[int]) -> Parts:
        """Return the states of all parts; if a part raises, stop the parts that have started."""
        with ExitStack() as started:
            states: list[Any] = []
            for part in self.parts:
                states.append(part.start(prompt))
                started.push(_StopPart(part, states[-1]))
            started.pop_all()
        return tuple(states)

    def observe(self, outcome: Outcome[Parts]) -> None:
        """Pass the outcome to every part; the verified tree may hold draft tokens of several parts."""
        for part, part_state in zip(self.parts, outcome.state, strict=True):
            part.observe(replace(outcome, state=part_state))

    def on_preempt(self, state: Parts) -> None:
        """Release the KV blocks that the parts hold for a preempted request."""
        for part, part_state in zip(self.parts, state, strict=True):
            part.on_preempt(part_state)

    def stop(self, state: Parts) -> None:
        """Stop every part, even if one raises; then raise the first error."""
        with ExitStack() as stops:
            for part, part_state in reversed([*zip(self.parts, state, strict=True)]):
                stops.push(_StopPart(part, part_state))

    def proposals(self, contexts: Sequence[DraftContext[Parts]]) -> Iterator[list[TokenTree]]:
        """Yield each part's proposals for all contexts, in order of the parts."""
        for number, part in enumerate(self.parts):
            yield part.propose([replace(context, state=context.state[number]) for context in contexts])
