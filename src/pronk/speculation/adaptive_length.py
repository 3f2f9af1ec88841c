"""What drafters that pay for every token of a chain have in common: it ends where the next token would not pay.

See :mod:`pronk.speculation.draft_length`; with ``budget="all"`` all guesses are made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pronk.checks import check_integer, check_path
from pronk.drafters.shared.chain import Chain, ChainDrafter, ChainProposer, Stop
from pronk.speculation.calibration import Calibration
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.draft_length import DraftLengthTracker, StepCost
from pronk.speculation.proposer import Capabilities, DraftContext, Outcome

__all__ = ["AdaptiveLengthDrafter", "AdaptiveLengthProposer", "AdaptiveLengthState"]

Lane = TypeVar("Lane")


@dataclass
class AdaptiveLengthState(Generic[Lane]):
    """One request's drafts.

    Attributes:
        calibration: of the drafter's probabilities.
        length_tracker: acceptance of late.
        lane: what the drafter's cache holds of the text; it makes a proposal cheaper, never another one.
    """

    calibration: Calibration
    length_tracker: DraftLengthTracker
    lane: Lane = field(compare=False)


@dataclass(frozen=True)
class AdaptiveLengthDrafter(ChainDrafter):
    """Options of all of them.

    Attributes:
        model: a folder or a Hub id; ``None`` is the clone's for ``pronk-tiny``.
        num_tokens: most tokens of a proposal, 1..64.
    """

    model: str | None = None
    num_tokens: int = 7

    def __post_init__(self) -> None:
        check_path(f"{self.name}: model", self.model)
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 64)

    @property
    def source(self) -> str:
        """Its name, and that of its model's folder."""
        return self.name if self.model is None else f"{self.name} {Path(self.model).name}"


class AdaptiveLengthProposer(ChainProposer[AdaptiveLengthState[Lane]]):
    """Guesses for as long as that pays.

    Attributes:
        options: it guesses by.
        name: theirs.
    """

    capabilities = Capabilities(costs=True, observes_all_steps=False)

    def __init__(self, options: AdaptiveLengthDrafter) -> None:
        self.options = options
        self.name = options.name

    @property
    def source(self) -> str:
        """As :class:`AdaptiveLengthDrafter` has it."""
        return self.options.source

    @abstractmethod
    def measured(self, target: CostCurve, context: int, requests: int) -> StepCost | None:
        """Prices as passes have shown them; ``None`` while they are not known.

        Args:
            target: costs of whole passes of the target.
            context: positions of all texts together.
            requests: that share the passes.
        """

    def begin(
        self, contexts: Sequence[DraftContext[AdaptiveLengthState[Lane]]], stop: Stop | None
    ) -> tuple[list[Chain], list[int]]:
        """An empty chain for each context, and the numbers of the contexts whose chains are to grow."""
        if stop is None:
            contexts = [replace(each, max_depth=min(each.max_depth, self.options.num_tokens)) for each in contexts]
        chains = [Chain(context, context.state.calibration) for context in contexts]
        return chains, [number for number, context in enumerate(contexts) if self.begins(context, len(contexts))]

    def observe(self, outcome: Outcome[AdaptiveLengthState[Lane]]) -> None:
        """Count what was accepted, by confidence and of late."""
        (tree, path), state = outcome.evaluated, outcome.state
        state.calibration.learn(outcome)
        own = {node for node, origin in enumerate(tree.origin or ()) if origin[0] == self.source}
        state.length_tracker.learn(len(own), len(own & {*path}))

    def step_cost(self, context: DraftContext[Any], requests: int) -> StepCost | None:
        """What passes cost, for a request that leaves out what does not pay; ``None`` for others."""
        if not context.prune_unprofitable or context.costs is None:
            return None
        return self.measured(context.costs, requests * len(context.tokens), requests)

    def begins(self, context: DraftContext[AdaptiveLengthState[Lane]], requests: int) -> bool:
        """Whether to guess at all for a request that shares its passes with ``requests - 1`` others."""
        most = _most(context)
        if not most or (context.prune_unprofitable and context.costs is None):
            return False
        step_cost, length_tracker = self.step_cost(context, requests), context.state.length_tracker
        return (
            step_cost is None
            or context.ignore_backoff
            or length_tracker.tries
            or length_tracker.goes_on((), most, step_cost)
        )

    def pays(self, chain: Chain, requests: int) -> bool:
        """Whether the next token of a chain pays, where ``requests`` chains grow together."""
        step_cost = self.step_cost(chain.context, requests)
        return step_cost is None or chain.context.state.length_tracker.goes_on(
            chain.gains, _most(chain.context), step_cost
        )


def _most(context: DraftContext[Any]) -> int:
    return min(context.max_depth, context.max_nodes)
