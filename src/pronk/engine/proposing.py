"""A step's first part: guessers are asked, and what they propose is held to the limits."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from time import perf_counter
from typing import Any

from torch import Tensor

from pronk.choosing.legal import prune
from pronk.drafters.base import DraftContext, Guesser, Outcome
from pronk.engine.budget import keep_paying_nodes
from pronk.engine.request import Request
from pronk.engine.scheduler import Turn
from pronk.errors import OptionError, PronkError
from pronk.interrupts import interruptible
from pronk.passes.costs import PassCosts
from pronk.passes.runner import Runner
from pronk.tree import TokenTree

__all__ = ["Proposing"]

_log = logging.getLogger(__name__)

# How far the sum of a distribution may be from 1.
_SLACK = 1e-3


class Proposing:
    """Asks the guessers of a step's requests, all requests of one together.

    A guesser that raises, or proposes what is no tree for its request, costs that request the guesses and nothing else:
    it goes on plainly, :attr:`~pronk.engine.stats.Stats.draft_error` says why, and so does a line in the log.

    Attributes:
        budget: whether guesses are dropped that do not pay for their rows (:mod:`pronk.engine.budget`).
        costs: of passes, measured when they are first asked for; ``None`` before.
    """

    def __init__(self, runner: Runner, *, budget: bool) -> None:
        self.runner, self.budget = runner, budget
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
        rooms = {turn.request: turn.room for turn in turns if turn.room}
        for guesser, requests in _by_guesser(rooms):
            drafts.update(self._ask(guesser, requests, rooms))
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
        began = perf_counter()
        try:
            drafts = self._proposals(guesser, requests, rooms)
        except Exception as error:  # noqa: BLE001 - whatever a guesser raises
            if len(requests) == 1:
                self._give_up(requests[0], error)
                return {}
            return {key: tree for request in requests for key, tree in self._ask(guesser, [request], rooms).items()}
        seconds = perf_counter() - began
        for request in requests:
            request.stats.draft_seconds += seconds
        return drafts

    def _proposals(
        self, guesser: Guesser[Any], requests: Sequence[Request], rooms: Mapping[Request, int]
    ) -> dict[Request, TokenTree]:
        try:
            contexts = [self._context(request, rooms[request]) for request in requests]
            with interruptible():
                proposed = guesser.propose(contexts)
            trees = zip(requests, contexts, proposed, strict=True)
            return {request: self._accept(guesser, context, tree) for request, context, tree in trees}
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
            self._costs() if request.needs.costs else None,
            self.budget,
            request.salt,
        )

    def _accept(self, guesser: Guesser[Any], context: DraftContext[Any], tree: TokenTree) -> TokenTree:
        """The proposal within the limits, less guesses that the target has no token for, or that its guide forbids."""
        tree = _plain(tree)
        if tree.tokens[0] != context.tokens[-1]:
            msg = f"drafter {guesser.name}: expected a tree below token {context.tokens[-1]}, found {tree.tokens[0]}"
            raise OptionError(msg)
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
        costs = self._costs()
        if costs is None:
            return drafts
        requests = sum(turn.request.num_pending == 1 for turn in turns)
        prompts = sum(turn.count for turn in turns) - requests
        # Where guesses are accepted by what they were drawn from, a tree stays whole: gains may say what was drawn, and
        # a guess that its own token could have cost its place has another law than its ``probs``.
        whole = {request for request, tree in drafts.items() if request.params.rejects and tree.probs is not None}
        offered = [replace(tree, gain=None) if request in whole else tree for request, tree in drafts.items()]
        paid = zip(drafts, keep_paying_nodes(offered, requests, costs, prompts=prompts), strict=True)
        return {request: drafts[request] if request in whole else tree for request, tree in paid}

    def _costs(self) -> PassCosts | None:
        """What passes cost: measured when first asked for, as soon as the cache has room."""
        if self.costs is None:
            with interruptible():
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
