"""A step's first part: guessers are asked, and what they propose is held to the limits."""

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

# More guesses than any tree has.
_MOST = 1024


class Speculator:
    """Asks the guessers of a step's requests, all requests of one together.

    A guesser that raises, or proposes what is no tree for its request, costs that request the guesses and nothing else:
    it goes on plainly, :attr:`~pronk.engine.stats.Stats.draft_error` says why, and so does a line in the log.

    Attributes:
        budget: whether guesses are dropped that do not pay for their rows (:mod:`pronk.speculation.node_selection`).
        costs: of the passes of this step; ``None`` while nothing is known of one without guesses.
        seconds: that guessers have taken in this step.
    """

    def __init__(self, runner: ModelRunner, *, budget: bool) -> None:
        self.runner, self.budget = runner, budget
        self.vocab_size = runner.decoder.config.vocab_size
        self.costs: CostCurve | None = None
        self.seconds = 0.0
        self._plain = 1
        self._asked: dict[Request, float] = {}
        self._heard: dict[Request, float] = {}
        self._shared_budgets: dict[int, SharedBudget] = {}

    def begin(self, batch: Sequence[ScheduledRequest], preempted: Sequence[Request]) -> None:
        """Begin a step: tell drafters of preempted requests, and start the drafter state of new requests."""
        self.runner.started_rows.clear()  # an interrupted step may have left some
        self._on_preempt(preempted)
        self.seconds, self._asked, self._heard = 0.0, {}, {}
        for request in (scheduled.request for scheduled in batch):
            if request.draft_started or request.proposer is None:
                continue
            proposer, began = request.proposer, self.runner.clock()
            try:
                request.draft_state = request.proposer.start(list(request.tokens))
                request.draft_started = True
            except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                self._give_up(request, error)
            if self.budget and not proposer.capabilities.bypass_budget and request.request_budget is None:
                request.request_budget = RequestBudget(self._shared_budget(proposer))
            self._book([request], began, {})  # whether to guess is asked later

    def propose(self, batch: Sequence[ScheduledRequest]) -> dict[Request, TokenTree]:
        """The guesses that pay, for all requests that decode; a prompt's own tokens need none."""
        drafts: dict[Request, TokenTree] = {}
        draft_slots = {scheduled.request: scheduled.num_draft_slots for scheduled in batch if scheduled.num_draft_slots}
        self.costs, self._plain = self._costs(batch), max(1, _rows(batch)[0])
        for proposer, requests in _by_proposer(draft_slots):
            asked = self._allowed(proposer, requests)
            if asked:
                drafts.update(self._ask(proposer, asked, draft_slots))
        return self._afford(batch, drafts)

    def update(
        self, steps: Sequence[RequestStep], outcomes: Mapping[Request, Outcome[Any]], context: int, began: float
    ) -> None:
        """End a step: report outcomes to drafters, record the duration of the forward pass, book costs and gains.

        Args:
            steps: all requests of the step.
            outcomes: reports for the requests that decode.
            context: committed tokens of all texts before the pass.
            began: start of the step, by the runner's clock.
        """
        self._observe(outcomes)
        seconds = self.runner.clock() - began - self.seconds
        self.runner.record_duration([step.job for step in steps], context, seconds)
        self._settle(steps, outcomes, seconds)

    def _observe(self, outcomes: Mapping[Request, Outcome[Any]]) -> None:
        """Tell the proposers what the target said; logits and hidden states only where they may be asked."""
        for proposer, requests in _by_proposer(outcomes):
            began = self.runner.clock()
            for request in requests:
                rests = request not in self._asked and not _may_ask(proposer, request)
                if rests and not proposer.capabilities.observes_all_steps:
                    continue
                try:
                    proposer.observe(outcomes[request].without_tensors if rests else outcomes[request])
                except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                    self._give_up(request, error)
            self._book(requests, began, self._heard)

    def _settle(self, steps: Sequence[RequestStep], outcomes: Mapping[Request, Outcome[Any]], seconds: float) -> None:
        """Book what this step's guesses cost and saved, where requests go without those that do not pay.

        Args:
            steps: of all requests of the step.
            outcomes: of those that decode.
            seconds: that it took, but for the guessers' part.
        """
        asked, self._asked = self._asked, {}
        heard, self._heard = self._heard, {}
        self._account(steps, outcomes, asked, heard, seconds)
        for step in steps:
            decision_trace, outcome = step.request.decision_trace, outcomes.get(step.request)
            if decision_trace is not None and outcome is not None:
                believed = self.costs if self.budget else None
                decision_trace.record_step(outcome, believed, self._plain, seconds, step.request.request_budget)

    def _account(
        self,
        steps: Sequence[RequestStep],
        outcomes: Mapping[Request, Outcome[Any]],
        asked: Mapping[Request, float],
        heard: Mapping[Request, float],
        seconds: float,
    ) -> None:
        """Each request's ledger."""
        requests, prompts = _rows([step.scheduled for step in steps])
        costs = self._costs([step.scheduled for step in steps]) if self.budget and requests else None
        if costs is None:
            return
        draft_tokens = {step.request: step.draft.num_draft_tokens for step in steps}
        step, count = costs.at(requests) / requests, sum(draft_tokens.values())
        whole = self.runner.costs_for([step.job for step in steps], costs).at(prompts + requests + count)
        # By what such passes usually take: that this one was disturbed is nobody's fault. And a row never takes longer
        # than a pass of its own: the first pass with guesses does, for what is done once, and none after it.
        added = (whole if math.isfinite(whole) else seconds) - costs.at(prompts + requests)
        added = min(max(0.0, added), count * step)
        for request, outcome in outcomes.items():
            if request.request_budget is not None:
                saved = max(0, min(len(outcome.path), len(outcome.committed) - 1))
                rows = added * draft_tokens[request] / count if count else 0.0
                asking, hearing = asked.get(request, 0.0), heard.get(request, 0.0)
                request.request_budget.settle(asking / step, rows / step, saved, hearing / step)

    def _on_preempt(self, requests: Iterable[Request]) -> None:
        """Requests have been preempted: their guessers' caches need not hold what the target's does not."""
        for request in requests:
            if request.proposer is not None and request.draft_started:
                try:
                    request.proposer.on_preempt(request.draft_state)
                except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                    self._give_up(request, error)

    def stop(self, request: Request) -> None:
        """The request has left: its state goes."""
        if request.request_budget is not None:
            request.request_budget.close()
        if request.proposer is not None and request.draft_started:
            request.draft_started = False
            try:
                request.proposer.stop(request.draft_state)
            except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                self._give_up(request, error)

    def _ask(
        self, proposer: Proposer[Any], requests: Sequence[Request], draft_slots: Mapping[Request, int]
    ) -> dict[Request, TokenTree]:
        """What one guesser proposes; if it raises, it is asked for each request alone, to learn whose fault it is."""
        began = self.runner.clock()
        try:
            drafts = self._proposals(proposer, requests, draft_slots)
        except Exception as error:  # noqa: BLE001 - whatever a guesser raises
            if len(requests) == 1:
                self._give_up(requests[0], error)
                return {}
            return {
                key: tree for request in requests for key, tree in self._ask(proposer, [request], draft_slots).items()
            }
        self._book(requests, began, self._asked)
        return drafts

    def _allowed(self, proposer: Proposer[Any], requests: list[Request]) -> list[Request]:
        """Those whom guessing may cost something, and none before it is known what it is compared with."""
        if not self.budget or proposer.capabilities.bypass_budget:
            return requests
        if self.costs is None:
            return []
        may = [request for request in requests if _may_ask(proposer, request)]
        return [request for request in may if not proposer.should_skip(request.draft_state, request.tokens)]

    def _shared_budget(self, proposer: Proposer[Any]) -> SharedBudget:
        """What the requests of one guesser draw on."""
        budget_owner = proposer.budget_owner
        shared_budget = self._shared_budgets.get(id(budget_owner))
        if shared_budget is None:
            shared_budget = self._shared_budgets[id(budget_owner)] = SharedBudget()
            finalize(budget_owner, self._shared_budgets.pop, id(budget_owner)).atexit = False
        return shared_budget

    def _book(self, requests: Sequence[Request], began: float, shares: dict[Request, float]) -> None:
        """A guesser has been at work for these, who share what it took."""
        seconds = self.runner.clock() - began
        self.seconds += seconds
        for request in requests:
            request.stats.draft_seconds += seconds
            if request.decision_trace is not None:
                request.decision_trace.add_draft_seconds(seconds / len(requests))
            shares[request] = shares.get(request, 0.0) + seconds / len(requests)

    def _proposals(
        self, proposer: Proposer[Any], requests: Sequence[Request], draft_slots: Mapping[Request, int]
    ) -> dict[Request, TokenTree]:
        try:
            contexts = [self._context(request, draft_slots[request]) for request in requests]
            with interruptible():
                proposed = proposer.propose(contexts)
            trees = zip(requests, contexts, proposed, strict=True)
            found = {
                request: validate_draft(proposer.name, context, tree, self.vocab_size)
                for request, context, tree in trees
            }
            for request, tree in found.items():
                if request.decision_trace is not None:
                    request.decision_trace.record_proposal(proposer.source_reports(request.draft_state), tree)
            return {request: tree for request, tree in found.items() if tree.num_draft_tokens}
        finally:
            # Choosers were on loan; an error or an interruption may have left one ahead of its text.
            for request in requests:
                request.sampler.recover()

    def _context(self, request: Request, num_draft_slots: int) -> DraftContext[Any]:
        return DraftContext(
            request.draft_state,
            request.tokens,
            max(0, request.remaining - 1),
            num_draft_slots,
            request.params,
            request.sampler,
            request.block_table,
            self.costs if request.capabilities.costs else None,
            self.budget,
            request.salt,
            max_seconds=self._allowance(request),
        )

    def _afford(self, batch: Sequence[ScheduledRequest], drafts: dict[Request, TokenTree]) -> dict[Request, TokenTree]:
        """The guesses that pay for their rows, where a guesser says how likely they are."""
        if not self.budget or all(tree.gain is None for tree in drafts.values()):
            return drafts
        requests, prompts = _rows(batch)
        # Where guesses are accepted by what they were drawn from, a tree stays whole: gains may say what was drawn, and
        # a guess that its own token could have cost its place has another law than its ``probs``.
        whole = {request for request, tree in drafts.items() if request.params.rejects and tree.probs is not None}
        offered = [replace(tree, gain=None) if request in whole else tree for request, tree in drafts.items()]
        most = [self._most(request, prompts, requests) for request in drafts]
        kept = select_paying_nodes(offered, requests, self.costs, prompts=prompts, most=most)
        paid = zip(drafts, kept, strict=True)
        return {request: drafts[request] if request in whole else tree for request, tree in paid}

    def _allowance(self, request: Request) -> float:
        """Seconds that may be lost with a request's guesses."""
        if request.request_budget is None or self.costs is None:
            return math.inf
        return request.request_budget.left * self.costs.at(self._plain) / self._plain

    def _most(self, request: Request, prompts: int, requests: int) -> int:
        """How many rows a request's guesses may have, by what it may lose with them."""
        costs = self.costs
        if request.request_budget is None or costs is None:
            return _MOST
        base = prompts + requests
        # Asking is paid for already: to leave out what pays would only make a loss of it.
        left = max(self._allowance(request) - self._asked.get(request, 0.0), costs.at(self._plain) / self._plain)
        return bisect_right(
            range(1, _MOST), costs.at(base) + left, key=lambda draft_tokens: costs.at(base + draft_tokens)
        )

    def _costs(self, batch: Sequence[ScheduledRequest]) -> CostCurve | None:
        """What a pass for these requests costs by its rows."""
        requests, _ = _rows(batch)
        return self.runner.cost_model.costs(
            sum(scheduled.request.block_table.length for scheduled in batch), max(1, requests)
        )

    def _give_up(self, request: Request, error: Exception) -> None:
        """The request goes on without guesses."""
        proposer, request.proposer = request.proposer, None
        if proposer is None:
            return
        named = f"{type(error).__name__}: {error}"
        request.stats.draft_error = str(error) if isinstance(error, PronkError) else named
        _log.warning("%s: %s; the request goes on without guesses", proposer.name, request.stats.draft_error)
        _log.debug("what %s raised", proposer.name, exc_info=error)
        if request.draft_started:
            request.draft_started = False
            with suppress(Exception):
                proposer.stop(request.draft_state)


def _may_ask(proposer: Proposer[Any], request: Request) -> bool:
    """Whether asking may cost the request something."""
    request_budget = request.request_budget
    return request_budget is None or (
        request_budget.may_choose if proposer.capabilities.self_budgeting else request_budget.may_ask
    )


def _rows(batch: Sequence[ScheduledRequest]) -> tuple[int, int]:
    """Rows of a pass without guesses: of requests that decode, and of prompts."""
    requests = sum(scheduled.num_tokens == 1 for scheduled in batch)
    return requests, sum(scheduled.num_tokens for scheduled in batch) - requests


def _by_proposer(requests: Iterable[Request]) -> list[tuple[Proposer[Any], list[Request]]]:
    """Requests grouped by the object that guesses for them: equal ones may hold different states."""
    groups: dict[int, tuple[Proposer[Any], list[Request]]] = {}
    for request in requests:
        if request.proposer is not None:
            groups.setdefault(id(request.proposer), (request.proposer, []))[1].append(request)
    return list(groups.values())
