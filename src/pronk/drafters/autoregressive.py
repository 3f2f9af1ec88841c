"""No guesses: one token per pass. The tree is the root alone.

The reference that every other drafter is compared with, and the plain path when guessing does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pronk.speculation.proposer import Capabilities, DraftContext, Outcome, Proposer
from pronk.speculation.tree import TokenTree

__all__ = ["Autoregressive"]


@dataclass(frozen=True)
class Autoregressive(Proposer[None]):
    """Plain decoding."""

    name = "autoregressive"
    capabilities = Capabilities(proposes=False)

    def start(self, prompt: Sequence[int]) -> None:
        """No state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """The root alone."""
        return [TokenTree.chain(context.tokens[-1:]) for context in contexts]

    def observe(self, outcome: Outcome[None]) -> None:
        """Nothing to learn."""
