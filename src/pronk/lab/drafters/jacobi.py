"""Jacobi decoding (Santilli et al. 2023): solve for the next tokens by fixed-point iteration.

Each forward pass computes a chain of draft tokens. The target's likeliest token after position p
becomes the draft token for position p + 1 in the next forward pass. Jacobi decoding divides the
text into blocks of ``num_tokens`` positions, as algorithm 2 of the lookahead paper does (Fu et al.
2024): the chain covers the rest of the current block, and gets shorter as draft tokens are
accepted. In Gauss-Seidel decoding the chain always has ``num_tokens`` positions.
``docs/methods/jacobi.md`` has an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pronk import Proposer, TokenTree
from pronk.base import known_keywords
from pronk.base.checks import check_integer
from pronk.drafting import (
    MAX_TREE,
    Capabilities,
    DraftContext,
    Outcome,
    Trie,
    initial_draft_token,
    top_tokens,
)

_NUM_RATES = 8  # one acceptance rate for each depth 1 to 7, and one for all greater depths
_PRIORS = dict.fromkeys(range(_NUM_RATES), 0.3)  # acceptance rates before any measurement


@dataclass
class JacobiState:
    """State of one request; text positions count from 0."""

    # Token ids of the prompt; one of them is the draft token for a position without an output.
    prompt: tuple[int, ...]
    start: int = 0  # text position of ``draft_tokens[0]``
    # The target's likeliest tokens in the last forward pass, for the positions from ``start`` on.
    draft_tokens: tuple[int, ...] = ()
    end: int = 0  # text position at which the current block of Jacobi decoding ends; 0: no block

    def draft_token(self, position: int) -> int:
        """Return the draft token for a text position.

        It is the target's likeliest token in the last forward pass. If that pass did not compute
        one for this position, it is a token of the prompt.
        """
        index = position - self.start
        if 0 <= index < len(self.draft_tokens):
            return self.draft_tokens[index]
        return initial_draft_token(self.prompt, position)


@known_keywords
@dataclass(frozen=True)
class Jacobi(Proposer[JacobiState]):
    """Options and proposer of Jacobi decoding, which drafts the rest of a block of positions.

    Attributes:
        num_tokens: number of positions in a block, 1..1023.
    """

    name = "jacobi"
    row_options = ("num_tokens",)
    capabilities = Capabilities(logits=True)

    num_tokens: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, MAX_TREE - 1)

    def start(self, prompt: Sequence[int]) -> JacobiState:
        return JacobiState(tuple(prompt))

    def propose(self, contexts: Sequence[DraftContext[JacobiState]]) -> list[TokenTree]:
        trees: list[TokenTree] = []
        for context in contexts:
            num_left = self._num_left(context.state, len(context.tokens))
            trees.append(build_chain(self.name, context, num_left))
        return trees

    def observe(self, outcome: Outcome[JacobiState]) -> None:
        """Store the target's outputs as the next draft tokens, and the end of the block."""
        first = outcome.position + 1
        outcome.state.end = first + self._num_left(outcome.state, first)
        store_outputs(outcome)

    def _num_left(self, state: JacobiState, first: int) -> int:
        """Return the number of positions from the text position ``first`` to the end of its block.

        If the block has ended, ``first`` begins a new block.
        """
        return state.end - first if first < state.end else self.num_tokens


@known_keywords
@dataclass(frozen=True)
class GaussSeidel(Proposer[JacobiState]):
    """Options and proposer of Gauss-Seidel decoding, which drafts chains of one length.

    Attributes:
        num_tokens: number of draft tokens per forward pass, 1..1023.
    """

    name = "gauss_seidel"
    row_options = ("num_tokens",)
    capabilities = Capabilities(logits=True)

    num_tokens: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, MAX_TREE - 1)

    def start(self, prompt: Sequence[int]) -> JacobiState:
        return JacobiState(tuple(prompt))

    def propose(self, contexts: Sequence[DraftContext[JacobiState]]) -> list[TokenTree]:
        return [build_chain(self.name, context, self.num_tokens) for context in contexts]

    def observe(self, outcome: Outcome[JacobiState]) -> None:
        store_outputs(outcome)


def build_chain(label: str, context: DraftContext[JacobiState], num_tokens: int) -> TokenTree:
    """Return the chain of draft tokens for the next ``num_tokens`` text positions.

    The chain is shorter if the request allows fewer draft tokens. ``label`` is the drafter's name
    in the acceptance statistics.
    """
    first = len(context.tokens)
    count = min(num_tokens, context.max_depth, context.max_nodes)
    trie = Trie(context.tokens[-1])
    node = 0
    gain = 1.0
    rates = context.acceptance.rates(label, _PRIORS)
    for index in range(count):
        # One rate for each depth from 1; deep tokens share the last rate.
        kind = min(index, _NUM_RATES - 1)
        gain *= rates.rate(kind, index + 1)
        node = trie.add(node, context.state.draft_token(first + index), gain, (label, kind))
    return trie.tree(count)


def store_outputs(outcome: Outcome[JacobiState]) -> None:
    """Store the next draft tokens: the target's likeliest token after each node of the chain.

    Branches that a composite drafter added to the tree are left out.
    """
    if outcome.logits is not None:
        outputs = top_tokens(outcome, 1, range(outcome.tree.main_chain))
        outcome.state.start = outcome.position + 1
        outcome.state.draft_tokens = tuple(token for (token,) in outputs)
