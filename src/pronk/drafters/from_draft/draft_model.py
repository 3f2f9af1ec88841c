"""A second, smaller model proposes chains (Leviathan et al. 2023, Chen et al. 2023).

The draft model reads the same text and generates ``num_tokens`` tokens, one forward pass each. Between two proposals it
runs the new tokens in one forward pass (:mod:`pronk.drafters.shared.draft`). All requests share its forward passes. A
chain ends early where the next token would not pay for its forward pass (:mod:`pronk.speculation.draft_length`), except
with ``budget="all"``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from pronk.checks import check_choice, check_number
from pronk.drafters.shared.chain import Chain, Stop, extend_chains
from pronk.drafters.shared.draft import DraftLane, DraftRunner
from pronk.models.linear import WEIGHTS
from pronk.speculation.adaptive_length import AdaptiveLengthDrafter, AdaptiveLengthProposer, AdaptiveLengthState
from pronk.speculation.calibration import Calibration
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.draft_length import DraftLengthTracker, StepCost
from pronk.speculation.proposer import DraftContext
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.target import Target

__all__ = ["DraftModel", "DraftState", "ModelDrafter", "ModelProposer"]


DraftState: TypeAlias = AdaptiveLengthState[DraftLane]


@dataclass(frozen=True)
class ModelDrafter(AdaptiveLengthDrafter):
    """Options of all drafters with a causal model and a cache of its own.

    Attributes:
        model: a folder or a Hub id; ``None`` is ``pronk-tiny-draft`` of the clone, for targets with its vocabulary.
        num_tokens: most tokens of a proposal, 1..64. With the root, the default is a forward pass of 8 rows.
        min_confidence: the chain ends at a token of less confidence, 0..1. The confidence is the draft's largest
            probability, except under the coupled rule: see :mod:`pronk.drafters.from_draft.threshold`.
    """

    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"{self.name}: min_confidence", self.min_confidence, 0, 1)

    @abstractmethod
    def open(self, target: Target) -> DraftRunner:
        """Load the model, once for each target; errors are those of :meth:`DraftRunner.open`."""

    def bind(self, target: Target) -> ModelProposer:
        """Return the proposer, with the model loaded beside the target; errors are those of :meth:`open`."""
        return ModelProposer(self, self.open(target), target)


class ModelProposer(AdaptiveLengthProposer[DraftLane]):
    """Proposes chains of a draft model; ``draft`` runs the model."""

    options: ModelDrafter

    def __init__(self, options: ModelDrafter, draft: DraftRunner, target: Target) -> None:
        super().__init__(options)
        self.draft, self.target, self.models = draft, target, (draft,)

    def start(self, prompt: Sequence[int]) -> DraftState:  # noqa: ARG002 - read with the first proposal
        """Return an empty state."""
        return DraftState(
            Calibration(self.source, known=SharedAcceptance.of(self.target)), DraftLengthTracker(), self.draft.lane()
        )

    def chains(self, contexts: Sequence[DraftContext[DraftState]], stop: Stop | None = None) -> list[Chain]:
        """Return a chain of the draft model's tokens for each context."""
        chains, active = self.begin(contexts, stop)
        active_chains = [chains[number] for number in active]
        lanes = [chain.context.state.lane for chain in active_chains]

        def logits(live: Sequence[int]) -> Sequence[Tensor | None]:
            if not active_chains[live[0]].draft_tokens:
                return self.draft.forward_texts([lanes[i] for i in live], [active_chains[i].context for i in live])
            return self.draft.forward_tokens(
                [lanes[i] for i in live], [self.draft.to_draft_ids(active_chains[i].tokens[-1:]) for i in live]
            )

        def is_complete(i: int, chain: Chain) -> bool:
            stopped = (
                chain.draft_tokens[-1].confidence < self.options.min_confidence
                if stop is None
                else stop(active[i], chain)
            )
            return stopped or not self.draft.num_free_positions(lanes[i]) or not self.pays(chain, len(active_chains))

        if len(active_chains) == 1 and self.draft.supports_draft_chain(active_chains[0].context):
            self.draft.draft_chain(lanes[0], active_chains[0], lambda chain: is_complete(0, chain))
        else:
            extend_chains(active_chains, logits, is_complete)
        return chains

    def on_preempt(self, state: DraftState) -> None:
        """Free the lane's blocks; the lane is filled again by the next proposal."""
        self.draft.release(state.lane)

    def stop(self, state: DraftState) -> None:
        """Free the lane's blocks."""
        self.draft.release(state.lane)

    def measured(self, target: CostCurve, context: int, requests: int) -> StepCost | None:
        """Return the costs of the target's and the draft's forward passes; ``None`` before the first one."""
        draft = self.draft.costs(context, requests)
        return None if draft is None else StepCost(target, draft, requests)


@dataclass(frozen=True)
class DraftModel(ModelDrafter):
    """Options of the draft model, beyond those of :class:`ModelDrafter`.

    Attributes:
        dtype: dtype of the weights; ``"auto"`` is the checkpoint's.
        weights: ``"plain"``, ``"int8"`` or ``"int4"``, as for :class:`~pronk.llm.LLM`.
    """

    name = "draft_model"

    dtype: str = "auto"
    weights: str = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice(f"{self.name}: weights", self.weights, WEIGHTS)

    def open(self, target: Target) -> DraftRunner:
        """Load the draft model; another vocabulary is translated if possible."""
        return DraftRunner.open(self.name, self.model, target, self.dtype, self.weights)
