"""Drafters that draft token by token.

A chain ends where the next token would cost more time than it saves (:mod:`pronk.speculation.policy`). With
``budget="all"`` a chain has all its tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pronk.checks import check_integer, check_path
from pronk.drafters.shared.chain import Chain, ChainDrafter, ChainProposer, Stop
from pronk.speculation.proposer import Capabilities, DraftContext, Outcome
from pronk.speculation.step_value import ChainPrice

Lane = TypeVar("Lane")


@dataclass
class StepwiseState(Generic[Lane]):
    """State of one request: ``lane`` is what the drafter's KV cache holds of its text.

    The lane makes a proposal cheaper and does not change it.
    """

    lane: Lane = field(compare=False)


@dataclass(frozen=True)
class StepwiseDrafter(ChainDrafter):
    """Options of drafters that draft token by token.

    Attributes:
        model: folder of the drafter's model, or a Hub id; ``None`` is the one in a clone, for ``pronk-tiny``.
        num_tokens: maximum number of draft tokens, 1..64.
    """

    model: str | None = None
    num_tokens: int = 7

    def __post_init__(self) -> None:
        check_path(f"{self.name}: model", self.model)
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 64)

    @property
    def source(self) -> str:
        """Name in the statistics: the drafter's name, followed by the name of its model's folder."""
        return self.name if self.model is None else f"{self.name} {Path(self.model).name}"


class StepwiseProposer(ChainProposer[StepwiseState[Lane]]):
    """Proposes chains token by token."""

    capabilities = Capabilities(observes_all_steps=False)

    def __init__(self, options: StepwiseDrafter) -> None:
        self.options = options
        self.name = options.name

    @property
    def source(self) -> str:
        """The same as :attr:`StepwiseDrafter.source`."""
        return self.options.source

    @abstractmethod
    def chain_price(self, context: DraftContext[StepwiseState[Lane]]) -> ChainPrice | None:
        """Return the price of draft tokens; ``None`` if all are wanted."""

    def begin(
        self, contexts: Sequence[DraftContext[StepwiseState[Lane]]], stop: Stop | None
    ) -> tuple[list[Chain], list[int]]:
        """Return an empty chain for each context, and the indices of those whose first token pays."""
        if stop is None:
            contexts = [replace(each, max_depth=min(each.max_depth, self.options.num_tokens)) for each in contexts]
        chains = [Chain(context, self.source) for context in contexts]
        return chains, [number for number, chain in enumerate(chains) if self.begins(chain.context)]

    def begins(self, context: DraftContext[Any]) -> bool:
        """Return whether to draft a first token."""
        return min(context.max_depth, context.max_nodes) > 0 and context.policy.extends(self, context, ())

    def pays(self, chain: Chain) -> bool:
        """Return whether the next token of a chain pays."""
        return chain.context.policy.extends(self, chain.context, chain.gains)

    def observe(self, outcome: Outcome[StepwiseState[Lane]]) -> None:
        """Do nothing: the next context has the text."""
