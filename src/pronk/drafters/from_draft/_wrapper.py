"""What drafters around another one that guesses token after token have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from pronk.drafters.base import DraftContext, Outcome, guesser_of
from pronk.drafters.from_draft.draft_model import DraftModel
from pronk.drafters.shared.chain import ChainDrafter, ChainGuesser
from pronk.drafters.target import Target
from pronk.errors import OptionError

__all__ = ["Wrapped", "Wrapper", "WrapperGuesser"]

Own = TypeVar("Own")


@dataclass
class Wrapped(Generic[Own]):
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

    def bind_inner(self, target: Target) -> ChainGuesser[Any]:
        """What guesses within.

        Raises:
            OptionError: it does not guess token after token; others are those of its ``bind``.
        """
        found = guesser_of(self.inner, target)
        if not isinstance(found, ChainGuesser):
            msg = (
                f"drafter {self.inner.name}: expected a ChainGuesser of its bind, found {type(found).__name__}; "
                f"return one there, or leave out {self.name}"
            )
            raise OptionError(msg)
        return found


class WrapperGuesser(ChainGuesser[Wrapped[Own]]):
    """A guesser around one that guesses token after token.

    Attributes:
        inner: that one.
        needs: what it reads.
        models: of that one.
    """

    def __init__(self, inner: ChainGuesser[Any]) -> None:
        self.inner = inner
        self.needs, self.models, self.listens = inner.needs, inner.models, inner.listens

    def bind(self, target: Target) -> Self:
        """Itself; errors are those of the guesser within."""
        self.inner.bind(target)
        return self

    @abstractmethod
    def fresh(self) -> Own:
        """The wrapper's own state of a new request."""

    def start(self, prompt: Sequence[int]) -> Wrapped[Own]:
        """Both states."""
        return Wrapped(self.fresh(), self.inner.start(prompt))

    def observe(self, outcome: Outcome[Wrapped[Own]]) -> None:
        """The drafter within hears what the target said."""
        self.inner.observe(replace(outcome, state=outcome.state.inner))

    def give_way(self, state: Wrapped[Own]) -> None:
        """The places of the state within go."""
        self.inner.give_way(state.inner)

    def stop(self, state: Wrapped[Own]) -> None:
        """The state within goes."""
        self.inner.stop(state.inner)

    def within(self, contexts: Sequence[DraftContext[Wrapped[Own]]], most: int) -> list[DraftContext[Any]]:
        """The contexts of the drafter within, for chains of at most ``most`` tokens."""
        return [
            replace(context, state=context.state.inner, max_depth=min(context.max_depth, most)) for context in contexts
        ]
