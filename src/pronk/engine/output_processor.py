"""Commit of a step: append verified tokens, commit KV rows, update statistics, build drafter outcomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pronk.arrays import Array
from pronk.engine.request import Request
from pronk.engine.request_step import RequestStep, VerifiedStep
from pronk.engine.stats import StepStats
from pronk.kv_cache.paged import PagedCache
from pronk.sampling.sampler import token_logprobs
from pronk.sampling.verify import VerifiedPath
from pronk.speculation.proposer import Outcome

_GUIDE = "guide"  # ``Token.source`` of tokens that a guide forces, so that no forward pass has to choose them


class OutputProcessor:
    """Commits verified drafts to the text and the KV cache."""

    def __init__(self, cache: PagedCache, clock: Callable[[], float]) -> None:
        self.cache, self.clock = cache, clock
        self.window = cache.config.window

    def commit(self, verified: VerifiedStep) -> Outcome[Any] | None:
        """Commit the tokens and KV rows of one request; return the drafter's outcome, or ``None`` in prefill."""
        step, path = verified.step, verified.path
        request, scheduled = step.request, step.scheduled
        self._append_prompt_logprobs(request, verified.prompt_logits)
        if path is None:
            if request.pooler is not None:
                request.add_hidden(verified.result.hidden[request.pooler.layer])
            self._commit_rows(request, range(scheduled.num_tokens))
            return None
        position = request.block_table.length + step.root_row
        committed = self._commit_tokens(verified, path)
        forced = self._append_forced_tokens(request)
        # With draft tokens, only the root is pending, so row n of the forward pass is node n of the draft. Commit the
        # rows of the root and of the committed tokens, except the last token: it is pending and gets its row in the
        # next step.
        self._commit_rows(request, [0, *path.path][: len(committed)] if path.path else range(scheduled.num_tokens))
        committed += forced
        self._record_stats(step, path, len(committed))
        capabilities = request.capabilities
        return Outcome(
            request.draft_state,
            step.draft,
            path.path,
            committed,
            position,
            request.params,
            verified.logits[:] if request.needs_logits else None,
            {layer: verified.result.hidden[layer][step.root_row :] for layer in capabilities.hidden},
            request.policy,
        )

    def _commit_tokens(self, verified: VerifiedStep, verified_path: VerifiedPath) -> tuple[int, ...]:
        """Append the sampled tokens until one ends the request; return the appended tokens."""
        step, logits = verified.step, verified.logits
        request = step.request
        all_logprobs: list[dict[int, float]] | None = None
        if request.params.logprobs is not None:
            extra_ids = request.params.logprob_token_ids
            all_logprobs = token_logprobs(
                logits[[0, *verified_path.path]], verified_path.tokens, request.params.logprobs, extra_ids
            )
        before = len(request.tokens)
        sources = [*(step.source(node) for node in verified_path.path), None]
        try:
            for count, token in enumerate(verified_path.tokens):
                logprobs = all_logprobs[count] if all_logprobs else None
                if not request.append(token, source=sources[count], logprobs=logprobs):
                    break
        finally:
            request.sampler.commit(len(request.tokens) - before)
        return verified_path.tokens[: len(request.tokens) - before]

    def _append_forced_tokens(self, request: Request) -> tuple[int, ...]:
        """Append and return the tokens that the guide forces under ``guide_mode="jump"``."""
        guide, before = request.sampler.guide, len(request.tokens)
        if guide is None or request.params.guide_mode != "jump" or request.ended:
            return ()
        try:
            for token in guide.forced():
                if token in request.stop_token_ids and request.num_generated < request.params.min_tokens:
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
        if self.window is not None:
            self.cache.release_before(request.block_table, request.block_table.length - self.window + 1)

    def _append_prompt_logprobs(self, request: Request, logits: Array) -> None:
        """Append the ``prompt_logprobs`` of the tokens after this step's prompt rows, from their ``logits``."""
        top = request.params.prompt_logprobs
        if top is None or not request.computes_prompt_logprobs:
            return
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        first = request.block_table.length + 1
        # Number of tokens from ``first`` on that have been appended before a preemption.
        num_reported = len(request.prompt_logprobs) - first
        following = request.prompt[first + num_reported : first + len(logits)]
        request.prompt_logprobs.extend(token_logprobs(logits[num_reported:], following, top))

    def _record_stats(self, step: RequestStep, verified_path: VerifiedPath, num_tokens: int) -> None:
        stats, draft = step.request.stats, step.draft
        clock = self.clock() - step.request.start_time
        clocks = (stats.draft_seconds, stats.target_seconds, clock)
        rows = len(step.job.segment.tree)
        if len(draft) == 1:  # no draft tokens
            stats.steps.append(StepStats(rows, 0, 0, 0, num_tokens, *clocks))
            return
        depths = [depth for node, depth in enumerate(draft.depths) if draft.acceptable[node]]
        stats.steps.append(StepStats(rows, len(depths) - 1, max(depths), len(verified_path.path), num_tokens, *clocks))
        accepted = set(verified_path.path)
        draft_tokens = [node for node in range(1, len(draft)) if draft.acceptable[node]]
        stats.count_sources([(step.source(node), node in accepted) for node in draft_tokens])
        if draft.gain is not None and not step.request.params.rejects:
            gain, reached = draft.gain, {0, *verified_path.path}
            evaluated = [
                node for node in draft_tokens if draft.parents[node] in reached and gain[draft.parents[node]] > 0.0
            ]
            stats.count_gains([(gain[node] / gain[draft.parents[node]], node in accepted) for node in evaluated])
