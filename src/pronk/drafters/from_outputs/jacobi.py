"""Jacobi decoding (Santilli et al. 2023): the next tokens as one system of equations, solved by iteration.

It is algorithm 2 of the lookahead paper (Fu et al. 2024). The tree is a chain: a guess for every unknown at once. The
target's output at each node is the guess for the place after it in the next pass; what has come to a fixed point is
accepted, at least one token per pass ::

    pass 1   the ── ?1 ── ?2 ── ?3 ── ?4        outputs  cat  a   b   c
    pass 2   cat ── a ── b ── c                 outputs  sat  on  c'  d
    pass 3   sat ── on ── c' …                  "on" was the output after "sat" already

Only when all ``num_tokens`` unknowns are known come the next ones: the chain gets shorter as they become known. It
gains little by itself, since a token is rarely right before those in front of it are; it is the base line that
lookahead decoding improves on, and needs neither a model nor a text to copy from. A step
takes 30 to 50 µs on the host, 20,000 a second: one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pronk.checks import check_integer
from pronk.drafters.from_outputs._likeliest import likeliest, unknown
from pronk.drafters.shared.trie import Trie
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.proposer import Capabilities, DraftContext, Outcome, Proposer
from pronk.speculation.tree import TokenTree

__all__ = ["Jacobi", "JacobiState"]

# Depths whose acceptance is told apart, and what is believed of each at first.
_DEPTHS, _PRIOR = 8, 0.3


@dataclass
class JacobiState:
    """The last iterate of a request.

    ``draft_tokens[i]`` is the draft token at position ``start + i``; ``end`` is the end of the present system. Unknown
    positions begin with tokens of ``prompt``. ``rates`` are acceptance rates by depth.
    """

    prompt: tuple[int, ...]
    rates: AcceptanceRates
    start: int = 0
    draft_tokens: tuple[int, ...] = ()
    end: int = 0

    def guess(self, position: int) -> int:
        """For the token at ``position``: the last output there, or some token of the prompt."""
        index = position - self.start
        if 0 <= index < len(self.draft_tokens):
            return self.draft_tokens[index]
        return unknown(self.prompt, position)


@dataclass(frozen=True)
class Jacobi(Proposer[JacobiState]):
    """Options of Jacobi decoding.

    Attributes:
        num_tokens: unknowns of a system, 1..128.
    """

    name = "jacobi"
    capabilities = Capabilities(logits=True)

    num_tokens: int = 7

    def __post_init__(self) -> None:
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 128)

    def start(self, prompt: Sequence[int]) -> JacobiState:
        """An iterate that is all first guesses."""
        return JacobiState(tuple(prompt), AcceptanceRates(self.name, dict.fromkeys(range(_DEPTHS), _PRIOR)))

    def propose(self, contexts: Sequence[DraftContext[JacobiState]]) -> list[TokenTree]:
        """The present iterate below each text."""
        return [self._chain(context) for context in contexts]

    def observe(self, outcome: Outcome[JacobiState]) -> None:
        """The outputs are the next iterate; greedy ones even when sampling, where they are the likeliest guess."""
        state, first = outcome.state, outcome.position + 1
        state.end = self._end(state, first)
        state.rates.learn(outcome)
        if outcome.logits is not None:
            state.start, state.draft_tokens = first, _outputs(outcome)

    def _chain(self, context: DraftContext[JacobiState]) -> TokenTree:
        first = len(context.tokens)
        count = min(self._end(context.state, first) - first, context.max_depth, context.max_nodes)
        trie, node, gain = Trie(context.tokens[-1]), 0, 1.0
        for i in range(count):
            way = min(i, _DEPTHS - 1)
            gain *= context.state.rates.rate(way)
            node = trie.add(node, context.state.guess(first + i), gain, (self.name, way))
        return trie.tree(count)

    def _end(self, state: JacobiState, first: int) -> int:
        """Where the system ends whose next unknown is at position ``first``."""
        return state.end if first < state.end else first + self.num_tokens


def _outputs(outcome: Outcome[JacobiState]) -> tuple[int, ...]:
    """What the target said along the main chain; beside a chain there may be other drafters' guesses."""
    return tuple(guess for (guess,) in likeliest(outcome, 1, range(outcome.tree.main_chain)))
