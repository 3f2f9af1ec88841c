"""The decode loop: schedule, propose, forward, verify, commit.

Where the kernels compute, the logits at *any* node of a tree are bit-equal to those of plain decoding, because the
order of every sum is that of the text (``kernels/README.md``). So every choice is final: the accepted rows are moved
into place, and the next step begins after them. In torch the last bit may differ, and :attr:`Engine.exact` says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from pronk.cache.budget import KVBudget
from pronk.cache.paged import PagedCache
from pronk.choosing.chooser import is_finite, token_logprobs
from pronk.choosing.rules import choices
from pronk.choosing.walk import Walk, walk
from pronk.drafters.base import DraftContext, Drafter, Outcome
from pronk.drafters.target import Target
from pronk.engine.budget import paying
from pronk.engine.request import Request
from pronk.engine.scheduler import Scheduler, Turn
from pronk.engine.stats import Step
from pronk.errors import OptionError, PronkError
from pronk.interrupts import interruptible, uninterrupted
from pronk.kernels.threads import lend_threads, return_threads
from pronk.model.decoder import Decoder
from pronk.passes.attention import Segment
from pronk.passes.costs import PassCosts
from pronk.passes.runner import Job, PassResult, Runner
from pronk.text.tokenizer import Tokenizer
from pronk.tree import TokenTree

__all__ = ["Engine"]


class _Plan(NamedTuple):
    """One request's part of a step: ``draft`` below its pending tokens is ``tree``, at ``position`` in the text."""

    turn: Turn
    draft: TokenTree
    tree: TokenTree
    job: Job
    position: int

    @property
    def start(self) -> int:
        """The node of the last pending token in ``tree``, which is the root of ``draft``."""
        return self.turn.count - 1


