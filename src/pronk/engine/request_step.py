"""One request's part of a step: rows in the forward pass, verification and commit of its draft.

Draft node 0 is the last token of the text. During prefill, rows of earlier prompt tokens precede
node 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pronk.base.arrays import Array, is_finite
from pronk.cache.paged import PagedCache
from pronk.drafting.proposer import Outcome
from pronk.engine.request import Request
from pronk.engine.scheduler import ScheduledRequest
from pronk.engine.stats import StepStats
from pronk.models.forward_job import ForwardJob, Segment
from pronk.models.model_runner import JobResult
from pronk.sampling.acceptance import acceptance_rule
from pronk.sampling.sampler import NotFiniteError, token_logprobs
from pronk.sampling.stateless import Logits
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import VerifiedPath, verify_tree

# ``Token.source`` of tokens that a guide forces, so that no forward pass has to choose them
_GUIDE = "guide"


class RequestStep(NamedTuple):
    """One request's rows in the forward pass of a step."""

    scheduled: ScheduledRequest  # the request and its number of pending tokens in the forward pass
    draft: TokenTree  # tree to verify: last pending token (the root) and the draft tokens, if any
    # input of the forward pass: rows of the pending tokens, then of the draft tokens
    job: ForwardJob

    @property
    def request(self) -> Request:
        """Request that the rows belong to."""
        return self.scheduled.request

    @property
    def root_row(self) -> int:
        """Index of the row of the draft's root; rows of earlier pending tokens come before."""
        return len(self.job.segment.tree) - len(self.draft)

    def source(self, node: int) -> str:
        """Return the name of the drafter that proposed a node of the draft."""
        if self.draft.origin is not None:
            return self.draft.origin[node][0]
        return (
            ""
            if self.request.speculation.proposer is None
            else self.request.speculation.proposer.name
        )


def plan_step(scheduled: ScheduledRequest, draft: TokenTree | None) -> RequestStep:
    """Return a request's rows in the next forward pass.

    The scheduler has reserved their KV slots.
    """
    request = scheduled.request
    block_table = scheduled.request.block_table
    pending = request.tokens[block_table.length : block_table.length + scheduled.num_tokens]
    draft = draft or TokenTree.chain(pending[-1:])
    tree = draft if scheduled.num_tokens == 1 else TokenTree.chain(pending)
    samples = scheduled.includes_last_token and request.pooler is None
    first = len(tree) - len(draft) if samples else len(tree)
    all_logits = request.computes_prompt_logprobs or request.params.rejects or request.needs_logits
    job = ForwardJob(
        Segment(block_table, tree),
        range(0 if request.computes_prompt_logprobs else first, len(tree)),
        len(request.prompt),
        all_logits=all_logits,
        stateless_sampler=None if all_logits else request.sampler.stateless_sampler,
    )
    return RequestStep(scheduled, draft, job)


def verify(step: RequestStep, result: JobResult) -> tuple[Array, Logits, VerifiedPath | None]:
    """Verify one request's draft against the logits of the target.

    Returns the logits ``[rows, vocab]`` of the rows before the root, for ``prompt_logprobs``; the
    logits ``[nodes, vocab]`` of the draft's nodes, root included; and the accepted nodes with the
    sampled tokens, which are ``None`` during prefill and for an embedding. The sampler advances
    past the sampled tokens; :meth:`OutputProcessor.commit` appends them to the text. Raises
    ``NotFiniteError`` if logits needed for sampling are infinite or NaN, ``OptionError`` if the
    request's options ban every token.
    """
    request = step.request
    logits = result.logits
    if request.pooler is not None:
        return logits[:], logits, None
    num_prompt_rows = len(logits) - (len(step.draft) if step.scheduled.includes_last_token else 0)
    prompt_logits = logits[:num_prompt_rows]
    logits = logits[num_prompt_rows:] if num_prompt_rows else logits
    _check_finite(prompt_logits)
    # The coupled rule reads only the logits along the accepted path: verify_tree checks these, and
    # others may be infinite. The rejection rules depend on the logits of every draft token: check
    # all.
    if request.params.rejects:
        _check_finite(logits[:])
    if not step.scheduled.includes_last_token:
        return prompt_logits, logits, None
    request.sampler.recover()  # an interrupted step may have left the sampler beyond the text's end
    path = verify_tree(
        step.draft, acceptance_rule(request.sampler, step.draft, logits, result.sampled)
    )
    return prompt_logits, logits, path


def _check_finite(logits: Array) -> None:
    if len(logits) and not is_finite(logits):
        raise NotFiniteError


