"""The draft model at run time: its weights, its KV cache, and its forward passes.

A *lane* is the draft model's KV cache of one request: the request's text, followed by the draft tokens of the last
proposal. At the next proposal the accepted draft tokens are already cached. Other new tokens (the prompt, a bonus
token, another drafter's tokens) are run in one forward pass, whose last row gives the logits of the first draft token.
If more than ``MAX_UNREAD`` tokens are new, the lane is emptied and begins anew with the last ones: reading a long text
costs many forward passes of the target, and draft tokens depend mostly on the text just before them. Without a policy
(``budget="all"``) the whole text is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pronk.base.arrays import Array
from pronk.base.errors import CacheFullError
from pronk.base.interrupts import uninterrupted
from pronk.cache.paged import PagedCache
from pronk.drafting.proposer import DraftContext
from pronk.drafting.shared.chain import Chain
from pronk.drafting.shared.side_cache import CHUNK, SideLane, common_prefix_length
from pronk.drafting.shared.vocabulary.reencoder import Reencoder
from pronk.drafting.shared.vocabulary.translation import Translation
from pronk.drafting.target import Target
from pronk.models.forward_job import ForwardJob, Segment
from pronk.models.model_runner import ModelRunner
from pronk.sampling.draft_token import DraftToken
from pronk.sampling.tree import TokenTree

# Most tokens that a draft model reads before it drafts. In four answers to HumanEval and GSM8K, Qwen2.5-Coder 0.5 B
# chose the token of the 1.5 B model in 86 % of cases after the whole prompt, in 84 % after 64 tokens, in 81 % after 32.
MAX_UNREAD = 64


@dataclass
class DraftLane(SideLane):
    """The KV cache that a draft model has for one request; ``tokens`` are ids of the draft model."""

    start: int = 0  # index in the text of the first one of ``tokens``; what is before it is not read
    # For drafters that propose trees: the cached nodes of the last proposal, as ids of the draft model. The root is the
    # text's token after ``tokens``. ``None`` if no tree is cached.
    tree: TokenTree | None = None
    reencoder: Reencoder | None = None  # re-encodes the text for the draft model; ``None`` if the ids are equal

    def release(self, cache: PagedCache) -> None:
        with uninterrupted():
            super().release(cache)
            self.tree, self.start = None, 0


class DraftRunner:
    """Owns the draft model and its KV pool; runs the model for several requests in shared forward passes.

    Attributes:
        runner: the draft model with its KV pool.
        translation: maps between the vocabularies of target and draft.
        context_length: context length of the draft model, in tokens.
        relative_size: size of the draft model divided by that of the target.
        max_unread: most tokens that are read before the first draft token; ``None`` for all of them.
    """

    max_unread: int | None = MAX_UNREAD

    def __init__(self, runner: ModelRunner, translation: Translation, target: Target, relative_size: float) -> None:
        self.runner, self.target, self.cost_model = runner, target, runner.cost_model
        self.translation, self.relative_size = translation, relative_size
        self.context_length = runner.decoder.config.context

    def make_lane(self) -> DraftLane:
        return DraftLane(reencoder=self.translation.make_reencoder())

    def forward_texts(self, contexts: Sequence[DraftContext[DraftLane]]) -> list[Array | None]:
        """Run the uncached tokens of each request's text; return the logits ``[vocab]`` after each text.

        The logits are ``None`` for requests that cannot draft in this step (see :meth:`align_lanes`).
        """
        pending = self.align_lanes(contexts)
        ready = [(each.state, new) for each, new in zip(contexts, pending, strict=True) if new is not None]
        rows = iter(self.forward_tokens([lane for lane, _ in ready], [new for _, new in ready]))
        return [None if new is None else next(rows) for new in pending]

    def align_lanes(self, contexts: Sequence[DraftContext[DraftLane]]) -> list[list[int] | None]:
        """Make each lane a prefix of the request's text; prefill long texts.

        A single request reads its whole text in this call, in chunks of ``CHUNK`` rows. Several requests together read
        at most ``CHUNK`` rows per step, the shortest texts first, so that no request waits for another's long prompt.

        Returns:
            For each request the tokens of the text that are not cached yet, as ids of the draft model, at least one.
            ``None`` if the request cannot draft in this step: KV slots are missing, the text exceeds the draft
            model's context, its vocabulary lacks the last token, or a part of the text has to wait for the next step.
        """
        pending: list[list[int] | None] = []
        for context in contexts:
            lane, text, num_unchanged = context.state, context.tokens, context.state.num_committed
            with uninterrupted():
                if lane.reencoder is not None:
                    num_unchanged = lane.reencoder.update(context.tokens, lane.num_committed)
                    text = lane.reencoder.tokens
                lane.match_prefix(self.runner.cache, text, context.salt)
                if context.policy.curve is not None:
                    self._skip_text(lane, len(text))
                self._align(lane, text, num_unchanged)
                # ``context.tokens`` may be longer and end with draft tokens of a drafter that wraps this one.
                lane.num_committed = context.block_table.length + 1
                lane.num_final = lane.num_committed if lane.reencoder is None else num_unchanged
                lane.num_final = max(0, lane.num_final - lane.start)
                lane.register_prefix(self.runner.cache)
                fits = self._reserve(lane, len(text) - lane.start, context)
            fits = fits and (lane.reencoder is None or lane.reencoder.is_complete)
            pending.append(list(text[lane.start + len(lane.tokens) :]) if fits else None)
        self._prefill([context.state for context in contexts], pending)
        return pending

    def _prefill(self, lanes: Sequence[DraftLane], pending: list[list[int] | None]) -> None:
        """Run long uncached texts ``pending`` in chunks; set entries to ``None`` if the text has to wait."""
        rows_left = CHUNK
        for size, number in sorted((len(new), number) for number, new in enumerate(pending) if new is not None):
            lane, new = lanes[number], pending[number] or []
            while len(lanes) == 1 and len(new) > CHUNK:
                self.forward_tokens([lane], [new[:CHUNK]])
                del new[:CHUNK]
            if len(new) > rows_left:
                if rows_left:
                    self.forward_tokens([lane], [new[:rows_left]])
                pending[number] = None
            rows_left = max(0, rows_left - size)

    def forward_tokens(self, lanes: Sequence[DraftLane], tokens: Sequence[Sequence[int]]) -> list[Array]:
        """Run the next tokens of each lane, one or more ids of the draft model; return the logits ``[vocab]``."""
        if not lanes:
            return []
        jobs = [self._chain_job(lane, new) for lane, new in zip(lanes, tokens, strict=True)]
        rows = self._run(jobs)
        for lane, new in zip(lanes, tokens, strict=True):
            lane.append(new)
        return [row[0] for row in rows]

    def supports_draft_chain(self, context: DraftContext[Any]) -> bool:
        """Whether :meth:`draft_chain` can be used for a request."""
        stateless = context.sampler.stateless_sampler is not None
        return stateless and self.runner.supports_draft_chain and self.translation.is_identity

    def draft_chain(self, chain: Chain, is_complete: Callable[[Chain], bool]) -> None:
        """Append draft tokens to ``chain`` in one call of the kernels, until ``is_complete`` returns True."""
        lane: DraftLane = chain.context.state
        (new,) = self.align_lanes([chain.context])
        if new is None:
            return
        max_steps = min(chain.max_tokens, 1 + self.num_free_positions(lane) - len(new))
        job = self._chain_job(lane, new)

        def append(token: DraftToken) -> bool:
            return chain.append_and_go_on(token, is_complete)

        with chain.context.sampler.after(), uninterrupted():
            num_passes = self.runner.draft_chain(job, chain.context.sampler, max_steps, append)
            lane.append([*new, *chain.tokens[: num_passes - 1]])

    def forward_trees(
        self, lanes: Sequence[DraftLane], trees: Sequence[TokenTree], pending_texts: Sequence[Sequence[int]]
    ) -> list[Array]:
        """Run the nodes of each tree that are not cached; return their logits ``[new nodes, vocab]``.

        ``trees[i]`` has ids of the draft model, and the root is the last token of the text. It begins with the nodes of
        ``lanes[i].tree``, which are cached. Without those, ``pending_texts[i]``, the uncached tokens before the root,
        are run first.
        """
        jobs = []
        for lane, tree, pending in zip(lanes, trees, pending_texts, strict=True):
            num_computed, full_tree = len(lane.tree or ()), tree.hang_below(pending)
            new_nodes = range(num_computed or len(pending), len(full_tree))
            jobs.append(self.make_job(lane, full_tree, new_nodes, num_computed))
        rows = self._run(jobs)
        with uninterrupted():
            for lane, tree, pending in zip(lanes, trees, pending_texts, strict=True):
                lane.append(pending)
                lane.tree = tree
        return rows

    def make_job(self, lane: DraftLane, tree: TokenTree, logits_nodes: range, num_computed: int = 0) -> ForwardJob:
        """Return the input to run the nodes of ``tree`` after the first ``num_computed``, which are cached."""
        segment = Segment(lane.block_table, tree, num_computed)
        return ForwardJob(segment, logits_nodes, len(lane.tokens) or logits_nodes.start + 1)

    def num_free_positions(self, lane: DraftLane) -> int:
        """Return how many more tokens the request may cache within the draft model's context length."""
        return self.context_length - len(lane.tokens)

    def to_draft_ids(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft model's ids of the target's tokens, without the tokens that it lacks."""
        ids = [self.translation.to_draft(token) for token in tokens]
        return [token for token in ids if token is not None]

    def _chain_job(self, lane: DraftLane, new: Sequence[int]) -> ForwardJob:
        return self.make_job(lane, TokenTree.chain(new), range(len(new) - 1, len(new)))

    def _run(self, jobs: Sequence[ForwardJob]) -> list[Array]:
        """Run one forward pass; return each job's float32 logits ``[nodes, vocab]``, by the target's ids."""
        result = self.runner.forward(jobs)
        self.runner.record_duration(jobs, result.context, result.seconds, plain=True, touched=result.touched)
        return [self.translation.to_target(logits[:]) for logits in result.logits]

    def _skip_text(self, lane: DraftLane, length: int) -> None:
        """Empty a lane that lacks too many of ``length`` tokens, or begins after them."""
        most, num_cached = self.max_unread, lane.start + len(lane.tokens) + len(lane.tree or ())
        if most is not None and (length - 1 - num_cached > most or lane.start >= length):
            self.rollback(lane, 0)
            lane.tree, lane.start = None, max(0, length - 1 - most)

    def _align(self, lane: DraftLane, text: Sequence[int], num_unchanged: int) -> None:
        """Drop the cached tokens and nodes that differ from ``text``, and the last token of ``text``.

        The last token has to be run again for its logits. The first ``num_unchanged`` tokens are known to be the same.
        """
        start, num_cached = lane.start, len(lane.tokens)
        num_kept = common_prefix_length(lane.tokens, text, num_unchanged - start, start)
        if lane.tree is not None and num_kept == num_cached < len(text) - 1 - start:
            path = _matching_path(lane.tree, text[start + num_kept : -1])
            self.runner.cache.commit(lane.block_table, path)
            lane.append(text[start + num_kept : start + num_kept + len(path)])
        else:
            self.rollback(lane, min(num_kept, len(text) - 1 - start))
        lane.tree = None

    def rollback(self, lane: DraftLane, length: int) -> None:
        """Keep the first ``length`` cached tokens of a request, which may have fewer."""
        del lane.tokens[length:]
        self.runner.cache.rollback(lane.block_table, length)

    def _reserve(self, lane: DraftLane, length: int, context: DraftContext[Any]) -> bool:
        """Allocate KV slots for ``length`` tokens and the draft tokens; return False if they do not fit."""
        if length > self.context_length:
            return False
        num_future = max(context.max_depth, context.params.max_tokens - context.sampler.context.num_generated)
        # First try to allocate the blocks of all future tokens, to get consecutive ones; then only those of this step.
        for num_extra in (num_future, 0):
            with suppress(CacheFullError):
                self.runner.cache.prepare(lane.block_table, length + num_extra + context.max_nodes)
                return True
        return False


def _matching_path(tree: TokenTree, text: Sequence[int]) -> list[int]:
    """Return the longest path of nodes from the root whose tokens are the first tokens of ``text``."""
    path: list[int] = []
    node: int | None = 0 if text and tree.tokens[0] == text[0] else None
    while node is not None:
        path.append(node)
        node = tree.child(node, text[len(path)]) if len(path) < len(text) else None
    return path
