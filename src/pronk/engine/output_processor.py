"""A step's last part: what the target said of one request's tree becomes tokens, rows of the cache, and a report.

Rows are numbered as the nodes of the draft are: node 0 is the last certain token. Before it come, in a pass over a
prompt, rows of that prompt's tokens, which have no guesses below them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronk.engine.request import Request
from pronk.engine.scheduler import ScheduledRequest
from pronk.engine.stats import StepStats
from pronk.errors import PronkError
from pronk.execution.attention import Early, Segment
from pronk.execution.forward_job import ForwardJob
from pronk.kv_cache.paged import PagedCache
from pronk.sampling.acceptance import choices
from pronk.sampling.sampler import NotFiniteError, is_finite, token_logprobs
from pronk.sampling.stateless import Logits
from pronk.sampling.verify import VerifiedPath, verify_tree
from pronk.speculation.proposer import Outcome
from pronk.speculation.tree import TokenTree

__all__ = ["OutputProcessor", "StepPlan"]

_GUIDE = "guide"  # the source of tokens that the model was not asked for


class StepPlan(NamedTuple):
    """One request's part of a step.

    Attributes:
        scheduled: how many of its pending tokens take part.
        draft: the guesses, below the last of these.
        job: its rows in the pass: the pending tokens, and the guesses.
    """

    scheduled: ScheduledRequest
    draft: TokenTree
    job: ForwardJob

    @property
    def request(self) -> Request:
        """Whose it is."""
        return self.scheduled.request

    @property
    def above(self) -> int:
        """Rows of the pass before the draft's."""
        return len(self.job.segment.tree) - len(self.draft)

    def source(self, node: int) -> str:
        """Who guessed a node of the draft: as the tree says, or else the request's drafter."""
        if self.draft.origin is not None:
            return self.draft.origin[node][0]
        return "" if self.request.proposer is None else self.request.proposer.name


