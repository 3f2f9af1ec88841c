"""Prompt lookup (Saxena 2023): propose the continuations of earlier occurrences of the text's end.

A *match* is an earlier occurrence of the last ``min_ngram`` to ``max_ngram`` tokens in prompt or
output. The tree merges the continuations of up to ``num_chains`` matches by common prefixes. Longer
matches come first, and later ones before earlier ones of the same length. The index takes up to 300
bytes per token for each match length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pronk.base.checks import check_integer
from pronk.base.errors import OptionError
from pronk.base.keywords import known_keywords
from pronk.drafting.proposer import DraftContext, Outcome, Proposer
from pronk.drafting.trie import Trie
from pronk.sampling.tree import TokenTree
from pronk.sampling.tree_size import MAX_TREE

# Maximum number of matches examined per step; a repeated phrase can have thousands, most with equal
# continuations.
_MAX_MATCHES = 32

# Acceptance rates are measured by *kind* of draft token, the number 3 * match length + role. The
# role is _SIBLING if the parent already has another child, else _FIRST for the first token of a
# continuation and _NEXT for later tokens. Example: a sibling from a match of 4 tokens has the kind
# 3 * 4 + 1 = 13.
_FIRST = 0
_SIBLING = 1
_NEXT = 2

# Rates before any measurement: 1 - 0.75**n for the first token after a match of n tokens, 0.1 for
# siblings, 0.75 for later tokens.
_PRIORS = {
    3 * n + role: rate for n in range(1, 17) for role, rate in enumerate((1.0 - 0.75**n, 0.1, 0.75))
}


@dataclass
class TextIndex:
    """State of one request: the token ids of its text, with an index of its n-grams."""

    sizes: tuple[int, ...]  # lengths of the indexed n-grams, in tokens
    text: list[int] = field(default_factory=list)
    # ``end_positions[gram]`` lists the position after each occurrence of an n-gram, ascending.
    end_positions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and enter its new n-grams in the index."""
        for token in tokens:
            self.text.append(token)
            end = len(self.text)
            for size in self.sizes:
                if end >= size:
                    self.end_positions.setdefault(tuple(self.text[end - size :]), []).append(end)

    def matches(self, tail: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield ``(match length, end)`` for each earlier occurrence of the last tokens of ``tail``.

        ``end`` is the position after the occurrence. Longer matches come first; of equally long
        ones, the latest first.
        """
        seen: set[int] = set()
        for size in sorted(self.sizes, reverse=True):
            if len(tail) < size:
                continue
            for end in reversed(self.end_positions.get(tuple(tail[-size:]), [])):
                if end < len(self.text) and end not in seen:
                    seen.add(end)
                    yield size, end


@known_keywords
@dataclass(frozen=True)
class PromptLookup(Proposer[TextIndex]):
    """Options of prompt lookup.

    Attributes:
        max_ngram: maximum match length in tokens, 1..16.
        min_ngram: minimum match length in tokens, 1..max_ngram.
        num_tokens: maximum number of draft tokens per step, 1..1023.
        num_chains: maximum number of different continuations in a tree, 1..16.
    """

    name = "prompt_lookup"
    row_options = ("num_tokens",)

    max_ngram: int = 4
    min_ngram: int = 2
    num_tokens: int = 15
    num_chains: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(f"{self.name}: max_ngram", self.max_ngram, 1, 16)
        check_integer(f"{self.name}: min_ngram", self.min_ngram, 1, 16)
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, MAX_TREE - 1)
        check_integer(f"{self.name}: num_chains", self.num_chains, 1, 16)
        if self.min_ngram > self.max_ngram:
            msg = (
                f"{self.name}: expected min_ngram at most max_ngram = {self.max_ngram}, found "
                f"{self.min_ngram}"
            )
            raise OptionError(msg)

    def start(self, prompt: Sequence[int]) -> TextIndex:
        index = TextIndex(tuple(range(self.min_ngram, self.max_ngram + 1)))
        index.extend(prompt)
        return index

    def propose(self, contexts: Sequence[DraftContext[TextIndex]]) -> list[TokenTree]:
        return [self._build_tree(context) for context in contexts]

    def observe(self, outcome: Outcome[TextIndex]) -> None:
        outcome.state.extend(outcome.committed)

    def _build_tree(self, context: DraftContext[TextIndex]) -> TokenTree:
        max_nodes = min(self.num_tokens, context.max_nodes)
        max_depth = min(self.num_tokens, context.max_depth)
        trie = Trie(context.tokens[-1])
        # ``context.tokens`` may end with draft tokens of a composite drafter. The index does not
        # contain these tokens.
        tail = context.tokens[-self.max_ngram :]
        chains: list[list[int]] = []
        if max_depth > 0 and max_nodes > 0:
            for match_length, start in islice(context.state.matches(tail), _MAX_MATCHES):
                chain = _continuation(context.tokens, start, max_depth)
                if chain not in chains:
                    chains.append(chain)
                    self._add_chain(trie, chain, match_length, context)
                if len(chains) == self.num_chains:
                    break
        return trie.tree(max_nodes)

    def _add_chain(
        self, trie: Trie, chain: Sequence[int], match_length: int, context: DraftContext[TextIndex]
    ) -> None:
        """Add a chain below the root.

        A node's gain is the product of the acceptance rates on its path.
        """
        rates = context.acceptance.rates(self.name, _PRIORS)
        node = 0
        gain = 1.0
        for depth, token in enumerate(chain):
            role = _SIBLING if trie.adds_sibling(node, token) else _NEXT if depth else _FIRST
            kind = 3 * match_length + role
            gain *= rates.rate(kind, depth + 1)
            if not context.plan.wants(gain, len(trie) - 1):
                break
            node = trie.add(node, token, gain, (self.name, kind))
            gain = trie.gains[node]


def _continuation(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Return ``count`` tokens from ``start`` on.

    If the text ends earlier, its part from ``start`` on is repeated.
    """
    chain: list[int] = []
    for source in range(start, start + count):
        chain.append(tokens[source] if source < len(tokens) else chain[source - len(tokens)])
    return chain
