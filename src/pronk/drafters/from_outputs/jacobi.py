"""Jacobi decoding (Santilli et al. 2023): solve for the next tokens by fixed-point iteration.

Source of the draft tokens: the target's greedy outputs in the previous forward pass. The tree is a chain with one draft
token per unknown position. The target's output at each node becomes the draft token of the next position in the next
forward pass. Tokens at a fixed point are accepted, at least one per forward pass. This is algorithm 2 of the lookahead
paper (Fu et al. 2024) ::

    forward pass 1   the ── ?1 ── ?2 ── ?3 ── ?4        outputs  cat  a   b   c
    forward pass 2   cat ── a ── b ── c                 outputs  sat  on  c'  d
    forward pass 3   sat ── on ── c' …                  "on" was already the output after "sat"

The chain gets shorter as its ``num_tokens`` unknowns are solved; the next block begins when all of them are.

When it pays: rarely by itself, since a token is rarely right before its predecessors are. It is the baseline that
lookahead decoding improves on. It needs neither a draft model nor repeated text. A step takes 30 to 50 µs on the host,
most of them for one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pronk.checks import check_integer
from pronk.drafters.from_outputs._likeliest import initial_draft_token, top_tokens
from pronk.drafters.shared.trie import Trie
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.proposer import Capabilities, DraftContext, Outcome, Proposer
from pronk.speculation.tree import TokenTree

__all__ = ["Jacobi", "JacobiState"]

# Number of depths with an acceptance rate of their own (deeper ones share the last), and the prior rate of each.
_DEPTHS, _PRIOR = 8, 0.3


@dataclass
class JacobiState:
    """The current iterate of a request.

    Attributes:
        prompt: prompt tokens, the initial draft tokens of positions without an earlier output.
        rates: acceptance rates by depth.
        start: position of ``draft_tokens[0]`` in the text.
        draft_tokens: draft tokens of the positions from ``start`` on.
        end: first position after the current block.
    """

    prompt: tuple[int, ...]
    rates: AcceptanceRates
    start: int = 0
    draft_tokens: tuple[int, ...] = ()
    end: int = 0

    def draft_token(self, position: int) -> int:
        """Return the draft token at ``position``: the last output there, or a token of the prompt."""
        index = position - self.start
        if 0 <= index < len(self.draft_tokens):
            return self.draft_tokens[index]
        return initial_draft_token(self.prompt, position)


@dataclass(frozen=True)
class Jacobi(Proposer[JacobiState]):
    """Options of Jacobi decoding.

    Attributes:
        num_tokens: number of unknowns of a block, 1..128.
    """

    name = "jacobi"
    capabilities = Capabilities(logits=True)

    num_tokens: int = 7

    def __post_init__(self) -> None:
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 128)

    def start(self, prompt: Sequence[int]) -> JacobiState:
        """Return an iterate without draft tokens."""
        return JacobiState(tuple(prompt), AcceptanceRates(self.name, dict.fromkeys(range(_DEPTHS), _PRIOR)))

    def propose(self, contexts: Sequence[DraftContext[JacobiState]]) -> list[TokenTree]:
        """Return a chain of the current iterate for each context."""
        return [self._chain(context) for context in contexts]

    def observe(self, outcome: Outcome[JacobiState]) -> None:
        """Store the greedy outputs as the next iterate; greedy also under sampling, as the likeliest tokens."""
        state, first = outcome.state, outcome.position + 1
        state.end = self._block_end(state, first)
        state.rates.learn(outcome)
        if outcome.logits is not None:
            state.start, state.draft_tokens = first, _outputs(outcome)

    def _chain(self, context: DraftContext[JacobiState]) -> TokenTree:
        first = len(context.tokens)
        count = min(self._block_end(context.state, first) - first, context.max_depth, context.max_nodes)
        trie, node, gain = Trie(context.tokens[-1]), 0, 1.0
        for i in range(count):
            kind = min(i, _DEPTHS - 1)
            gain *= context.state.rates.rate(kind)
            node = trie.add(node, context.state.draft_token(first + i), gain, (self.name, kind))
        return trie.tree(count)

    def _block_end(self, state: JacobiState, first: int) -> int:
        """Return the end of the block whose first unknown is at position ``first``."""
        return state.end if first < state.end else first + self.num_tokens


def _outputs(outcome: Outcome[JacobiState]) -> tuple[int, ...]:
    """Return the greedy outputs along the main chain; other branches come from other drafters."""
    return tuple(token for (token,) in top_tokens(outcome, 1, range(outcome.tree.main_chain)))
