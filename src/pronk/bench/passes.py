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

ROWS = (1, 2, 4, 8, 16, 32, 64)

_ROUNDS = 3  # default number of rounds over all numbers of rows
_STEPS = 6  # default maximum number of forward passes per round and number of rows


@dataclass(frozen=True)
class _StarProposer(Proposer[None]):
    """Proposer of ``rows - 1`` draft tokens below the last token: ``rows`` rows per forward pass."""

    name = "star"
    rows: int
    vocab_size: int

    def start(self, prompt: Sequence[int]) -> None:
        """Return ``None``: the proposer has no state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """Propose ``root + 1``, ``root + 2``, … (modulo ``vocab_size``) as children of the last token."""
        parents = (-1, *[0] * (self.rows - 1))
        roots = [context.tokens[-1] for context in contexts]
        return [TokenTree(tuple((root + i) % self.vocab_size for i in range(self.rows)), parents) for root in roots]

    def observe(self, outcome: Outcome[None]) -> None:
        """Do nothing: the proposer has no state."""


def pass_times(
    llm: LLM, prompt: list[int], sizes: Sequence[int] | None = None, *, rounds: int | None = None, steps: int = _STEPS
) -> Iterator[PassTime]:
    """Measure forward passes after a prompt, for each number of rows in ``sizes`` (default :data:`ROWS`).

    The measurement has ``rounds`` rounds. A round measures at most ``steps`` forward passes of each number of rows.
    """
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    for _ in range(rounds or _ROUNDS):
        for rows in sizes or ROWS:
            stats = llm.generate(prompt, params, drafter=_StarProposer(rows, llm.config.vocab_size)).stats
            for previous, step in pairwise(stats.steps):
                if step.rows == rows:  # fewer in the last steps, where max_tokens limits draft tokens
                    yield PassTime(rows, step.target_clock - previous.target_clock)
