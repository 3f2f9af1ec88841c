"""Base classes of wrappers: drafters that change an inner drafter's chains (``threshold``, ``cape``)."""

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
    """One request's state: the wrapper's own state, and the state of the inner drafter."""

    own: Own
    inner: Any


@dataclass(frozen=True)
class Wrapper(ChainDrafter):
    """Options of a wrapper; ``parts`` is a tuple of one drafter, the inner drafter."""

    parts: tuple[ChainDrafter, ...] = field(default_factory=lambda: (DraftModel(),))

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or len(self.parts) != 1 or not isinstance(self.parts[0], ChainDrafter):
            msg = f"{self.name}: expected one drafter of chains, such as draft_model; found {self.parts!r}"
            raise OptionError(msg)
        if self.inner.proposes_tree:
            found = self.inner.name
            if found == self.name:
                advice = f"one {found} is enough"
            elif isinstance(self.inner, Wrapper):
                advice = f"write {found}({self.name}(…)) instead"
            else:
                advice = "leave out its tree"
            msg = f"{self.name}: expected a drafter of chains, found {found}; {advice}"
            raise OptionError(msg)

    @property
    def inner(self) -> ChainDrafter:
        """The wrapped drafter, whose chains the wrapper changes."""
        return self.parts[0]

    def bind_inner(self, target: Target) -> ChainProposer[Any]:
        """Return the inner drafter's proposer for ``target``; raise OptionError unless it proposes chains."""
        found = bind_proposer(self.inner, target)
        if not isinstance(found, ChainProposer):
            msg = (
                f"drafter {self.inner.name}: expected bind() to return a ChainProposer, found {type(found).__name__}; "
                f"return one, or leave out {self.name}"
            )
            raise OptionError(msg)
        return found


class WrapperProposer(ChainProposer[WrappedState[Own]]):
    """Base of a wrapper's proposer, with the capabilities and models of the inner proposer."""

    def __init__(self, options: Wrapper, inner: ChainProposer[Any]) -> None:
        self.options, self.inner = options, inner
        self.capabilities, self.models = inner.capabilities, inner.models

    @property
    def source(self) -> str:
        """Drafter name in ``TokenTree.origin`` for the draft tokens that the wrapper adds."""
        return self.options.source

    def bind(self, target: Target) -> Self:
        """Bind the inner proposer to the target; return ``self``."""
        self.inner.bind(target)
        return self

    @abstractmethod
    def make_own_state(self) -> Own:
        """Return the wrapper's own state for a new request."""

    def start(self, prompt: Sequence[int]) -> WrappedState[Own]:
        """Return the state of a new request."""
        return WrappedState(self.make_own_state(), self.inner.start(prompt))

    def observe(self, outcome: Outcome[WrappedState[Own]]) -> None:
        """Pass the outcome of a step on to the inner proposer."""
        self.inner.observe(replace(outcome, state=outcome.state.inner))

    def on_preempt(self, state: WrappedState[Own]) -> None:
        """Release the KV blocks that the inner drafter holds for a preempted request."""
        self.inner.on_preempt(state.inner)

    def stop(self, state: WrappedState[Own]) -> None:
        """Release the inner drafter's resources of a request that has ended."""
        self.inner.stop(state.inner)

    def inner_contexts(
        self, contexts: Sequence[DraftContext[WrappedState[Own]]], max_depth: int
    ) -> list[DraftContext[Any]]:
        """Return the contexts for the inner proposer, limited to chains of ``max_depth`` draft tokens."""
        return [
            replace(context, state=context.state.inner, max_depth=min(context.max_depth, max_depth))
            for context in contexts
        ]
