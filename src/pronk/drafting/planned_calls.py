"""Calls of a drafter for the requests in which the planner lets it propose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pronk.drafting.checked_proposals import call_propose
from pronk.drafting.proposer import DraftContext, Outcome, Proposer
from pronk.drafting.tree_union import TreeUnion
from pronk.sampling.tree import TokenTree

Check = Callable[[DraftContext[Any], TokenTree], TokenTree]


def propose_planned(
    proposer: Proposer[Any],
    contexts: Sequence[DraftContext[Any]],
    unions: Sequence[TreeUnion],
    clock: Callable[[], float],
    check: Check | None = None,
    part: int | None = None,
) -> None:
    """Call a drafter for the requests in which it may propose; add its trees to ``unions``.

    The planner decides for each request for which the drafter may have draft tokens. The duration
    is recorded in the requests' ledgers.

    Args:
        proposer: the drafter.
        contexts: one per request, with the drafter's own states; they get its ``plan``.
        unions: for each request, the draft tokens of the drafters before this one.
        clock: returns the time in seconds.
        check: returns a proposed tree if it is valid, and raises an error otherwise; then no tree
            is added. ``None``: the caller checks the trees.
        part: if ``contexts`` belong to a composite drafter, the index of this drafter's state in
            the composite's. The drafter gets copies of the contexts.
    """
    planned: list[DraftContext[Any]] = []
    own_unions: list[TreeUnion] = []
    reports_before: list[int] = []
    charged_before: list[float] = []
    for context, union in zip(contexts, unions, strict=True):
        if not proposer.drafts_for(context.params):
            continue
        own = context
        if part is not None:
            own = context.with_state(context.state[part], draws=False)
        ledger = own.ledger
        own.plan = ledger.plan(proposer, own, union)
        if own.plan.reason is not None:
            planned.append(own)
            own_unions.append(union)
            reports_before.append(len(ledger.reports))
            charged_before.append(ledger.charged)
    if not planned:
        return
    planned[0].ledger.ledger.drafters[proposer.label].num_calls += 1
    began = clock()
    by_context = _propose(proposer, planned, check)
    seconds = (clock() - began) / len(planned)
    for number, own in enumerate(planned):
        began = clock()
        ledger = own.ledger
        # A drafter that has only scored the text proposes nothing.
        proposed = by_context.get(id(own)) or TokenTree.chain(own.tokens[-1:], gain=[1.0])
        ledger.add(
            proposer,
            own.plan,
            seconds,
            proposed,
            own_unions[number],
            own.tokens[own.block_table.length + 1 :],
            num_reports=reports_before[number],
        )
        ledger.charge(proposer, seconds + clock() - began, charged_before[number])


def _propose(
    proposer: Proposer[Any], planned: Sequence[DraftContext[Any]], check: Check | None
) -> dict[int, TokenTree]:
    """Return the valid trees of a drafter by the ids of their contexts.

    Requests whose text the drafter has only scored are left out.
    """
    drafting = [
        context
        for context in planned
        if context.plan.reason != "learns" or not proposer.score_history(context)
    ]
    trees: dict[int, TokenTree] = {}
    if drafting:
        for context, tree in zip(drafting, call_propose(proposer, drafting), strict=True):
            trees[id(context)] = tree if check is None else check(context, tree)
    return trees


def observe_planned(
    proposer: Proposer[Any],
    outcome: Outcome[Any],
    clock: Callable[[], float],
    part: int | None = None,
) -> None:
    """Pass an outcome to a drafter that has proposed in this step, or that observes all steps.

    A drafter that uses no outcomes gets none. The duration of the call is added to that of the
    drafter's proposal in this step. If ``outcome`` belongs to a composite drafter, ``part`` is the
    index of this drafter's state in the composite's.
    """
    if not proposer.observes:
        return
    has_proposed = id(proposer) in outcome.ledger.proposers
    if not has_proposed and not proposer.capabilities.observes_all_steps:
        return
    charged_before = outcome.ledger.charged
    began = clock()
    proposer.observe(outcome if part is None else outcome.with_state(outcome.state[part]))
    if has_proposed:
        outcome.ledger.charge(proposer, clock() - began, charged_before)
