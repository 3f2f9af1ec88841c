"""Draft tokens that a grammar forces, before and between another drafter's draft tokens.

Source of the draft tokens: the request's guide (the grammar's state), and one other drafter, the part. Where the
grammar allows one continuation, that continuation is a draft that costs next to nothing and is nearly always accepted.
The part proposes after the forced text ::

    forced      {"name": "                                     ", "age":
    the part                      Ada ─┬─ Lovelace                        36
                                       └─ Yonath
    tree        {"name": " ─ Ada ─┬─ Lovelace ─ ", "age":
                                  └─ Yonath ─ ", "age":

When it pays: always, for requests with a guide whose grammar forces text, such as JSON schemas. A request with
``guide_mode="forced"`` gets this drafter around its own automatically. Without a guide it proposes what its part does.

**Why forced tokens are accepted.** A text has several tokenizations, such as ``{"`` or ``{`` and ``"``. Where a
grammar forces text, the draft tokens are the tokenizer's own spelling of it after the output so far, which is the
spelling that models are trained on. The last tokens of forced text stay open if they might join the text that follows.
The mask leaves only that spelling (:mod:`pronk.structured.grammar_processor`), so the target's choice is known before
the forward pass, under every acceptance rule and at every temperature. The draft tokens are verified all the same, by
rows that the text needs anyway, so a guide whose masks are wider is as safe. The only exception is the end of the text
in a model with several stop tokens: the forced one is an ordinary draft token.
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
    """Options of forced draft tokens.

    Attributes:
        parts: one drafter, for text that is not forced.
    """

    name = "grammar"

    parts: tuple[Drafter, ...] = field(default_factory=lambda: (Suffix(store_tokens=0),))

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.parts) > 1:
            found = ", ".join(part.name for part in self.parts)
            msg = f"{self.name}: expected one drafter, found {found}; write merged({found}) to combine them"
            raise OptionError(msg)

    def bind(self, target: Target) -> GrammarProposer:
        """Bind the part and return a proposer of forced text and of the part's draft tokens."""
        (part,) = self.bind_parts(target)
        return GrammarProposer(part)


class GrammarProposer(CompositeProposer):
    """A proposer of forced tokens, and of another proposer's draft tokens between them."""

    name = Grammar.name

    def __init__(self, part: Proposer[Any]) -> None:
        super().__init__((part,))
        self.capabilities = replace(self.capabilities, proposes=True)

    @property
    def budget_owner(self) -> Proposer[Any]:
        """Return the part's budget owner: forced tokens cost nothing, and this object ends with its requests."""
        return self.parts[0].budget_owner

    def source_reports(self, state: Parts) -> Sequence[SourceReport]:
        """Return the part's reports."""
        return self.parts[0].source_reports(state[0])

    def should_skip(self, state: Parts, tokens: Sequence[int]) -> bool:  # noqa: ARG002
        """Return False: the guide may force tokens in any step."""
        return False

    def propose(self, contexts: Sequence[DraftContext[Parts]]) -> list[TokenTree]:
        """Return for each context the forced chain, the part's tree below it, and forced chains below that."""
        leads = [_forced(context) for context in contexts]
        views = [_part_context(context, lead) for context, lead in zip(contexts, leads, strict=True)]
        drafting = [
            i
            for i, view in enumerate(views)
            if self.parts[0].capabilities.proposes and min(view.max_depth, view.max_nodes) > 0
        ]
        trees = [TokenTree.chain(view.tokens[-1:]) for view in views]
        with ExitStack() as samplers:
            for i in drafting:
                samplers.enter_context(contexts[i].sampler.after(leads[i]))
            for i, tree in zip(drafting, self.parts[0].propose([views[i] for i in drafting]), strict=True):
                trees[i] = tree
        return [self._add_forced(*each) for each in zip(contexts, leads, trees, strict=True)]

    def _add_forced(self, context: DraftContext[Parts], lead: Sequence[int], tree: TokenTree) -> TokenTree:
        if context.sampler.guide is None:
            return tree
        tree_with_forced = _ForcedTree(self.parts[0].name, context, lead, tree)
        with context.sampler.after():
            tree_with_forced.add_forced_chains()
        return tree_with_forced.tree()


class _ForcedTree:
    """The part's tree below a forced chain, and the chains that the guide forces at its nodes."""

    def __init__(self, name: str, context: DraftContext[Parts], lead: Sequence[int], tree: TokenTree) -> None:
        num_forced = len(lead)
        self.context = context
        self.tokens = [context.tokens[-1], *lead, *tree.tokens[1:]]
        self.parents = [*range(-1, num_forced), *(parent + num_forced for parent in tree.parents[1:])]
        self.depths = [*range(num_forced + 1), *(depth + num_forced for depth in tree.depths[1:])]
        self.verify = [True] * num_forced + [True, *tree.acceptable[1:]]
        self.probs = None if tree.probs is None else [*(None,) * (num_forced + 1), *tree.probs[1:]]
        unknown_gain = tree.gain is None and tree.num_draft_tokens > 0
        self.gain = None if unknown_gain else [1.0] * (num_forced + 1) + list((tree.gain or (1.0,))[1:])
        part_origins = tree.origin or (("", 0), *((name, 0),) * tree.num_draft_tokens)
        self.origin = [("", 0), *((Grammar.name, 0),) * num_forced, *part_origins[1:]]
        self.children: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            if self.verify[node]:
                self.children[self.parents[node]].append(node)

    def add_forced_chains(self) -> None:
        """Add the forced chains below all nodes that the guide allows."""
        guide = self.context.sampler.guide
        assert guide is not None

        def visit_node(node: int) -> bool:
            if not guide.allows(self.tokens[node]):
                return False
            guide.advance(self.tokens[node])
            chain = guide.forced()
            guide.rollback(1)
            self._add(node, chain)
            return True

        visit(self.tokens, self.children, guide, visit_node)

    def _add(self, node: int, chain: Sequence[int]) -> None:
        """Add ``chain`` below ``node`` within the limits, reusing existing nodes."""
        for token in chain:
            existing = next((child for child in self.children[node] if self.tokens[child] == token), None)
            if existing is None:
                if self.depths[node] >= self.context.max_depth or len(self.tokens) > self.context.max_nodes:
                    return
                existing = self._new(node, token)
            node = existing

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
        return TokenTree(
            tuple(self.tokens),
            tuple(self.parents),
            None if all(self.verify) else tuple(self.verify),
            None if self.probs is None else tuple(self.probs),
            None if self.gain is None else tuple(self.gain),
            tuple(self.origin),
        )


def _forced(context: DraftContext[Parts]) -> list[int]:
    guide = context.sampler.guide
    return [] if guide is None else guide.forced()[: max(0, min(context.max_depth, context.max_nodes))]


def _part_context(context: DraftContext[Parts], lead: Sequence[int]) -> DraftContext[Any]:
    """Return the part's context: the text plus the forced tokens ``lead``."""
    return replace(
        context,
        state=context.state[0],
        tokens=TokenView(context.tokens, lead) if lead else context.tokens,
        max_depth=context.max_depth - len(lead),
        max_nodes=context.max_nodes - len(lead),
    )
