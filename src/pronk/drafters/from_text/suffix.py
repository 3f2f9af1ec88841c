"""Suffix decoding (Oliaro et al. 2024): what followed the longest match, here or in earlier answers, by counts.

The text so far is one suffix automaton, the outputs of earlier requests are two more. The longest end of the text that
occurs in one of them is looked up, and the tree grows from what followed it, likeliest first ::

    store   …for i in range(n): …  (6 times)          in ─┬─ range .6 ─── ( .5 ─┬─ n .4 ─── ): .3
            …for i in range(10): … (2 times)              │                     └─ 10 .1
    text    …for i in names: … for i in                   └─ names .3

A node's gain is its parent's times the measured acceptance of guesses of its kind: how long the match is at that
point, what share of its occurrences went on with this token, and whether it was found in the text or in the store.
What cannot pay for its row is not guessed at all, where it is known what rows cost. A match supports guesses to a depth
of ``depth_factor`` times its length; a match that ends nowhere goes on as its longest suffix that does. The engine's
budget or ``num_nodes`` decide how wide the tree is.

For texts that repeat themselves or each other: code, edits, agents, templates, the same questions again. Prefer it to
prompt lookup where requests resemble each other or the text branches. A proposal takes 0.05 to 0.3 ms.

Memory: 30 to 150 bytes per token of text for a request while it runs, and as much per token of the store, which
holds at most ``store_tokens``: 10 MB by default. Requests of one drafter object are faster for each other's outputs.
Where users must not learn from response times what others were told, bind one for each, or set ``store_tokens=0``.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from pronk.checks import check_integer, check_number, check_path
from pronk.drafters.base import DraftContext, Drafter, Guesser, Needs, Outcome
from pronk.drafters.from_text._automaton import Continuation, SuffixAutomaton
from pronk.drafters.from_text._suffix_store import SuffixStore
from pronk.drafters.shared.known import Known
from pronk.drafters.shared.rates import Rates
from pronk.drafters.shared.trie import Frontier, Trie
from pronk.drafters.target import Target
from pronk.errors import OptionError
from pronk.tree import TokenTree

__all__ = ["Suffix", "SuffixState"]

# Kinds of guesses: a match of at least so many tokens, of whose occurrences at least such a share went on like this.
_LENGTHS = (2, 4, 8)
_SHARES = (0.25, 0.5, 0.75)

# What is believed before a request has seen anything: how often they were right in the second halves of Python modules
# and of other held-out texts. A row per length of the match, a column per share.
_TEXT = (
    (0.05, 0.12, 0.31, 0.70),
    (0.05, 0.17, 0.52, 0.87),
    (0.07, 0.20, 0.67, 0.93),
    (0.06, 0.22, 0.82, 0.96),
)
_STORE = (
    (0.01, 0.05, 0.08, 0.16),
    (0.02, 0.05, 0.15, 0.51),
    (0.02, 0.06, 0.32, 0.55),
    (0.05, 0.10, 0.67, 0.70),
)
_PRIORS = dict(enumerate(prior for table in (_TEXT, _STORE) for row in table for prior in row))

# A guess that several sources share is looked at more than once, which takes time; at most so often per row.
_LOOKS = 2


def _way(*, stored: bool, length: int, share: float) -> int:
    """The kind of a guess: a number below 32."""
    return 16 * stored + 4 * bisect(_LENGTHS, length) + bisect(_SHARES, share)


@dataclass
class SuffixState:
    """A request: its text and what came of its guesses.

    Attributes:
        text: the certain tokens, up to the last proposal: to read them takes time.
        rates: acceptance by the kind of guess.
        output: the certain tokens after the prompt, where they are to be kept.
        private: whether other requests may not learn from it.
    """

    text: SuffixAutomaton
    rates: Rates
    output: list[int] = field(default_factory=list)
    private: bool = False


@dataclass(frozen=True)
class Suffix(Drafter):
    """Options of suffix decoding.

    Attributes:
        num_nodes: guesses per step, 1..128.
        max_match: longest match that is looked for, 2..64 tokens.
        min_match: shortest match that counts, 1..max_match tokens.
        depth_factor: a match supports guesses to so many times its length, 0.25..64; at least one.
        store_tokens: how much of earlier outputs is kept, 0..16777216 tokens; 0 for nothing.
        store: a file for them, that outlives the process (``_suffix_store``); read by :meth:`bind`.
    """

    name = "suffix"

    num_nodes: int = 15
    max_match: int = 16
    min_match: int = 1
    depth_factor: float = 4.0
    store_tokens: int = 65536
    store: str | None = None

    def __post_init__(self) -> None:
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, 128)
        check_integer(f"{self.name}: max_match", self.max_match, 2, 64)
        check_integer(f"{self.name}: min_match", self.min_match, 1, 64)
        check_number(f"{self.name}: depth_factor", self.depth_factor, 0.25, 64)
        check_integer(f"{self.name}: store_tokens", self.store_tokens, 0, 2**24)
        check_path(f"{self.name}: store", self.store)
        if self.min_match > self.max_match:
            msg = f"{self.name}: expected min_match at most max_match = {self.max_match}, found {self.min_match}"
            raise OptionError(msg)
        if self.store is not None and not self.store_tokens:
            msg = f"{self.name}: expected store_tokens of at least 1 for the store {self.store}, found 0"
            raise OptionError(msg)

    def bind(self, target: Target) -> SuffixGuesser:
        """What guesses by these options; reads the store's file."""
        past = SuffixStore(self.max_match, self.store_tokens, None if self.store is None else Path(self.store))
        past.open(target.vocabulary, target.decoder.config.vocab_size)
        return SuffixGuesser(self, past, target)


