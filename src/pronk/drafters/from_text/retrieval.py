"""Retrieval (He et al. 2023, REST): propose the most frequent continuations in a datastore.

Source of the draft tokens: a datastore of tokenized text. The longest suffix of the text that occurs in the datastore
is looked up. Its continuations, weighted by frequency, become the tree; the most frequent path comes first ::

    text      … return self
    corpus    return self . _name      3 ×
              return self . _value     2 ×        return self ┬ .  5 of 6 ┬ _name   3 of 5
              return self ,            1 ×                    │           └ _value  2 of 5
                                                              └ ,  1 of 6

When it pays: for outputs that resemble *other* texts, such as boilerplate, an API's idioms and answers like earlier
answers. ``pronk datastore build`` makes a datastore of such texts. A clone of the repository has one for
``pronk-tiny``, of 0.2 M tokens of Python, sums and prose. Without a match it proposes nothing.

Cost: 0.13 ms of host time per step with 10 M tokens (maximum of 100 steps: 0.4 ms), with the accessed pages in memory;
the time grows with the logarithm of the number of tokens. On disk a datastore takes 6 bytes per token (8 with a
vocabulary of 65,536 or more).
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

# Kinds of draft tokens, each with an acceptance rate: pairs of a class of the match length and a class of the token's
# share of the continuations. The share is k / (n + 1) for k of n occurrences, since one occurrence is no certainty.
# Each number is the lower bound of a class; the first class lies below all of them.
_LENGTHS = (3, 4, 6, 9)
_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.66, 0.8, 0.92)
_NUM_SHARES = len(_SHARES) + 1

# Prior acceptance rates: rows by length, columns by share. Measured on ``pronk-tiny`` with datastores of 0.2 M and 10 M
# tokens.
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
        datastore: folder of ``pronk datastore build``; ``None`` selects the clone's datastore for ``pronk-tiny``.
        num_nodes: maximum number of draft tokens per step, 1..128.
        max_match: maximum match length in tokens, 1..64.
        min_match: minimum match length in tokens, 1..max_match.
        max_depth: maximum depth of the tree in tokens, 1..64.
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
        """Open the datastore and return a proposer.

        Raises:
            CheckpointError: the datastore is missing or damaged.
            OptionError: the datastore was made with another tokenizer, or is not given outside a clone.
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
    """Retrieval from an open datastore."""

    name = Retrieval.name
    capabilities = Capabilities(observes_all_steps=False)

    def __init__(self, options: Retrieval, store: Datastore, target: Target) -> None:
        self.options, self.store, self.target = options, store, target

    def start(self, prompt: Sequence[int]) -> AcceptanceRates:  # noqa: ARG002 - the context has the text
        """Return the prior acceptance rates."""
        priors = {kind: _PRIORS[kind // _NUM_SHARES][kind % _NUM_SHARES] for kind in range(len(_PRIORS) * _NUM_SHARES)}
        return AcceptanceRates(self.name, priors, SharedAcceptance.of(self.target))

    def propose(self, contexts: Sequence[DraftContext[AcceptanceRates]]) -> list[TokenTree]:
        """Return for each context a tree of the likeliest continuations."""
        return [self._tree(context) for context in contexts]

    def observe(self, outcome: Outcome[AcceptanceRates]) -> None:
        """Update the acceptance rates."""
        outcome.state.learn(outcome)

    def _tree(self, context: DraftContext[AcceptanceRates]) -> TokenTree:
        """Grow a tree best first: add the candidate of largest gain, then offer its children."""
        trie = Trie(context.tokens[-1])
        options, store = self.options, self.store
        nodes, depth = min(options.num_nodes, context.max_nodes), min(options.max_depth, context.max_depth)
        found = store.find(context.tokens, options.max_match)
        if found.length < options.min_match or nodes < 1 or depth < 1:
            return trie.tree(0)
        frontier = Frontier[tuple[int, int, Child]]()  # parent, kind, and the interval in the datastore
        parent, low, high = 0, found.low, found.high
        while len(trie) <= nodes:
            parent_depth, rates = trie.depths[parent], context.state
            if parent_depth < depth:
                length = found.length + parent_depth
                for child in store.children(low, high, length, nodes - len(trie) + 1):
                    kind = _kind_of(length, child.high - child.low, high - low)
                    frontier.push(trie.gains[parent] * rates.rate(kind, parent_depth + 1), (parent, kind, child))
            if not frontier:
                break
            gain, (parent, kind, (token, low, high)) = frontier.pop()
            parent = trie.add(parent, token, gain, (self.name, kind))
        return trie.tree(nodes)


def _kind_of(length: int, count: int, total: int) -> int:
    """Return the kind of a token that follows a match of ``length`` in ``count`` of ``total`` places."""
    return bisect_right(_LENGTHS, length) * _NUM_SHARES + bisect_right(_SHARES, count / (total + 1))
