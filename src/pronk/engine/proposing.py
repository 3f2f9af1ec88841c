"""A step's first part: guessers are asked, and what they propose is held to the limits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

from pronk.drafters.base import DraftContext, Guesser, Outcome
from pronk.engine.budget import keep_paying_nodes
from pronk.engine.request import Request
from pronk.engine.scheduler import Turn
from pronk.errors import OptionError, PronkError
from pronk.interrupts import uninterrupted
from pronk.passes.costs import PassCosts
from pronk.passes.runner import Runner
from pronk.tree import TokenTree

__all__ = ["Proposing"]

_log = logging.getLogger(__name__)


class Proposing:
    """Asks the guessers of a step's requests, all requests of one together.

    A guesser that raises, or proposes what is no tree for its request, costs that request the guesses and nothing else:
    it goes on plainly, :attr:`~pronk.engine.stats.Stats.draft_error` says why, and so does a line in the log.

    Attributes:
        budget: whether guesses are dropped that do not pay for their rows (:mod:`pronk.engine.budget`).
        costs: of passes, measured when they are first asked for; ``None`` before.
    """

    def __init__(self, runner: Runner, max_tree: int, *, budget: bool) -> None:
        self.runner, self.max_tree, self.budget = runner, max_tree, budget
        self.vocab_size = runner.decoder.config.vocab_size
        self.costs: PassCosts | None = None

    def start(self, turns: Sequence[Turn]) -> None:
        """Start the guessers' states of requests in their first pass; a request that waits in the queue has none."""
        for request in (turn.request for turn in turns):
            if request.drafting or request.guesser is None:
                continue
            began = perf_counter()
            try:
                request.draft_state = request.guesser.start(request.prompt)
                request.drafting = True
            except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                self._give_up(request, error)
            request.stats.draft_seconds += perf_counter() - began

    def propose(self, turns: Sequence[Turn]) -> dict[Request, TokenTree]:
        """The guesses that pay, for all requests that decode; a prompt's own tokens need none."""
        drafts: dict[Request, TokenTree] = {}
        for guesser, requests in _by_guesser(turn.request for turn in turns if turn.request.num_pending == 1):
            drafts.update(self._ask(guesser, requests))
        return self._afford(turns, drafts)

    def observe(self, outcomes: Mapping[Request, Outcome[Any]]) -> None:
        """Tell the guessers what the target said."""
        for guesser, requests in _by_guesser(outcomes):
            began = perf_counter()
            for request in requests:
                try:
                    guesser.observe(outcomes[request])
                except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                    self._give_up(request, error)
            seconds = perf_counter() - began
            for request in requests:
                request.stats.draft_seconds += seconds

    def stop(self, request: Request) -> None:
        """The request has left: its state goes."""
        if request.guesser is not None and request.drafting:
            request.drafting = False
            try:
                request.guesser.stop(request.draft_state)
            except Exception as error:  # noqa: BLE001 - whatever a guesser raises
                self._give_up(request, error)

    def _ask(self, guesser: Guesser[Any], requests: Sequence[Request]) -> dict[Request, TokenTree]:
        """What one guesser proposes; if it raises, it is asked for each request alone, to learn whose fault it is."""
        began = perf_counter()
        try:
            contexts = [self._context(request) for request in requests]
            trees = zip(requests, contexts, guesser.propose(contexts), strict=True)
            drafts = {request: self._accept(guesser, context, tree) for request, context, tree in trees}
        except Exception as error:  # noqa: BLE001 - whatever a guesser raises
            if len(requests) == 1:
                self._give_up(requests[0], error)
                return {}
            return {key: tree for request in requests for key, tree in self._ask(guesser, [request]).items()}
        finally:
            # Choosers were on loan; an error or an interruption may have left one ahead of its text.
            with uninterrupted():
                for request in requests:
                    request.chooser.recover()
        seconds = perf_counter() - began
        for request in requests:
            request.stats.draft_seconds += seconds
        return drafts

    def _context(self, request: Request) -> DraftContext[Any]:
        return DraftContext(
            request.draft_state,
            request.tokens,
            max(0, request.remaining - 1),
            self.max_tree - 1,
            request.params,
            request.chooser,
            request.table,
            self._costs() if request.needs.costs else None,
            self.budget,
        )

    def _accept(self, guesser: Guesser[Any], context: DraftContext[Any], tree: TokenTree) -> TokenTree:
        """The proposal within the limits; guesses that the target has no token for are left out."""
        if tree.tokens[0] != context.tokens[-1]:
            msg = f"drafter {guesser.name}: expected a tree below token {context.tokens[-1]}, found {tree.tokens[0]}"
            raise OptionError(msg)
        if any(q is not None and len(q) != self.vocab_size for q in tree.probs or ()):
            # Drawn from other tokens than the target's, some of which are left out: what is left has another law. And
            # it must not depend on the draw how a guess is tried, so all are point masses, which any guess may be.
            tree = replace(tree, probs=None)
        if min(tree.tokens) < 0 or max(tree.tokens) >= self.vocab_size:
            tree = tree.keep(node for node, token in enumerate(tree.tokens) if 0 <= token < self.vocab_size)
        return tree.limit(context.max_depth, context.max_nodes)

    def _afford(self, turns: Sequence[Turn], drafts: dict[Request, TokenTree]) -> dict[Request, TokenTree]:
        """The guesses that pay for their rows, where a guesser says how likely they are."""
        if not self.budget or all(tree.gain is None for tree in drafts.values()):
            return drafts
        costs = self._costs()
        if costs is None:
            return drafts
        rows = sum(turn.count for turn in turns)
        # Where guesses are accepted by what they were drawn from, a tree stays whole: gains may say what was drawn, and
        # a guess that its own token could have cost its place has another law than its ``probs``.
        whole = {request for request, tree in drafts.items() if request.params.rejects and tree.probs is not None}
        offered = [replace(tree, gain=None) if request in whole else tree for request, tree in drafts.items()]
        paid = zip(drafts, keep_paying_nodes(offered, rows, costs), strict=True)
        return {request: drafts[request] if request in whole else tree for request, tree in paid}

    def _costs(self) -> PassCosts | None:
        """What passes cost: measured when first asked for, as soon as the cache has room."""
        if self.costs is None:
            self.costs = PassCosts.measure(self.runner)
        return self.costs

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


def _by_guesser(requests: Iterable[Request]) -> list[tuple[Guesser[Any], list[Request]]]:
    """Requests grouped by the object that guesses for them: equal ones may hold different states."""
    groups: dict[int, tuple[Guesser[Any], list[Request]]] = {}
    for request in requests:
        if request.guesser is not None:
            groups.setdefault(id(request.guesser), (request.guesser, []))[1].append(request)
    return list(groups.values())
