"""A drafter whose chains are written down: for tests of what is done with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafters.helpers import VOCAB
from pronk.choosing.chooser import Guess
from pronk.drafters import DraftContext, Outcome
from pronk.drafters.shared.calibration import Calibration
from pronk.drafters.shared.chain import Chain, ChainGuesser, Stop
from pronk.tree import TokenTree


def guess(token: int, confidence: float, *others: int, vocab: int = VOCAB) -> Guess:
    """A guess that is this sure; ``others`` come after it, and share what it leaves."""
    scores = np.full(vocab, -math.inf)
    scores[token] = math.log(confidence)
    for rank, other in enumerate(others):
        scores[other] = -3.0 - rank
    return Guess(token, confidence, scores)


@dataclass(frozen=True)
class Scripted(ChainGuesser[Calibration]):
    """Guesses ``script``, whatever the text."""

    name = "scripted"

    script: tuple[Guess, ...] = ()

    def start(self, prompt: Sequence[int]) -> Calibration:
        return Calibration(self.name)

    def chains(self, contexts: Sequence[DraftContext[Calibration]], stop: Stop | None = None) -> list[Chain]:
        chains = [Chain(context, context.state) for context in contexts]
        for number, chain in enumerate(chains):
            for each in self.script:
                if chain.full:
                    break
                chain.guesses.append(each)
                chain.origin.append((self.name, 0))
                chain.reached.append((chain.reached or [1.0])[-1] * each.confidence)
                chain.gains.append((chain.gains or [1.0])[-1] * each.confidence)
                if stop is not None and stop(number, chain):
                    break
        return chains

    def observe(self, outcome: Outcome[Calibration]) -> None:
        """It learns nothing."""

    def drafted(self, tree: TokenTree) -> list[int]:
        return [node for node in range(1, len(tree)) if tree.origin and tree.origin[node][0] == self.name]
