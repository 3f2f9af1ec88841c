"""Plain autoregressive decoding: no draft tokens, one token per forward pass.

It is the baseline of every comparison, and the fallback while speculation does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pronk.speculation.proposer import Capabilities, DraftContext, Outcome, Proposer
from pronk.speculation.tree import TokenTree

__all__ = ["Autoregressive"]


@dataclass(frozen=True)
class Autoregressive(Proposer[None]):
    """Drafter without draft tokens and without options."""

    name = "autoregressive"
    capabilities = Capabilities(proposes=False)

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """Return trees of the root alone."""
        return [TokenTree.chain(context.tokens[-1:]) for context in contexts]

    def observe(self, outcome: Outcome[None]) -> None:
        """Ignore the outcome."""
