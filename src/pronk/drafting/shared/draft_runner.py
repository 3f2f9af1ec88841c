"""A draft model at run time: its weights, its KV pool, and its forward passes.

Each request has a :class:`~pronk.drafting.shared.draft_cache.DraftCache`: its text, followed by the
draft tokens of the last proposal. At the next proposal the accepted draft tokens are already
cached. Other new tokens (the prompt, a bonus token, another drafter's tokens) are run in one
forward pass, whose last row gives the logits of the first draft token. If more than ``MAX_UNREAD``
tokens are new, the cache is emptied and begins anew with the last ones: reading a long text costs
many forward passes of the target, and draft tokens depend mostly on the text just before them.
If costs are ignored (``budget="all"``), the whole text is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from pronk.base.arrays import Array
from pronk.base.errors import CacheFullError
from pronk.base.interrupts import uninterrupted
from pronk.drafting.proposer import DraftContext
from pronk.drafting.shared.chain import Chain, draft_chains
from pronk.drafting.shared.draft_cache import DraftCache
from pronk.drafting.shared.module_runner import CHUNK
from pronk.drafting.shared.vocabulary.translation import Translation
from pronk.drafting.target import Target
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.layer_executor import ChainJob
from pronk.models.model_runner import ModelRunner
from pronk.sampling.draft_token import DraftLogits
from pronk.sampling.tree import TokenTree

# Most tokens that a draft model reads before it drafts. In four answers to HumanEval and GSM8K,
# Qwen2.5-Coder 0.5 B chose the token of the 1.5 B model in 86 % of cases after the whole prompt, in
# 84 % after 64 tokens, in 81 % after 32.
MAX_UNREAD = 64


# Callback ``make_entry(context, tree, logits_nodes, num_computed)``: returns the entry of a forward
# pass that runs the nodes of ``tree`` after the first ``num_computed``, which are cached, below the
# cached tokens of ``context.state``.
MakeEntry = Callable[[DraftContext[DraftCache], TokenTree, range, int], BatchEntry]


def make_draft_entry(
    context: DraftContext[DraftCache], tree: TokenTree, logits_nodes: range, num_computed: int
) -> BatchEntry:
    """Return a draft model's entry in a forward pass; arguments as in :data:`MakeEntry`.

    Positions count from the first token that the model has read, which may be in the middle of the
    text.
    """
    cache = context.state
    prompt_length = len(cache.tokens) or logits_nodes.start + 1
    # The last token's row may be needed again: see :meth:`DraftCache.align`.
    num_final = max(0, cache.num_final - 1)
    return BatchEntry(cache.block_table, tree, logits_nodes, prompt_length, num_computed, num_final)


class DraftRunner:
    """Owns the draft model and its KV pool.

    Runs the model for several requests in shared forward passes.

    Attributes:
        runner: the draft model with its KV pool.
        translation: maps between the vocabularies of target and draft.
        context_length: context length of the draft model, in tokens.
        relative_size: bytes of the weight matrices that a forward pass of the draft model reads,
            divided by those of the target. A draft token is expected to cost this part of a forward
            pass of the target until passes of the draft model have been measured.
        max_unread: most tokens that are read before the first draft token; ``None`` for all of
            them.
        keeps_drafts: whether the rows of accepted draft tokens are used for the text. False if they
            can differ from those that the model computes for the text; then they are run again.
        kv_layers: numbers (from 1) of the target's layers whose keys and values the model reads.
    """

    def __init__(
        self,
        runner: ModelRunner,
        translation: Translation,
        target: Target,
        relative_size: float,
        *,
        max_unread: int | None = MAX_UNREAD,
        keeps_drafts: bool = True,
        kv_layers: tuple[int, ...] = (),
        make_entry: MakeEntry = make_draft_entry,
    ) -> None:
        self.runner = runner
        self.target = target
        self.cost_model = runner.cost_model
        self.translation = translation
        self.relative_size = relative_size
        self.context_length = runner.decoder.config.context
        self.max_unread = max_unread
        self.keeps_drafts = keeps_drafts
        self.kv_layers = kv_layers
        self._make_entry = make_entry

    def make_cache(self) -> DraftCache:
        """Return the empty cache of a new request."""
        return DraftCache(self.runner.cache, self.translation.make_reencoder())

    def draft_chains(self, chains: Sequence[Chain]) -> None:
        """Draft the tokens of empty ``chains`` of several requests in shared forward passes.

        The state of each chain's context is the request's :class:`DraftCache`.
        """
        if len(chains) <= self.runner.max_chains and all(
            self.supports_draft_chain(chain.context) for chain in chains
        ):
            self.draft_in_one_call(chains)
        else:
            draft_chains(chains, self._next_logits)

    def _next_logits(self, chains: Sequence[Chain]) -> list[DraftLogits | None]:
        """Return the logits after each chain; ``None`` if the model's context is full."""
        contexts = [chain.context for chain in chains]
        if not chains[0].draft_tokens:  # first round: all chains are empty
            return [
                None if logits is None else DraftLogits(logits)
                for logits in self.forward_texts(contexts)
            ]
        ready = [chain for chain in chains if self.num_free_positions(chain.context.state)]
        tokens = [self.to_draft_ids(chain.tokens[-1:]) for chain in ready]
        rows = self.forward_tokens([chain.context for chain in ready], tokens)
        by_chain = dict(zip(ready, map(DraftLogits, rows), strict=True))
        return [by_chain.get(chain) for chain in chains]

    def forward_texts(self, contexts: Sequence[DraftContext[DraftCache]]) -> list[Array | None]:
        """Run the uncached tokens of each request's text; return the logits ``[vocab]`` after it.

        The logits are ``None`` for requests that cannot draft in this step (see :meth:`align`).
        """
        pending = self.align(contexts)
        ready = [
            (each, new) for each, new in zip(contexts, pending, strict=True) if new is not None
        ]
        logits = self.forward_tokens([context for context, _ in ready], [new for _, new in ready])
        rows = iter(logits)
        return [None if new is None else next(rows) for new in pending]

    def align(self, contexts: Sequence[DraftContext[DraftCache]]) -> list[list[int] | None]:
        """Drop cached rows that are not those of the request's text; prefill long texts.

        A single request reads its whole text in this call, in chunks of ``CHUNK`` rows. Several
        requests together read at most ``CHUNK`` rows per step, the shortest texts first, so that no
        request waits for another's long prompt.

        Returns:
            For each request the tokens of the text that are not cached yet, as ids of the draft
            model, at least one. ``None`` if the request cannot draft in this step: KV slots are
            missing, the text exceeds the draft model's context, its vocabulary lacks the last
            token, or a part of the text has to wait for the next step.
        """
        pending = [self._align(context) for context in contexts]
        self._prefill(contexts, pending)
        return pending

    def _align(self, context: DraftContext[DraftCache]) -> list[int] | None:
        """Drop cached rows that are not those of one request's text, and allocate KV slots.

        The result is that of :meth:`align`, whatever the number of tokens.
        """
        cache = context.state
        reencoder = cache.reencoder
        # ``context.tokens`` may be longer and end with draft tokens of a drafter that wraps this
        # one.
        num_committed = context.block_table.length + 1
        with uninterrupted():
            if not self.keeps_drafts:
                cache.rollback(max(0, cache.num_committed - cache.start))
                cache.tree = None
            if reencoder is None:
                text = context.tokens
                num_unchanged = cache.num_committed
                num_final = num_committed
            else:
                num_unchanged = reencoder.update(context.tokens, cache.num_committed)
                text = reencoder.tokens
                num_final = num_unchanged
            cache.match_prefix(text, context.salt)
            if context.plan.costs is not None:
                self._skip_text(cache, len(text))
            cache.align(text, num_unchanged)
            cache.num_committed = num_committed
            cache.num_final = max(0, num_final - cache.start)
            cache.register_prefix()
            fits = self._reserve(cache, len(text) - cache.start, context)
        if not fits or (reencoder is not None and not reencoder.is_complete):
            return None
        return list(text[cache.start + len(cache.tokens) :])

    def _prefill(
        self, contexts: Sequence[DraftContext[DraftCache]], pending: list[list[int] | None]
    ) -> None:
        """Run the beginnings of long uncached texts ``pending``, by the rule of :meth:`align`.

        An element becomes ``None`` if the rest of its text has to wait for the next step.
        """
        if len(contexts) == 1:
            (new,) = pending
            while new is not None and len(new) > CHUNK:
                self.forward_tokens(contexts, [new[:CHUNK]])
                del new[:CHUNK]
            return
        texts = [(number, new) for number, new in enumerate(pending) if new is not None]
        texts.sort(key=lambda text: len(text[1]))
        rows_left = CHUNK
        for number, new in texts:
            if len(new) > rows_left:
                if rows_left:
                    self.forward_tokens([contexts[number]], [new[:rows_left]])
                pending[number] = None
            rows_left = max(0, rows_left - len(new))

    def forward_tokens(
        self, contexts: Sequence[DraftContext[DraftCache]], tokens: Sequence[Sequence[int]]
    ) -> list[Array]:
        """Run the next tokens of each request; return the logits ``[vocab]`` after them.

        ``tokens[i]`` are one or more ids of the draft model.
        """
        if not contexts:
            return []
        entries = [
            self._chain_entry(context, new) for context, new in zip(contexts, tokens, strict=True)
        ]
        rows = self._run(entries)
        for context, new in zip(contexts, tokens, strict=True):
            context.state.append(new)
        return [row[0] for row in rows]

    def supports_draft_chain(self, context: DraftContext[Any]) -> bool:
        """Whether a request's chain can be drafted in one call of the runner."""
        is_supported = self.runner.supports_draft_chain(context.sampler)
        return is_supported and self.translation.is_identity

    def draft_in_one_call(self, chains: Sequence[Chain]) -> None:
        """Draft all tokens of empty chains in one call of the kernels or of the device."""
        pending = self.align([chain.context for chain in chains])
        ready = [(chain, new) for chain, new in zip(chains, pending, strict=True) if new]
        if not ready:
            return
        with ExitStack() as stack:
            jobs = list[ChainJob]()
            for chain, new in ready:
                context = chain.context
                stack.enter_context(context.sampler.after())
                most = min(chain.max_tokens, 1 + self.num_free_positions(context.state) - len(new))
                entry = self._chain_entry(context, new)
                jobs.append(ChainJob(entry, context.sampler, most, chain.append_and_go_on))
            with uninterrupted():
                passes = self.runner.draft_chains(jobs)
                for (chain, new), num_passes in zip(ready, passes, strict=True):
                    chain.context.state.append([*new, *chain.tokens[: num_passes - 1]])

    def forward_trees(
        self,
        contexts: Sequence[DraftContext[DraftCache]],
        trees: Sequence[TokenTree],
        pending_texts: Sequence[Sequence[int]],
    ) -> list[Array]:
        """Run the nodes of each tree that are not cached; return their logits ``[nodes, vocab]``.

        ``trees[i]`` has ids of the draft model, and the root is the last token of the text. It
        begins with the nodes of the tree in the request's cache. Without those,
        ``pending_texts[i]``, the uncached tokens before the root, are run first.
        """
        entries = list[BatchEntry]()
        for context, tree, pending in zip(contexts, trees, pending_texts, strict=True):
            num_computed = len(context.state.tree or ())
            full_tree = tree.hang_below(pending)
            new_nodes = range(num_computed or len(pending), len(full_tree))
            entries.append(self._make_entry(context, full_tree, new_nodes, num_computed))
        rows = self._run(entries)
        with uninterrupted():
            for context, tree, pending in zip(contexts, trees, pending_texts, strict=True):
                context.state.append(pending)
                context.state.tree = tree
        return rows

    def num_free_positions(self, cache: DraftCache) -> int:
        """Return how many more tokens of a request fit into the draft model's context."""
        return self.context_length - len(cache.tokens)

    def to_draft_ids(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft model's ids of the target's tokens, without the tokens that it lacks."""
        ids = [self.translation.to_draft(token) for token in tokens]
        return [token for token in ids if token is not None]

    def _chain_entry(self, context: DraftContext[DraftCache], new: Sequence[int]) -> BatchEntry:
        return self._make_entry(context, TokenTree.chain(new), range(len(new) - 1, len(new)), 0)

    def _run(self, entries: Sequence[BatchEntry]) -> list[Array]:
        """Run one forward pass.

        Return each entry's float32 logits ``[nodes, vocab]``, by the target's ids.
        """
        batch = ForwardBatch(entries)
        result = self.runner.forward(batch)
        self.runner.record_duration(
            batch, result.seconds, plain=True, experts_read=result.experts_read
        )
        return [self.translation.to_target(logits[:]) for logits in result.logits]

    def _skip_text(self, cache: DraftCache, length: int) -> None:
        """Restart a cache that is more than ``max_unread`` tokens behind.

        It begins with the last ``max_unread`` tokens.
        """
        most = self.max_unread
        if most is not None and (length - 1 - cache.num_read > most or cache.start >= length):
            cache.begin_at(max(0, length - 1 - most))

    def _reserve(self, cache: DraftCache, length: int, context: DraftContext[Any]) -> bool:
        """Allocate KV slots for ``length`` tokens of the text and for draft tokens.

        Return False if the text exceeds the model's context or the pool is full.
        """
        if length > self.context_length:
            return False
        # First try to allocate the blocks of all future tokens, to get consecutive ones; then only
        # those of this step.
        for num_extra in (context.max_future_tokens, 0):
            with suppress(CacheFullError):
                cache.pool.prepare(cache.block_table, length + num_extra + context.max_nodes)
                num_free = cache.pool.num_free_updates
                return num_free is None or num_free > context.max_nodes
        return False
