"""A step's first part: guessers are asked, and what they propose is held to the limits."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from typing import Any
from weakref import finalize

from torch import Tensor

from pronk.choosing.legal import prune
from pronk.drafters.base import DraftContext, Guesser, Outcome
from pronk.engine.budget import keep_paying_nodes
from pronk.engine.ledger import Fund, Ledger
from pronk.engine.request import Request
from pronk.engine.scheduler import Turn
from pronk.engine.settling import Plan
from pronk.errors import OptionError, PronkError
from pronk.interrupts import interruptible
from pronk.passes.costs import PassCosts
from pronk.passes.runner import Runner
from pronk.tree import TokenTree

__all__ = ["Proposing"]

_log = logging.getLogger(__name__)

# More guesses than any tree has.
_MOST = 1024

# How far the sum of a distribution may be from 1.
_SLACK = 1e-3


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
                request.draft_state = request.guesser.start(request.prompt)
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
        requests, prompts = _rows([plan.turn for plan in plans])
        costs = self._costs([plan.turn for plan in plans]) if self.budget and requests else None
        if costs is None:
            return
        guesses = {plan.request: plan.draft.num_guesses for plan in plans}
        step, count = costs.at(requests) / requests, sum(guesses.values())
        whole = self.runner.costs_of([plan.job for plan in plans], costs).at(prompts + requests + count)
        # By what such passes usually take: that this one was disturbed is nobody's fault.
        added = max(0.0, (whole if math.isfinite(whole) else seconds) - costs.at(prompts + requests))
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
        return [request for request in may if not guesser.skips(request.draft_state)]

    def _fund(self, guesser: Guesser[Any]) -> Fund:
        """What the requests of one guesser draw on."""
        fund = self._funds.get(id(guesser))
        if fund is None:
            fund = self._funds[id(guesser)] = Fund()
            finalize(guesser, self._funds.pop, id(guesser)).atexit = False
        return fund

    def _book(self, requests: Sequence[Request], began: float, shares: dict[Request, float]) -> None:
        """A guesser has been at work for these, who share what it took."""
        seconds = self.runner.clock() - began
        self.seconds += seconds
        for request in requests:
            request.stats.draft_seconds += seconds
            shares[request] = shares.get(request, 0.0) + seconds / len(requests)

    def _proposals(
        self, guesser: Guesser[Any], requests: Sequence[Request], rooms: Mapping[Request, int]
    ) -> dict[Request, TokenTree]:
        try:
            contexts = [self._context(request, rooms[request]) for request in requests]
            with interruptible():
                proposed = guesser.propose(contexts)
            trees = zip(requests, contexts, proposed, strict=True)
            found = {request: self._accept(guesser, context, tree) for request, context, tree in trees}
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

    def _accept(self, guesser: Guesser[Any], context: DraftContext[Any], tree: TokenTree) -> TokenTree:
        """The proposal within the limits, less guesses that the target has no token for, or that its guide forbids."""
        if tree.num_guesses:
            tree = _plain(tree)
        if tree.tokens[0] != context.tokens[-1]:
            msg = f"drafter {guesser.name}: expected a tree below token {context.tokens[-1]}, found {tree.tokens[0]}"
            raise OptionError(msg)
        if not tree.num_guesses:
            return tree
        if any(q is not None and len(q) != self.vocab_size for q in tree.probs or ()):
            # Drawn from other tokens than the target's, some of which are left out: what is left has another law. And
            # it must not depend on the draw how a guess is tried, so all are point masses, which any guess may be.
            tree = replace(tree, probs=None)
        if not all(q is None or _is_distribution(q) for q in tree.probs or ()):
            msg = f"drafter {guesser.name}: expected distributions [vocab] of a float type in probs, found others"
            raise OptionError(msg)
        if min(tree.tokens) < 0 or max(tree.tokens) >= self.vocab_size:
            tree = tree.keep(node for node, token in enumerate(tree.tokens) if 0 <= token < self.vocab_size)
        guide = context.chooser.guide
        # A guess that its own token could cost its place has another law than its ``probs``.
        if guide is not None and not (context.params.rejects and tree.probs is not None):
            tree = prune(tree, guide)
        return tree.limit(context.max_depth, context.max_nodes)

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
        left = self._allowance(request) - self._asked.get(request, 0.0)
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
    return ledger is None or (ledger.left > 0.0 if guesser.chooses else ledger.may_ask)


def _rows(turns: Sequence[Turn]) -> tuple[int, int]:
    """Rows of a pass without guesses: of requests that decode, and of prompts."""
    requests = sum(turn.count == 1 for turn in turns)
    return requests, sum(turn.count for turn in turns) - requests


def _plain(tree: TokenTree) -> TokenTree:
    """The tree in Python's own numbers: those of other libraries would get into reports, and fail there.

    Raises:
        TypeError, ValueError: tokens or parents are not whole, or gains not finite, or origins no pairs of name and
            number.
    """
    gain, origin, verify = tree.gain, tree.origin, tree.verify
    if gain is not None and not math.isfinite(sum(gain)):
        msg = f"expected finite gains, found {gain}"
        raise ValueError(msg)
    is_plain = (
        type(tree.tokens) is type(tree.parents) is tuple
        and set(map(type, (*tree.tokens, *tree.parents))) == {int}
        and (gain is None or set(map(type, gain)) == {float})
        and (verify is None or set(map(type, verify)) == {bool})
        and (origin is None or {(type(name), type(way)) for name, way in origin} == {(str, int)})
    )
    if is_plain:
        return tree
    return TokenTree(
        tuple(int(index(token)) for token in tree.tokens),
        tuple(int(index(parent)) for parent in tree.parents),
        None if verify is None else tuple(map(bool, verify)),
        tree.probs,
        None if gain is None else tuple(map(float, gain)),
        None if origin is None else tuple((str(name), int(index(way))) for name, way in origin),
    )


def _is_distribution(q: Tensor) -> bool:
    return q.ndim == 1 and q.is_floating_point() and bool(q.min() >= 0.0) and abs(float(q.sum()) - 1.0) < _SLACK


def _by_guesser(requests: Iterable[Request]) -> list[tuple[Guesser[Any], list[Request]]]:
    """Requests grouped by the object that guesses for them: equal ones may hold different states."""
    groups: dict[int, tuple[Guesser[Any], list[Request]]] = {}
    for request in requests:
        if request.guesser is not None:
            groups.setdefault(id(request.guesser), (request.guesser, []))[1].append(request)
    return list(groups.values())