class OutputProcessor:
    """Verifies drafts, and commits them to the text and the KV cache."""

    def __init__(self, cache: PagedCache, clock: Callable[[], float]) -> None:
        self.cache = cache
        self.clock = clock

    def commit(self, step: RequestStep, result: JobResult) -> Outcome[Any] | None:
        """Verify and commit one request's part.

        Return the drafter's outcome, or ``None`` in prefill.
        """
        prompt_logits, logits, path = verify(step, result)
        request = step.request
        scheduled = step.scheduled
        self._append_prompt_logprobs(request, prompt_logits)
        if path is None:
            if request.pooler is not None:
                request.add_hidden(result.hidden[request.pooler.layer])
            self._commit_rows(request, range(scheduled.num_tokens))
            return None
        position = request.block_table.length + step.root_row
        committed = self._commit_tokens(step, logits, path)
        forced = self._append_forced_tokens(request)
        # With draft tokens, only the root is pending, so row n of the forward pass is node n of the
        # draft. Commit the rows of the root and of the committed tokens, except the last token: it
        # is pending and gets its row in the next step.
        self._commit_rows(
            request, [0, *path.path][: len(committed)] if path.path else range(scheduled.num_tokens)
        )
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
            {
                layer: result.hidden[layer][step.root_row :]
                for layer in request.speculation.capabilities.hidden
            },
            request.speculation.ledger,
        )

    def _commit_tokens(
        self, step: RequestStep, logits: Logits, path: VerifiedPath
    ) -> tuple[int, ...]:
        """Append the sampled tokens until one ends the request; return the appended tokens."""
        request = step.request
        params = step.request.params
        all_logprobs: Sequence[dict[int, float] | None] = [None] * len(path.tokens)
        if params.logprobs is not None:
            rows = logits[[0, *path.path]]
            all_logprobs = token_logprobs(
                rows, path.tokens, params.logprobs, params.logprob_token_ids
            )
        before = len(request.tokens)
        sources = [*(step.source(node) for node in path.path), None]
        try:
            for token, source, logprobs in zip(path.tokens, sources, all_logprobs, strict=True):
                if not request.append(token, source=source, logprobs=logprobs):
                    break
        finally:
            request.sampler.commit(len(request.tokens) - before)
        return path.tokens[: len(request.tokens) - before]

    def _append_forced_tokens(self, request: Request) -> tuple[int, ...]:
        """Append and return the tokens that the guide forces under ``guide_mode="jump"``."""
        guide = request.sampler.guide
        before = len(request.tokens)
        if guide is None or request.params.guide_mode != "jump" or request.ended:
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
            request.sampler.commit(len(request.tokens) - before)
        return tuple(request.tokens[before:])

    def _commit_rows(self, request: Request, offsets: list[int] | range) -> None:
        if isinstance(offsets, list):
            request.stats.moved += sum(offset != index for index, offset in enumerate(offsets))
        self.cache.commit(request.block_table, offsets)
        self.cache.cache_blocks(request.block_table, request.tokens, request.cache_salt)
        self.cache.release_outside_window(request.block_table)

    def _append_prompt_logprobs(self, request: Request, logits: Array) -> None:
        """Append the ``prompt_logprobs`` of the tokens after this step's prompt rows, from their ``logits``."""
        top = request.params.prompt_logprobs
        if top is None or not request.computes_prompt_logprobs:
            return
        if not request.result.prompt_logprobs:
            request.result.prompt_logprobs.append(None)
        first = request.block_table.length + 1
        # Number of tokens from ``first`` on that have been appended before a preemption.
        num_reported = len(request.result.prompt_logprobs) - first
        following = request.prompt[first + num_reported : first + len(logits)]
        request.result.prompt_logprobs.extend(token_logprobs(logits[num_reported:], following, top))

    def _record_stats(self, step: RequestStep, path: VerifiedPath, num_tokens: int) -> None:
        stats = step.request.stats
        draft = step.draft
        accepted = {0, *path.path}
        depths = [depth for node, depth in enumerate(draft.depths) if draft.acceptable[node]]
        stats.steps.append(
            StepStats(
                rows=len(step.job.segment.tree),
                drafted=len(depths) - 1,
                depth=max(depths),
                accepted=len(path.path),
                tokens=num_tokens,
                draft_clock=stats.draft_seconds,
                target_clock=stats.target_seconds,
                clock=self.clock() - step.request.start_time,
            )
        )
        draft_tokens = [node for node in range(1, len(draft)) if draft.acceptable[node]]
        stats.count_sources([(step.source(node), node in accepted) for node in draft_tokens])
        if draft.gain is not None and not step.request.params.rejects:
            pairs = [(node, draft.parents[node]) for node in draft_tokens]
            gain = draft.gain
            reached = [(node, parent) for node, parent in pairs if parent in accepted]
            stats.count_gains(
                [
                    (gain[n] / gain[parent], n in accepted)
                    for n, parent in reached
                    if gain[parent] > 0.0
                ]
            )
