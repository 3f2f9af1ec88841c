"""Drafters that draft token by token.

A chain ends where the next token would cost more time than it saves (:mod:`pronk.drafting.policy`). With
``budget="all"`` a chain has all its tokens.

A *shadow pass* learns acceptance rates without draft tokens: one forward pass of the drafter's model over tokens of the
text that it has not read gives its choice after each of them, and the next token of the text tells whether the choice
is right. So 16 to 64 choices are counted for the price of reading; drafting would count one or two. If more than 64 are
unread, the earlier ones are read without counting. The tokens of the prompt are not the target's choices and do not
count, nor do the first 16 that a model reads without the text before them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from pronk.base.arrays import Array
from pronk.base.checks import check_integer, check_path
from pronk.cache.paged import PagedCache
from pronk.drafting.proposer import Capabilities, DraftContext, Outcome
from pronk.drafting.shared.chain import Chain, ChainDrafter, ChainProposer, Stop
from pronk.drafting.shared.side_cache import SideLane
from pronk.drafting.step_value import ChainPrice
from pronk.drafting.target import Target
from pronk.models.cost_model import CostModel
from pronk.sampling.draft_token import DraftIds

Lane = TypeVar("Lane", bound=SideLane)

MIN_COUNTED, MAX_COUNTED = 16, 64  # numbers of tokens whose choices are counted in one shadow pass


@dataclass(frozen=True)
class LaneDrafter(ChainDrafter):
    """Options of drafters whose model has a KV cache of its own; ``model`` is its folder or Hub id."""

    model: str | None = None

    def __post_init__(self) -> None:
        check_path(f"{self.name}: model", self.model)


@dataclass(frozen=True)
class StepwiseDrafter(LaneDrafter):
    """Options of drafters that draft token by token.

    Attributes:
        model: folder of the drafter's model, or a Hub id; ``None`` is the one in a clone, for ``pronk-tiny``.
        num_tokens: maximum number of draft tokens, 1..64.
    """

    num_tokens: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 64)


class StepwiseRunner(Protocol):
    """Runner of a drafter's model; ``relative_size`` is the model's size divided by the target's."""

    target: Target
    cost_model: CostModel
    relative_size: float


class LaneProposer(ChainProposer[Lane]):
    """Base of proposers whose model has a KV cache of its own; ``runner`` is freed with its last proposer.

    The state of a request is its lane: what ``cache`` holds of its text. A lane makes a proposal cheaper and does not
    change it.
    """

    capabilities = Capabilities(observes_all_steps=False)

    def __init__(self, options: LaneDrafter, runner: object, target: Target, cache: PagedCache | None) -> None:
        self.options, self.target, self.models = options, target, (runner,)
        self.name, self._cache = options.name, cache

    @property
    def source(self) -> str:
        model = self.options.model
        return self.name if model is None else f"{self.name} {Path(model).name}"

    @property
    def proposes_tree(self) -> bool:
        return self.options.proposes_tree

    def start(self, prompt: Sequence[int]) -> Lane:  # noqa: ARG002 - the first proposal reads it
        return cast("Lane", SideLane())  # proposers with other lanes override this

    def observe(self, outcome: Outcome[Lane]) -> None:
        """Do nothing: the next context has the text."""

    def stop(self, state: Lane) -> None:
        if self._cache is not None:
            state.release(self._cache)

    on_preempt = stop  # for a preempted request, the next proposal fills new blocks


class StepwiseProposer(LaneProposer[Lane]):
    """Proposes chains token by token."""

    options: StepwiseDrafter

    def __init__(self, options: StepwiseDrafter, runner: StepwiseRunner, cache: PagedCache | None) -> None:
        super().__init__(options, runner, runner.target, cache)
        self._runner = runner

    def chains(self, contexts: Sequence[DraftContext[Lane]], stop: Stop | None = None) -> list[Chain]:
        """Return a chain for each context; it is empty if drafting does not pay or is impossible in this step."""
        if stop is None:
            contexts = [replace(each, max_depth=min(each.max_depth, self.options.num_tokens)) for each in contexts]
        chains = [Chain(context, self.source) for context in contexts]
        active = {number: chain for number, chain in enumerate(chains) if self.begins(chain.context)}
        self.draft_chains(active, partial(self.is_complete, stop))
        return chains

    @abstractmethod
    def draft_chains(self, chains: Mapping[int, Chain], is_complete: Stop) -> None:
        """Draft the tokens of empty chains whose first token pays; the keys are those for ``is_complete``."""

    def can_count(self, context: DraftContext[Any], num_unread: int) -> bool:
        """Return whether the choices at the last ``num_unread`` tokens of the text are worth a shadow pass.

        False if fewer than 16 of them are the target's, or if draft tokens depend on more than logits, seed and
        position.
        """
        num_own = len(context.tokens) - context.sampler.context.num_prompt
        return context.sampler.stateless_sampler is not None and min(num_unread, num_own) >= MIN_COUNTED

    def count_choices(self, context: DraftContext[Any], logits: Array, first: int, ids: DraftIds | None = None) -> None:
        """Count choices in the drafter's acceptance rates, by their confidence.

        ``logits`` ``[choices, draft vocab]`` are the drafter's for successive tokens of the text; ``first`` is the
        index in the text of the token that the first choice is compared with. ``ids`` has the target's token of each
        logit.
        """
        sampler, rates = context.sampler, context.policy.acceptance.source(self.source)
        skipped = max(0, sampler.context.num_prompt - first)
        for position, row in enumerate(logits[skipped:], first + skipped):
            choice = sampler.draft_token_at(row, position, ids)
            if choice is not None:
                kind = rates.confidence_kind(choice.confidence)
                rates.learn(kind, 1, right=choice.token == context.tokens[position], share=True)

    def begins(self, context: DraftContext[Any]) -> bool:
        """Return whether to draft a first token."""
        return min(context.max_depth, context.max_nodes) > 0 and context.policy.extends(self, context, ())

    def ends(self, chain: Chain) -> bool:  # noqa: ARG002 - for overrides
        """Return whether the drafter's own rule ends a chain."""
        return False

    def is_complete(self, stop: Stop | None, number: int, chain: Chain) -> bool:
        """Return whether ``stop`` or else the drafter's rule ends a chain, or its next token does not pay."""
        ended = self.ends(chain) if stop is None else stop(number, chain)
        return ended or not chain.context.policy.extends(self, chain.context, chain.gains)

    def chain_price(self, context: DraftContext[Lane]) -> ChainPrice | None:
        """Return the price of draft tokens, even before any measurement; ``None``: all are wanted."""
        policy, runner = context.policy, self._runner
        if policy.curve is None:
            return None
        size, own, target = runner.relative_size, runner.cost_model, runner.target.costs
        curve = own.costs(policy.num_requests * len(context.tokens))
        curve = curve or policy.curve._replace(speed=size * policy.curve.speed)
        reading = own.prompt_row or size * (target.prompt_row or 0.0)
        return ChainPrice(policy.curve, curve.at(policy.num_requests), self.num_unread(context) * reading)

    def num_unread(self, context: DraftContext[Lane]) -> int:  # noqa: ARG002 - for overrides
        """Return how many tokens of the text the model has to read before it drafts."""
        return 0
