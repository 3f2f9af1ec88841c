"""What drafters that are made of other drafters have in common."""

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

# One state per part.
Parts = tuple[Any, ...]


@dataclass(frozen=True)
class Composite(Drafter):
    """Options of a drafter that is made of others.

    Attributes:
        parts: the drafters, in order of precedence, at least one.
    """

    parts: tuple[Drafter, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or not self.parts or not all(isinstance(p, Drafter) for p in self.parts):
            msg = f"{self.name}: parts: expected a tuple of drafters, found {self.parts!r}"
            raise OptionError(msg)

    def bind_parts(self, target: Target) -> tuple[Proposer[Any], ...]:
        """What guesses for each part."""
        return tuple(bind_proposer(part, target) for part in self.parts)


@dataclass(frozen=True)
class _Stop:
    """Stops a part at the end of a stack, where an error that is there already goes on."""

    part: Proposer[Any]
    state: Any

    def __call__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.part.stop(self.state)
        except Exception:
            if error is None:
                raise


class CompositeProposer(Proposer[Parts]):
    """Several guessers, each with its own state; all of them learn from every step.

    Attributes:
        parts: in order of precedence.
        needs: what any of them reads.
        proposes: whether any of them does.
        observes_all_steps: the same.
        self_budgeting: whether all of them do.
        models: of all of them.
    """

    def __init__(self, parts: Sequence[Proposer[Any]]) -> None:
        self.parts = tuple(parts)
        wants = [part.capabilities for part in self.parts]
        hidden = tuple(sorted({layer for want in wants for layer in want.hidden}))
        self.capabilities = Capabilities(
            hidden,
            logits=any(want.logits for want in wants),
            costs=any(want.costs for want in wants),
            proposes=any(want.proposes for want in wants),
            observes_all_steps=any(want.observes_all_steps for want in wants),
            self_budgeting=all(want.self_budgeting for want in wants),
        )
        self.models = tuple(model for part in self.parts for model in part.models)

    def bind(self, target: Target) -> Self:
        """Itself; errors are those of its parts."""
        for part in self.parts:
            part.bind(target)
        return self

    def start(self, prompt: Sequence[int]) -> Parts:
        """Every part's state; if one part raises, those before it are stopped."""
        with ExitStack() as started:
            states: list[Any] = []
            for part in self.parts:
                states.append(part.start(prompt))
                started.push(_Stop(part, states[-1]))
            started.pop_all()
        return tuple(states)

    def observe(self, outcome: Outcome[Parts]) -> None:
        """Every part hears what the target said, of the others' guesses too."""
        for part, own in zip(self.parts, outcome.state, strict=True):
            part.observe(replace(outcome, state=own))

    def on_preempt(self, state: Parts) -> None:
        """Every part's places go."""
        for part, own in zip(self.parts, state, strict=True):
            part.on_preempt(own)

    def stop(self, state: Parts) -> None:
        """Every part's state goes, whatever others raise; of several errors it is the first."""
        with ExitStack() as stops:
            for part, own in reversed([*zip(self.parts, state, strict=True)]):
                stops.push(_Stop(part, own))

    def proposals(self, contexts: Sequence[DraftContext[Parts]]) -> Iterator[list[TokenTree]]:
        """What each part proposes for all contexts, one part after the other, as they are asked for."""
        for number, part in enumerate(self.parts):
            yield part.propose([replace(context, state=context.state[number]) for context in contexts])
