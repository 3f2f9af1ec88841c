"""One request's part of a step: its entry of the batch, and verification and commit of its draft.

The root of the draft is the last token of the text. In the pass that completes the prompt, the rows
of earlier prompt tokens precede the row of the root.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import ne
from typing import Any, NamedTuple

import numpy as np

from pronk.base.arrays import Array, is_finite
from pronk.cache.paged import PagedCache
from pronk.drafting.proposer import Outcome
from pronk.engine.request import Request
from pronk.engine.scheduler import ScheduledRequest
from pronk.engine.stats import StepStats
from pronk.models.forward_batch import BatchEntry
from pronk.models.model_runner import ForwardResult
from pronk.sampling.acceptance import acceptance_rule
from pronk.sampling.log_probs import token_logprobs
from pronk.sampling.logits_processors import GuideProcessor
from pronk.sampling.sampler import NotFiniteError, Sampler
from pronk.sampling.stateless import Logits
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import VerifiedPath, verify_tree

# ``Token.source`` of tokens that a guide forces: they are appended without a forward pass
_GUIDE = "guide"


class RequestStep(NamedTuple):
    """One request's rows in a step, and the draft that the step verifies."""

    # the request, and how many of its pending tokens the forward pass computes
    scheduled: ScheduledRequest
    draft: TokenTree  # tree to verify: the last token of the pass as its root, and the draft tokens
    # The request's rows in the forward pass: the draft or, while the prompt is read, a chain of
    # pending tokens.
    entry: BatchEntry
    request: Request
    # whether the forward pass includes the last pending token, the root of the draft
    includes_root: bool

    @property
    def root_row(self) -> int:
        """Index of the row of the draft's root; rows of earlier pending tokens come before."""
        return len(self.entry.tree.tokens) - len(self.draft.tokens)

    def source(self, node: int) -> str:
        """Return the name of the drafter that proposed a node of the draft."""
        if self.draft.origin is not None:
            name, _ = self.draft.origin[node]
            return name
        proposer = self.request.speculation.proposer
        return "" if proposer is None else proposer.name


def plan_step(scheduled: ScheduledRequest, draft: TokenTree | None) -> RequestStep:
    """Return a request's rows in the next forward pass and the draft to verify.

    ``draft`` is the tree of draft tokens; ``None`` without any. A request with draft tokens has no
    other pending token than the root. The scheduler has reserved the KV slots of the rows.
    """
    request = scheduled.request
    block_table = request.block_table
    pending = request.tokens[block_table.length : block_table.length + scheduled.num_tokens]
    tree = TokenTree.chain(pending) if draft is None else draft
    num_rows = len(tree.tokens)
    if draft is None:
        draft = tree if num_rows == 1 else TokenTree.chain(pending[-1:])
    includes_root = scheduled.includes_last_token
    samples = includes_root and request.pooler is None
    first = num_rows - len(draft.tokens) if samples else num_rows
    has_prompt_logprobs = request.computes_prompt_logprobs
    if has_prompt_logprobs:
        first = 0
    all_logits = has_prompt_logprobs or request.params.rejects or request.needs_logits
    # An interrupted step may have left the sampler behind draft tokens.
    request.sampler.recover()
    library_sampler = None
    if samples and not has_prompt_logprobs:
        library_sampler = request.sampler.library_sampler
    entry = BatchEntry(
        block_table,
        tree,
        range(first, num_rows),
        len(request.prompt),
        num_final=block_table.length + scheduled.num_tokens,
        all_logits=all_logits,
        stateless_sampler=None if all_logits else request.sampler.stateless_sampler,
        library_sampler=library_sampler,
    )
    return RequestStep(scheduled, draft, entry, request, includes_root)


def verify_draft(step: RequestStep, logits: Logits, sampled: Mapping[int, int]) -> VerifiedPath:
    """Verify a request's draft; return the accepted nodes with the sampled tokens.

    The sampler advances past the sampled tokens; :meth:`OutputProcessor.process` appends them to
    the text.

    Args:
        step: the request, all of whose pending tokens are in the forward pass.
        logits: ``[nodes, vocab]`` of the draft, root included.
        sampled: tokens that a worker process sampled after a node.

    Raises:
        NotFiniteError: logits needed for sampling are infinite or NaN.
        OptionError: the request's options ban every token.
    """
    sampler = step.request.sampler
    # The coupled rule reads only the logits along the accepted path: the sampler checks these, and
    # others may be infinite. The rejection rules depend on the logits of every draft token, so all
    # are checked here.
    if step.request.params.rejects:
        _check_finite(logits[:])
    path = verify_in_library(sampler, step.draft, logits)
    return path or verify_tree(step.draft, acceptance_rule(sampler, step.draft, logits, sampled))


