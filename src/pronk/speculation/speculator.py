"""Call proposers, drop draft tokens that cost more time than they save, and charge request budgets.

Drafting costs time: the proposer's own time, and additional rows in the forward pass. The request budget
(:mod:`pronk.speculation.request_budget`) counts this time in *plain steps*. A plain step is the time of a forward pass
without draft tokens, divided by its number of requests.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import finalize

from pronk.engine.request import Request
from pronk.engine.request_step import RequestStep
from pronk.engine.scheduler import ScheduledRequest
from pronk.engine.validate_draft import validate_draft
from pronk.errors import PronkError
from pronk.execution.model_runner import ModelRunner
from pronk.interrupts import interruptible
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.node_selection import select_paying_nodes
from pronk.speculation.proposer import DraftContext, Outcome, Proposer
from pronk.speculation.request_budget import RequestBudget, SharedBudget
from pronk.speculation.tree import TokenTree

__all__ = ["Speculator"]

_log = logging.getLogger(__name__)

# Maximum number of draft tokens that the selection by cost keeps in one tree.
_MAX_DRAFT_TOKENS = 1024


class Speculator:
    """Calls each proposer once per step, for all of its requests together.

    If a proposer raises an exception or returns an invalid tree, the request continues without draft tokens.
    :attr:`~pronk.engine.stats.Stats.draft_error` and a line in the log give the reason.

    Attributes:
        budget: if True, request budgets limit drafting, and draft tokens that cost more time than they save are dropped
            (:mod:`pronk.speculation.node_selection`).
        costs: seconds of this step's forward pass by its number of rows; ``None`` until a forward pass without draft
            tokens has been measured.
        seconds: duration of all proposer calls of this step.
    """

    def __init__(self, runner: ModelRunner, *, budget: bool) -> None:
        self.runner, self.budget = runner, budget
        self.vocab_size = runner.decoder.config.vocab_size
        self.costs: CostCurve | None = None
        self.seconds = 0.0
        self._num_decoding = 1
        self._propose_seconds: dict[Request, float] = {}
        self._observe_seconds: dict[Request, float] = {}
        self._shared_budgets: dict[int, SharedBudget] = {}

    def begin(self, batch: Sequence[ScheduledRequest], preempted: Sequence[Request]) -> None:
        """Begin a step: call the proposers' ``on_preempt`` for preempted requests, ``start`` for new ones."""
        self.runner.early_tokens.clear()  # of the previous step: tokens whose first layers drafters have computed
        self._on_preempt(preempted)
        self.seconds, self._propose_seconds, self._observe_seconds = 0.0, {}, {}
        for request in (scheduled.request for scheduled in batch):
            if request.draft_started or request.proposer is None:
                continue
            proposer, began = request.proposer, self.runner.clock()
            try:
                request.draft_state = request.proposer.start(list(request.tokens))
                request.draft_started = True
            except Exception as error:  # noqa: BLE001 - proposers are user code
                self._give_up(request, error)
            if self.budget and not proposer.capabilities.bypass_budget and request.request_budget is None:
                request.request_budget = RequestBudget(self._shared_budget(proposer))
            self._record_draft_time([request], began, {})  # into a new dict: request budgets do not pay for start()

    def propose(self, batch: Sequence[ScheduledRequest]) -> dict[Request, TokenTree]:
        """Return the token trees to verify, only for requests that have draft tokens."""
        drafts: dict[Request, TokenTree] = {}
        draft_slots = {scheduled.request: scheduled.num_draft_slots for scheduled in batch if scheduled.num_draft_slots}
        self.costs, self._num_decoding = self._cost_curve(batch), max(1, _count_plain_rows(batch)[0])
        for proposer, requests in _group_by_proposer(draft_slots):
            allowed = self._requests_with_budget(proposer, requests)
            if allowed:
                drafts.update(self._call(proposer, allowed, draft_slots))
        return self._select(batch, drafts)

    def update(
        self, steps: Sequence[RequestStep], outcomes: Mapping[Request, Outcome[Any]], context: int, began: float
    ) -> None:
        """End a step: pass outcomes to proposers, record the step's duration, and charge request budgets.

        Args:
            steps: one entry per request of the step.
            outcomes: verification results of the decoding requests.
            context: number of cached tokens before the forward pass, summed over its requests.
            began: start of the step by the runner's clock, in seconds.
        """
        self._observe(outcomes)
        seconds = self.runner.clock() - began - self.seconds
        self.runner.record_duration([step.job for step in steps], context, seconds)
        self._close_step(steps, outcomes, seconds)

    def _observe(self, outcomes: Mapping[Request, Outcome[Any]]) -> None:
        """Pass outcomes to proposers; drop those of requests without budget, or at least their tensors."""
        for proposer, requests in _group_by_proposer(outcomes):
            began = self.runner.clock()
            for request in requests:
                suspended = request not in self._propose_seconds and not _has_budget(proposer, request)
                if suspended and not proposer.capabilities.observes_all_steps:
                    continue
                try:
                    proposer.observe(outcomes[request].without_tensors if suspended else outcomes[request])
                except Exception as error:  # noqa: BLE001 - proposers are user code
                    self._give_up(request, error)
            self._record_draft_time(requests, began, self._observe_seconds)

    def _close_step(
        self, steps: Sequence[RequestStep], outcomes: Mapping[Request, Outcome[Any]], seconds: float
    ) -> None:
        """Charge request budgets for this step, and add the step to the decision traces of its requests.

        Args:
            steps: one entry per request of the step.
            outcomes: verification results of the decoding requests.
            seconds: duration of the step without the time spent in proposers.
        """
        proposing, self._propose_seconds = self._propose_seconds, {}
        observing, self._observe_seconds = self._observe_seconds, {}
        self._charge(steps, outcomes, proposing, observing, seconds)
        for step in steps:
            decision_trace, outcome = step.request.decision_trace, outcomes.get(step.request)
            if decision_trace is not None and outcome is not None:
                costs = self.costs if self.budget else None
                decision_trace.record_step(outcome, costs, self._num_decoding, seconds, step.request.request_budget)

    def _charge(
        self,
        steps: Sequence[RequestStep],
        outcomes: Mapping[Request, Outcome[Any]],
        proposing: Mapping[Request, float],
        observing: Mapping[Request, float],
        seconds: float,
    ) -> None:
        """Charge each request's budget for drafting and for its draft rows; credit accepted tokens.

        ``proposing`` and ``observing`` are each request's seconds in the proposer's ``propose`` and ``observe``.
        """
        decoding, prompt_rows = _count_plain_rows([step.scheduled for step in steps])
        costs = self._cost_curve([step.scheduled for step in steps]) if self.budget and decoding else None
        if costs is None:
            return
        draft_tokens = {step.request: step.draft.num_draft_tokens for step in steps}
        plain_step, draft_rows = costs.at(decoding) / decoding, sum(draft_tokens.values())
        estimate = self.runner.costs_for([step.job for step in steps], costs).at(prompt_rows + decoding + draft_rows)
        # Seconds that the draft rows add to the forward pass. A finite estimate is preferred to the measured duration,
        # which other processes may prolong. At most one plain step per draft row is charged, because the first forward
        # pass with draft tokens includes one-time work.
        added = (estimate if math.isfinite(estimate) else seconds) - costs.at(prompt_rows + decoding)
        added = min(max(0.0, added), draft_rows * plain_step)
        for request, outcome in outcomes.items():
            if (request_budget := request.request_budget) is not None:
                saved = max(0, min(len(outcome.path), len(outcome.committed) - 1))
                row_seconds = added * draft_tokens[request] / draft_rows if draft_rows else 0.0
                proposed, observed = proposing.get(request, 0.0), observing.get(request, 0.0)
                request_budget.settle(proposed / plain_step, row_seconds / plain_step, saved, observed / plain_step)

    def _on_preempt(self, requests: Iterable[Request]) -> None:
        """Let proposers free the KV blocks that preempted requests hold in a draft model's cache."""
        for request in requests:
            if request.proposer is not None and request.draft_started:
                try:
                    request.proposer.on_preempt(request.draft_state)
                except Exception as error:  # noqa: BLE001 - proposers are user code
                    self._give_up(request, error)

    def stop(self, request: Request) -> None:
        """Free the draft state of a request that has ended."""
        if request.request_budget is not None:
            request.request_budget.close()
        if request.proposer is not None and request.draft_started:
            request.draft_started = False
            try:
                request.proposer.stop(request.draft_state)
            except Exception as error:  # noqa: BLE001 - proposers are user code
                self._give_up(request, error)

    def _call(
        self, proposer: Proposer[Any], requests: Sequence[Request], draft_slots: Mapping[Request, int]
    ) -> dict[Request, TokenTree]:
        """Return a proposer's token trees; if the call for all requests raises, call it once per request."""
        began = self.runner.clock()
        try:
            drafts = self._proposals(proposer, requests, draft_slots)
        except Exception as error:  # noqa: BLE001 - proposers are user code
            if len(requests) == 1:
                self._give_up(requests[0], error)
                return {}
            return {
                key: tree for request in requests for key, tree in self._call(proposer, [request], draft_slots).items()
            }
        self._record_draft_time(requests, began, self._propose_seconds)
        return drafts

    def _requests_with_budget(self, proposer: Proposer[Any], requests: list[Request]) -> list[Request]:
        """Return the requests with budget left, except those for which ``should_skip`` returns True."""
        if not self.budget or proposer.capabilities.bypass_budget:
            return requests
        if self.costs is None:
            return []  # a forward pass without draft tokens has to be measured first
        funded = [request for request in requests if _has_budget(proposer, request)]
        return [request for request in funded if not proposer.should_skip(request.draft_state, request.tokens)]

    def _shared_budget(self, proposer: Proposer[Any]) -> SharedBudget:
        """Return the budget that all requests of a proposer share; create it at the first call."""
        budget_owner = proposer.budget_owner
        shared_budget = self._shared_budgets.get(id(budget_owner))
        if shared_budget is None:
            shared_budget = self._shared_budgets[id(budget_owner)] = SharedBudget()
            finalize(budget_owner, self._shared_budgets.pop, id(budget_owner)).atexit = False
        return shared_budget

    def _record_draft_time(
        self, requests: Sequence[Request], began: float, seconds_by_request: dict[Request, float]
    ) -> None:
        """Record the time since ``began``; add each request's equal share to ``seconds_by_request``."""
        seconds = self.runner.clock() - began
        self.seconds += seconds
        for request in requests:
            request.stats.draft_seconds += seconds
            if request.decision_trace is not None:
                request.decision_trace.add_draft_seconds(seconds / len(requests))
            seconds_by_request[request] = seconds_by_request.get(request, 0.0) + seconds / len(requests)

    def _proposals(
        self, proposer: Proposer[Any], requests: Sequence[Request], draft_slots: Mapping[Request, int]
    ) -> dict[Request, TokenTree]:
        try:
            contexts = [self._context(request, draft_slots[request]) for request in requests]
            with interruptible():
                proposed = proposer.propose(contexts)
            trees = {
                request: validate_draft(proposer.name, context, tree, self.vocab_size)
                for request, context, tree in zip(requests, contexts, proposed, strict=True)
            }
            for request, tree in trees.items():
                if request.decision_trace is not None:
                    request.decision_trace.record_proposal(proposer.source_reports(request.draft_state), tree)
            return {request: tree for request, tree in trees.items() if tree.num_draft_tokens}
        finally:
            # A proposer that raised may have left draft tokens in the context of a sampler: remove them.
            for request in requests:
                request.sampler.recover()

    def _context(self, request: Request, num_draft_slots: int) -> DraftContext[Any]:
        return DraftContext(
            request.draft_state,
            request.tokens,
            max(0, request.num_remaining - 1),
            num_draft_slots,
            request.params,
            request.sampler,
            request.block_table,
            self.costs if request.capabilities.costs else None,
            self.budget,
            request.salt,
            max_seconds=self._budget_seconds(request),
        )

    def _select(self, batch: Sequence[ScheduledRequest], drafts: dict[Request, TokenTree]) -> dict[Request, TokenTree]:
        """Drop draft tokens that cost more time than they save; keep each tree without ``gain`` whole."""
        if not self.budget or all(tree.gain is None for tree in drafts.values()):
            return drafts
        decoding, prompt_rows = _count_plain_rows(batch)
        # The acceptance rules rejection and block are exact only if draft tokens are distributed as ``probs``. Dropping
        # tokens by their gain could change this distribution. Under these rules, trees with ``probs`` stay whole.
        whole = {request for request, tree in drafts.items() if request.params.rejects and tree.probs is not None}
        candidates = [replace(tree, gain=None) if request in whole else tree for request, tree in drafts.items()]
        limits = [self._max_draft_tokens(request, prompt_rows + decoding) for request in drafts]
        kept = select_paying_nodes(candidates, decoding, self.costs, prompts=prompt_rows, most=limits)
        selected = zip(drafts, kept, strict=True)
        return {request: drafts[request] if request in whole else tree for request, tree in selected}

    def _budget_seconds(self, request: Request) -> float:
        """Return the rest of the request's budget in seconds; infinite if nothing limits it."""
        if request.request_budget is None or self.costs is None:
            return math.inf
        return request.request_budget.left * self.costs.at(self._num_decoding) / self._num_decoding

    def _max_draft_tokens(self, request: Request, base_rows: int) -> int:
        """Return how many draft rows, besides ``base_rows`` rows, the request's budget can pay for."""
        costs = self.costs
        if request.request_budget is None or costs is None:
            return _MAX_DRAFT_TOKENS
        # The proposal is already paid for, so its rows may cost one plain step even if the budget is used up.
        max_seconds = costs.at(base_rows) + max(
            self._budget_seconds(request) - self._propose_seconds.get(request, 0.0),
            costs.at(self._num_decoding) / self._num_decoding,
        )
        return bisect_right(range(1, _MAX_DRAFT_TOKENS), max_seconds, key=lambda count: costs.at(base_rows + count))

    def _cost_curve(self, batch: Sequence[ScheduledRequest]) -> CostCurve | None:
        """Return the cost curve of a forward pass over the batch; ``None`` before the first measurement."""
        decoding, _ = _count_plain_rows(batch)
        return self.runner.cost_model.costs(
            sum(scheduled.request.block_table.length for scheduled in batch), max(1, decoding)
        )

    def _give_up(self, request: Request, error: Exception) -> None:
        """Continue a request without draft tokens after its proposer failed."""
        proposer, request.proposer = request.proposer, None
        if proposer is None:
            return
        is_pronk_error = isinstance(error, PronkError)  # its message is clear without the type
        request.stats.draft_error = str(error) if is_pronk_error else f"{type(error).__name__}: {error}"
        _log.warning("%s: %s; the request continues without draft tokens", proposer.name, request.stats.draft_error)
        _log.debug("traceback of %s", proposer.name, exc_info=error)
        if request.draft_started:
            request.draft_started = False
            with suppress(Exception):  # only ``error``, the first one, is reported
                proposer.stop(request.draft_state)


def _has_budget(proposer: Proposer[Any], request: Request) -> bool:
    """Return whether the request's budget covers another proposal."""
    request_budget = request.request_budget
    return request_budget is None or (
        request_budget.may_choose if proposer.capabilities.self_budgeting else request_budget.may_ask
    )


def _count_plain_rows(batch: Sequence[ScheduledRequest]) -> tuple[int, int]:
    """Return the numbers of decoding requests and of prompt tokens: the rows without draft tokens."""
    decoding = sum(scheduled.num_tokens == 1 for scheduled in batch)
    return decoding, sum(scheduled.num_tokens for scheduled in batch) - decoding


def _group_by_proposer(requests: Iterable[Request]) -> list[tuple[Proposer[Any], list[Request]]]:
    """Group requests by proposer object; proposers that compare equal may hold different states."""
    groups: dict[int, tuple[Proposer[Any], list[Request]]] = {}
    for request in requests:
        if request.proposer is not None:
            groups.setdefault(id(request.proposer), (request.proposer, []))[1].append(request)
    return list(groups.values())