class Engine:
    """Advances any number of requests, one pass at a time."""

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        *,
        max_batch: int = 16,
        prefill_chunk: int = 512,
        max_tree: int = 128,
        budget: bool = False,
        tokenizer: Tokenizer | None = None,
        kv_budget: KVBudget | None = None,
        folder: Path | None = None,
    ) -> None:
        """Bring a model and its cache together.

        Args:
            decoder: the model.
            cache: for its keys and values.
            max_batch: most requests in a pass.
            prefill_chunk: most prompt tokens in a pass.
            max_tree: most rows of a request in a pass that decodes.
            budget: drop guesses that do not pay for their rows (see :mod:`pronk.engine.budget`).
            tokenizer: of the model, for drafters to which it matters what ids mean.
            kv_budget: what ``cache`` belongs to, for drafters that need a cache of their own.
            folder: of the checkpoint, for drafters that were trained on it.
        """
        self.runner = Runner(decoder, cache)
        self.cache = cache
        self.window = decoder.config.window
        self.vocab_size = decoder.config.vocab_size
        self.scheduler = Scheduler(cache, self.window, max_batch, prefill_chunk, max_tree)
        self.max_tree = max_tree
        self.budget = budget
        self.costs: PassCosts | None = None
        self.target = Target(decoder, cache, tokenizer, kv_budget, folder)

    @property
    def exact(self) -> bool:
        """Whether a row's logits depend on its own text alone, to the bit."""
        return self.runner.exact

    def add(self, request: Request) -> None:
        """Take a request in."""
        request.began = perf_counter()
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Stop a request and free what it holds; harmless if it has left."""
        self._leave(request)

    def step(self) -> None:
        """One pass for every request that takes part."""
        with interruptible():
            try:
                if self.exact:
                    lend_threads()
                self._step()
            finally:
                if self.exact:
                    return_threads()

    def _step(self) -> None:
        with uninterrupted():
            self._dismiss()
            turns = self.scheduler.schedule()
            self._start_drafting(turns)
        if not turns:
            return
        drafts = self._afford(turns, self._propose(turns))
        with uninterrupted():
            plans = [self._plan(turn, drafts.get(turn.request)) for turn in turns]
        result = self._forward(plans)
        with uninterrupted():
            outcomes = {plan.turn.request: self._verify(plan, result, i) for i, plan in enumerate(plans)}
            self._observe({request: outcome for request, outcome in outcomes.items() if outcome is not None})
            self._dismiss()

    def _start_drafting(self, turns: Sequence[Turn]) -> None:
        """Drafter states begin with a request's first pass; those that wait in the queue cost nothing."""
        for request in (turn.request for turn in turns if not turn.request.drafting):
            began = perf_counter()
            request.draft_state = request.drafter.start(request.prompt)
            request.stats.draft_seconds += perf_counter() - began
            request.drafting = True

    def _observe(self, outcomes: Mapping[Request, Outcome[Any]]) -> None:
        for drafter, requests in _by_drafter(outcomes):
            began = perf_counter()
            drafter.observe([outcomes[request] for request in requests])
            seconds = perf_counter() - began
            for request in requests:
                request.stats.draft_seconds += seconds

    def _propose(self, turns: Sequence[Turn]) -> dict[Request, TokenTree]:
        """Ask each drafter once, for all its requests that decode; a prompt's own tokens need no guesses."""
        drafts: dict[Request, TokenTree] = {}
        for drafter, requests in _by_drafter(turn.request for turn in turns if turn.request.num_pending == 1):
            began = perf_counter()
            try:
                contexts = [self._context(request) for request in requests]
                trees = drafter.propose(contexts)
            except BaseException:
                # Drafters borrow the choosers; an interruption may have left one between two tokens.
                with uninterrupted():
                    for request in requests:
                        request.chooser.recover(request.tokens)
                raise
            seconds = perf_counter() - began
            for request, context, tree in zip(requests, contexts, trees, strict=True):
                drafts[request] = self._accept_draft(drafter, context, tree)
                request.stats.draft_seconds += seconds
        return drafts

    def _afford(self, turns: Sequence[Turn], drafts: dict[Request, TokenTree]) -> dict[Request, TokenTree]:
        """The guesses that pay for their rows, where a drafter says how likely they are."""
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
        paid = zip(drafts, paying(offered, rows, costs), strict=True)
        return {request: drafts[request] if request in whole else tree for request, tree in paid}

    def _costs(self) -> PassCosts | None:
        """What passes cost: measured when first asked for, as soon as the cache has room."""
        if self.costs is None:
            self.costs = PassCosts.measure(self.runner)
        return self.costs

    def _accept_draft(self, drafter: Drafter[Any], context: DraftContext[Any], tree: TokenTree) -> TokenTree:
        """The proposal within the limits; guesses that the target has no token for are left out."""
        if tree.tokens[0] != context.tokens[-1]:
            msg = f"drafter {drafter.name}: expected a tree below token {context.tokens[-1]}, found {tree.tokens[0]}"
            raise OptionError(msg)
        if any(q is not None and len(q) != self.vocab_size for q in tree.probs or ()):
            # Drawn from other tokens than the target's, some of which are left out: what is left has another law. And
            # it must not depend on the draw how a guess is tried, so all are point masses, which any guess may be.
            tree = replace(tree, probs=None)
        if tree.early is not None and min(drafter.needs.hidden, default=tree.early.layers + 1) <= tree.early.layers:
            tree = replace(tree, early=None)  # another part of the drafter reads what the pass would leave out
        if min(tree.tokens) < 0 or max(tree.tokens) >= self.vocab_size:
            tree = tree.keep(node for node, token in enumerate(tree.tokens) if 0 <= token < self.vocab_size)
        return tree.limit(context.max_depth, context.max_nodes)

    def _context(self, request: Request) -> DraftContext[Any]:
        request.chooser.follow(len(request.tokens))
        return DraftContext(
            request.draft_state,
            request.tokens,
            max(0, request.remaining - 1),
            self.max_tree - 1,
            request.params,
            request.chooser,
            request.table,
            self._costs() if request.drafter.needs.costs else None,
            self.budget,
        )

    def _plan(self, turn: Turn, draft: TokenTree | None) -> _Plan:
        request = turn.request
        held = request.table.length
        lead = request.tokens[held : held + turn.count]
        draft = draft or TokenTree.chain(lead[-1:])
        tree = draft.hang_below(lead[:-1])
        self.cache.prepare(request.table, held + len(tree))
        first = len(tree) if not turn.decodes else turn.count - 1
        if _reports_prompt(request):
            first = 0
        job = Job(Segment(request.table, tree), range(first, len(tree)), len(request.prompt))
        return _Plan(turn, draft, tree, job, held)

    def _forward(self, plans: Sequence[_Plan]) -> PassResult:
        layers = frozenset(layer for plan in plans for layer in plan.turn.request.drafter.needs.hidden)
        result = self.runner.forward([plan.job for plan in plans], layers)
        for plan in plans:
            plan.turn.request.stats.target_seconds += result.seconds
        return result

    def _verify(self, plan: _Plan, result: PassResult, index: int) -> Outcome[Any] | None:
        """Walk one request's tree and commit what the target chose. ``None`` while its prompt is not through."""
        request, logits = plan.turn.request, result.logits[index]
        above = plan.start - plan.job.wanted.start  # rows of the prompt's tokens before the last one
        try:
            # What plain decoding does not look at cannot end a request: a wrong guess may overflow where the text does
            # not. So the walk checks what it chooses from; other rules look at every guess.
            if above or not plan.turn.decodes or request.params.rejects:
                _check(logits if not plan.turn.decodes or request.params.rejects else logits[:above])
            self._report_prompt(plan, logits)
            if not plan.turn.decodes:
                self._commit_rows(request, range(plan.turn.count))
                return None
            logits = logits[above:] if above else logits
            found = self._walk(plan, logits)
        except OverflowError:
            request.error = PronkError(f"the model's numbers overflow in {self.runner.dtype}; use a wider dtype")
            return None
        committed = self._commit_tokens(plan, found, logits)
        self._commit_rows(request, [*range(plan.start + 1), *found.path] if found.path else range(plan.start + 1))
        return self._outcome(plan, found, committed, result, index)

    def _walk(self, plan: _Plan, logits: Tensor) -> Walk:
        """The target's choices from the last certain token on; ``logits`` has a row per node from there."""
        request, start = plan.turn.request, plan.start
        chooser = request.chooser
        # It may have been told of choices of a step that was interrupted.
        chooser.follow(len(request.tokens))
        return walk(plan.tree, choices(chooser, plan.tree, logits, start), start)

    def _commit_tokens(self, plan: _Plan, found: Walk, logits: Tensor) -> tuple[int, ...]:
        request = plan.turn.request
        reports: list[dict[int, float]] | None = None
        if request.params.logprobs is not None:
            rows = logits[[node - plan.start for node in (plan.start, *found.path)]]
            reports = token_logprobs(rows, found.tokens, request.params.logprobs)
        for count, token in enumerate(found.tokens):
            report = reports[count] if reports else None
            if not request.append(token, guessed=count < len(found.path), logprobs=report):
                return found.tokens[: count + 1]
        return found.tokens

    def _commit_rows(self, request: Request, offsets: Sequence[int]) -> None:
        if not isinstance(offsets, range):
            request.stats.moved += sum(offset != place for place, offset in enumerate(offsets))
        self.cache.commit(request.table, offsets)
        if self.window is not None:
            self.cache.release_before(request.table, request.table.length - self.window + 1)

    def _report_prompt(self, plan: _Plan, logits: Tensor) -> None:
        """Log-probabilities of the prompt's tokens that follow this pass's nodes."""
        request, top = plan.turn.request, plan.turn.request.params.prompt_logprobs
        if top is None or not _reports_prompt(request):
            return
        held = request.table.length
        following = request.prompt[held + 1 : held + 1 + plan.turn.count]
        if not held:
            request.prompt_logprobs.append(None)
        request.prompt_logprobs.extend(token_logprobs(logits[: len(following)], following, top))

    def _outcome(
        self, plan: _Plan, found: Walk, committed: tuple[int, ...], result: PassResult, index: int
    ) -> Outcome[Any]:
        request, draft, above = plan.turn.request, plan.draft, plan.start
        path = tuple(node - above for node in found.path)
        depths = [depth for node, depth in enumerate(draft.depths) if draft.acceptable[node]]
        self._record(plan, len(depths) - 1, max(depths, default=0), len(path), len(committed))
        request.stats.count_sources(draft, path)
        needs = request.drafter.needs
        logits = result.logits[index][above - plan.job.wanted.start :] if needs.logits else None
        hidden = {layer: result.hidden[layer][index][above:] for layer in needs.hidden} if needs.hidden else {}
        root = plan.position + above
        return Outcome(request.draft_state, draft, path, committed, root, request.params, logits, hidden)

    def _record(self, plan: _Plan, drafted: int, depth: int, accepted: int, tokens: int) -> None:
        request, stats = plan.turn.request, plan.turn.request.stats
        clock = perf_counter() - request.began
        clocks = (stats.draft_seconds, stats.target_seconds, clock)
        stats.steps.append(Step(len(plan.tree), drafted, depth, accepted, tokens, *clocks))

    def _dismiss(self) -> None:
        """Requests that have ended leave: those of this step, and those of one that was interrupted."""
        for request in [request for request in self.scheduler.running if request.ended]:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        if self.scheduler.remove(request):
            request.stats.total_seconds = perf_counter() - request.began
            if request.drafting:
                request.drafter.stop(request.draft_state)


def _by_drafter(requests: Iterable[Request]) -> list[tuple[Drafter[Any], list[Request]]]:
    """Requests grouped by the drafter object: equal ones may hold different states."""
    groups: dict[int, list[Request]] = defaultdict(list)
    for request in requests:
        groups[id(request.drafter)].append(request)
    return [(group[0].drafter, group) for group in groups.values()]


def _reports_prompt(request: Request) -> bool:
    """Whether the logits at the prompt's tokens are wanted; a further sample leaves them to the first one."""
    return request.params.prompt_logprobs is not None and not request.output and request.parent is None


def _check(logits: Tensor) -> None:
    if len(logits) and not is_finite(logits):
        raise OverflowError
