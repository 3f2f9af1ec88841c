"""Shadow passes: acceptance rates of a draft model, learned without draft tokens.

One forward pass of the draft model over tokens of the text that it has not read gives its choice after each of them.
The next token of the text tells whether the choice is right (teacher forcing). So 16 to 64 choices are counted for the
price of reading; drafting would count one or two. The tokens must be read before the next draft token anyway. If more
than 64 are unread, the earlier ones are read in the same call, without counting.
"""

from __future__ import annotations

from typing import Any

from pronk.drafters.shared.draft import DraftLane, DraftRunner
from pronk.speculation.proposer import DraftContext
from pronk.speculation.tree import TokenTree

__all__ = ["shadow"]

_MIN_TOKENS, _MAX_TOKENS = 16, 64  # numbers of tokens whose choices are counted in one pass


def shadow(draft: DraftRunner, lane: DraftLane, context: DraftContext[Any], source: str) -> bool:
    """Count the draft model's choices in the acceptance rates of ``source``, by their confidence.

    Return False, without a forward pass, if fewer than 16 tokens are unread, if the draft model has other token ids, or
    if draft tokens depend on more than logits, seed and position.
    """
    sampler, text = context.sampler, context.tokens
    num_unread = context.root - len(lane.tokens) - len(lane.tree or ())
    if lane.reencoder is not None or not sampler.drafts_statelessly or num_unread < _MIN_TOKENS:
        return False
    (unread,) = draft.align_lanes([lane], [context])
    if unread is None:
        return False
    if len(unread) > _MAX_TOKENS + 1:
        draft.forward_tokens([lane], [unread[: -_MAX_TOKENS - 1]])
        unread = unread[-_MAX_TOKENS - 1 :]
    first = len(lane.tokens) + 1  # index in the text of the token after the first unread one
    (logits,) = draft.forward_trees([lane], [TokenTree.chain(unread[:-1])], [[]])
    rates = context.policy.acceptance.source(source)
    for position, row in enumerate(logits, first):
        choice = sampler.draft_token_at(row, position)
        if choice is not None:
            kind = rates.confidence_kind(choice.confidence)
            rates.learn(kind, 1, right=choice.token == text[position], share=True)
    return True
