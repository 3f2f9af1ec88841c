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
prompt lookup where requests resemble each other or the text branches. A proposal takes 0.03 to 0.1 ms with the compiled
kernels, whose automaton it is, and 0.3 to 1 ms without.

Memory: 30 to 85 bytes (without the kernels, 150) per token of text for a request while it runs, and as much per token
of the store, which holds at most ``store_tokens``: 5 MB by default. Requests of one drafter object are faster for each
other's outputs. Where users must not learn from response times what others were told, bind one for each, or set
``store_tokens=0``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pronk.checks import check_integer, check_number, check_path
from pronk.drafters.from_text._growth import PRIORS, SuffixIndex, TreeGrower, TreeLimits, growth, strings
from pronk.drafters.from_text._suffix_store import SuffixStore
from pronk.errors import OptionError
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.proposer import Capabilities, DraftContext, Drafter, Outcome, Proposer
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Suffix", "SuffixState"]


@dataclass
class SuffixState:
    """A request: its text and what came of its guesses.

    Attributes:
        text: the certain tokens, up to the last proposal: to read them takes time.
        rates: acceptance by the kind of guess.
        growth: grows its trees.
        output: the certain tokens after the prompt, where they are to be kept.
        private: whether other requests may not learn from it.
    """

    text: SuffixIndex
    rates: AcceptanceRates
    growth: TreeGrower = field(repr=False, compare=False)
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

    def bind(self, target: Target) -> SuffixProposer:
        """What guesses by these options; reads the store's file."""
        past = SuffixStore(self.max_match, self.store_tokens, None if self.store is None else Path(self.store))
        past.open(target.vocabulary, target.decoder.config.vocab_size)
        return SuffixProposer(self, past, target)


class SuffixProposer(Proposer[SuffixState]):
    """Suffix decoding with what it remembers.

    Attributes:
        options: it guesses by.
        past: earlier outputs.
    """

    name = Suffix.name
    capabilities = Capabilities(costs=True)

    def __init__(self, options: Suffix, past: SuffixStore, target: Target) -> None:
        self.options, self.past, self.target = options, past, target
        self.capabilities = Capabilities(costs=True, observes_all_steps=options.store_tokens > 0)

    def start(self, prompt: Sequence[int]) -> SuffixState:  # noqa: ARG002 - read with the first proposal
        """Nothing is read yet."""
        rates = AcceptanceRates(self.name, PRIORS, SharedAcceptance.of(self.target))
        return SuffixState(strings(self.options.max_match), rates, growth(rates, self.name))

    def propose(self, contexts: Sequence[DraftContext[SuffixState]]) -> list[TokenTree]:
        """What followed the longest matches of each text's end, the likeliest first."""
        return [self._tree(context, len(contexts)) for context in contexts]

    def observe(self, outcome: Outcome[SuffixState]) -> None:
        """The rates learn."""
        state = outcome.state
        state.rates.learn(outcome)
        if self.capabilities.observes_all_steps:
            state.output.extend(outcome.committed)
        state.private = outcome.params.rejects

    def stop(self, state: SuffixState) -> None:
        """Keep the output for requests to come."""
        if not state.private:
            self.past.add(state.output)

    def _tree(self, context: DraftContext[SuffixState], requests: int) -> TokenTree:
        options, state = self.options, context.state
        costs = context.costs if context.thrifty else None
        state.text.extend(context.tokens[state.text.num_tokens : context.root + 1])
        width = min(options.num_nodes, context.max_nodes)
        least = 0.0 if costs is None else costs.least_gain(requests)
        limits = TreeLimits(width, context.max_depth, options.min_match, options.depth_factor, least)
        # Provisional tokens are among no strings yet, but they are where the text ends.
        return state.growth.grow([state.text, *self.past.generations], context.tokens, limits)