def verify_in_library(sampler: Sampler, tree: TokenTree, logits: Logits) -> VerifiedPath | None:
    """Follow the target's tokens down a tree by one call of the library, and advance past them.

    The tokens are those of :meth:`Sampler.choose`. Returns ``None`` if the library cannot compute
    the request's options, or the rows of logits are loaded on access. Raises ``NotFiniteError`` if
    logits on the path are not finite.
    """
    if sampler.library_sampler is None or not isinstance(logits, np.ndarray):
        return None
    path = sampler.library_sampler.verify(tree, logits, len(sampler.context))
    if path is None:
        raise NotFiniteError
    for token in path.tokens:
        sampler.advance(token)
    return path


def _check_finite(logits: Array) -> None:
    if len(logits) and not is_finite(logits):
        raise NotFiniteError


class OutputProcessor:
    """Verifies drafts, and commits them to the text and the KV cache."""

    def __init__(self, cache: PagedCache, clock: Callable[[], float]) -> None:
        self.cache = cache
        self.clock = clock

    def process(self, step: RequestStep, result: ForwardResult, index: int) -> Outcome[Any] | None:
        """Verify one request's draft after a forward pass, and commit tokens and KV rows.

        ``index`` is that of the request's entry in the batch. Returns what the drafter observes;
        ``None`` for an embedding, and while tokens of the prompt are pending.
        """
        request = step.request
        if request.pooler is not None:
            request.add_hidden(result.hidden[request.pooler.layer][index])
            self._commit_slots(request, range(step.scheduled.num_tokens))
            return None
        logits = result.logits[index]
        includes_root = step.includes_root
        num_prompt_rows = len(logits) - (len(step.draft.tokens) if includes_root else 0)
        prompt_logits = logits[:num_prompt_rows]
        if num_prompt_rows:
            _check_finite(prompt_logits)
        if not includes_root:
            self._append_prompt_logprobs(request, prompt_logits)
            self._commit_slots(request, range(step.scheduled.num_tokens))
            return None
        if num_prompt_rows:
            logits = logits[num_prompt_rows:]
        path = None if result.paths is None else result.paths[index]
        if path is None:
            path = verify_draft(step, logits, result.sampled[index] if result.sampled else {})
        else:
            for token in path.tokens:
                request.sampler.advance(token)
        if request.params.prompt_logprobs is not None:
            self._append_prompt_logprobs(request, prompt_logits)
        hidden: dict[int, Array] = {}
        for layer in request.speculation.capabilities.hidden:
            hidden[layer] = result.hidden[layer][index][step.root_row :]
        return self._commit(step, path, logits, hidden)

    def _commit(
        self, step: RequestStep, path: VerifiedPath, logits: Logits, hidden: Mapping[int, Array]
    ) -> Outcome[Any]:
        """Commit the tokens and the KV rows of a verified draft; return what the drafter observes.

        ``logits`` and ``hidden`` have a row per node of the draft, root included.
        """
        request = step.request
        position = request.block_table.length + step.root_row
        committed = self._commit_tokens(step, logits, path)
        forced: tuple[int, ...] = ()
        if request.sampler.guide is not None:
            forced = self._append_forced_tokens(request, request.sampler.guide)
        # With draft tokens, only the root is pending, so row n of the forward pass is node n of the
        # draft. Commit the rows of the root and of the committed tokens, except the last token: it
        # is pending and gets its row in the next step.
        if path.path:
            self._commit_slots(request, [0, *path.path][: len(committed)])
        else:
            self._commit_slots(request, range(step.scheduled.num_tokens))
        committed += forced
        self._record_stats(step, path, len(committed))
        return Outcome(
            request.speculation.state,
            step.draft,
            path.path,
            committed,
            position,
            request.params,
            logits[:] if request.needs_logits else None,
            hidden,
            request.speculation.ledger,
        )

    def _commit_tokens(
        self, step: RequestStep, logits: Logits, path: VerifiedPath
    ) -> tuple[int, ...]:
        """Append the sampled tokens until one ends the request; return the appended tokens."""
        request = step.request
        params = request.params
        all_logprobs: Sequence[dict[int, float] | None] = [None] * len(path.tokens)
        if params.logprobs is not None:
            rows = logits[[0, *path.path]]
            all_logprobs = token_logprobs(
                rows, path.tokens, params.logprobs, params.logprob_token_ids
            )
        before = len(request.tokens)
        sources: list[str | None] = []
        if path.path:
            sources += [step.source(node) for node in path.path]
        sources.append(None)
        try:
            for token, source, logprobs in zip(path.tokens, sources, all_logprobs, strict=True):
                if not request.append(token, source=source, logprobs=logprobs):
                    break
        finally:
            request.sampler.commit_tokens(len(request.tokens) - before)
        return path.tokens[: len(request.tokens) - before]

    def _append_forced_tokens(self, request: Request, guide: GuideProcessor) -> tuple[int, ...]:
        """Append and return the tokens that the guide forces under ``guide_mode="jump"``."""
        before = len(request.tokens)
        if request.params.guide_mode != "jump" or request.ended:
            return ()
        try:
            for token in guide.forced():
                if (
                    token in request.stop_token_ids
                    and request.num_generated < request.params.min_tokens
                ):
                    break
                request.sampler.advance(token)
                request.stats.jumped += 1
                if not request.append(token, source=_GUIDE, logprobs=None):
                    break
        finally:
            request.sampler.commit_tokens(len(request.tokens) - before)
        return tuple(request.tokens[before:])

    def _commit_slots(self, request: Request, offsets: list[int] | range) -> None:
        """Move computed KV rows behind the committed ones, and count them as committed.

        The new order is that of ``offsets``, which count from the first row after the committed
        ones. The other new rows are dropped.
        """
        if isinstance(offsets, list):
            num_moved = sum(map(ne, offsets, range(len(offsets))))
            request.stats.moved += num_moved
            if not num_moved:
                offsets = range(len(offsets))
        self.cache.commit_slots(request.block_table, offsets)
        self.cache.cache_blocks(request.block_table, request.tokens, request.cache_salt)
        self.cache.release_outside_window(request.block_table)

    def _append_prompt_logprobs(self, request: Request, logits: Array) -> None:
        """Append the ``prompt_logprobs`` of the tokens that follow this step's prompt rows.

        ``logits`` are those of the prompt rows, ``[rows, vocab]``.
        """
        top = request.params.prompt_logprobs
        if top is None or not request.computes_prompt_logprobs:
            return
        if not request.result.prompt_logprobs:
            request.result.prompt_logprobs.append(None)
        first = request.block_table.length + 1
        # number of tokens from ``first`` on whose log-probabilities were appended before a
        # preemption
        num_reported = len(request.result.prompt_logprobs) - first
        following = request.prompt[first + num_reported : first + len(logits)]
        request.result.prompt_logprobs.extend(token_logprobs(logits[num_reported:], following, top))

    def _record_stats(self, step: RequestStep, path: VerifiedPath, num_tokens: int) -> None:
        stats = step.request.stats
        draft = step.draft
        draft_tokens: Sequence[int] = range(1, len(draft.tokens))
        if draft.verify is not None:
            acceptable = draft.acceptable
            draft_tokens = [node for node in draft_tokens if acceptable[node]]
        depth = 0
        if draft_tokens:
            depth = max(map(draft.depths.__getitem__, draft_tokens))
        stats.steps.append(
            StepStats(
                rows=len(step.entry.tree.tokens),
                drafted=len(draft_tokens),
                depth=depth,
                accepted=len(path.path),
                tokens=num_tokens,
                draft_clock=stats.draft_seconds,
                target_clock=stats.target_seconds,
                clock=self.clock() - step.request.start_time,
            )
        )
        if not draft_tokens:
            return
        accepted = {0, *path.path}
        stats.count_sources([(step.source(node), node in accepted) for node in draft_tokens])
        gain = draft.gain
        if gain is None or step.request.params.rejects:
            return
        chances = list[tuple[float, bool]]()
        for node in draft_tokens:
            parent = draft.parents[node]
            if parent in accepted and gain[parent] > 0.0:
                chances.append((gain[node] / gain[parent], node in accepted))
        stats.count_gains(chances)
