"""Base classes of ``threshold`` and ``cape``, which end or extend the chains of an inner drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pronk.base.errors import OptionError
from pronk.drafting.from_draft.draft_model import DraftModel
from pronk.drafting.proposer import DraftContext, bind_proposer
from pronk.drafting.shared.chain import ChainDrafter, ChainProposer
from pronk.drafting.shared.composite import CompositeProposer, States
from pronk.drafting.step_value import ChainPrice
from pronk.drafting.target import Target


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
            found = f"found {type(proposer).__name__}; return one, or leave out {self.name}"
            msg = f"drafter {self.inner.name}: expected bind() to return a ChainProposer, {found}"
            raise OptionError(msg)
        return proposer


class WrapperProposer(CompositeProposer, ChainProposer[States]):
    """Base of a wrapper's proposer; the first part of its state is the inner proposer's."""

    def __init__(self, options: Wrapper, inner: ChainProposer[Any]) -> None:
        super().__init__((inner,))
        self.options, self.inner, self.capabilities = options, inner, inner.capabilities

    @property
    def chain_source(self) -> str:
        return self.inner.chain_source

    def chain_price(self, context: DraftContext[States]) -> ChainPrice | None:
        return self.inner.chain_price(context.with_state(context.state[0]))

    def shadow(self, context: DraftContext[States]) -> bool:
        return self.inner.shadow(context.with_state(context.state[0]))

    def inner_contexts(self, contexts: Sequence[DraftContext[States]], max_depth: int) -> list[DraftContext[Any]]:
        """Return ``contexts`` with the inner proposer's states, and with at most ``max_depth`` draft tokens."""
        return [each.with_state(each.state[0], max_depth=min(each.max_depth, max_depth)) for each in contexts]
