"""What a guide forces, before and between another drafter's guesses.

Where a grammar leaves one continuation, it need not be asked of the model: it is a guess for free, and nearly always
right. Between such stretches another drafter guesses, at the place where the forced text ends ::

    forced      {"name": "                                     ", "age":
    the part                      Ada ─┬─ Lovelace                        36
                                       └─ Yonath
    tree        {"name": " ─ Ada ─┬─ Lovelace ─ ", "age":
                                  └─ Yonath ─ ", "age":

A request with a guide and the mode ``"forced"`` has this around its own drafter, whichever that is; there is nothing to
be named. Without a guide it is its part.

**When a token may be had without asking.** A text can be spelled in several ways, ``{"`` or ``{`` and ``"``. Where a
grammar forces text, the draft tokens are the tokenizer's own spelling of it after the output so far, which is the
spelling that models are trained on; its last tokens are left open if they might join the text that follows. The mask
leaves only that spelling (:mod:`pronk.structured.grammar_processor`), so the target's choice is known before the
forward pass, under every acceptance rule and at every temperature. The draft tokens are verified all the same, by rows
that the text needs anyway, so a guide whose masks are wider is as safe. Only an end is a draft token like others,
where a model has more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from pronk.drafters.from_text.suffix import Suffix
from pronk.drafters.shared.composite import Composite, CompositeProposer, Parts
from pronk.errors import OptionError
from pronk.sampling.grammar_pruning import visit
from pronk.speculation.proposer import DraftContext, Drafter, Proposer, SourceReport
from pronk.speculation.target import Target
from pronk.speculation.token_view import TokenView
from pronk.speculation.tree import TokenTree

__all__ = ["Grammar", "GrammarProposer"]


@dataclass(frozen=True)
class Grammar(Composite):
    """Options of forced guesses.

    Attributes:
        parts: the drafter for what is not forced, one.
    """

    name = "grammar"

    parts: tuple[Drafter, ...] = field(default_factory=lambda: (Suffix(store_tokens=0),))

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.parts) > 1:
            found = ", ".join(part.name for part in self.parts)
            msg = (
                f"{self.name}: expected one drafter, found {found}; write merged({found}) for one that is made of them"
            )
            raise OptionError(msg)

    def bind(self, target: Target) -> GrammarProposer:
        """What guesses forced text, and otherwise as its part does."""
        (part,) = self.bind_parts(target)
        return GrammarProposer(part)


class GrammarProposer(CompositeProposer):
    """Guesses what guides force, and asks another guesser for the rest."""

    name = Grammar.name

    def __init__(self, part: Proposer[Any]) -> None:
        super().__init__((part,))
        self.capabilities = replace(self.capabilities, proposes=True)

    @property
    def budget_owner(self) -> Proposer[Any]:
        """Its part's, as what is forced costs nothing, and one of these does not outlive its requests."""
        return self.parts[0].budget_owner

    def source_reports(self, state: Parts) -> Sequence[SourceReport]:
        """Who its part has asked."""
        return self.parts[0].source_reports(state[0])

    def should_skip(self, state: Parts, tokens: Sequence[int]) -> bool:  # noqa: ARG002 - what is forced is known without asking its part
        """Never: something may be forced."""
        return False

    def propose(self, contexts: Sequence[DraftContext[Parts]]) -> list[TokenTree]:
        """For each context the forced chain, the part's tree behind it, and behind its nodes what is forced there."""
        leads = [_forced(context) for context in contexts]
        views = [_behind(context, lead) for context, lead in zip(contexts, leads, strict=True)]
        asked = [
            i
            for i, view in enumerate(views)
            if self.parts[0].capabilities.proposes and min(view.max_depth, view.max_nodes) > 0
        ]
        trees = [TokenTree.chain(view.tokens[-1:]) for view in views]
        with ExitStack() as loans:
            for i in asked:
                loans.enter_context(contexts[i].sampler.after(leads[i]))
            for i, tree in zip(asked, self.parts[0].propose([views[i] for i in asked]), strict=True):
                trees[i] = tree
        return [self._joined(*each) for each in zip(contexts, leads, trees, strict=True)]

    def _joined(self, context: DraftContext[Parts], lead: Sequence[int], tree: TokenTree) -> TokenTree:
        if context.sampler.guide is None:
            return tree
        grown = _Grown(self.parts[0].name, context, lead, tree)
        with context.sampler.after():
            grown.force()
        return grown.tree()


class _Grown:
    """A part's tree below a forced chain, which grows by what is forced behind its nodes."""

    def __init__(self, name: str, context: DraftContext[Parts], lead: Sequence[int], tree: TokenTree) -> None:
        above = len(lead)
        self.context = context
        self.tokens = [context.tokens[-1], *lead, *tree.tokens[1:]]
        self.parents = [*range(-1, above), *(parent + above for parent in tree.parents[1:])]
        self.depths = [*range(above + 1), *(depth + above for depth in tree.depths[1:])]
        self.verify = [True] * above + [True, *tree.acceptable[1:]]
        self.probs = None if tree.probs is None else [*(None,) * (above + 1), *tree.probs[1:]]
        silent = tree.gain is None and tree.num_draft_tokens > 0
        self.gain = None if silent else [1.0] * (above + 1) + list((tree.gain or (1.0,))[1:])
        own = tree.origin or (("", 0), *((name, 0),) * tree.num_draft_tokens)
        self.origin = [("", 0), *((Grammar.name, 0),) * above, *own[1:]]
        self.children: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            if self.verify[node]:
                self.children[self.parents[node]].append(node)

    def force(self) -> None:
        """Add what is forced behind the nodes that the guide allows."""
        guide = self.context.sampler.guide
        assert guide is not None

        def see(node: int) -> bool:
            if not guide.legal(self.tokens[node]):
                return False
            guide.advance(self.tokens[node])
            chain = guide.forced()
            guide.rollback(1)
            self._add(node, chain)
            return True

        visit(self.tokens, self.children, guide, see)

    def _add(self, node: int, chain: Sequence[int]) -> None:
        """``chain`` below ``node``, with the nodes that are there already, as far as there is room."""
        for token in chain:
            known = next((child for child in self.children[node] if self.tokens[child] == token), None)
            if known is None:
                if self.depths[node] >= self.context.max_depth or len(self.tokens) > self.context.max_nodes:
                    return
                known = self._new(node, token)
            node = known

    def _new(self, parent: int, token: int) -> int:
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.verify.append(True)
        self.origin.append((Grammar.name, 0))
        if self.probs is not None:
            self.probs.append(None)
        if self.gain is not None:
            self.gain.append(self.gain[parent])
        self.children.append([])
        self.children[parent].append(node)
        return node

    def tree(self) -> TokenTree:
        """All of it."""
        return TokenTree(
            tuple(self.tokens),
            tuple(self.parents),
            None if all(self.verify) else tuple(self.verify),
            None if self.probs is None else tuple(self.probs),
            None if self.gain is None else tuple(self.gain),
            tuple(self.origin),
        )


def _forced(context: DraftContext[Parts]) -> list[int]:
    """What is forced behind the text, as far as there is room."""
    guide = context.sampler.guide
    return [] if guide is None else guide.forced()[: max(0, min(context.max_depth, context.max_nodes))]


def _behind(context: DraftContext[Parts], lead: Sequence[int]) -> DraftContext[Any]:
    """What the part sees: the text with what is forced behind it."""
    return replace(
        context,
        state=context.state[0],
        tokens=TokenView(context.tokens, lead) if lead else context.tokens,
        max_depth=context.max_depth - len(lead),
        max_nodes=context.max_nodes - len(lead),
    )
