"""Prompt lookup (Saxena 2023): propose continuations of earlier occurrences of the text's end.

Source of the draft tokens: the prompt and the output so far. The tree is a trie of several continuations. Longer
matches come first, and among matches of one length the latest ::

    … the cat sat on the mat … the cat ran … the cat
                                                  ├── ran ── …      (latest match of "the cat")
                                                  └── sat ── on ── the ── mat

When it pays: for outputs that repeat themselves or their prompt, such as code, edits, summaries and retrieval. Without
a match it proposes nothing.

Cost: 10 to 50 µs of host time per step, independent of the text's length. The index takes about 300 bytes per token and
match length: with the defaults at most 1.2 KB per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pronk.checks import check_integer
from pronk.drafters.shared.trie import Trie
from pronk.errors import OptionError
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.proposer import DraftContext, Outcome, Proposer
from pronk.speculation.tree import TokenTree

__all__ = ["LookupState", "PromptLookup", "TextIndex"]

# Maximum number of matches per step: a text that repeats one phrase has many matches with the same continuation.
_MAX_MATCHES = 32

# Kinds of draft tokens of a match of n tokens, each with an acceptance rate: 3n is the first token of a continuation,
# 3n + 1 a sibling of another draft token, 3n + 2 a later token of the continuation.
_FIRST, _SIBLING, _NEXT = 0, 1, 2


@dataclass
class TextIndex:
    """A text with an index of its n-grams.

    Attributes:
        sizes: indexed lengths of n-grams.
        text: tokens.
        end_positions: ``end_positions[n][gram]`` lists the position after each occurrence of ``gram``, ascending.
    """

    sizes: tuple[int, ...]
    text: list[int] = field(default_factory=list)
    end_positions: dict[int, dict[tuple[int, ...], list[int]]] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.text.append(token)
            end = len(self.text)
            for size in self.sizes:
                if end >= size:
                    grams = self.end_positions.setdefault(size, {})
                    grams.setdefault(tuple(self.text[end - size :]), []).append(end)

    def matches(self, tail: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield earlier occurrences of the end of ``tail``: match length and position after the match.

        The longest match comes first, then the latest.
        """
        seen: set[int] = set()
        for size in sorted(self.sizes, reverse=True):
            if len(tail) < size:
                continue
            for end in reversed(self.end_positions.get(size, {}).get(tuple(tail[-size:]), [])):
                if end < len(self.text) and end not in seen:
                    seen.add(end)
                    yield size, end


@dataclass
class LookupState:
    """State of one request: its indexed text, and the acceptance rates by kind of draft token."""

    index: TextIndex
    rates: AcceptanceRates


@dataclass(frozen=True)
class PromptLookup(Proposer[LookupState]):
    """Options of prompt lookup.

    Attributes:
        max_ngram: maximum match length in tokens, 1..16.
        min_ngram: minimum match length in tokens, 1..max_ngram.
        num_tokens: maximum number of draft tokens per step, 1..127.
        num_chains: maximum number of different continuations in a tree, 1..16.
    """

    name = "prompt_lookup"

    max_ngram: int = 4
    min_ngram: int = 2
    num_tokens: int = 15
    num_chains: int = 2

    def __post_init__(self) -> None:
        check_integer(f"{self.name}: max_ngram", self.max_ngram, 1, 16)
        check_integer(f"{self.name}: min_ngram", self.min_ngram, 1, 16)
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 127)
        check_integer(f"{self.name}: num_chains", self.num_chains, 1, 16)
        if self.min_ngram > self.max_ngram:
            msg = f"{self.name}: expected min_ngram at most max_ngram = {self.max_ngram}, found {self.min_ngram}"
            raise OptionError(msg)

    def start(self, prompt: Sequence[int]) -> LookupState:
        """Index the prompt."""
        sizes = tuple(range(self.min_ngram, self.max_ngram + 1))
        priors = {3 * n + kind: rate for n in sizes for kind, rate in enumerate((1.0 - 0.75**n, 0.1, 0.75))}
        state = LookupState(TextIndex(sizes), AcceptanceRates(self.name, priors))
        state.index.extend(prompt)
        return state

    def propose(self, contexts: Sequence[DraftContext[LookupState]]) -> list[TokenTree]:
        """Return for each context a trie of the continuations of its last tokens."""
        return [self._tree(context) for context in contexts]

    def observe(self, outcome: Outcome[LookupState]) -> None:
        """Index the committed tokens and update the acceptance rates."""
        outcome.state.index.extend(outcome.committed)
        outcome.state.rates.learn(outcome)

    def _tree(self, context: DraftContext[LookupState]) -> TokenTree:
        size_limit, depth = min(self.num_tokens, context.max_nodes), min(self.num_tokens, context.max_depth)
        trie = Trie(context.tokens[-1])
        # The tail may end with tokens that a composite appended; they are not indexed.
        tail = context.tokens[-self.max_ngram :]
        chains: list[list[int]] = []
        if depth > 0 and size_limit > 0:
            for size, start in islice(context.state.index.matches(tail), _MAX_MATCHES):
                chain = _continuation(context.tokens, start, depth)
                if chain not in chains:
                    chains.append(chain)
                    self._add_chain(trie, chain, size, context.state.rates)
                if len(chains) == self.num_chains:
                    break
        return trie.tree(size_limit)

    def _add_chain(self, trie: Trie, chain: Sequence[int], size: int, rates: AcceptanceRates) -> None:
        node, gain = 0, 1.0
        for depth, token in enumerate(chain):
            kind = 3 * size + (_SIBLING if trie.adds_sibling(node, token) else _NEXT if depth else _FIRST)
            gain *= rates.rate(kind)
            node = trie.add(node, token, gain, (self.name, kind))
            gain = trie.gains[node]


def _continuation(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Return ``count`` tokens from ``start`` on; past the text's end, the copy repeats itself."""
    chain: list[int] = []
    for source in range(start, start + count):
        chain.append(tokens[source] if source < len(tokens) else chain[source - len(tokens)])
    return chain
