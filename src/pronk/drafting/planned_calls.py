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
    """
    planned: list[DraftContext[Any]] = []
    own_unions: list[TreeUnion] = []
    for context, union in zip(contexts, unions, strict=True):
        if not proposer.drafts_for(context.params):
            continue
        context.plan = context.ledger.plan(proposer, context, union)
        if context.plan.reason is not None:
            planned.append(context)
            own_unions.append(union)
    if not planned:
        return
    planned[0].ledger.ledger.drafters[proposer.label].num_calls += 1
    reports_before = [len(context.ledger.reports) for context in planned]
    charged_before = [context.ledger.charged for context in planned]
    began = clock()
    drafting = [
        context
        for context in planned
        if context.plan.reason != "learns" or not proposer.score_history(context)
    ]
    trees = call_propose(proposer, drafting) if drafting else []
    by_context = dict(zip(map(id, drafting), trees, strict=True))
    if check is not None:
        for context in drafting:
            by_context[id(context)] = check(context, by_context[id(context)])
    seconds = (clock() - began) / len(planned)
    for number, context in enumerate(planned):
        began = clock()
        ledger = context.ledger
        # A drafter that has only scored the text proposes nothing.
        tree = by_context.get(id(context)) or TokenTree.chain(context.tokens[-1:], gain=[1.0])
        lead = context.tokens[context.root + 1 :]
        ledger.add(
            proposer,
            context.plan,
            seconds,
            tree,
            own_unions[number],
            lead,
            num_reports=reports_before[number],
        )
        ledger.charge(proposer, seconds + clock() - began, charged_before[number])


def observe_planned(
    proposer: Proposer[Any],
    outcome: Outcome[Any],
    clock: Callable[[], float],
    part: int | None = None,
) -> None:
    """Pass an outcome to a drafter that has proposed in this step, or that observes all steps.

    The duration of the call is added to that of the drafter's proposal in this step. If ``outcome``
    belongs to a composite drafter, ``part`` is the index of this drafter's state in the
    composite's.
    """
    has_proposed = outcome.ledger.has_proposed(proposer)
    if not has_proposed and not proposer.capabilities.observes_all_steps:
        return
    charged_before = outcome.ledger.charged
    began = clock()
    proposer.observe(outcome if part is None else outcome.with_state(outcome.state[part]))
    if has_proposed:
        outcome.ledger.charge(proposer, clock() - began, charged_before)
