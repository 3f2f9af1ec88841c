"""What drafters that pay for every token of a chain have in common: it ends where the next token would not pay.

See :mod:`pronk.drafters.shared.pace`; with ``budget="all"`` all guesses are made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pronk.checks import check_integer, check_path
from pronk.drafters.base import DraftContext, Needs, Outcome
from pronk.drafters.shared.calibration import Calibration
from pronk.drafters.shared.chain import Chain, ChainDrafter, ChainGuesser, Stop
from pronk.drafters.shared.pace import Pace, Prices
from pronk.passes.costs import PassCosts

__all__ = ["PacedDrafter", "PacedGuesser", "PacedState"]

Lane = TypeVar("Lane")


@dataclass
class PacedState(Generic[Lane]):
    """One request's drafts.

    Attributes:
        calibration: of the drafter's probabilities.
        pace: acceptance of late.
        lane: what the drafter's cache holds of the text; it makes a proposal cheaper, never another one.
    """

    calibration: Calibration
    pace: Pace
    lane: Lane = field(compare=False)


@dataclass(frozen=True)
class PacedDrafter(ChainDrafter):
    """Options of all of them.

    Attributes:
        model: a folder or a Hub id; ``None`` is the bundled one.
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


class PacedGuesser(ChainGuesser[PacedState[Lane]]):
    """Guesses for as long as that pays.

    Attributes:
        options: it guesses by.
        name: theirs.
    """

    needs = Needs(costs=True)
    listens = False

    def __init__(self, options: PacedDrafter) -> None:
        self.options = options
        self.name = options.name

    @property
    def source(self) -> str:
        """As :class:`PacedDrafter` has it."""
        return self.options.source

    @abstractmethod
    def measured(self, target: PassCosts, context: int, requests: int) -> Prices | None:
        """Prices as passes have shown them; ``None`` while they are not known.

        Args:
            target: costs of whole passes of the target.
            context: positions of all texts together.
            requests: that share the passes.
        """

    def begin(
        self, contexts: Sequence[DraftContext[PacedState[Lane]]], stop: Stop | None
    ) -> tuple[list[Chain], list[int]]:
        """An empty chain for each context, and the numbers of the contexts whose chains are to grow."""
        if stop is None:
            contexts = [replace(each, max_depth=min(each.max_depth, self.options.num_tokens)) for each in contexts]
        chains = [Chain(context, context.state.calibration) for context in contexts]
        return chains, [number for number, context in enumerate(contexts) if self.begins(context, len(contexts))]

    def observe(self, outcome: Outcome[PacedState[Lane]]) -> None:
        """Count what was accepted, by confidence and of late."""
        (tree, path), state = outcome.judged, outcome.state
        state.calibration.learn(outcome)
        own = {node for node, origin in enumerate(tree.origin or ()) if origin[0] == self.source}
        state.pace.learn(len(own), len(own & {*path}))

    def prices(self, context: DraftContext[Any], requests: int) -> Prices | None:
        """What passes cost, for a request that leaves out what does not pay; ``None`` for others."""
        if not context.thrifty or context.costs is None:
            return None
        return self.measured(context.costs, requests * len(context.tokens), requests)

    def begins(self, context: DraftContext[PacedState[Lane]], requests: int) -> bool:
        """Whether to guess at all for a request that shares its passes with ``requests - 1`` others."""
        most = _most(context)
        if not most or (context.thrifty and context.costs is None):
            return False
        prices, pace = self.prices(context, requests), context.state.pace
        return prices is None or context.tries or pace.tries or pace.goes_on((), most, prices)

    def pays(self, chain: Chain, requests: int) -> bool:
        """Whether the next token of a chain pays, where ``requests`` chains grow together."""
        prices = self.prices(chain.context, requests)
        return prices is None or chain.context.state.pace.goes_on(chain.gains, _most(chain.context), prices)


def _most(context: DraftContext[Any]) -> int:
    return min(context.max_depth, context.max_nodes)
