"""Drafting in each step: call proposers, choose the draft tokens to verify, record costs."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pronk.base.errors import PronkError, describe_error
from pronk.base.interrupts import interruptible
from pronk.drafting.acceptance_stats import AcceptanceStats, RequestAcceptance
from pronk.drafting.checked_proposals import call_propose
from pronk.drafting.ledger import FinishedStep, Ledger, RequestLedger
from pronk.drafting.planned_calls import observe_planned, propose_planned
from pronk.drafting.planner import select_nodes, stays_whole
from pronk.drafting.proposer import DraftContext, Outcome, Proposer
from pronk.drafting.step_costs import StepCosts
from pronk.drafting.tree_union import TreeUnion
from pronk.engine.request import Request
from pronk.engine.request_step import RequestStep
from pronk.engine.scheduler import ScheduledRequest
from pronk.engine.validate_draft import validate_draft
from pronk.models.adapters import Adapter
from pronk.models.forward_batch import ForwardBatch
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree import TokenTree

_log = logging.getLogger(__name__)


class Speculator:
    """Calls each proposer once per step, for all of its requests together.

    If a proposer raises an exception or returns an invalid tree, the request continues without
    draft tokens. :attr:`~pronk.engine.stats.Stats.draft_error` and a line in the log give the
    reason.
    """

    def __init__(self, runner: ModelRunner, *, budget: bool, stats: AcceptanceStats | None) -> None:
        """Create a speculator.

        With ``budget``, the planner decides which drafters propose and which draft tokens are
        verified; otherwise all do and are.

        ``stats`` are the acceptance statistics of all requests without an adapter; ``None``: each
        request has its own.
        """
        self.runner = runner
        self.budget = budget
        self.vocab_size = runner.decoder.config.vocab_size
        self.ledger = Ledger()
        self.seconds = 0.0  # seconds of all calls of proposers in this step
        # Numbers of decoding requests and of prompt tokens in this step. Their sum is the number of
        # rows of the forward pass without draft tokens.
        self.num_decoding = 0
        self.num_prompt_rows = 0
        self._stats_by_adapter: dict[Adapter | None, AcceptanceStats] | None = None
        if stats is not None:
            self._stats_by_adapter = defaultdict(AcceptanceStats, {None: stats})

    def begin(self, batch: Sequence[ScheduledRequest], preempted: Sequence[Request]) -> None:
        """Begin a step: call ``on_preempt`` for preempted requests, ``start`` for new ones."""
        for request in preempted:
            if request.speculation.proposer is not None and request.speculation.started:
                try:
                    request.speculation.proposer.on_preempt(request.speculation.state)
                except Exception as error:  # noqa: BLE001 - proposers are user code
                    self._give_up(request, error)
        self.seconds = 0.0
        self.num_decoding = 0
        self.num_prompt_rows = 0
        for scheduled in batch:
            if scheduled.num_tokens == 1:
                self.num_decoding += 1
            else:
                self.num_prompt_rows += scheduled.num_tokens
            request = scheduled.request
            request.speculation.ledger.begin()
            if request.speculation.started or request.speculation.proposer is None:
                continue
            params = request.params
            began = self.runner.clock()
            stats = (
                None if self._stats_by_adapter is None else self._stats_by_adapter[request.adapter]
            )
            if stats is not None:
                stats.assume(request.speculation.proposer.known_acceptance)
            acceptance = RequestAcceptance(stats, params.temperature, private=params.rejects)
            request.speculation.ledger = RequestLedger(self.ledger, acceptance)
            request.stats.regret = request.speculation.ledger.regret
            try:
                request.speculation.state = request.speculation.proposer.start(list(request.tokens))
                request.speculation.started = True
            except Exception as error:  # noqa: BLE001 - proposers are user code
                self._give_up(request, error)
            self._record_draft_time([request], began)

    def propose(self, batch: Sequence[ScheduledRequest]) -> dict[Request, TokenTree]:
        """Return the token trees to verify, only for requests that have draft tokens."""
        drafts: dict[Request, TokenTree] = {}
        draft_slots: dict[Request, int] = {}
        for scheduled in batch:
            if scheduled.num_draft_slots:
                draft_slots[scheduled.request] = scheduled.num_draft_slots
        self.ledger.begin_step(self._step_costs(batch), len(draft_slots))
        if not draft_slots:
            return drafts
        began = self.seconds
        for proposer, group in _group_by_proposer(draft_slots):
            everything = not self.budget or proposer.capabilities.bypass_budget
            requests: list[Request] = []
            for request in group:
                has_guide = request.params.guide is not None
                ledger = request.speculation.ledger
                if ledger.begin_proposals(everything=everything, has_guide=has_guide):
                    requests.append(request)
            if requests:
                drafts.update(self._call(proposer, requests, draft_slots))
        return self._select(drafts, self.seconds - began)

    def update(
        self,
        steps: Sequence[RequestStep],
        outcomes: Mapping[Request, Outcome[Any]],
        batch: ForwardBatch,
        began: float,
        *,
        experts_read: float | None = None,
    ) -> None:
        """End a step: pass outcomes to the proposers; record durations, costs and savings.

        ``outcomes`` are the verification results of the decoding requests. ``began`` is the time at
        which the step began, by the runner's clock. ``batch`` are the rows of the forward pass, and
        ``experts_read`` is the number of experts that it read, relative to a pass of one row.
        """
        self._observe(outcomes)
        seconds = self.runner.clock() - began - self.seconds
        num_draft_rows = 0
        for step in steps:
            num_draft_rows += len(step.draft.tokens) - 1
        self._record_step(steps, outcomes, seconds, num_draft_rows)
        self.runner.record_duration(
            batch, seconds, plain=not num_draft_rows, experts_read=experts_read
        )
        for step in steps:
            decision_trace = step.request.speculation.trace
            outcome = outcomes.get(step.request)
            if decision_trace is not None and outcome is not None:
                decision_trace.record_step(
                    outcome, self.ledger.costs, seconds, self.ledger.allowance
                )

    def stop(self, request: Request) -> None:
        """Free the draft state of a request that has ended."""
        if request.speculation.proposer is not None and request.speculation.started:
            request.speculation.started = False
            try:
                request.speculation.proposer.stop(request.speculation.state)
            except Exception as error:  # noqa: BLE001 - proposers are user code
                self._give_up(request, error)

    def _step_costs(self, batch: Sequence[ScheduledRequest]) -> StepCosts | None:
        """Return the costs of a step; ``None`` without a budget, or if they are not known."""
        if not self.budget:
            return None
        context = 0
        for scheduled in batch:
            context += scheduled.request.block_table.length
        curve = self.runner.cost_model.costs(context, len(batch))
        return None if curve is None else StepCosts(curve, max(1, self.num_decoding))

    def _record_step(
        self,
        steps: Sequence[RequestStep],
        outcomes: Mapping[Request, Outcome[Any]],
        seconds: float,
        num_draft_rows: int,
    ) -> None:
        """Record in the ledger how many seconds the step's drafting cost and saved.

        ``seconds`` is the duration of the step without the time of drafters.
        """
        has_drafters = False
        for step in steps:
            has_drafters = has_drafters or step.request.needs_draft_slots
        num_saved = 0
        ledgers: list[RequestLedger] = []
        for request, outcome in outcomes.items():
            num_saved += outcome.num_saved
            ledgers.append(request.speculation.ledger)
        finished = FinishedStep(
            seconds,
            self.seconds,
            self.num_decoding,
            self.num_prompt_rows,
            num_draft_rows,
            num_saved,
            has_drafters,
        )
        self.ledger.record_step(finished, ledgers)

    def _observe(self, outcomes: Mapping[Request, Outcome[Any]]) -> None:
        """Count which draft tokens equal the new text, and pass the outcomes to the proposers."""
        for proposer, requests in _group_by_proposer(outcomes):
            if not (proposer.capabilities.proposes or proposer.capabilities.observes_all_steps):
                continue
            began = self.runner.clock()
            for request in requests:
                outcome = outcomes[request]
                ledger = request.speculation.ledger
                try:
                    ledger.acceptance.advance(outcome.committed)
                    draft_rows = len(outcome.tree.tokens) - 1
                    ledger.end(outcome.committed, outcome.num_saved, draft_rows)
                    if proposer.capabilities.self_budgeting:
                        proposer.observe(outcome)
                    else:
                        observe_planned(proposer, outcome, self.runner.clock)
                except Exception as error:  # noqa: BLE001 - proposers are user code
                    self._give_up(request, error)
            self._record_draft_time(requests, began)

    def _call(
        self,
        proposer: Proposer[Any],
        requests: Sequence[Request],
        draft_slots: Mapping[Request, int],
    ) -> dict[Request, TokenTree]:
        """Call a proposer for several requests; return its token trees by request.

        If the call raises an exception, the proposer is called again for each request alone, so
        that a faulty request does not stop the others.
        """
        began = self.runner.clock()
        # a proposer that raised an exception may not have rolled back a sampler that it had
        # advanced
        contexts: list[DraftContext[Any]] = []
        for request in requests:
            request.sampler.recover()
            contexts.append(_draft_context(request, draft_slots[request]))
        try:
            with interruptible():
                trees = self._propose(proposer, contexts)
        except Exception as error:  # noqa: BLE001 - proposers are user code
            if len(requests) == 1:
                self._give_up(requests[0], error)
                return {}
            for request in requests:
                request.speculation.ledger.forget_proposals()
            drafts = dict[Request, TokenTree]()
            for request in requests:
                drafts |= self._call(proposer, [request], draft_slots)
            return drafts
        proposed: dict[Request, TokenTree] = {}
        for request, tree in zip(requests, trees, strict=True):
            if request.speculation.trace is not None:
                request.speculation.trace.proposed = tree
            if len(tree.tokens) > 1:
                proposed[request] = tree
        self._record_draft_time(requests, began)
        return proposed

    def _propose(
        self, proposer: Proposer[Any], contexts: Sequence[DraftContext[Any]]
    ) -> list[TokenTree]:
        """Return a proposer's valid token trees, one per context.

        Unless the proposer is ``self_budgeting``, the planner decides for which requests it is
        called.
        """

        def check(context: DraftContext[Any], tree: TokenTree) -> TokenTree:
            return validate_draft(proposer.name, context, tree, self.vocab_size)

        trees: list[TokenTree] = []
        if proposer.capabilities.self_budgeting:
            proposed = call_propose(proposer, contexts)
            for context, tree in zip(contexts, proposed, strict=True):
                trees.append(check(context, tree))
            return trees
        unions = [TreeUnion(context.ledger.costs) for context in contexts]
        propose_planned(proposer, contexts, unions, self.runner.clock, check)
        for context, union in zip(contexts, unions, strict=True):
            trees.append(union.tree(context.tokens[-1], context.max_nodes))
        return trees

    def _record_draft_time(self, requests: Sequence[Request], began: float) -> None:
        """Charge the time since ``began`` to the requests for which drafters were called."""
        seconds = self.runner.clock() - began
        self.seconds += seconds
        for request in requests:
            request.speculation.ledger.charge_rest(seconds / len(requests))
            request.stats.draft_seconds += seconds
            if request.speculation.trace is not None:
                request.speculation.trace.draft_seconds += seconds / len(requests)

    def _select(
        self, drafts: dict[Request, TokenTree], drafting: float
    ) -> dict[Request, TokenTree]:
        """Drop draft tokens that cost more time than they save.

        ``drafting`` is the time in seconds that the proposals took.
        """
        if not self.budget or not drafts:
            return drafts
        whole: list[bool] = []
        for request, tree in drafts.items():
            rejects = request.params.rejects
            bypass_budget = request.speculation.capabilities.bypass_budget
            whole.append(stays_whole(tree, rejects=rejects, bypass_budget=bypass_budget))
        selected = select_nodes(
            [*drafts.values()],
            self.ledger.costs,
            whole=whole,
            prompt_rows=self.num_prompt_rows,
            drafting=drafting,
            allowance=self.ledger.allowance,
        )
        return {
            request: tree
            for request, tree in zip(drafts, selected, strict=True)
            if len(tree.tokens) > 1
        }

    def _give_up(self, request: Request, error: Exception) -> None:
        """Let a request go on without its proposer, which raised ``error``."""
        proposer = request.speculation.proposer
        if proposer is None:
            return
        request.speculation.drop_proposer()
        if isinstance(error, PronkError):
            reason = str(error)  # clear without the type
        else:
            reason = f"{type(error).__name__}: {describe_error(error)}"
        request.stats.draft_error = reason
        _log.warning("%s: %s; the request continues without draft tokens", proposer.name, reason)
        _log.debug("traceback of %s", proposer.name, exc_info=error)
        if request.speculation.started:
            request.speculation.started = False
            with suppress(Exception):  # only ``error``, the first one, is reported
                proposer.stop(request.speculation.state)


def _draft_context(request: Request, num_draft_slots: int) -> DraftContext[Any]:
    """Return what a proposer sees of a request with KV slots for ``num_draft_slots`` tokens."""
    return DraftContext(
        request.speculation.state,
        request.tokens,
        max(0, request.num_remaining - 1),
        num_draft_slots,
        request.params,
        request.sampler,
        request.block_table,
        ledger=request.speculation.ledger,
        salt=request.cache_salt,
    )


def _group_by_proposer(requests: Iterable[Request]) -> list[tuple[Proposer[Any], list[Request]]]:
    """Group requests by proposer object; proposers that compare equal may hold different states."""
    groups: dict[int, tuple[Proposer[Any], list[Request]]] = {}
    for request in requests:
        proposer = request.speculation.proposer
        if proposer is not None:
            _, group = groups.setdefault(id(proposer), (proposer, []))
            group.append(request)
    return [*groups.values()]
