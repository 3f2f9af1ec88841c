"""Base classes of ``threshold`` and ``cape``, which end or extend the chains of an inner drafter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from pronk.drafters.from_draft.draft_model import DraftModel
from pronk.drafters.shared.chain import ChainDrafter, ChainProposer
from pronk.errors import OptionError
from pronk.speculation.proposer import DraftContext, Outcome, bind_proposer
from pronk.speculation.step_value import ChainPrice
from pronk.speculation.target import Target

__all__ = ["Wrapper", "WrapperProposer", "WrapperState"]

OwnState = TypeVar("OwnState")


@dataclass
class WrapperState(Generic[OwnState]):
    """One request's state in a wrapper and in its inner proposer."""

    own: OwnState
    inner: Any


@dataclass(frozen=True)
class Wrapper(ChainDrafter):
    """Options of a wrapper; ``parts`` has its single inner drafter, such as ``glide`` in ``cape(glide)``."""

    parts: tuple[ChainDrafter, ...] = field(default_factory=lambda: (DraftModel(),))

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or len(self.parts) != 1 or not isinstance(self.parts[0], ChainDrafter):
            msg = f"{self.name}: expected one drafter of chains, such as draft_model; found {self.parts!r}"
            raise OptionError(msg)
        if self.inner.proposes_tree:
            inner_name = self.inner.name
            if inner_name == self.name:  # the same wrapper twice: cape(cape(…))
                advice = f"one {inner_name} is enough"
            elif isinstance(self.inner, Wrapper):  # two wrappers in the wrong order, such as threshold(cape(…))
                advice = f"write {inner_name}({self.name}(…)) instead"
            else:  # a drafter that proposes trees only by its options, such as multi_token(tree=…)
                advice = "leave out its tree"
            msg = f"{self.name}: expected a drafter of chains, found {inner_name}; {advice}"
            raise OptionError(msg)

    @property
    def inner(self) -> ChainDrafter:
        """Options of the inner drafter."""
        return self.parts[0]

    def bind_inner(self, target: Target) -> ChainProposer[Any]:
        """Return the inner drafter's proposer for ``target``; raise OptionError unless it proposes chains."""
        proposer = bind_proposer(self.inner, target)
        if not isinstance(proposer, ChainProposer):
            msg = (
                f"drafter {self.inner.name}: expected bind() to return a ChainProposer, "
                f"found {type(proposer).__name__}; return one, or leave out {self.name}"
            )
            raise OptionError(msg)
        return proposer


class WrapperProposer(ChainProposer[WrapperState[OwnState]]):
    """Base of a wrapper's proposer, with the capabilities and models of the inner proposer."""

    def __init__(self, options: Wrapper, inner: ChainProposer[Any]) -> None:
        self.options, self.inner = options, inner
        self.capabilities, self.models = inner.capabilities, inner.models

    @property
    def source(self) -> str:
        """Drafter name in ``TokenTree.origin`` for draft tokens that the wrapper adds, such as siblings."""
        return self.options.source

    def bind(self, target: Target) -> Self:
        """Bind the inner proposer to the target; return ``self``."""
        self.inner.bind(target)
        return self

    def chain_price(self, context: DraftContext[WrapperState[OwnState]]) -> ChainPrice | None:
        """Return the inner proposer's price of draft tokens."""
        return self.inner.chain_price(context.with_state(context.state.inner))

    @property
    def chain_source(self) -> str:
        """Name in the statistics of the inner proposer's draft tokens."""
        return self.inner.chain_source

    def shadow(self, context: DraftContext[WrapperState[OwnState]]) -> bool:
        """Count the inner proposer's choices at the last tokens of the text."""
        return self.inner.shadow(context.with_state(context.state.inner))

    @abstractmethod
    def make_own_state(self) -> OwnState:
        """Return :attr:`WrapperState.own` for a new request."""

    def start(self, prompt: Sequence[int]) -> WrapperState[OwnState]:
        """Return the state of a new request: the wrapper's own state and the inner proposer's state."""
        return WrapperState(self.make_own_state(), self.inner.start(prompt))

    def observe(self, outcome: Outcome[WrapperState[OwnState]]) -> None:
        """Pass the outcome of a step on to the inner proposer."""
        self.inner.observe(outcome.with_state(outcome.state.inner))

    def on_preempt(self, state: WrapperState[OwnState]) -> None:
        """Release the KV blocks that the inner proposer holds for a preempted request."""
        self.inner.on_preempt(state.inner)

    def stop(self, state: WrapperState[OwnState]) -> None:
        """Release the inner proposer's resources of a request that has ended."""
        self.inner.stop(state.inner)

    def inner_contexts(
        self, contexts: Sequence[DraftContext[WrapperState[OwnState]]], max_depth: int
    ) -> list[DraftContext[Any]]:
        """Return ``contexts`` with the inner proposer's states, and with at most ``max_depth`` draft tokens."""
        return [
            context.with_state(context.state.inner, max_depth=min(context.max_depth, max_depth)) for context in contexts
        ]
