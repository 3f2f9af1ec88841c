"""What drafters that are made of other drafters have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from pronk.drafters.base import DraftContext, Drafter, Needs, Outcome
from pronk.drafters.target import Target
from pronk.errors import OptionError
from pronk.tree import TokenTree

__all__ = ["Composite", "Parts"]

# One state per part.
Parts = tuple[Any, ...]


@dataclass(frozen=True)
class Composite(Drafter[Parts]):
    """Several drafters, each with its own state; all of them learn from every step.

    Attributes:
        parts: the drafters, in order of precedence, at least one.
    """

    name: ClassVar[str]

    parts: tuple[Drafter[Any], ...]
    needs: Needs = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or not self.parts or not all(isinstance(p, Drafter) for p in self.parts):
            msg = f"{self.name}: parts must be a tuple of drafters, found {self.parts!r}"
            raise OptionError(msg)
        wants = [part.needs for part in self.parts]
        hidden = tuple(sorted({layer for want in wants for layer in want.hidden}))
        needs = Needs(hidden, any(want.logits for want in wants), any(want.costs for want in wants))
        object.__setattr__(self, "needs", needs)

    def bind(self, target: Target) -> Self:
        """Every part meets the target."""
        parts = tuple(part.bind(target) for part in self.parts)
        return self if all(a is b for a, b in zip(parts, self.parts, strict=True)) else replace(self, parts=parts)

    def start(self, prompt: Sequence[int]) -> Parts:
        """Every part's state."""
        return tuple(part.start(prompt) for part in self.parts)

    def observe(self, outcomes: Sequence[Outcome[Parts]]) -> None:
        """Every part hears what the target said, of the others' guesses too."""
        for number, part in enumerate(self.parts):
            part.observe([replace(outcome, state=outcome.state[number]) for outcome in outcomes])

    def stop(self, state: Parts) -> None:
        """Every part's state goes."""
        for part, own in zip(self.parts, state, strict=True):
            part.stop(own)

    def proposals(self, contexts: Sequence[DraftContext[Parts]]) -> Iterator[list[TokenTree]]:
        """What each part proposes for all contexts, one part after the other, as they are asked for."""
        for number, part in enumerate(self.parts):
            yield part.propose([replace(context, state=context.state[number]) for context in contexts])
