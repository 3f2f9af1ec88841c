"""Functions for drafters that draft token by token.

A chain ends where the next token would cost more time than it saves: the planner's rule
(:meth:`.DraftPlan.extends`), which is asked before each token. With ``budget="all"`` a chain has
all its tokens. A drafter's own rule may end a chain earlier.

*Scoring the history* learns acceptance rates without draft tokens: one forward pass of the
drafter's model over tokens of the text that it has not read gives its choice after each of them,
and the next token of the text tells whether the choice is right. So 16 to 64 choices are counted
for the seconds of reading; drafting would count one or two. If more than 64 tokens are unread, the
earlier ones are read without counting. The tokens of the prompt are not the target's choices and do
not count, nor do the first 16 that a model reads without the text before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pronk.drafting.planner import DEFAULT_RATE
from pronk.drafting.proposer import DraftContext, Proposer
from pronk.drafting.shared.chain import Chain, Stop
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.drafting.target import Target
from pronk.models.cost_model import CostModel
from pronk.sampling.draft_token import DraftLogits

# Smallest and largest number of tokens at which scoring the history compares the drafter's choice
# with the text.
MIN_COUNTED = 16
MAX_COUNTED = 64


class TimedRunner(Protocol):
    """Runner of a drafter's model, with the measured costs of its forward passes.

    ``relative_size`` is the number of bytes of weight matrices that a forward pass reads, divided
    by the target's.
    """

    target: Target
    cost_model: CostModel
    relative_size: float


# Callback ``extends(gains)``: whether a chain of draft tokens with these gains is worth another.
Extends = Callable[[Sequence[float]], bool]


def extension_rule(proposer: Proposer[Any], context: DraftContext[Any]) -> Extends:
    """Return a function that tells whether a request's chain should get another draft token."""
    plan = context.plan
    max_tokens = min(context.max_depth, context.max_nodes)
    chain = plan.chain
    if chain is None and plan.costs is not None:  # a composite has no costs of its own in its plan
        chain = proposer.chain_costs(context, plan.costs)
    rate = context.ledger.acceptance.rates(proposer.chain_label).mean(DEFAULT_RATE)
    return lambda gains: len(gains) < max_tokens and plan.extends(gains, chain, rate, max_tokens)


def begin_chains(
    proposer: Proposer[Any],
    contexts: Sequence[DraftContext[Any]],
    num_tokens: int,
    stop: Stop | None = None,
    stops: Sequence[Stop] | None = None,
) -> list[Chain]:
    """Return an empty chain for each context.

    A chain ends by the drafter's own rule ``stop`` or after ``num_tokens``; the ``stops`` of a
    wrapper replace both. In any case it ends where the next token is not expected to save time. If
    that is the first token, the chain is full at once.
    """
    chains = list[Chain]()
    for number, given in enumerate(contexts):
        own_stop = stop if stops is None else stops[number]
        context = given
        if stops is None and num_tokens < given.max_depth:
            context = given.with_state(given.state, max_depth=num_tokens)
        extends = extension_rule(proposer, context)

        def is_complete(
            chain: Chain, own_stop: Stop | None = own_stop, extends: Extends = extends
        ) -> bool:
            return (own_stop is not None and own_stop(chain)) or not extends(chain.gains)

        max_tokens = None if extends(()) else 0
        chains.append(Chain(context, proposer.label, is_complete, max_tokens))
    return chains


def model_chain_costs(
    runner: TimedRunner,
    context: DraftContext[Any],
    costs: StepCosts,
    max_tokens: int,
    num_unread: int = 0,
) -> ChainCosts:
    """Return the seconds of draft tokens of a model, by its measurements or else by its size.

    Args:
        runner: runner of the model.
        context: the request.
        costs: costs of the step.
        max_tokens: largest number of draft tokens of a proposal, or of a path of a tree.
        num_unread: number of tokens of the text that the model has to read before it drafts.
    """
    own = runner.cost_model
    curve = own.costs(costs.num_requests * len(context.tokens), costs.num_requests)
    if curve is None:
        curve = costs.curve._replace(speed=runner.relative_size * costs.curve.speed)
    prefill = 0.0
    if num_unread:
        token_prefill = own.prompt_row
        if token_prefill is None:
            token_prefill = runner.relative_size * (runner.target.cost_model.prompt_row or 0.0)
        prefill = num_unread * token_prefill
    token = curve.at(costs.num_requests) / costs.num_requests
    return ChainCosts(token, prefill, max_tokens=max_tokens)


def can_count(context: DraftContext[Any], num_unread: int) -> bool:
    """Return whether the last ``num_unread`` tokens of the text are worth a pass that scores them.

    False if fewer than 16 of them are the target's, or if the library cannot sample the request's
    tokens.
    """
    num_own = len(context.tokens) - context.sampler.context.num_prompt
    in_library = context.sampler.library_sampler is not None
    return in_library and min(num_unread, num_own) >= MIN_COUNTED


def count_choices(
    label: str, context: DraftContext[Any], logits: Sequence[DraftLogits], first: int
) -> None:
    """Compare a drafter's choices with the text, and count them in its acceptance rates.

    ``logits`` are the drafter's for successive tokens of the text; ``first`` is the index in the
    text of the token that the first choice is compared with. ``label`` is the drafter's.
    """
    sampler = context.sampler
    rates = context.acceptance.rates(label)
    skipped = max(0, sampler.context.num_prompt - first)
    first += skipped
    text = sampler.context.committed
    assert sampler.library_sampler is not None, "expected a sampler in the library"
    choices = sampler.library_sampler.draft_history(logits[skipped:], text, first)
    for position, choice in enumerate(choices, first):
        if choice is not None:
            kind = rates.confidence_kind(choice.confidence)
            rates.learn(kind, 1, accepted=choice.token == text[position], share=True)