class OutputProcessor:
    """Plans passes, and settles what they say, one request at a time.

    Whatever is raised in settling a request ends that request, with what was raised as its error; the others of the
    step do not notice.
    """

    def __init__(self, cache: PagedCache, clock: Callable[[], float]) -> None:
        self.cache, self.clock = cache, clock
        self.window = cache.config.window

    def plan(self, scheduled: ScheduledRequest, draft: TokenTree | None) -> StepPlan:
        """The request's rows in the next pass, with places for them in the cache."""
        request, block_table = scheduled.request, scheduled.request.block_table
        lead = request.tokens[block_table.length : block_table.length + scheduled.count]
        draft = draft or TokenTree.chain(lead[-1:])
        tree = draft if scheduled.count == 1 else TokenTree.chain(lead)
        self.cache.prepare(block_table, block_table.length + len(tree))
        early, block_table.started = Early.of(block_table.started, tree), None
        if early is not None and min(request.needs.hidden, default=early.layers + 1) <= early.layers:
            early = None  # another part of the drafter reads what the pass would leave out
        first = len(tree) - len(draft) if scheduled.decodes else len(tree)
        wanted = range(0 if request.reports_prompt else first, len(tree))
        whole = request.reports_prompt or request.params.rejects or request.needs.logits
        job = ForwardJob(
            Segment(block_table, tree, early=early),
            wanted,
            len(request.prompt),
            whole=whole,
            stateless_sampler=None if whole else request.sampler.stateless_sampler,
        )
        return StepPlan(scheduled, draft, job)

    def settle(
        self, plan: StepPlan, logits: Logits, hidden: Mapping[int, Tensor], chosen: Mapping[int, int] | None = None
    ) -> Outcome[Any] | None:
        """Walk one request's tree and commit what the target chose.

        Args:
            plan: its part of the step.
            logits: ``[wanted rows, vocab]`` of the pass.
            hidden: layer number to ``[rows, hidden]`` of the pass, for the layers that guessers need.
            chosen: tokens after wanted rows, by their places, where whoever has their logits has chosen them.

        Returns:
            What its guesser is to hear; ``None`` if the request has ended with an error, or its prompt is not through.
        """
        try:
            return self._settle(plan, logits, hidden, chosen)
        except NotFiniteError:
            plan.request.fail(PronkError(_not_finite(self.cache.dtype)))
        except Exception as error:  # noqa: BLE001 - of this request alone, whatever it is
            plan.request.fail(error)
        return None

    def _settle(
        self, plan: StepPlan, logits: Logits, hidden: Mapping[int, Tensor], chosen: Mapping[int, int] | None
    ) -> Outcome[Any] | None:
        request, scheduled = plan.request, plan.scheduled
        before = len(logits) - (len(plan.draft) if scheduled.decodes else 0)
        of_prompt, logits = logits[:before], logits[before:] if before else logits
        # What plain decoding does not look at cannot end a request: a wrong guess may overflow where the text does
        # not. So the walk checks what it chooses from; other rules look at every guess.
        _check(of_prompt)
        if request.params.rejects:
            _check(logits[:])
        self._report_prompt(plan, of_prompt)
        if not scheduled.decodes:
            self._commit_rows(request, range(scheduled.count))
            return None
        position = request.block_table.length + plan.above
        request.sampler.recover()  # it may have been told of choices of a step that was interrupted
        found = verify_tree(plan.draft, choices(request.sampler, plan.draft, logits, chosen))
        committed = self._commit_tokens(plan, found, logits)
        jumped = self._jump(request)
        # A request with guesses has one pending token, so that its draft is the whole tree of the pass.
        # No row beyond the text, where it ends within the path: the last token is never in the cache.
        self._commit_rows(request, [0, *found.path][: len(committed)] if found.path else range(scheduled.count))
        committed += jumped
        self._record(plan, found, len(committed))
        needs = request.needs
        return Outcome(
            request.draft_state,
            plan.draft,
            found.path,
            committed,
            position,
            request.params,
            logits[:] if needs.logits else None,
            {layer: hidden[layer][plan.above :] for layer in needs.hidden},
        )

    def _commit_tokens(self, plan: StepPlan, found: VerifiedPath, logits: Logits) -> tuple[int, ...]:
        """Append what the target chose, up to the request's end; returns these tokens."""
        request = plan.request
        reports: list[dict[int, float]] | None = None
        if request.params.logprobs is not None:
            wanted = request.params.logprob_token_ids
            reports = token_logprobs(logits[[0, *found.path]], found.tokens, request.params.logprobs, wanted)
        before = len(request.tokens)
        sources = [*(plan.source(node) for node in found.path), None]
        try:
            for count, token in enumerate(found.tokens):
                report = reports[count] if reports else None
                if not request.append(token, source=sources[count], logprobs=report):
                    break
        finally:
            request.sampler.settle(len(request.tokens) - before)
        return found.tokens[: len(request.tokens) - before]

    def _jump(self, request: Request) -> tuple[int, ...]:
        """Append what the guide forces, if the request asks for that; returns these tokens."""
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
            request.sampler.settle(len(request.tokens) - before)
        return tuple(request.tokens[before:])

    def _commit_rows(self, request: Request, offsets: list[int] | range) -> None:
        if isinstance(offsets, list):
            request.stats.moved += sum(offset != place for place, offset in enumerate(offsets))
        self.cache.commit(request.block_table, offsets)
        self.cache.learn(request.block_table, request.tokens, request.salt)
        if self.window is not None:
            self.cache.release_before(request.block_table, request.block_table.length - self.window + 1)

    def _report_prompt(self, plan: StepPlan, logits: Tensor) -> None:
        """Log-probabilities of the prompt's tokens that follow this pass's rows of the prompt."""
        request, top = plan.request, plan.request.params.prompt_logprobs
        if top is None or not request.reports_prompt:
            return
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        first = request.block_table.length + 1
        known = len(request.prompt_logprobs) - first  # from before it was preempted
        following = request.prompt[first + known : first + len(logits)]
        request.prompt_logprobs.extend(token_logprobs(logits[known:], following, top))

    def _record(self, plan: StepPlan, found: VerifiedPath, tokens: int) -> None:
        stats, draft = plan.request.stats, plan.draft
        depths = [depth for node, depth in enumerate(draft.depths) if draft.acceptable[node]]
        clock = self.clock() - plan.request.began
        clocks = (stats.draft_seconds, stats.target_seconds, clock)
        rows = len(plan.job.segment.tree)
        stats.steps.append(StepStats(rows, len(depths) - 1, max(depths), len(found.path), tokens, *clocks))
        accepted = set(found.path)
        draft_tokens = [node for node in range(1, len(draft)) if draft.acceptable[node]]
        stats.count_sources([(plan.source(node), node in accepted) for node in draft_tokens])
        if draft.gain is not None and not plan.request.params.rejects:
            gain, reached = draft.gain, {0, *found.path}
            judged = [
                node for node in draft_tokens if draft.parents[node] in reached and gain[draft.parents[node]] > 0.0
            ]
            stats.count_gains([(gain[node] / gain[draft.parents[node]], node in accepted) for node in judged])


def _check(logits: Tensor) -> None:
    if len(logits) and not is_finite(logits):
        raise NotFiniteError


def _not_finite(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    cause = "its weights are damaged"
    if dtype != torch.float32:
        cause = f'they overflow, or {cause}; try dtype="float32"'
    return f"expected finite logits, found others in {name}: {cause}"
