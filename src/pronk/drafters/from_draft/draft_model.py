"""A second, smaller model proposes chains (Leviathan et al. 2023, Chen et al. 2023).

The draft model generates up to ``num_tokens`` draft tokens, one forward pass each, which all requests share. Tokens
that entered the text since the last proposal are run in one pass (:mod:`pronk.drafters.shared.draft`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pronk.arrays import Array
from pronk.checks import check_choice, check_number
from pronk.drafters.shared.chain import Chain, Stop, extend_chains
from pronk.drafters.shared.draft import DraftLane, DraftRunner
from pronk.drafters.shared.shadow import shadow
from pronk.drafters.shared.stepwise import StepwiseDrafter, StepwiseProposer, StepwiseState
from pronk.models.linear import WEIGHTS
from pronk.speculation.proposer import DraftContext
from pronk.speculation.step_value import ChainPrice
from pronk.speculation.target import Target

DraftState: TypeAlias = StepwiseState[DraftLane]


@dataclass(frozen=True)
class ModelDrafter(StepwiseDrafter):
    """Options shared by the drafters that run a small decoder with a KV cache of its own.

    Attributes:
        model: folder or Hub id of the draft model. ``None`` selects a model in the folder ``models`` of a clone of this
            repository. For ``draft_model`` this is ``pronk-tiny-draft``; it needs a target with the same vocabulary.
        num_tokens: most draft tokens of a chain, 1..64. By default the target verifies 8 rows: the root and 7 tokens.
        min_confidence: a chain ends after its first token with a lower confidence, 0..1; 0 turns the rule off. The
            confidence is the draft model's largest probability. Under the coupled rule it includes the noise of the
            request's seed (:mod:`pronk.drafters.from_draft.threshold`).
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


class ModelProposer(StepwiseProposer[DraftLane]):
    """Proposes chains of draft tokens; ``draft`` holds the draft model with its KV cache, and runs it."""

    options: ModelDrafter

    def __init__(self, options: ModelDrafter, draft: DraftRunner, target: Target) -> None:
        super().__init__(options)
        self.draft, self.target, self.models = draft, target, (draft,)

    def start(self, prompt: Sequence[int]) -> DraftState:  # noqa: ARG002 - the first proposal reads it
        return DraftState(self.draft.make_lane())

    def chains(self, contexts: Sequence[DraftContext[DraftState]], stop: Stop | None = None) -> list[Chain]:
        chains, active = self.begin(contexts, stop)
        active_chains = [chains[number] for number in active]
        lanes = [chain.context.state.lane for chain in active_chains]

        def next_logits(indices: Sequence[int]) -> Sequence[Array | None]:
            if not active_chains[indices[0]].draft_tokens:  # first round: all chains are empty
                return self.draft.forward_texts(
                    [lanes[i] for i in indices], [active_chains[i].context for i in indices]
                )
            return self.draft.forward_tokens(
                [lanes[i] for i in indices], [self.draft.to_draft_ids(active_chains[i].tokens[-1:]) for i in indices]
            )

        def is_complete(i: int, chain: Chain) -> bool:
            stopped = (
                chain.draft_tokens[-1].confidence < self.options.min_confidence
                if stop is None
                else stop(active[i], chain)
            )
            return stopped or not self.draft.num_free_positions(lanes[i]) or not self.pays(chain)

        if len(active_chains) == 1 and self.draft.supports_draft_chain(active_chains[0].context):
            self.draft.draft_chain(lanes[0], active_chains[0], lambda chain: is_complete(0, chain))
        else:
            extend_chains(active_chains, next_logits, is_complete)
        return chains

    def shadow(self, context: DraftContext[DraftState]) -> bool:
        return shadow(self.draft, context.state.lane, context, self.source)

    def stop(self, state: DraftState) -> None:
        self.draft.release(state.lane)

    on_preempt = stop  # for a preempted request, the next proposal fills new blocks

    def chain_price(self, context: DraftContext[DraftState]) -> ChainPrice | None:
        return self.draft.chain_price(context.state.lane, context)


@dataclass(frozen=True)
class DraftModel(ModelDrafter):
    """Options of the drafter ``draft_model``, in addition to those of :class:`ModelDrafter`.

    Attributes:
        dtype: dtype of the weights; ``"auto"`` is the checkpoint's.
        weights: how the weights are stored: ``"plain"``, ``"int8"`` or ``"int4"``, as for :class:`~pronk.llm.LLM`.
    """

    name = "draft_model"

    dtype: str = "auto"
    weights: str = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice(f"{self.name}: weights", self.weights, WEIGHTS)

    def open(self, target: Target) -> DraftRunner:
        """Load the draft model, and map its vocabulary to the target's."""
        return DraftRunner.open(self.name, self.model, target, self.dtype, self.weights)
