"""Shadow passes: acceptance rates of a drafter with a model, learned without draft tokens.

One forward pass of the drafter's model over tokens of the text that it has not read gives its choice after each of
them, and the next token of the text tells whether the choice is right. So 16 to 64 choices are counted for the price of
reading; drafting would count one or two. If more than 64 are unread, the earlier ones are read without counting. The
tokens of the prompt are not the target's choices and do not count, nor do the first 16 that a model reads without the
text before them.
"""

from __future__ import annotations

from typing import Any

from pronk.arrays import Array
from pronk.drafters.shared.draft import DraftLane, DraftRunner
from pronk.sampling.draft_token import DraftIds
from pronk.speculation.proposer import DraftContext
from pronk.speculation.tree import TokenTree

_MIN_TOKENS, MAX_TOKENS = 16, 64  # numbers of tokens whose choices are counted in one pass


def can_count(context: DraftContext[Any], num_unread: int) -> bool:
    """Return whether the choices at the last ``num_unread`` tokens of the text are worth a forward pass.

    False if fewer than 16 of them are the target's, or if draft tokens depend on more than logits, seed and position.
    """
    num_own = len(context.tokens) - context.sampler.context.num_prompt
    return context.sampler.drafts_statelessly and min(num_unread, num_own) >= _MIN_TOKENS


def count_choices(
    context: DraftContext[Any], logits: Array, first: int, source: str, ids: DraftIds | None = None
) -> None:
    """Count choices in the acceptance rates of ``source``, by their confidence.

    ``logits`` ``[choices, draft vocab]`` are the drafter's for successive tokens of the text; ``first`` is the index in
    the text of the token that the first choice is compared with. ``ids`` has the target's token of each logit.
    """
    sampler, rates = context.sampler, context.policy.acceptance.source(source)
    skipped = max(0, sampler.context.num_prompt - first)
    for position, row in enumerate(logits[skipped:], first + skipped):
        choice = sampler.draft_token_at(row, position, ids)
        if choice is not None:
            kind = rates.confidence_kind(choice.confidence)
            rates.learn(kind, 1, right=choice.token == context.tokens[position], share=True)


def shadow(draft: DraftRunner, lane: DraftLane, context: DraftContext[Any], source: str) -> bool:
    """Count a draft model's choices; return False, without a forward pass, if it cannot be done."""
    num_unread = context.root - lane.start - len(lane.tokens) - len(lane.tree or ())
    if lane.reencoder is not None or not can_count(context, num_unread):
        return False
    (unread,) = draft.align_lanes([lane], [context])
    if unread is None:
        return False
    if len(unread) > MAX_TOKENS + 1:
        draft.forward_tokens([lane], [unread[: -MAX_TOKENS - 1]])
        unread = unread[-MAX_TOKENS - 1 :]
    skipped = _MIN_TOKENS if lane.start and not lane.tokens else 0
    first = lane.start + len(lane.tokens) + 1  # index in the text of the token after the first unread one
    (logits,) = draft.forward_trees([lane], [TokenTree.chain(unread[:-1])], [[]])
    count_choices(context, logits[skipped:], first + skipped, source)
    return True
