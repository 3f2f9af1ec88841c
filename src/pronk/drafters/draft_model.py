"""A second, smaller model that guesses for the target (Leviathan et al. 2023, Chen et al. 2023).

It reads the same text and writes a chain of ``num_tokens`` tokens, one pass of its own for each. Between two proposals
it reads what was accepted and the bonus token in one pass; see :mod:`pronk.drafters.draft`. All requests share its
passes. A token costs a pass of the draft, so the chain ends early where the next one would not pay for it
(:mod:`pronk.drafters.pace`), unless all guesses are asked for (``budget="all"``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from pronk.drafters.base import DraftContext, Needs, Outcome, Target
from pronk.drafters.calibration import Calibration
from pronk.drafters.chain import Chain, ChainDrafter, Stop, grow
from pronk.drafters.draft import Draft, Lane
from pronk.drafters.options import check_choice, check_integer, check_number, check_path
from pronk.drafters.pace import Pace, Prices

__all__ = ["DraftModel", "DraftState"]


@dataclass
class DraftState:
    """One request's drafts.

    Attributes:
        calibration: of the draft's probabilities.
        pace: acceptance of late.
        lane: what the draft's cache holds of the text; it makes a proposal cheaper, never another one.
    """

    calibration: Calibration
    pace: Pace
    lane: Lane = field(compare=False)


@dataclass(frozen=True)
class DraftModel(ChainDrafter[DraftState]):
    """Options of the draft model.

    Attributes:
        model: a folder or a Hub id; ``None`` is the bundled one, which guesses for the bundled target and its like.
        num_tokens: most tokens of a proposal, 1..64. By default, with the root, a pass of 8 rows.
        min_confidence: the chain ends at a token that the draft itself gives less than this probability, 0..1.
        dtype: of its weights; ``"auto"`` is the checkpoint's.
        weights: ``"plain"``, or ``"int8"`` for half the memory of bfloat16.
    """

    name: ClassVar[str] = "draft_model"
    needs = Needs(costs=True)

    model: str | None = None
    num_tokens: int = 7
    min_confidence: float = 0.0
    dtype: str = "auto"
    weights: str = "plain"
    _draft: Draft | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_path(self.name, "model", self.model)
        check_integer(self.name, "num_tokens", self.num_tokens, 1, 64)
        check_number(self.name, "min_confidence", self.min_confidence, 0, 1)
        check_choice(self.name, "dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice(self.name, "weights", self.weights, ("plain", "int8"))

    def bind(self, target: Target) -> Self:
        """The drafter with the draft model loaded beside the target.

        Raises:
            CheckpointError: it cannot be loaded.
            OptionError: its vocabulary does not go with the target's.
        """
        draft = Draft.open(self.name, self.model, target, self.dtype, self.weights)
        if self._draft is draft:
            return self
        bound = replace(self)
        object.__setattr__(bound, "_draft", draft)
        return bound

    @property
    def source(self) -> str:
        """Its name, and that of its model's folder."""
        return self.name if self.model is None else f"{self.name} {Path(self.model).name}"

    @property
    def draft(self) -> Draft:
        """The model at work."""
        assert self._draft is not None, "a drafter has to meet its target before it guesses"
        return self._draft

    def start(self, prompt: Sequence[int]) -> DraftState:  # noqa: ARG002 - read with the first proposal
        """Nothing is read yet."""
        return DraftState(Calibration(self.source), Pace(), self.draft.lane())

    def chains(self, contexts: Sequence[DraftContext[DraftState]], stop: Stop | None = None) -> list[Chain]:
        """See :class:`~pronk.drafters.chain.ChainDrafter`."""
        if stop is None:
            contexts = [replace(each, max_depth=min(each.max_depth, self.num_tokens)) for each in contexts]
        chains = [Chain(context, context.state.calibration) for context in contexts]
        going = [number for number, context in enumerate(contexts) if self.begins(context, len(contexts))]
        begun = [chains[number] for number in going]
        lanes = [chain.context.state.lane for chain in begun]

        def logits(live: Sequence[int]) -> Sequence[Tensor | None]:
            if not begun[live[0]].guesses:
                return self.draft.read([lanes[i] for i in live], [begun[i].context for i in live])
            return self.draft.feed([lanes[i] for i in live], [self.draft.ids(begun[i].tokens[-1:]) for i in live])

        def ends(i: int, chain: Chain) -> bool:
            enough = chain.guesses[-1].confidence < self.min_confidence if stop is None else stop(going[i], chain)
            return enough or not self.draft.room(lanes[i]) or not self._pays(chain, len(begun))

        grow(begun, logits, ends)
        return chains

    def observe(self, outcomes: Sequence[Outcome[DraftState]]) -> None:
        """Count what was accepted, by confidence and of late."""
        for outcome in outcomes:
            tree, state = outcome.tree, outcome.state
            state.calibration.learn(tree, outcome.path)
            own = {node for node, origin in enumerate(tree.origin or ()) if origin[0] == self.source}
            state.pace.learn(len(own), len(own & {*outcome.path}))

    def stop(self, state: DraftState) -> None:
        """Give back the lane."""
        self.draft.release(state.lane)

    def prices(self, context: DraftContext[Any], requests: int) -> Prices | None:
        """What passes cost, for a request that leaves out what does not pay; ``None`` for others."""
        if not context.thrifty or context.costs is None:
            return None
        draft = self.draft.costs
        return None if draft is None else Prices(context.costs, draft, requests)

    def begins(self, context: DraftContext[DraftState], requests: int) -> bool:
        """Whether to guess at all for one of so many requests."""
        prices, pace = self.prices(context, requests), context.state.pace
        return prices is None or pace.tries or pace.goes_on((), _most(context), prices)

    def _pays(self, chain: Chain, requests: int) -> bool:
        prices = self.prices(chain.context, requests)
        return prices is None or chain.context.state.pace.goes_on(chain.gains, _most(chain.context), prices)


def _most(context: DraftContext[Any]) -> int:
    return min(context.max_depth, context.max_nodes)
