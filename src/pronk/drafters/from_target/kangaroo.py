"""Kangaroo: the target's own first layers draft for it (*Kangaroo*, Liu et al. 2024).

The draft model is the target up to layer ``l``, a small trained adapter, and the target's head
(:mod:`pronk.drafters.from_target.modules.kangaroo`). The chain ends after the first token with
``confidence <= eta`` (equation 4); this token is proposed too. The target's forward pass computes only the later layers
of these rows (:mod:`pronk.drafters.from_target._early_exit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pronk.arrays import Array
from pronk.checks import check_number
from pronk.drafters.from_target._early_exit import EarlyExit, ExitDraft
from pronk.drafters.from_target.modules.files import read_trained_drafter
from pronk.drafters.shared.chain import Chain, Stop, extend_chains
from pronk.drafters.shared.side_cache import SideLane
from pronk.drafters.shared.stepwise import StepwiseDrafter, StepwiseProposer, StepwiseState
from pronk.speculation.proposer import DraftContext
from pronk.speculation.step_value import ChainPrice
from pronk.speculation.target import Target

KangarooState: TypeAlias = StepwiseState[SideLane]


@dataclass(frozen=True)
class Kangaroo(StepwiseDrafter):
    """Options of Kangaroo.

    Attributes:
        model: folder written by ``pronk train kangaroo``, or a Hub id. ``None`` is ``models/pronk-tiny-kangaroo`` of a
            clone of the repository, which fits only pronk-tiny.
        num_tokens: most draft tokens of a chain, 1..64; gamma in the paper.
        eta: a chain ends after a token of at most this confidence, 0..1; 0 turns the rule off.
    """

    name = "kangaroo"

    num_tokens: int = 6
    eta: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"{self.name}: eta", self.eta, 0, 1)

    def bind(self, target: Target) -> KangarooProposer:
        """Return the proposer; errors are those of :func:`read_trained_drafter` and :class:`EarlyExit`."""
        trained = read_trained_drafter(self.name, self.model, "pronk-tiny-kangaroo", target)
        return KangarooProposer(
            self, target.load_shared(trained.folder, self.name, load=lambda: EarlyExit.load(trained, target))
        )


class KangarooProposer(StepwiseProposer[SideLane]):
    """Proposes chains; ``early_exit`` runs the target's first layers and the adapter."""

    options: Kangaroo

    def __init__(self, options: Kangaroo, early_exit: EarlyExit) -> None:
        super().__init__(options)
        self.early_exit, self.target, self.models = early_exit, early_exit.target, (early_exit,)

    def start(self, prompt: Sequence[int]) -> KangarooState:  # noqa: ARG002 - the first proposal reads it
        return KangarooState(SideLane())

    def chains(self, contexts: Sequence[DraftContext[KangarooState]], stop: Stop | None = None) -> list[Chain]:
        chains, active = self.begin(contexts, stop)
        drafts = {number: ExitDraft(chains[number], contexts[number].state.lane) for number in active}
        drafts = {number: draft for number, draft in drafts.items() if self.early_exit.reserve(draft)}
        numbers = [*drafts]

        def next_logits(indices: Sequence[int]) -> Sequence[Array | None]:
            return list(self.early_exit.next_logits([drafts[numbers[i]] for i in indices]))

        def is_complete(i: int, chain: Chain) -> bool:
            ended = chain.draft_tokens[-1].confidence <= self.options.eta if stop is None else stop(numbers[i], chain)
            return ended or not self.pays(chain)

        extend_chains([chains[number] for number in numbers], next_logits, is_complete)
        return chains

    def stop(self, state: KangarooState) -> None:
        self.early_exit.release(state.lane)

    on_preempt = stop  # for a preempted request, the next proposal fills new blocks

    def chain_price(self, context: DraftContext[KangarooState]) -> ChainPrice | None:
        return self.early_exit.chain_price(context)
