"""What drafters around another one that guesses token after token have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from pronk.drafters.from_draft.draft_model import DraftModel
from pronk.drafters.shared.chain import ChainDrafter, ChainProposer
from pronk.errors import OptionError
from pronk.speculation.proposer import DraftContext, Outcome, bind_proposer
from pronk.speculation.target import Target

__all__ = ["WrappedState", "Wrapper", "WrapperProposer"]

Own = TypeVar("Own")


@dataclass
class WrappedState(Generic[Own]):
    """One request's state: the wrapper's own, and that of the drafter within."""

    own: Own
    inner: Any


@dataclass(frozen=True)
class Wrapper(ChainDrafter):
    """Options of a drafter around one that guesses token after token.

    Attributes:
        parts: that one alone.
    """

    parts: tuple[ChainDrafter, ...] = field(default_factory=lambda: (DraftModel(),))

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or len(self.parts) != 1 or not isinstance(self.parts[0], ChainDrafter):
            msg = (
                f"{self.name}: expected a drafter that guesses token after token, as draft_model; found {self.parts!r}"
            )
            raise OptionError(msg)
        if self.inner.expands:
            outer = self.inner.name
            if outer == self.name:
                instead = f"one {outer} is enough"
            elif isinstance(self.inner, Wrapper):
                instead = f"write {outer}({self.name}(…)) instead"
            else:
                instead = "leave out its tree"
            msg = f"{self.name}: expected a drafter of chains, found {outer}; {instead}"
            raise OptionError(msg)

    @property
    def inner(self) -> ChainDrafter:
        """The drafter within."""
        return self.parts[0]

    def bind_inner(self, target: Target) -> ChainProposer[Any]:
        """What guesses within.

        Raises:
            OptionError: it does not guess token after token; others are those of its ``bind``.
        """
        found = bind_proposer(self.inner, target)
        if not isinstance(found, ChainProposer):
            msg = (
                f"drafter {self.inner.name}: expected a ChainGuesser of its bind, found {type(found).__name__}; "
                f"return one there, or leave out {self.name}"
            )
            raise OptionError(msg)
        return found


class WrapperProposer(ChainProposer[WrappedState[Own]]):
    """A guesser around one that guesses token after token.

    Attributes:
        inner: that one.
        needs: what it reads.
        models: of that one.
    """

    def __init__(self, inner: ChainProposer[Any]) -> None:
        self.inner = inner
        self.capabilities, self.models = inner.capabilities, inner.models

    def bind(self, target: Target) -> Self:
        """Itself; errors are those of the guesser within."""
        self.inner.bind(target)
        return self

    @abstractmethod
    def fresh(self) -> Own:
        """The wrapper's own state of a new request."""

    def start(self, prompt: Sequence[int]) -> WrappedState[Own]:
        """Both states."""
        return WrappedState(self.fresh(), self.inner.start(prompt))

    def observe(self, outcome: Outcome[WrappedState[Own]]) -> None:
        """The drafter within hears what the target said."""
        self.inner.observe(replace(outcome, state=outcome.state.inner))

    def on_preempt(self, state: WrappedState[Own]) -> None:
        """The places of the state within go."""
        self.inner.on_preempt(state.inner)

    def stop(self, state: WrappedState[Own]) -> None:
        """The state within goes."""
        self.inner.stop(state.inner)

    def within(self, contexts: Sequence[DraftContext[WrappedState[Own]]], most: int) -> list[DraftContext[Any]]:
        """The contexts of the drafter within, for chains of at most ``most`` tokens."""
        return [
            replace(context, state=context.state.inner, max_depth=min(context.max_depth, most)) for context in contexts
        ]
