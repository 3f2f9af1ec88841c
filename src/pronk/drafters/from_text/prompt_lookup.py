"""Prompt lookup (Saxena 2023): what followed the last few tokens earlier in the text will follow again.

The tree is the trie of several continuations, from matches in the prompt and in the output; longer matches count for
more, and among equal ones the latest comes first::

    … the cat sat on the mat … the cat ran … the cat
                                                  ├── ran ── …      (latest match of "the cat")
                                                  └── sat ── on ── the ── mat

For texts that repeat themselves or their prompt: code, edits, summaries, retrieval. A step takes 10 to 50 µs,
whatever the length of the text, and nothing at all is guessed where nothing matches. The index takes about 300 bytes
per token and length of match, at most 1.2 KB a token with the defaults.
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

# A text that repeats one phrase has many matches and one continuation; looking further would only take time.
_MAX_MATCHES = 32

# Ways of guessing: for a match of n tokens, 3n is the first token after it, 3n + 1 any token in whose place there is
# another guess already, 3n + 2 what follows in the same chain.
_FIRST, _OTHER, _NEXT = 0, 1, 2


@dataclass
class TextIndex:
    """A text and where its n-grams end.

    ``ends[n][gram]`` lists the places after each occurrence of ``gram``; ``text[place]`` is what followed.
    """

    sizes: tuple[int, ...]
    text: list[int] = field(default_factory=list)
    ends: dict[int, dict[tuple[int, ...], list[int]]] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        for token in tokens:
            self.text.append(token)
            place = len(self.text)
            for size in self.sizes:
                if place >= size:
                    grams = self.ends.setdefault(size, {})
                    grams.setdefault(tuple(self.text[place - size :]), []).append(place)

    def matches(self, tail: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Earlier occurrences of the end of ``tail``: their length and the place after them.

        Longest match first, then latest first.
        """
        seen: set[int] = set()
        for size in sorted(self.sizes, reverse=True):
            if len(tail) < size:
                continue
            for place in reversed(self.ends.get(size, {}).get(tuple(tail[-size:]), [])):
                if place < len(self.text) and place not in seen:
                    seen.add(place)
                    yield size, place


@dataclass
class LookupState:
    """One request's text, and how often each length of match was right."""

    index: TextIndex
    rates: AcceptanceRates


@dataclass(frozen=True)
class PromptLookup(Proposer[LookupState]):
    """Options of prompt lookup.

    Attributes:
        max_ngram: longest match that is looked for, 1..16 tokens.
        min_ngram: shortest match that counts, 1..max_ngram tokens.
        num_tokens: guesses per step, 1..127.
        num_chains: how many different continuations share them, 1..16.
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
        """An index of the prompt."""
        sizes = tuple(range(self.min_ngram, self.max_ngram + 1))
        priors = {3 * n + way: rate for n in sizes for way, rate in enumerate((1.0 - 0.75**n, 0.1, 0.75))}
        state = LookupState(TextIndex(sizes), AcceptanceRates(self.name, priors))
        state.index.extend(prompt)
        return state

    def propose(self, contexts: Sequence[DraftContext[LookupState]]) -> list[TokenTree]:
        """A trie of what followed earlier occurrences of each text's end."""
        return [self._tree(context) for context in contexts]

    def observe(self, outcome: Outcome[LookupState]) -> None:
        """Index the committed tokens, and count what was right."""
        outcome.state.index.extend(outcome.committed)
        outcome.state.rates.learn(outcome)

    def _tree(self, context: DraftContext[LookupState]) -> TokenTree:
        room, depth = min(self.num_tokens, context.max_nodes), min(self.num_tokens, context.max_depth)
        trie = Trie(context.tokens[-1])
        # Provisional tokens are not indexed yet, but they are where the text ends.
        tail = context.tokens[-self.max_ngram :]
        chains: list[list[int]] = []
        if depth > 0 and room > 0:
            for size, place in islice(context.state.index.matches(tail), _MAX_MATCHES):
                chain = _continuation(context.tokens, place, depth)
                if chain not in chains:
                    chains.append(chain)
                    self._grow(trie, chain, size, context.state.rates)
                if len(chains) == self.num_chains:
                    break
        return trie.tree(room)

    def _grow(self, trie: Trie, chain: Sequence[int], size: int, rates: AcceptanceRates) -> None:
        node, gain = 0, 1.0
        for depth, token in enumerate(chain):
            way = 3 * size + (_OTHER if trie.forks(node, token) else _NEXT if depth else _FIRST)
            gain *= rates.rate(way)
            node = trie.add(node, token, gain, (self.name, way))
            gain = trie.gains[node]


def _continuation(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """``count`` tokens from ``place`` on; past the end of the text the copy goes on copying itself, as a loop would."""
    chain: list[int] = []
    for source in range(place, place + count):
        chain.append(tokens[source] if source < len(tokens) else chain[source - len(tokens)])
    return chain
