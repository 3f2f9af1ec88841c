"""Retrieval (He et al. 2023, REST): what followed the last few tokens in a corpus will follow again.

The longest phrase that ends the text and occurs in the datastore is looked up, and its continuations there, by how
often each follows, become the tree; the most frequent path comes first::

    text      … return self
    corpus    return self . _name      3 ×
              return self . _value     2 ×        return self ┬ .  5 of 6 ┬ _name   3 of 5
              return self ,            1 ×                    │           └ _value  2 of 5
                                                              └ ,  1 of 6

For texts that say what was said before *somewhere else*: boilerplate, an API's idioms, answers like earlier answers.
Build a datastore of such text (``pronk datastore build``). A clone has one for ``pronk-tiny``, of 0.2 M tokens of
Python, sums and prose, to try the method. Nothing is guessed where nothing matches.

A proposal takes 0.13 ms on average with 10 M tokens, and 0.4 ms at worst of a hundred, once the pages that it looks at
are in memory; the time grows with the logarithm of their number. On disk a datastore has 6 bytes per token (8 with a
vocabulary of 65,536 and more).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pronk.checks import check_integer, check_path
from pronk.drafters.from_text.datastore.reader import Child, Datastore
from pronk.drafters.shared.trie import Frontier, Trie
from pronk.errors import OptionError
from pronk.models.clone_models import DEFAULT_MODEL, clone_model
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.proposer import Capabilities, DraftContext, Drafter, Outcome, Proposer
from pronk.speculation.shared_acceptance import SharedAcceptance
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Retrieval"]

_BUILD = "build one with pronk datastore build OUT FILES --model MODEL and use it with retrieval(datastore='OUT')"

# How likely a continuation is depends on how long a phrase it continues, and on its share of what follows the phrase:
# k of n times, counted as k of n + 1, since what was seen once is no certainty. Each pair of classes is a way of
# guessing with a rate of its own. Classes begin at these values, the first one below them.
_LENGTHS = (3, 4, 6, 9)
_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.66, 0.8, 0.92)
_WAYS = len(_SHARES) + 1

# What is believed before anything was seen: rows by length, columns by share. Measured on ``pronk-tiny`` with
# datastores of 0.2 M and 10 M tokens.
_PRIORS = (
    (0.02, 0.03, 0.06, 0.10, 0.13, 0.16, 0.26, 0.50, 0.70),
    (0.02, 0.03, 0.06, 0.10, 0.19, 0.18, 0.44, 0.50, 0.80),
    (0.02, 0.04, 0.08, 0.10, 0.28, 0.25, 0.46, 0.75, 0.90),
    (0.02, 0.04, 0.15, 0.12, 0.35, 0.35, 0.47, 0.75, 0.90),
    (0.02, 0.05, 0.15, 0.12, 0.45, 0.50, 0.70, 0.90, 0.95),
)


@dataclass(frozen=True)
class Retrieval(Drafter):
    """Options of retrieval.

    Attributes:
        datastore: folder that ``pronk datastore build`` wrote; ``None`` is the clone's, for ``pronk-tiny``.
        num_nodes: guesses per step, 1..128.
        max_match: longest phrase that is looked up, 1..64 tokens.
        min_match: shortest phrase that counts, 1..max_match tokens.
        max_depth: no guess is further from the text's end than this, 1..64 tokens.
    """

    name = "retrieval"

    datastore: str | None = None
    num_nodes: int = 15
    max_match: int = 16
    min_match: int = 2
    max_depth: int = 10

    def __post_init__(self) -> None:
        check_path(f"{self.name}: datastore", self.datastore)
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, 128)
        check_integer(f"{self.name}: max_match", self.max_match, 1, 64)
        check_integer(f"{self.name}: min_match", self.min_match, 1, 64)
        check_integer(f"{self.name}: max_depth", self.max_depth, 1, 64)
        if self.min_match > self.max_match:
            msg = f"{self.name}: expected min_match at most max_match = {self.max_match}, found {self.min_match}"
            raise OptionError(msg)

    def bind(self, target: Target) -> RetrievalProposer:
        """What guesses from the datastore, whose tokens have to be the model's.

        Raises:
            CheckpointError: the datastore is missing or damaged.
            OptionError: it was made with another tokenizer, or none is given outside a clone.
        """
        store = Datastore.open(self._folder())
        header = store.header
        if target.vocabulary not in {None, header.vocabulary} or header.largest_id >= target.decoder.config.vocab_size:
            found = f"{self.datastore or 'that of pronk-tiny'}, of another tokenizer"
            msg = f"{self.name}: expected a datastore of this model's tokens, found {found}; {_BUILD}"
            raise OptionError(msg)
        return RetrievalProposer(self, store, target)

    def _folder(self) -> Path:
        if self.datastore is not None:
            return Path(self.datastore).expanduser()
        own = clone_model(DEFAULT_MODEL)
        if own is None:
            msg = f"{self.name}: expected a datastore, found none; {_BUILD}"
            raise OptionError(msg)
        return own / "datastore"


class RetrievalProposer(Proposer[AcceptanceRates]):
    """Retrieval from an open datastore.

    Attributes:
        options: it guesses by.
        store: the datastore.
    """

    name = Retrieval.name
    capabilities = Capabilities(observes_all_steps=False)

    def __init__(self, options: Retrieval, store: Datastore, target: Target) -> None:
        self.options, self.store, self.target = options, store, target

    def start(self, prompt: Sequence[int]) -> AcceptanceRates:  # noqa: ARG002 - the text is the context's
        """What is believed of guesses before any was verified."""
        priors = {way: _PRIORS[way // _WAYS][way % _WAYS] for way in range(len(_PRIORS) * _WAYS)}
        return AcceptanceRates(self.name, priors, SharedAcceptance.of(self.target))

    def propose(self, contexts: Sequence[DraftContext[AcceptanceRates]]) -> list[TokenTree]:
        """The likeliest continuations of each text's end."""
        return [self._tree(context) for context in contexts]

    def observe(self, outcome: Outcome[AcceptanceRates]) -> None:
        """Learn how far the datastore can be trusted with this text."""
        outcome.state.learn(outcome)

    def _tree(self, context: DraftContext[AcceptanceRates]) -> TokenTree:
        """Best first: the likeliest node that is not in the tree comes in, and its children become candidates."""
        trie = Trie(context.tokens[-1])
        options, store = self.options, self.store
        nodes, depth = min(options.num_nodes, context.max_nodes), min(options.max_depth, context.max_depth)
        found = store.find(context.tokens, options.max_match)
        if found.length < options.min_match or nodes < 1 or depth < 1:
            return trie.tree(0)
        frontier = Frontier[tuple[int, int, Child]]()  # parent, way, and the place in the datastore
        parent, low, high = 0, found.low, found.high
        while len(trie) <= nodes:
            above, rates = trie.depths[parent], context.state
            if above < depth:
                length = found.length + above
                for child in store.children(low, high, length, nodes - len(trie) + 1):
                    way = _way(length, child.high - child.low, high - low)
                    frontier.offer(trie.gains[parent] * rates.rate(way, above + 1), (parent, way, child))
            if not frontier:
                break
            gain, (parent, way, (token, low, high)) = frontier.take()
            parent = trie.add(parent, token, gain, (self.name, way))
        return trie.tree(nodes)


def _way(length: int, count: int, total: int) -> int:
    """The way of a guess that followed a phrase of ``length`` tokens ``count`` of ``total`` times."""
    return bisect_right(_LENGTHS, length) * _WAYS + bisect_right(_SHARES, count / (total + 1))
