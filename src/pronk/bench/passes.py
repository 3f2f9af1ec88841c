"""Measure the time of the target's forward pass by its number of rows: the cost of verification."""

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
    """Drafter that makes forward passes of ``rows`` rows by ``rows - 1`` alternatives for the next token."""

    name = "star"
    rows: int
    vocab_size: int

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """Propose the ids ``last + 1, last + 2, …`` modulo the vocabulary size as next tokens."""
        parents = (-1, *[0] * (self.rows - 1))
        roots = [context.tokens[-1] for context in contexts]
        return [TokenTree(tuple((root + i) % self.vocab_size for i in range(self.rows)), parents) for root in roots]

    def observe(self, outcome: Outcome[None]) -> None:
        """Ignore the outcome."""


def pass_times(
    llm: LLM, prompt: list[int], sizes: Sequence[int] | None = None, *, rounds: int | None = None, steps: int = _STEPS
) -> Iterator[PassTime]:
    """Measure forward passes after a prompt; ``sizes`` are numbers of rows, by default :data:`ROWS`.

    Each of ``rounds`` goes over all sizes, with at most ``steps`` forward passes of each.
    """
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    for _ in range(rounds or _ROUNDS):
        for rows in sizes or ROWS:
            stats = llm.generate(prompt, params, drafter=_Star(rows, llm.config.vocab_size)).stats
            for before, step in pairwise(stats.steps):
                if step.rows == rows:  # the last step has fewer rows: max_tokens leaves no room for draft tokens
                    yield PassTime(rows, step.target_clock - before.target_clock)
