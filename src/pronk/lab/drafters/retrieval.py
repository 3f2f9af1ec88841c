"""Retrieval (He et al. 2023, REST): propose the most frequent continuations in a datastore.

A datastore is a tokenized corpus on disk with an index. The longest suffix of the request's text
that occurs in the corpus is the *match*. The tokens that follow the match in the corpus become the
tree, the most frequent path first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pronk import Drafter, OptionError, Proposer, TokenTree
from pronk.base import known_keywords
from pronk.base.checks import check_integer, check_path
from pronk.checkpoint import TINY_MODEL, clone_model
from pronk.drafting import MAX_TREE, Capabilities, DraftContext, Frontier, Target, Trie
from pronk.lab.drafters.datastore.reader import Child, Datastore

_ADVICE = (
    "build one with pronk datastore build OUT FILES --model MODEL and use it with "
    "retrieval(datastore='OUT')"
)

# Acceptance rates are measured by *kind* of draft token: a class of match lengths and a class of
# shares. A token that follows k of the n occurrences of the match has the share k / (n + 1): 1 of 1
# (0.5) is less certain than 10 of 10. Each bound is the smallest value of a class. The length
# classes, for example, are 1-2, 3, 4-5, 6-8, and 9 or more.
_LENGTH_BOUNDS = (3, 4, 6, 9)
_SHARE_BOUNDS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.66, 0.8, 0.92)
_NUM_SHARE_CLASSES = len(_SHARE_BOUNDS) + 1

# Initial acceptance rates, measured with ``pronk-tiny`` and datastores of 0.2 M and 10 M tokens:
# one row per length class, one column per share class.
_PRIORS = (
    (0.02, 0.03, 0.06, 0.10, 0.13, 0.16, 0.26, 0.50, 0.70),
    (0.02, 0.03, 0.06, 0.10, 0.19, 0.18, 0.44, 0.50, 0.80),
    (0.02, 0.04, 0.08, 0.10, 0.28, 0.25, 0.46, 0.75, 0.90),
    (0.02, 0.04, 0.15, 0.12, 0.35, 0.35, 0.47, 0.75, 0.90),
    (0.02, 0.05, 0.15, 0.12, 0.45, 0.50, 0.70, 0.90, 0.95),
)
_PRIORS_BY_KIND = dict(enumerate(prior for row in _PRIORS for prior in row))


@known_keywords
@dataclass(frozen=True)
class Retrieval(Drafter):
    """Options of retrieval, which drafts frequent continuations from a datastore.

    Attributes:
        datastore: folder written by ``pronk datastore build``; ``None`` is the datastore of
            ``pronk-tiny`` in a clone of the repository.
        num_nodes: maximum number of draft tokens per step, 1..1023.
        max_match: maximum match length in tokens, 1..64.
        min_match: minimum match length in tokens, 1..max_match.
        max_depth: maximum number of draft tokens on a path of the tree, 1..64.
    """

    name = "retrieval"
    row_options = ("num_nodes",)

    datastore: str | None = None
    num_nodes: int = 15
    max_match: int = 16
    min_match: int = 2
    max_depth: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(f"{self.name}: datastore", self.datastore)
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, MAX_TREE - 1)
        check_integer(f"{self.name}: max_match", self.max_match, 1, 64)
        check_integer(f"{self.name}: min_match", self.min_match, 1, 64)
        check_integer(f"{self.name}: max_depth", self.max_depth, 1, 64)
        if self.min_match > self.max_match:
            msg = (
                f"{self.name}: expected min_match at most max_match = {self.max_match}, found "
                f"{self.min_match}"
            )
            raise OptionError(msg)

    def bind(self, target: Target) -> RetrievalProposer:
        store = Datastore.open(self._folder())
        header = store.header
        is_other_tokenizer = target.tokenizer_fingerprint not in {None, header.vocabulary}
        if is_other_tokenizer or header.largest_id >= target.decoder.config.vocab_size:
            found = f"{self.datastore or 'that of pronk-tiny'}, of another tokenizer"
            msg = (
                f"{self.name}: expected a datastore of this model's tokens, found {found}; "
                f"{_ADVICE}"
            )
            raise OptionError(msg)
        return RetrievalProposer(self, store, target)

    def _folder(self) -> Path:
        if self.datastore is not None:
            return Path(self.datastore).expanduser()
        model = clone_model(TINY_MODEL)
        if model is None:
            msg = f"{self.name}: expected a datastore, found none; {_ADVICE}"
            raise OptionError(msg)
        return model / "datastore"


class RetrievalProposer(Proposer[None]):
    """Proposes continuations from one datastore, for all requests of a target."""

    name = Retrieval.name
    capabilities = Capabilities(observes_all_steps=False)

    def __init__(self, options: Retrieval, store: Datastore, target: Target) -> None:
        self.options = options
        self.store = store
        self.target = target

    def start(self, prompt: Sequence[int]) -> None: ...

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        return [self._build_tree(context) for context in contexts]

    def _build_tree(self, context: DraftContext[None]) -> TokenTree:
        """Grow a tree of continuations of the match, the node of largest gain first.

        The gain of a node is the product of the acceptance rates on its path.
        """
        trie = Trie(context.tokens[-1])
        options = self.options
        store = self.store
        rates = context.acceptance.rates(self.name, _PRIORS_BY_KIND)
        max_nodes = min(options.num_nodes, context.max_nodes)
        max_depth = min(options.max_depth, context.max_depth)
        match = store.find(context.tokens, options.max_match)
        if match.length < options.min_match or max_nodes < 1 or max_depth < 1:
            return trie.tree(0)
        # Nodes that may be added: (parent node, kind, token with its suffixes).
        candidates = Frontier[tuple[int, int, Child]]()
        node = 0
        low = match.low
        high = match.high
        while len(trie) <= max_nodes:
            depth = trie.depths[node]
            if depth < max_depth:
                length = match.length + depth
                for child in store.children(low, high, length, max_nodes - len(trie) + 1):
                    kind = _kind_of(length, child.high - child.low, high - low)
                    gain = trie.gains[node] * rates.rate(kind, depth + 1)
                    candidates.push(gain, (node, kind, child))
            if not candidates:
                break
            gain, (parent, kind, (token, low, high)) = candidates.pop()
            node = trie.add(parent, token, gain, (self.name, kind))
        return trie.tree(max_nodes)


def _kind_of(match_length: int, count: int, total: int) -> int:
    """Return the kind of a token that follows ``count`` of the ``total`` occurrences of a match."""
    length_class = bisect_right(_LENGTH_BOUNDS, match_length)
    share_class = bisect_right(_SHARE_BOUNDS, count / (total + 1))
    return length_class * _NUM_SHARE_CLASSES + share_class
