"""Time of a forward pass of the target by its number of rows, which bounds the gain of drafting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pronk.bench.records import PassTime
from pronk.drafters import DraftContext, Outcome, Proposer
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.speculation.tree import TokenTree

__all__ = ["ROWS", "pass_times"]

ROWS = (1, 2, 4, 8, 16, 32, 64)

_ROUNDS, _STEPS = 3, 6


@dataclass(frozen=True)
class _Star(Proposer[None]):
    """A drafter that proposes ``rows - 1`` different next tokens: a forward pass has ``rows`` rows."""

    name = "star"
    rows: int
    vocab_size: int

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """Propose the ids that follow the last token's id."""
        parents = (-1, *[0] * (self.rows - 1))
        roots = [context.tokens[-1] for context in contexts]
        return [TokenTree(tuple((root + i) % self.vocab_size for i in range(self.rows)), parents) for root in roots]

    def observe(self, outcome: Outcome[None]) -> None:
        """Ignore the outcome."""


def pass_times(
    llm: LLM, prompt: list[int], sizes: Sequence[int] | None = None, *, rounds: int | None = None, steps: int = _STEPS
) -> Iterator[PassTime]:
    """Measure forward passes of several sizes (:data:`ROWS` by default) after a prompt, interleaved.

    Each of ``rounds`` goes over all sizes, with ``steps`` forward passes of each.
    """
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    for _ in range(rounds or _ROUNDS):
        for rows in sizes or ROWS:
            stats = llm.generate(prompt, params, drafter=_Star(rows, llm.config.vocab_size)).stats
            for before, step in pairwise(stats.steps):
                if step.rows == rows:  # the last step has fewer rows: max_tokens leaves no room for draft tokens
                    yield PassTime(rows, step.target_clock - before.target_clock)
