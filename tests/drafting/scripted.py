"""A proposer with given chains, for tests of its wrappers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from drafting.helpers import VOCAB
from pronk.drafting import Chain, DraftContext, Proposer, States, Stop
from pronk.sampling.sampler import DraftToken
from pronk.sampling.tree import TokenTree


def drafted(token: int, confidence: float, *others: int, vocab: int = VOCAB) -> DraftToken:
    """Return a draft token of this confidence; ``others`` are the next likeliest tokens."""
    scores = np.full(vocab, -math.inf)
    scores[token] = math.log(confidence)
    for rank, other in enumerate(others):
        scores[other] = -3.0 - rank
    return DraftToken(token, confidence, scores)


@dataclass(frozen=True)
class Scripted(Proposer[States]):
    """Proposes ``script`` for every text."""

    name = "scripted"

    script: tuple[DraftToken, ...] = ()

    def as_chains(self) -> Self:
        return self

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        return [chain.tree() for chain in self.chains(contexts)]

    def chains(
        self, contexts: Sequence[DraftContext[States]], stops: Sequence[Stop] | None = None
    ) -> list[Chain]:
        chains = [Chain(context, self.name) for context in contexts]
        for number, chain in enumerate(chains):
            for each in self.script:
                if chain.is_full:
                    break
                chain.draft_tokens.append(each)
                chain.origin.append((self.name, 0))
                chain.cumulative_confidence.append(
                    (chain.cumulative_confidence or [1.0])[-1] * each.confidence
                )
                chain.gains.append((chain.gains or [1.0])[-1] * each.confidence)
                if stops is not None and stops[number](chain):
                    break
        return chains

    def drafted(self, tree: TokenTree) -> list[int]:
        return [
            node
            for node in range(1, len(tree))
            if tree.origin and tree.origin[node][0] == self.name
        ]
