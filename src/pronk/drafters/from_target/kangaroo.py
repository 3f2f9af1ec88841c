"""Kangaroo: the target's own first layers guess for it (*Kangaroo*, Liu et al. 2024).

The self-draft model is the target up to an early layer, a small trained adapter, and the target's head
(``kangaroo``). It writes a chain token after token and leaves early twice: out of the target after layer
``l``, and out of the chain at the first token of which it is not sure enough (equation 4)::

    max_n M^s_n(x) <= eta

What it computes is the beginning of what the target computes, so the target's pass goes on from there
(``_early_exit``). The token at which a chain stops is a guess too; the adapter is not asked about it,
and its early feature is computed in the target's pass, beside the others', from where the next chain goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from pronk.checks import check_number
from pronk.drafters.from_target._early_exit import EarlyExit, ExitDraft
from pronk.drafters.from_target.modules.files import open_trained
from pronk.drafters.shared.chain import Chain, Stop, grow
from pronk.drafters.shared.side_cache import SideLane
from pronk.speculation.adaptive_length import AdaptiveLengthDrafter, AdaptiveLengthProposer, AdaptiveLengthState
from pronk.speculation.calibration import Calibration
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.draft_length import DraftLengthTracker, StepCost
from pronk.speculation.proposer import DraftContext
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.target import Target

__all__ = ["Kangaroo", "KangarooState"]


KangarooState: TypeAlias = AdaptiveLengthState[SideLane]


@dataclass(frozen=True)
class Kangaroo(AdaptiveLengthDrafter):
    """Options of the early exit.

    Attributes:
        model: a folder that ``pronk train kangaroo`` has written, or a Hub id; ``None`` is the clone's for
            ``pronk-tiny``.
        num_tokens: most tokens of a chain, 1..64: the paper's gamma.
        eta: the chain ends at a token of at most this confidence, 0..1: the paper's eta; 0 is fixed-step drafting.
    """

    name = "kangaroo"

    num_tokens: int = 6
    eta: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"{self.name}: eta", self.eta, 0, 1)

    def bind(self, target: Target) -> KangarooProposer:
        """What guesses with the adapter in the target.

        Raises:
            CheckpointError: it cannot be loaded.
            OptionError: it was trained on another target, or there is no memory for what it keeps.
        """
        trained = open_trained(self.name, self.model, "pronk-tiny-kangaroo", target)
        return KangarooProposer(
            self, target.share(trained.folder, self.name, make=lambda: EarlyExit.load(trained, target))
        )


class KangarooProposer(AdaptiveLengthProposer[SideLane]):
    """The target's first layers, guessing.

    Attributes:
        options: it guesses by.
        exit: the layers and the adapter at work.
    """

    options: Kangaroo

    def __init__(self, options: Kangaroo, early_exit: EarlyExit) -> None:
        super().__init__(options)
        self.exit, self.target, self.models = early_exit, early_exit.target, (early_exit,)

    def start(self, prompt: Sequence[int]) -> KangarooState:  # noqa: ARG002 - read with the first proposal
        """Nothing is read yet."""
        return KangarooState(
            Calibration(self.source, known=SharedAcceptance.of(self.target)), DraftLengthTracker(), SideLane()
        )

    def chains(self, contexts: Sequence[DraftContext[KangarooState]], stop: Stop | None = None) -> list[Chain]:
        """A chain for each context, of the first layers' tokens."""
        chains, going = self.begin(contexts, stop)
        walks = {number: ExitDraft(chains[number], contexts[number].state.lane) for number in going}
        walks = {number: walk for number, walk in walks.items() if self.exit.ready(walk)}
        numbers = [*walks]

        def logits(live: Sequence[int]) -> Sequence[Tensor | None]:
            return list(self.exit.read([walks[numbers[i]] for i in live]))

        def ends(i: int, chain: Chain) -> bool:
            enough = chain.draft_tokens[-1].confidence <= self.options.eta if stop is None else stop(numbers[i], chain)
            return enough or not self.pays(chain, len(numbers))

        grow([chains[number] for number in numbers], logits, ends)
        return chains

    def on_preempt(self, state: KangarooState) -> None:
        """Give back the lane, which begins anew."""
        self.exit.release(state.lane)

    def stop(self, state: KangarooState) -> None:
        """Give back the lane."""
        self.exit.release(state.lane)

    def measured(self, target: CostCurve, context: int, requests: int) -> StepCost | None:
        """Prices of the first layers with the adapter, and of the rest of the target."""
        return self.exit.step_cost(target, context, requests)
