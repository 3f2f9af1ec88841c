"""Plain autoregressive decoding: no draft tokens, one token per forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pronk.base.keywords import known_keywords
from pronk.drafting.proposer import Capabilities, DraftContext, Proposer, States
from pronk.sampling.tree import TokenTree


@known_keywords
@dataclass(frozen=True)
class Autoregressive(Proposer[States]):
    """Drafter that never proposes draft tokens; it has no options."""

    name = "autoregressive"
    capabilities = Capabilities(proposes=False, observes_all_steps=False)

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        return [TokenTree.chain(context.tokens[-1:]) for context in contexts]
