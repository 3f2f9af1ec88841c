"""What a pass costs, by its number of rows: the room that guessing lives in."""

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
    """Guesses ``rows - 1`` different next tokens, whatever the text: a pass of so many rows."""

    name = "star"
    rows: int
    vocab_size: int

    def start(self, prompt: Sequence[int]) -> None:
        """No state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """The ids that follow the last token's."""
        parents = (-1, *[0] * (self.rows - 1))
        roots = [context.tokens[-1] for context in contexts]
        return [TokenTree(tuple((root + i) % self.vocab_size for i in range(self.rows)), parents) for root in roots]

    def observe(self, outcome: Outcome[None]) -> None:
        """Nothing to learn."""


def pass_times(
    llm: LLM, prompt: list[int], sizes: Sequence[int] | None = None, *, rounds: int | None = None, steps: int = _STEPS
) -> Iterator[PassTime]:
    """Passes over so many rows below a prompt (:data:`ROWS`), in interleaved rounds of so many steps."""
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    for _ in range(rounds or _ROUNDS):
        for rows in sizes or ROWS:
            stats = llm.generate(prompt, params, drafter=_Star(rows, llm.config.vocab_size)).stats
            for before, step in pairwise(stats.steps):
                if step.rows == rows:  # the last step has no room for guesses
                    yield PassTime(rows, step.target_clock - before.target_clock)
