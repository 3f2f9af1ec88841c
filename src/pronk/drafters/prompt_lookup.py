"""Prompt lookup (Saxena 2023): what followed the last few tokens earlier in the text will follow again.

The tree is the trie of several continuations, longest match first, and among equal matches the latest first::

    … the cat sat on the mat … the cat ran … the cat
                                                  ├── ran ── …      (latest match of "the cat")
                                                  └── sat ── on ── the ── mat

For texts that repeat themselves or their prompt: code, edits, summaries, retrieval. Proposing takes microseconds, and
nothing at all is guessed where nothing matches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from pronk.drafters.base import DraftContext, Drafter, Outcome
from pronk.drafters.options import check_integer
from pronk.errors import OptionError
from pronk.tree import TokenTree

__all__ = ["PromptLookup", "TextIndex"]

# A text that repeats one phrase has many matches and one continuation; looking further would only take time.
_MAX_MATCHES = 32


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

    def matches(self, tail: Sequence[int]) -> Iterator[int]:
        """Places after earlier occurrences of the end of ``tail``: longest match first, then latest first."""
        seen: set[int] = set()
        for size in sorted(self.sizes, reverse=True):
            if len(tail) < size:
                continue
            for place in reversed(self.ends.get(size, {}).get(tuple(tail[-size:]), [])):
                if place < len(self.text) and place not in seen:
                    seen.add(place)
                    yield place


@dataclass(frozen=True)
class PromptLookup(Drafter[TextIndex]):
    """Options of prompt lookup.

    Attributes:
        max_ngram: longest match that is looked for, 1..16 tokens.
        min_ngram: shortest match that counts, 1..max_ngram tokens.
        num_tokens: guesses per step, 1..64.
        num_chains: how many different continuations share them, 1..16.
    """

    name: ClassVar[str] = "prompt_lookup"

    max_ngram: int = 4
    min_ngram: int = 2
    num_tokens: int = 7
    num_chains: int = 2

    def __post_init__(self) -> None:
        check_integer(self.name, "max_ngram", self.max_ngram, 1, 16)
        check_integer(self.name, "min_ngram", self.min_ngram, 1, 16)
        check_integer(self.name, "num_tokens", self.num_tokens, 1, 64)
        check_integer(self.name, "num_chains", self.num_chains, 1, 16)
        if self.min_ngram > self.max_ngram:
            msg = f"{self.name}: expected min_ngram at most max_ngram = {self.max_ngram}, found {self.min_ngram}"
            raise OptionError(msg)

    def start(self, prompt: Sequence[int]) -> TextIndex:
        """An index of the prompt."""
        index = TextIndex(tuple(range(self.min_ngram, self.max_ngram + 1)))
        index.extend(prompt)
        return index

    def propose(self, contexts: Sequence[DraftContext[TextIndex]]) -> list[TokenTree]:
        """A trie of what followed earlier occurrences of each text's end."""
        return [self._tree(context) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome[TextIndex]]) -> None:
        """Index the committed tokens."""
        for outcome in outcomes:
            outcome.state.extend(outcome.committed)

    def _tree(self, context: DraftContext[TextIndex]) -> TokenTree:
        index = context.state
        depth = min(self.num_tokens, context.max_depth)
        # Provisional tokens are not indexed yet, but they are where the text ends.
        tail = context.tokens[-self.max_ngram :]
        chains: list[list[int]] = []
        if depth > 0:
            for place in islice(index.matches(tail), _MAX_MATCHES):
                chain = _continuation(context.tokens, place, depth)
                if chain not in chains:
                    chains.append(chain)
                if len(chains) == self.num_chains:
                    break
        return TokenTree.trie(context.tokens[-1], chains, min(self.num_tokens, context.max_nodes))


def _continuation(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """``count`` tokens from ``place`` on; past the end of the text the copy goes on copying itself, as a loop would."""
    chain: list[int] = []
    for source in range(place, place + count):
        chain.append(tokens[source] if source < len(tokens) else chain[source - len(tokens)])
    return chain