class SuffixGuesser(Guesser[SuffixState]):
    """Suffix decoding with what it remembers.

    Attributes:
        options: it guesses by.
        past: earlier outputs.
    """

    name = Suffix.name
    needs = Needs(costs=True)

    def __init__(self, options: Suffix, past: SuffixStore, target: Target) -> None:
        self.options, self.past, self.target = options, past, target
        self.listens = options.store_tokens > 0

    def start(self, prompt: Sequence[int]) -> SuffixState:  # noqa: ARG002 - read with the first proposal
        """Nothing is read yet."""
        return SuffixState(SuffixAutomaton(self.options.max_match), Rates(self.name, _PRIORS, Known.of(self.target)))

    def propose(self, contexts: Sequence[DraftContext[SuffixState]]) -> list[TokenTree]:
        """What followed the longest matches of each text's end, the likeliest first."""
        return [self._tree(context, len(contexts)) for context in contexts]

    def observe(self, outcome: Outcome[SuffixState]) -> None:
        """The rates learn."""
        state = outcome.state
        state.rates.learn(outcome)
        if self.listens:
            state.output.extend(outcome.committed)
        state.private = outcome.params.rejects

    def stop(self, state: SuffixState) -> None:
        """Keep the output for requests to come."""
        if not state.private:
            self.past.add(state.output)

    def _tree(self, context: DraftContext[SuffixState], requests: int) -> TokenTree:
        options, costs = self.options, context.costs if context.thrifty else None
        text = context.state.text
        for token in context.tokens[text.num_tokens : context.root + 1]:
            text.extend(token)
        width = min(options.num_nodes, context.max_nodes)
        least = 0.0 if costs is None else costs.least_gain(requests)
        growth = _Growth(Trie(context.tokens[-1]), context.state.rates, width, options.min_match, least)
        # Provisional tokens are in no automaton yet, but they are where the text ends.
        for source in (text, *self.past.generations):
            growth.sources.append(source)
            state, length = source.match(context.tokens)
            known: set[int] = set()
            while length >= options.min_match and len(known) < width:
                depth = min(context.max_depth, max(1, int(options.depth_factor * length)))
                growth.offer(_Place(0, len(growth.sources) - 1, state, length, depth), known)
                state, length = source.shorter(state)
        return growth.grow()


class _Place(NamedTuple):
    """A node of the tree, and where a source knows the text above it: what follows there may be guessed.

    ``depth`` is how deep guesses may go that began with the same match.
    """

    node: int
    source: int
    state: int
    length: int
    depth: int


class _Guess(NamedTuple):
    """A token that may follow a place, and the kind of guess that it is."""

    place: _Place
    found: Continuation
    way: int


@dataclass
class _Growth:
    """A tree growing from its likeliest end on.

    Attributes:
        trie: the tree.
        rates: acceptance by the kind of guess.
        width: guesses that it may have.
        min_match: shortest match that counts.
        least: guesses of a smaller gain do not count.
        sources: the text's own automaton, then those of earlier outputs.
        frontier: guesses to come.
    """

    trie: Trie
    rates: Rates
    width: int
    min_match: int
    least: float
    sources: list[SuffixAutomaton] = field(default_factory=list)
    frontier: Frontier[_Guess] = field(default_factory=Frontier)

    def offer(self, place: _Place, known: set[int]) -> None:
        """What follows a place, but for ``known``, which grows: what longer matches know already."""
        if self.trie.depths[place.node] >= place.depth or place.length < self.min_match:
            return
        above, depth = self.trie.gains[place.node], self.trie.depths[place.node] + 1
        following = self.sources[place.source].continuations(place.state)
        total = 1 + sum([each.times for each in following])
        # Among equals the newest comes first.
        for each in nlargest(self.width, following, key=attrgetter("times")) if len(following) > 1 else following:
            if each.token not in known:
                known.add(each.token)
                way = _way(stored=place.source > 0, length=place.length, share=each.times / total)
                gain = above * self.rates.rate(way, depth)
                if gain >= self.least:
                    self.frontier.offer(gain, _Guess(place, each, way))

    def grow(self) -> TokenTree:
        """The tree of the likeliest guesses."""
        looks = _LOOKS * self.width
        while self.frontier and len(self.trie) <= self.width and looks:
            looks -= 1
            gain, (place, found, way) = self.frontier.take()
            node = self.trie.add(place.node, found.token, gain, (Suffix.name, way))
            state, length = self.sources[place.source].follow(found, place.length)
            self.offer(_Place(node, place.source, state, length, place.depth), set())
        return self.trie.tree(self.width)
