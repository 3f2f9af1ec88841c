"""A step's last part: what the target said of one request's tree becomes tokens, rows of the cache, and a report.

Rows are numbered as the nodes of the draft are: node 0 is the last certain token. Before it come, in a pass over a
prompt, rows of that prompt's tokens, which have no guesses below them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronk.cache.paged import PagedCache
from pronk.choosing.alone import Logits
from pronk.choosing.chooser import NotFiniteError, is_finite, token_logprobs
from pronk.choosing.rules import choices
from pronk.choosing.walk import Walk, walk
from pronk.drafters.base import Outcome
from pronk.engine.request import Request
from pronk.engine.scheduler import Turn
from pronk.engine.stats import Step
from pronk.errors import PronkError
from pronk.passes.attention import Early, Segment
from pronk.passes.stage import Job
from pronk.tree import TokenTree

__all__ = ["Plan", "Settling"]

_GUIDE = "guide"  # the source of tokens that the model was not asked for


class Plan(NamedTuple):
    """One request's part of a step.

    Attributes:
        turn: how many of its pending tokens take part.
        draft: the guesses, below the last of these.
        job: its rows in the pass: the pending tokens, and the guesses.
    """

    turn: Turn
    draft: TokenTree
    job: Job

    @property
    def request(self) -> Request:
        """Whose it is."""
        return self.turn.request

    @property
    def above(self) -> int:
        """Rows of the pass before the draft's."""
        return len(self.job.segment.tree) - len(self.draft)

    def source(self, node: int) -> str:
        """Who guessed a node of the draft: as the tree says, or else the request's drafter."""
        if self.draft.origin is not None:
            return self.draft.origin[node][0]
        return "" if self.request.guesser is None else self.request.guesser.name


class Settling:
    """Plans passes, and settles what they say, one request at a time.

    Whatever is raised in settling a request ends that request, with what was raised as its error; the others of the
    step do not notice.
    """

    def __init__(self, cache: PagedCache, clock: Callable[[], float]) -> None:
        self.cache, self.clock = cache, clock
        self.window = cache.config.window

    def plan(self, turn: Turn, draft: TokenTree | None) -> Plan:
        """The request's rows in the next pass, with places for them in the cache."""
        request, table = turn.request, turn.request.table
        lead = request.tokens[table.length : table.length + turn.count]
        draft = draft or TokenTree.chain(lead[-1:])
        tree = draft if turn.count == 1 else TokenTree.chain(lead)
        self.cache.prepare(table, table.length + len(tree))
        early, table.started = Early.of(table.started, tree), None
        if early is not None and min(request.needs.hidden, default=early.layers + 1) <= early.layers:
            early = None  # another part of the drafter reads what the pass would leave out
        first = len(tree) - len(draft) if turn.decodes else len(tree)
        wanted = range(0 if request.reports_prompt else first, len(tree))
        whole = request.reports_prompt or request.params.rejects or request.needs.logits
        job = Job(
            Segment(table, tree, early=early),
            wanted,
            len(request.prompt),
            whole=whole,
            choosing=None if whole else request.chooser.choosing,
        )
        return Plan(turn, draft, job)

    def settle(
        self, plan: Plan, logits: Logits, hidden: Mapping[int, Tensor], chosen: Mapping[int, int] | None = None
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
        self, plan: Plan, logits: Logits, hidden: Mapping[int, Tensor], chosen: Mapping[int, int] | None
    ) -> Outcome[Any] | None:
        request, turn = plan.request, plan.turn
        before = len(logits) - (len(plan.draft) if turn.decodes else 0)
        of_prompt, logits = logits[:before], logits[before:] if before else logits
        # What plain decoding does not look at cannot end a request: a wrong guess may overflow where the text does
        # not. So the walk checks what it chooses from; other rules look at every guess.
        _check(of_prompt)
        if request.params.rejects:
            _check(logits[:])
        self._report_prompt(plan, of_prompt)
        if not turn.decodes:
            self._commit_rows(request, range(turn.count))
            return None
        position = request.table.length + plan.above
        request.chooser.recover()  # it may have been told of choices of a step that was interrupted
        found = walk(plan.draft, choices(request.chooser, plan.draft, logits, chosen))
        committed = self._commit_tokens(plan, found, logits)
        jumped = self._jump(request)
        # A request with guesses has one pending token, so that its draft is the whole tree of the pass.
        # No row beyond the text, where it ends within the path: the last token is never in the cache.
        self._commit_rows(request, [0, *found.path][: len(committed)] if found.path else range(turn.count))
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

    def _commit_tokens(self, plan: Plan, found: Walk, logits: Logits) -> tuple[int, ...]:
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
            request.chooser.settle(len(request.tokens) - before)
        return found.tokens[: len(request.tokens) - before]

    def _jump(self, request: Request) -> tuple[int, ...]:
        """Append what the guide forces, if the request asks for that; returns these tokens."""
        guide, before = request.chooser.guide, len(request.tokens)
        if guide is None or request.params.guide_mode != "jump" or request.ended:
            return ()
        try:
            for token in guide.forced():
                if token in request.ends and request.num_generated < request.params.min_tokens:
                    break
                request.chooser.advance(token)
                request.stats.jumped += 1
                if not request.append(token, source=_GUIDE, logprobs=None):
                    break
        finally:
            request.chooser.settle(len(request.tokens) - before)
        return tuple(request.tokens[before:])

    def _commit_rows(self, request: Request, offsets: list[int] | range) -> None:
        if isinstance(offsets, list):
            request.stats.moved += sum(offset != place for place, offset in enumerate(offsets))
        self.cache.commit(request.table, offsets)
        self.cache.learn(request.table, request.tokens, request.salt)
        if self.window is not None:
            self.cache.release_before(request.table, request.table.length - self.window + 1)

    def _report_prompt(self, plan: Plan, logits: Tensor) -> None:
        """Log-probabilities of the prompt's tokens that follow this pass's rows of the prompt."""
        request, top = plan.request, plan.request.params.prompt_logprobs
        if top is None or not request.reports_prompt:
            return
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        first = request.table.length + 1
        known = len(request.prompt_logprobs) - first  # from before it was preempted
        following = request.prompt[first + known : first + len(logits)]
        request.prompt_logprobs.extend(token_logprobs(logits[known:], following, top))

    def _record(self, plan: Plan, found: Walk, tokens: int) -> None:
        stats, draft = plan.request.stats, plan.draft
        depths = [depth for node, depth in enumerate(draft.depths) if draft.acceptable[node]]
        clock = self.clock() - plan.request.began
        clocks = (stats.draft_seconds, stats.target_seconds, clock)
        rows = len(plan.job.segment.tree)
        stats.steps.append(Step(rows, len(depths) - 1, max(depths), len(found.path), tokens, *clocks))
        accepted = set(found.path)
        guesses = [node for node in range(1, len(draft)) if draft.acceptable[node]]
        stats.count_sources([(plan.source(node), node in accepted) for node in guesses])
        if draft.gain is not None and not plan.request.params.rejects:
            gain, reached = draft.gain, {0, *found.path}
            judged = [node for node in guesses if draft.parents[node] in reached and gain[draft.parents[node]] > 0.0]
            stats.count_trust([(gain[node] / gain[draft.parents[node]], node in accepted) for node in judged])


def _check(logits: Tensor) -> None:
    if len(logits) and not is_finite(logits):
        raise NotFiniteError


def _not_finite(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    cause = "its weights are damaged"
    if dtype != torch.float32:
        cause = f'they overflow, or {cause}; try dtype="float32"'
    return f"expected finite logits, found others in {name}: {cause}"
