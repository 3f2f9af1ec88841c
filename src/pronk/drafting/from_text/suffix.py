"""Suffix decoding (Oliaro et al. 2024): propose the likeliest continuations of the longest match.

The longest suffix of the text that occurs in the request's text or in the *store* of earlier
outputs (the match) is looked up in suffix automata, which are indexes of all substrings.
``docs/methods/suffix.md`` describes the tree. A match that no token follows, at the end of the
text, is shortened at its front until one does. If the cost of forward passes is known, nodes with
too small a gain to pay for their row are left out.

Security: all requests with equal options share a store, so response times may reveal other users'
outputs. Set ``store_tokens=0`` to disable the store, or bind one proposer for each user
(``Suffix(…).bind(target)``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pronk.base.checks import check_integer, check_number, check_path
from pronk.base.errors import OptionError
from pronk.base.keywords import known_keywords
from pronk.drafting.from_text._growth import (
    PRIORS,
    SuffixIndex,
    TreeBuilder,
    make_suffix_index,
    make_tree_builder,
)
from pronk.drafting.from_text._suffix_store import SuffixStore
from pronk.drafting.proposer import Capabilities, DraftContext, Drafter, Outcome, Proposer
from pronk.drafting.target import Target
from pronk.kernels.suffixes import TreeLimits
from pronk.sampling.tree import TokenTree
from pronk.sampling.tree_size import MAX_TREE


@dataclass
class SuffixState:
    """State of one request: its index, and its output for the store."""

    index: SuffixIndex  # index of the request's text as of the last proposal
    # builder of the request's draft trees, made at the first proposal
    tree_builder: TreeBuilder | None = field(default=None, repr=False, compare=False)
    # committed tokens, which ``stop`` adds to the store
    output: list[int] = field(default_factory=list)
    # True under rejection sampling: the output must not enter the store. It depends on the
    # request's random numbers. Another request with the same seed has the same numbers, and its
    # draft tokens must be independent of them.
    private: bool = False


@known_keywords
@dataclass(frozen=True)
class Suffix(Drafter):
    """Options of suffix decoding.

    Attributes:
        num_nodes: maximum number of draft tokens per step, 1..1023.
        max_match: maximum match length in tokens, 2..64.
        min_match: minimum match length in tokens, 1..max_match.
        depth_factor: maximum depth of a draft token per token of the match, 0.25..64; depth 1 is
            always allowed.
        store_tokens: maximum number of tokens of earlier outputs in the store, 0..16777216; 0
            disables the store.
        store: file of JSON lines that keeps the store across processes, or ``None``.
    """

    name = "suffix"
    row_options = ("num_nodes",)

    num_nodes: int = 15
    max_match: int = 16
    min_match: int = 1
    depth_factor: float = 4.0
    store_tokens: int = 65536
    store: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, MAX_TREE - 1)
        check_integer(f"{self.name}: max_match", self.max_match, 2, 64)
        check_integer(f"{self.name}: min_match", self.min_match, 1, 64)
        check_number(f"{self.name}: depth_factor", self.depth_factor, 0.25, 64)
        check_integer(f"{self.name}: store_tokens", self.store_tokens, 0, 2**24)
        check_path(f"{self.name}: store", self.store)
        if self.min_match > self.max_match:
            msg = (
                f"{self.name}: expected min_match at most max_match = {self.max_match}, found "
                f"{self.min_match}"
            )
            raise OptionError(msg)
        if self.store is not None and not self.store_tokens:
            msg = (
                f"{self.name}: expected store_tokens of at least 1 for store={self.store!r}, found "
                "0; increase it"
            )
            raise OptionError(msg)

    def bind(self, target: Target) -> SuffixProposer:
        store = SuffixStore(self.max_match, self.store_tokens)
        # without a file the vocabulary, whose hash takes a second, is not needed
        if self.store is not None:
            store.open(
                Path(self.store), target.tokenizer_fingerprint, target.decoder.config.vocab_size
            )
        return SuffixProposer(self, store, target)

    def for_adapter(self) -> Suffix | None:
        """Return the options of a proposer with a separate store for the requests of one adapter.

        The store has no file, because the file has outputs of the model without an adapter.
        ``None`` if there is no store.
        """
        return replace(self, store=None) if self.store_tokens else None


class SuffixProposer(Proposer[SuffixState]):
    """Proposer of suffix decoding; all requests of a target share it and its store."""

    name = Suffix.name

    def __init__(self, options: Suffix, store: SuffixStore, target: Target) -> None:
        self.options = options
        self.store = store
        self.target = target
        self.observes = options.store_tokens > 0
        self.capabilities = Capabilities(observes_all_steps=self.observes)

    def start(self, prompt: Sequence[int]) -> SuffixState:  # noqa: ARG002 - contexts hold the text
        return SuffixState(make_suffix_index(self.options.max_match))

    def propose(self, contexts: Sequence[DraftContext[SuffixState]]) -> list[TokenTree]:
        return list(map(self._build_tree, contexts))

    def observe(self, outcome: Outcome[SuffixState]) -> None:
        state = outcome.state
        state.output.extend(outcome.committed)
        state.private = outcome.params.rejects

    def stop(self, state: SuffixState) -> None:
        """Add the request's output to the store, from which later requests draft.

        Outputs under the rejection rules are not added: they depend on random numbers of which the
        draft tokens of other requests must be independent.
        """
        if not state.private:
            self.store.add(state.output)

    def _build_tree(self, context: DraftContext[SuffixState]) -> TokenTree:
        options = self.options
        state = context.state
        rates = context.ledger.acceptance.rates(self.name, PRIORS)
        if state.tree_builder is None or state.tree_builder.rates is not rates:
            state.tree_builder = make_tree_builder(rates, self.name)
        # ``context.tokens`` may end with draft tokens of a composite drafter, which the index must
        # not contain.
        stop = context.block_table.length + 1
        appended = context.tokens[state.index.num_known : stop]
        max_nodes = min(options.num_nodes, context.max_nodes)
        min_gain = context.plan.min_gain
        limits = TreeLimits(
            max_nodes, context.max_depth, options.min_match, options.depth_factor, min_gain
        )
        indexes = [state.index, *self.store.generations]
        return state.tree_builder.build(indexes, context.tokens, limits, appended)
