"""Who is asked for guesses, decided at each step of each request by what asking costs and brings: the default.

The sources are asked one after the other, cheap ones first, each only if what it may be expected to add to the guesses
that are there is worth the time (``_worth``). What they offer is one tree, the same guess counted once ::

    text ends like an earlier place    suffix       return ── x ── +        .8 .6 .5
    it adds .4 tokens for .002 steps   recycling     │       └──── *        .2
    .1 tokens for .06 steps: no        draft_model   ·

of which the engine computes the nodes that pay. So a copied passage is copied, without asking the draft model; where
nothing repeats itself the draft model is asked; and where nothing pays, nobody.

**At hand** are, for every target, what the text itself says (``suffix``) and what the target has said before
(``recycling``); ``lookahead`` where rows cost next to nothing; in a clone ``pronk-tiny-draft`` where it has the
target's vocabulary; heads in a folder beside the target's weights; and whatever is given:
``auto(draft_model(model='…'))``, ``auto(retrieval(datastore='…'), kangaroo)``. What is given takes the place of what
would be found of its kind.

**Exploring.** Who does not seem to pay is asked now and then all the same, the one that has waited longest: for that
there is an account of all requests together, 2 plain steps at first, and a hundredth of each step. So exploring takes
no more time than that, and one proposal of each source; who has a model has to wait for its first one until that would
be enough to prepare it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from pronk.checks import check_flag, check_integer
from pronk.drafters.from_draft.cape import Cape
from pronk.drafters.from_draft.draft_model import DraftModel
from pronk.drafters.from_outputs.lookahead import Lookahead
from pronk.drafters.from_outputs.recycling import Recycling
from pronk.drafters.from_target.multi_token import MultiToken, find_target_heads
from pronk.drafters.from_text.suffix import Suffix
from pronk.drafters.registry import make_drafter
from pronk.drafters.shared.chain import ChainProposer
from pronk.drafters.shared.composite import Composite, CompositeProposer
from pronk.errors import PronkError
from pronk.hub.cache import find_cached
from pronk.hub.pairs import all_pairs, find_pairs
from pronk.speculation.auto_step import AutoStep
from pronk.speculation.proposer import DraftContext, Drafter, Outcome, Proposer, SourceReport, bind_proposer
from pronk.speculation.source_states import SourceStates
from pronk.speculation.source_value import BestOffer, SourceCost, SourceValue, alike
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["Auto", "AutoProposer"]

# Plain steps for exploring: at first, of each step, at most.
_BEGIN, _SHARE, _MOST = 2.0, 0.01, 8.0

# Steps for which a source that does not pay is left alone at least.
_LEAVE = 4

# Steps for which nobody is asked after nobody was worth it, or had anything to offer: 1, 3, 7, and then so many; but no
# more than it takes for the time spent on that to be such a share of them.
_REST, _VAIN = 15, 0.01

# Proposals over which the reading of a text is counted.
_TERMS = 16

# Rows are cheap where so many take no longer than so many times one row.
_ROWS, _CHEAP = 16, 1.35

# Of what may be lost, how much may be put on one source, and how many plain steps are kept for a text that is copied.
_PART, _KEPT = 0.5, 2.0

# Seconds that it is believed to take a model until its first guess: it is not prepared before exploring might have
# taken so long.
_PREPARING = 0.005

# Steps of one request that count for all.
_TAUGHT = 64

# Who hears in so small a part of a step may hear of all of them.
_EASY = 0.003


@dataclass(frozen=True)
class Auto(Composite):
    """Options of choosing.

    Attributes:
        parts: drafters that are at hand beside what is found.
        bundled: whether to use ``pronk-tiny-draft``, in a clone, if no part has a model and the vocabularies are equal.
        num_nodes: guesses that a tree has at most, 1..127.
    """

    name = "auto"

    parts: tuple[Drafter, ...] = ()
    bundled: bool = True
    num_nodes: int = 31

    def __post_init__(self) -> None:
        if self.parts != ():
            super().__post_init__()
        check_flag(f"{self.name}: bundled", self.bundled)
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, 127)

    def bind(self, target: Target) -> AutoProposer:
        """Return a proposer that chooses among sources; errors are those of binding the given parts."""
        given = self.bind_parts(target)
        names = _names(given)
        light = [each for each in given if not each.models]
        light += [each.bind(target) for each in (Recycling(), Lookahead()) if each.name not in names]
        if Suffix.name not in names:
            light.insert(0, Suffix(store_tokens=0).bind(target))
        heavy = [each for each in given if each.models] or self._found(target)
        return AutoProposer(self, [*light, *heavy], target)

    def _found(self, target: Target) -> list[Proposer[Any]]:
        """Return a drafter with a model that is found without an option; an empty list if there is none.

        The first of these that fits: heads in the target's folder, a model of the table of pairs that is on this
        machine, ``pronk-tiny-draft`` in a clone.
        """
        found: list[Drafter] = [MultiToken()] if find_target_heads(target) is not None else []
        if target.folder is not None and any(find_cached(pair.model) for pair in all_pairs()):
            pairs = [pair for pair in find_pairs(target.folder, target.decoder.config) if find_cached(pair.model)]
            found += [make_drafter(f'{pair.drafter}(model="{pair.source}")') for pair in pairs]
        found += [Cape((DraftModel(),))] if self.bundled else []
        for drafter in found:
            with suppress(PronkError):  # no clone, another vocabulary, or no memory
                return [bind_proposer(drafter, target)]
        return []


def _names(proposers: Sequence[Proposer[Any]]) -> set[str]:
    """Return the names of proposers and, recursively, of their parts."""
    parts = [part for each in proposers if isinstance(each, CompositeProposer) for part in each.parts]
    return {each.name for each in proposers} | (_names(parts) if parts else set())


class AutoProposer(CompositeProposer):
    """Several sources, asked where it pays.

    Attributes:
        options: it chooses by.
        sources: the names of its parts.
        account: plain steps that may be spent exploring.
        steps: of all requests, so far.
        worth: of each source, by what all requests have shown.
        step_cost: of asking each.
    """

    name = Auto.name

    def __init__(self, options: Auto, parts: Sequence[Proposer[Any]], target: Target) -> None:
        super().__init__([part for part in parts if part.capabilities.proposes])
        self.options, self.target, self.clock = options, target, target.clock
        self.capabilities = replace(self.capabilities, costs=True, self_budgeting=True)
        self.account, self.steps = _BEGIN, 0
        self._given = {part.name for part in options.parts}
        self.sources = [part.source if isinstance(part, ChainProposer) else part.name for part in self.parts]
        self.worth = [SourceValue() for _ in self.parts]
        self.step_cost = [SourceCost() for _ in self.parts]

    def start(self, prompt: Sequence[int]) -> Any:
        """The sources' states, and what is known of their worth."""
        states = super().start(prompt)
        return SourceStates(states, [each.own() for each in self.worth], [-_LEAVE] * len(self.parts))

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        """The union of what those offer who are worth asking."""
        began = self.clock()
        views = [self._view(context, len(contexts)) for context in contexts]
        for number in range(len(self.parts)):
            asked = [(view, why) for view in views if (why := self._why(number, view, len(contexts))) is not None]
            if asked:
                self._ask(number, asked, len(contexts))
        spent = (self.clock() - began) / max(1, len(contexts))
        return [self._tree(view, spent) for view in views]

    def observe(self, outcome: Outcome[Any]) -> None:
        """Every source hears what became of its own guesses, and who was asked what the target said, too."""
        choices: SourceStates = outcome.state
        choices.steps += 1
        for number, part in enumerate(self.parts):
            source_reports, price = choices.source_reports.get(number), self.step_cost[number]
            if source_reports:
                choices.asked[number] = choices.steps
                own = replace(outcome, state=choices.states[number])
                began = self.clock()
                part.observe(own if outcome.params.rejects else choices.judged(own, source_reports.tree))
                price.hearing.append(self.clock() - began)
            elif part.capabilities.logits and price.hears_within(_EASY * choices.plain):
                part.observe(replace(outcome, state=choices.states[number]))
            elif part.capabilities.observes_all_steps:
                part.observe(replace(outcome, state=choices.states[number]).without_tensors)
        choices.source_reports.clear()

    def source_reports(self, state: Any) -> Sequence[SourceReport]:
        """Return the reports of the sources asked in this step, in the order of asking."""
        return [*state.source_reports.values()]

    def should_skip(self, state: Any, tokens: Sequence[int]) -> bool:
        """Return whether to skip drafting, as for some steps after an empty proposal of a new text."""
        left, length = state.rest
        if left and not state.repeating and state.repeats(tokens, len(tokens)) and (state.copies or not state.sparing):
            left = 0
        if left:
            state.rest = left - 1, length
            self._save()
        return left > 0

    def on_preempt(self, state: Any) -> None:
        """The places of every source go."""
        state.read.clear()
        super().on_preempt(state.states)

    def stop(self, state: Any) -> None:
        """Every source's state goes."""
        super().stop(state.states)

    def _view(self, context: DraftContext[SourceStates], requests: int) -> AutoStep:
        """Return the state of a step before any source is asked."""
        choices, certain = context.state, context.root + 1
        choices.source_reports.clear()  # there are some where a source has raised
        choices.root, choices.lead = len(context.tokens) - 1, tuple(context.tokens[certain:])
        best = None
        if context.prune_unprofitable and context.costs is not None:
            best = BestOffer.of((), context.costs, requests)
            choices.plain = best.seconds
            self._save()
        repeats = choices.repeats(context.tokens, certain)
        choices.sparing = best is not None and context.max_seconds < _KEPT * choices.plain
        choices.repeating = repeats and (choices.copies or not choices.sparing)
        kind = alike(0.0, first=True, repeats=repeats)
        return AutoStep(context, best, kind, context.max_seconds)

    def _save(self) -> None:
        """A part of a step is put by for exploring."""
        self.account = min(_MOST, self.account + _SHARE)
        self.steps += 1

    def _why(self, number: int, view: AutoStep, requests: int) -> Literal["pays", "explores", "all"] | None:
        """Why to ask a source, if there is a reason to."""
        context, choices, best = view.context, view.context.state, view.best
        if min(context.max_depth, context.max_nodes) < 1 or not self._fits(number, context, requests):
            return None
        if best is None:
            return "all"
        plain, terms = choices.plain, max(1, min(_TERMS, context.max_depth // 2))
        tokens, rows = choices.worth[number].at(view.kind)
        asking, reading = self._takes(number, view, requests)
        # Whoever has a model guesses what is new as well.
        kept = 0.0 if choices.copies or self.parts[number].models else _KEPT * plain
        if asking + reading / terms > _PART * (view.allowance - kept):
            return None
        seconds = best.seconds + rows * plain + asking + reading / terms
        # Who has a model is not believed to pay before it is known what asking takes.
        if self._prepared(number) and (best.tokens + tokens) * best.seconds > best.tokens * seconds:
            return "pays"
        return "explores" if not choices.sparing and self._due(number, view, requests) else None

    def _takes(self, number: int, view: AutoStep, requests: int) -> tuple[float, float]:
        """Seconds for asking a source, and for what it has to read of the text before."""
        price = self.step_cost[number]
        return price.seconds(requests), price.reads(view.unread(number))

    def _due(self, number: int, view: AutoStep, requests: int) -> bool:
        """Whether a source has waited longest of those that can be tried at all, and there is enough put by for it."""
        asked, plain = view.context.state.asked, view.context.state.plain
        if not self._prepared(number):
            return (_BEGIN + _SHARE * self.steps) * plain >= _PREPARING
        if (
            asked[number] > view.context.state.steps - _LEAVE
            or sum(self._takes(number, view, requests)) > self.account * plain
        ):
            return False
        longer = [other for other, last in enumerate(asked) if last < asked[number]]
        return not any(
            self._fits(other, view.context, requests)
            and self._prepared(other)
            and sum(self._takes(other, view, requests)) <= _MOST * plain
            for other in longer
        )

    def _prepared(self, number: int) -> bool:
        """Whether it was asked before, or has no model that would have to be prepared for that."""
        return self.step_cost[number].began is not None or not self.parts[number].models

    def _fits(self, number: int, context: DraftContext[SourceStates], requests: int) -> bool:
        """Whether a source is one for these costs at all."""
        if self.parts[number].name != Lookahead.name or Lookahead.name in self._given:
            return True
        costs = context.costs if context.prune_unprofitable else None
        return costs is not None and costs.at(_ROWS * requests) <= _CHEAP * costs.at(requests)

    def _ask(
        self, number: int, asked: Sequence[tuple[AutoStep, Literal["pays", "explores", "all"]]], requests: int
    ) -> None:
        """Ask a source for draft tokens; record its cost and what it adds to each step."""
        part, views = self.parts[number], [view for view, _ in asked]
        began = self.clock()
        trees = part.propose(
            [
                replace(
                    view.context,
                    state=view.context.state.states[number],
                    ignore_backoff=view.best is not None,
                    draws=False,
                )
                for view in views
            ]
        )
        seconds = self.clock() - began
        first, share = self.step_cost[number].began is None, seconds / len(views)
        self.step_cost[number].learn(seconds, len(views), [view.unread(number) for view in views])
        for (view, why), tree in zip(asked, trees, strict=True):
            choices, before = view.context.state, view.best
            choices.read[number] = len(view.context.tokens)
            view.allowance -= share
            view.take(part.name, tree, requests)
            choices.source_reports[number] = SourceReport(self.sources[number], why, share, tree, before, view.best)
            if why == "explores":  # what prepares a source for all does not count
                self.account -= min(share / choices.plain, _BEGIN) if first else share / choices.plain
            self._learn(number, view, before, afresh=why == "explores")

    def _learn(self, number: int, view: AutoStep, before: BestOffer | None, *, afresh: bool) -> None:
        """Asking a source has brought this."""
        after, choices = view.best, view.context.state
        if before is None or after is None:
            return
        tokens, rows = after.tokens - before.tokens, (after.seconds - before.seconds) / choices.plain
        choices.worth[number].learn(view.kind, tokens, rows, afresh=afresh)
        if not view.context.params.rejects and choices.taught < _TAUGHT:
            choices.taught += 1
            self.worth[number].learn(view.kind, tokens, rows)
        view.kind = alike(after.tokens - 1.0, first=False, repeats=False)

    def _tree(self, view: AutoStep, spent: float) -> TokenTree:
        """Return the tree of all offers; after an empty one that took time, skip drafting for some steps."""
        choices = view.context.state
        tree = (
            view.tree(self.options.num_nodes) if choices.source_reports else TokenTree.chain(view.context.tokens[-1:])
        )
        length = 0
        if not tree.num_draft_tokens and choices.plain:
            length = min(_REST, 1 + 2 * choices.rest[1], int(spent / (_VAIN * choices.plain)))
        choices.rest = length, length
        return tree
