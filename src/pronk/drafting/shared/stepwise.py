"""Functions for drafters that draft token by token.

A chain ends where the next token would cost more time than it saves (:mod:`pronk.drafting.policy`).
With ``budget="all"`` a chain has all its tokens.

A *shadow pass* learns acceptance rates without draft tokens: one forward pass of the drafter's
model over tokens of the text that it has not read gives its choice after each of them, and the next
token of the text tells whether the choice is right. So 16 to 64 choices are counted for the price
of reading; drafting would count one or two. If more than 64 are unread, the earlier ones are read
without counting. The tokens of the prompt are not the target's choices and do not count, nor do the
first 16 that a model reads without the text before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pronk.base.arrays import Array
from pronk.drafting.proposer import DraftContext, Proposer
from pronk.drafting.shared.chain import Chain, Stop
from pronk.drafting.step_value import ChainPrice
from pronk.drafting.target import Target
from pronk.models.cost_model import CostModel
from pronk.sampling.draft_token import DraftIds

# numbers of tokens whose choices are counted in one shadow pass
MIN_COUNTED = 16
MAX_COUNTED = 64


class PricedRunner(Protocol):
    """Runner of a drafter's model.

    ``relative_size`` is the model's size divided by the target's.
    """

    target: Target
    cost_model: CostModel
    relative_size: float


def first_token_pays(proposer: Proposer[Any], context: DraftContext[Any]) -> bool:
    """Return whether the request allows a draft token, and whether its gain is worth the time to draft it."""
    return min(context.max_depth, context.max_nodes) > 0 and context.policy.extends(
        proposer, context, ()
    )


def begin_chains(
    proposer: Proposer[Any],
    contexts: Sequence[DraftContext[Any]],
    num_tokens: int,
    stop: Stop | None = None,
    stops: Sequence[Stop] | None = None,
) -> list[Chain]:
    """Return an empty chain for each context; it is full if its first token does not pay.

    A chain ends by the drafter's own rule ``stop`` or after ``num_tokens``; the ``stops`` of a
    wrapper replace both. In any case it ends where the next token does not pay.
    """
    chains = list[Chain]()
    for number, given in enumerate(contexts):
        own_stop = stop if stops is None else stops[number]
        context = given
        if stops is None and num_tokens < given.max_depth:
            context = given.with_state(given.state, max_depth=num_tokens)

        def is_complete(chain: Chain, own_stop: Stop | None = own_stop) -> bool:
            if own_stop is not None and own_stop(chain):
                return True
            return not chain.context.policy.extends(proposer, chain.context, chain.gains)

        most = None if first_token_pays(proposer, context) else 0
        chains.append(Chain(context, proposer.source, is_complete, most))
    return chains


def price_chain(
    runner: PricedRunner, context: DraftContext[Any], num_unread: int = 0
) -> ChainPrice | None:
    """Return the price of draft tokens, even before any measurement; ``None``: all are wanted.

    ``num_unread`` is the number of tokens of the text that the model has to read before it drafts.
    """
    policy = context.policy
    if policy.curve is None:
        return None
    size = runner.relative_size
    own = runner.cost_model
    target = runner.target.costs
    curve = own.costs(policy.num_requests * len(context.tokens))
    curve = curve or policy.curve._replace(speed=size * policy.curve.speed)
    reading = own.prompt_row or size * (target.prompt_row or 0.0)
    return ChainPrice(policy.curve, curve.at(policy.num_requests), num_unread * reading)


def can_count(context: DraftContext[Any], num_unread: int) -> bool:
    """Return whether the choices at the last ``num_unread`` tokens of the text are worth a shadow pass.

    False if fewer than 16 of them are the target's, or if draft tokens depend on more than logits,
    seed and position.
    """
    num_own = len(context.tokens) - context.sampler.context.num_prompt
    return context.sampler.stateless_sampler is not None and min(num_unread, num_own) >= MIN_COUNTED


def count_choices(
    source: str, context: DraftContext[Any], logits: Array, first: int, ids: DraftIds | None = None
) -> None:
    """Count choices in the acceptance rates of a drafter, ``source``, by their confidence.

    ``logits`` ``[choices, draft vocab]`` are the drafter's for successive tokens of the text;
    ``first`` is the index in the text of the token that the first choice is compared with. ``ids``
    has the target's token of each logit.
    """
    sampler = context.sampler
    rates = context.policy.acceptance.source(source)
    skipped = max(0, sampler.context.num_prompt - first)
    for position, row in enumerate(logits[skipped:], first + skipped):
        choice = sampler.draft_token_at(row, position, ids)
        if choice is not None:
            kind = rates.confidence_kind(choice.confidence)
            rates.learn(kind, 1, right=choice.token == context.tokens[position], share=True)
