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

from pronk.drafters.base import DraftContext, Guesser, Outcome
from pronk.engine.budget import keep_paying_nodes
from pronk.engine.checked import checked
from pronk.engine.ledger import Fund, Ledger
from pronk.engine.request import Request
from pronk.engine.scheduler import Turn
from pronk.engine.settling import Plan
from pronk.errors import PronkError
from pronk.interrupts import interruptible
from pronk.passes.costs import PassCosts
from pronk.passes.runner import Runner
from pronk.tree import TokenTree

__all__ = ["Proposing"]

_log = logging.getLogger(__name__)

# More guesses than any tree has.
_MOST = 1024


class Proposing:
    """Asks the guessers of a step's requests, all requests of one together.

    A guesser that raises, or proposes what is no tree for its request, costs that request the guesses and nothing else:
    it goes on plainly, :attr:`~pronk.engine.stats.Stats.draft_error` says why, and so does a line in the log.

    Attributes:
        budget: whether guesses are dropped that do not pay for their rows (:mod:`pronk.engine.budget`).
        costs: of the passes of this step; ``None`` while nothing is known of one without guesses.
        seconds: that guessers have taken in this step.
    """

    def __init__(self, runner: Runner, *, budget: bool) -> None:
        self.runner, self.budget = runner, budget
        self.vocab_size = runner.decoder.config.vocab_size
        self.costs: PassCosts | None = None
        self.seconds = 0.0
        self._plain = 1
        self._asked: dict[Request, float] = {}
        self._heard: dict[Request, float] = {}
        self._funds: dict[int, Fund] = {}

    def start(self, turns: Sequence[Turn]) -> None:
        """Start the guessers' states of requests in their first pass; a request that waits in the queue has none."""
        self.seconds, self._asked, self._heard = 0.0, {}, {}
        for request in (turn.request for turn in turns):
            if request.drafting or request.guesser is None:
                continue
            guesser, began = request.guesser, self.runner.clock()
            try:
                request.draft_state = request.guesser.start(list(request.tokens))
                request.drafting = True
            except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                self._give_up(request, error)
            if self.budget and not guesser.insists and request.ledger is None:
                request.ledger = Ledger(self._fund(guesser))
            self._book([request], began, {})  # whether to guess is asked later

    def propose(self, turns: Sequence[Turn]) -> dict[Request, TokenTree]:
        """The guesses that pay, for all requests that decode; a prompt's own tokens need none."""
        drafts: dict[Request, TokenTree] = {}
        rooms = {turn.request: turn.room for turn in turns if turn.room}
        self.costs, self._plain = self._costs(turns), max(1, _rows(turns)[0])
        for guesser, requests in _by_guesser(rooms):
            asked = self._allowed(guesser, requests)
            if asked:
                drafts.update(self._ask(guesser, asked, rooms))
        return self._afford(turns, drafts)

    def observe(self, outcomes: Mapping[Request, Outcome[Any]]) -> None:
        """Tell the guessers what the target said; what takes time to learn from, only where they may be asked."""
        for guesser, requests in _by_guesser(outcomes):
            began = self.runner.clock()
            for request in requests:
                rests = request not in self._asked and not _may_ask(guesser, request)
                if rests and not guesser.listens:
                    continue
                try:
                    guesser.observe(outcomes[request].muted if rests else outcomes[request])
                except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                    self._give_up(request, error)
            self._book(requests, began, self._heard)

    def settle(self, plans: Sequence[Plan], outcomes: Mapping[Request, Outcome[Any]], seconds: float) -> None:
        """Book what this step's guesses cost and saved, where requests go without those that do not pay.

        Args:
            plans: of all requests of the step.
            outcomes: of those that decode.
            seconds: that it took, but for the guessers' part.
        """
        asked, self._asked = self._asked, {}
        heard, self._heard = self._heard, {}
        self._account(plans, outcomes, asked, heard, seconds)
        for plan in plans:
            journal, outcome = plan.request.journal, outcomes.get(plan.request)
            if journal is not None and outcome is not None:
                believed = self.costs if self.budget else None
                journal.settle(outcome, believed, self._plain, seconds, plan.request.ledger)

    def _account(
        self,
        plans: Sequence[Plan],
        outcomes: Mapping[Request, Outcome[Any]],
        asked: Mapping[Request, float],
        heard: Mapping[Request, float],
        seconds: float,
    ) -> None:
        """Each request's ledger."""
        requests, prompts = _rows([plan.turn for plan in plans])
        costs = self._costs([plan.turn for plan in plans]) if self.budget and requests else None
        if costs is None:
            return
        guesses = {plan.request: plan.draft.num_guesses for plan in plans}
        step, count = costs.at(requests) / requests, sum(guesses.values())
        whole = self.runner.costs_of([plan.job for plan in plans], costs).at(prompts + requests + count)
        # By what such passes usually take: that this one was disturbed is nobody's fault. And a row never takes longer
        # than a pass of its own: the first pass with guesses does, for what is done once, and none after it.
        added = (whole if math.isfinite(whole) else seconds) - costs.at(prompts + requests)
        added = min(max(0.0, added), count * step)
        for request, outcome in outcomes.items():
            if request.ledger is not None:
                saved = max(0, min(len(outcome.path), len(outcome.committed) - 1))
                rows = added * guesses[request] / count if count else 0.0
                asking, hearing = asked.get(request, 0.0), heard.get(request, 0.0)
                request.ledger.settle(asking / step, rows / step, saved, hearing / step)

    def give_way(self, requests: Iterable[Request]) -> None:
        """Requests have been preempted: their guessers' caches need not hold what the target's does not."""
        for request in requests:
            if request.guesser is not None and request.drafting:
                try:
                    request.guesser.give_way(request.draft_state)
                except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                    self._give_up(request, error)

    def stop(self, request: Request) -> None:
        """The request has left: its state goes."""
        if request.ledger is not None:
            request.ledger.close()
        if request.guesser is not None and request.drafting:
            request.drafting = False
            try:
                request.guesser.stop(request.draft_state)
            except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                self._give_up(request, error)

    def _ask(
        self, guesser: Guesser[Any], requests: Sequence[Request], rooms: Mapping[Request, int]
    ) -> dict[Request, TokenTree]:
        """What one guesser proposes; if it raises, it is asked for each request alone, to learn whose fault it is."""
        began = self.runner.clock()
        try:
            drafts = self._proposals(guesser, requests, rooms)
        except Exception as error:  # noqa: BLE001 - whatever a guesser raises
            if len(requests) == 1:
                self._give_up(requests[0], error)
                return {}
            return {key: tree for request in requests for key, tree in self._ask(guesser, [request], rooms).items()}
        self._book(requests, began, self._asked)
        return drafts

    def _allowed(self, guesser: Guesser[Any], requests: list[Request]) -> list[Request]:
        """Those whom guessing may cost something, and none before it is known what it is compared with."""
        if not self.budget or guesser.insists:
            return requests
        if self.costs is None:
            return []
        may = [request for request in requests if _may_ask(guesser, request)]
        return [request for request in may if not guesser.skips(request.draft_state, request.tokens)]

    def _fund(self, guesser: Guesser[Any]) -> Fund:
        """What the requests of one guesser draw on."""
        payer = guesser.payer
        fund = self._funds.get(id(payer))
        if fund is None:
            fund = self._funds[id(payer)] = Fund()
            finalize(payer, self._funds.pop, id(payer)).atexit = False
        return fund

    def _book(self, requests: Sequence[Request], began: float, shares: dict[Request, float]) -> None:
        """A guesser has been at work for these, who share what it took."""
        seconds = self.runner.clock() - began
        self.seconds += seconds
        for request in requests:
            request.stats.draft_seconds += seconds
            if request.journal is not None:
                request.journal.took(seconds / len(requests))
            shares[request] = shares.get(request, 0.0) + seconds / len(requests)

    def _proposals(
        self, guesser: Guesser[Any], requests: Sequence[Request], rooms: Mapping[Request, int]
    ) -> dict[Request, TokenTree]:
        try:
            contexts = [self._context(request, rooms[request]) for request in requests]
            with interruptible():
                proposed = guesser.propose(contexts)
            trees = zip(requests, contexts, proposed, strict=True)
            found = {request: checked(guesser.name, context, tree, self.vocab_size) for request, context, tree in trees}
            for request, tree in found.items():
                if request.journal is not None:
                    request.journal.offer(guesser.consulted(request.draft_state), tree)
            return {request: tree for request, tree in found.items() if tree.num_guesses}
        finally:
            # Choosers were on loan; an error or an interruption may have left one ahead of its text.
            for request in requests:
                request.chooser.recover()

    def _context(self, request: Request, room: int) -> DraftContext[Any]:
        return DraftContext(
            request.draft_state,
            request.tokens,
            max(0, request.remaining - 1),
            room,
            request.params,
            request.chooser,
            request.table,
            self.costs if request.needs.costs else None,
            self.budget,
            request.salt,
            allowance=self._allowance(request),
        )

    def _afford(self, turns: Sequence[Turn], drafts: dict[Request, TokenTree]) -> dict[Request, TokenTree]:
        """The guesses that pay for their rows, where a guesser says how likely they are."""
        if not self.budget or all(tree.gain is None for tree in drafts.values()):
            return drafts
        requests, prompts = _rows(turns)
        # Where guesses are accepted by what they were drawn from, a tree stays whole: gains may say what was drawn, and
        # a guess that its own token could have cost its place has another law than its ``probs``.
        whole = {request for request, tree in drafts.items() if request.params.rejects and tree.probs is not None}
        offered = [replace(tree, gain=None) if request in whole else tree for request, tree in drafts.items()]
        most = [self._most(request, prompts, requests) for request in drafts]
        kept = keep_paying_nodes(offered, requests, self.costs, prompts=prompts, most=most)
        paid = zip(drafts, kept, strict=True)
        return {request: drafts[request] if request in whole else tree for request, tree in paid}

    def _allowance(self, request: Request) -> float:
        """Seconds that may be lost with a request's guesses."""
        if request.ledger is None or self.costs is None:
            return math.inf
        return request.ledger.left * self.costs.at(self._plain) / self._plain

    def _most(self, request: Request, prompts: int, requests: int) -> int:
        """How many rows a request's guesses may have, by what it may lose with them."""
        costs = self.costs
        if request.ledger is None or costs is None:
            return _MOST
        base = prompts + requests
        # Asking is paid for already: to leave out what pays would only make a loss of it.
        left = max(self._allowance(request) - self._asked.get(request, 0.0), costs.at(self._plain) / self._plain)
        return bisect_right(range(1, _MOST), costs.at(base) + left, key=lambda guesses: costs.at(base + guesses))

    def _costs(self, turns: Sequence[Turn]) -> PassCosts | None:
        """What a pass for these requests costs by its rows."""
        requests, _ = _rows(turns)
        return self.runner.times.costs(sum(turn.request.table.length for turn in turns), max(1, requests))

    def _give_up(self, request: Request, error: Exception) -> None:
        """The request goes on without guesses."""
        guesser, request.guesser = request.guesser, None
        if guesser is None:
            return
        named = f"{type(error).__name__}: {error}"
        request.stats.draft_error = str(error) if isinstance(error, PronkError) else named
        _log.warning("%s: %s; the request goes on without guesses", guesser.name, request.stats.draft_error)
        _log.debug("what %s raised", guesser.name, exc_info=error)
        if request.drafting:
            request.drafting = False
            with suppress(Exception):
                guesser.stop(request.draft_state)


def _may_ask(guesser: Guesser[Any], request: Request) -> bool:
    """Whether asking may cost the request something."""
    ledger = request.ledger
    return ledger is None or (ledger.may_choose if guesser.chooses else ledger.may_ask)


def _rows(turns: Sequence[Turn]) -> tuple[int, int]:
    """Rows of a pass without guesses: of requests that decode, and of prompts."""
    requests = sum(turn.count == 1 for turn in turns)
    return requests, sum(turn.count for turn in turns) - requests


def _by_guesser(requests: Iterable[Request]) -> list[tuple[Guesser[Any], list[Request]]]:
    """Requests grouped by the object that guesses for them: equal ones may hold different states."""
    groups: dict[int, tuple[Guesser[Any], list[Request]]] = {}
    for request in requests:
        if request.guesser is not None:
            groups.setdefault(id(request.guesser), (request.guesser, []))[1].append(request)
    return list(groups.values())
