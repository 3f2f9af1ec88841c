"""The drafter ``grammar``: tokens that a guide forces, and another drafter between them.

Text is *forced* if the guide allows only one continuation. The wrapped drafter proposes after the
forced text.

Forced tokens are the tokenizer's own encoding of the forced text after the output so far. Tokens at
the end of forced text are left out if the following text could change them. The guide's mask allows
only this encoding (:mod:`pronk.sampling.grammar_processor`), so forced tokens are accepted. They
are verified nevertheless, so a guide with a wider mask does no harm. In models with several stop
tokens the mask allows all of them at the end of the text, and the forced one may be rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from pronk.base.errors import OptionError
from pronk.base.keywords import known_keywords
from pronk.drafting.checked_proposals import call_propose
from pronk.drafting.from_text.suffix import Suffix
from pronk.drafting.proposer import DraftContext, Drafter, Proposer, States
from pronk.drafting.shared.composite import Composite
from pronk.drafting.target import Target
from pronk.sampling.grammar_pruning import visit
from pronk.sampling.tree import TokenTree, TokenView


@known_keywords
@dataclass(frozen=True)
class Grammar(Composite):
    """Options of ``grammar``.

    Attributes:
        parts: one drafter, of any kind, for the text that is not forced.
    """

    name = "grammar"

    parts: tuple[Drafter, ...] = field(default_factory=lambda: (Suffix(store_tokens=0),))

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.parts) > 1:
            found = ", ".join(part.name for part in self.parts)
            msg = (
                f"{self.name}: expected one drafter, found {found}; write merged({found}) to "
                "combine them"
            )
            raise OptionError(msg)

    def bind(self, target: Target) -> GrammarProposer:
        (wrapped,) = self.bind_parts(target)
        return GrammarProposer(wrapped)


class GrammarProposer(Proposer[States]):
    """Proposer of forced tokens, and of a wrapped drafter's draft tokens between them."""

    name = Grammar.name

    def __init__(self, wrapped: Proposer[Any]) -> None:
        self.set_parts([wrapped])
        self.wrapped = wrapped
        self.capabilities = replace(self.capabilities, proposes=True)

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        forced = [_forced_tokens(context) for context in contexts]
        after_forced = [  # the contexts for the wrapped drafter: forced tokens are part of the text
            context.with_state(
                context.state[0],
                tokens=TokenView(context.tokens, tokens) if tokens else context.tokens,
                max_depth=context.max_depth - len(tokens),
                max_nodes=context.max_nodes - len(tokens),
            )
            for context, tokens in zip(contexts, forced, strict=True)
        ]
        # indices of contexts with room for draft tokens of the wrapped drafter after the forced
        # ones
        drafting = [
            i
            for i, context in enumerate(after_forced)
            if self.wrapped.capabilities.proposes and context.max_tokens > 0
        ]
        trees = [TokenTree.chain(context.tokens[-1:]) for context in after_forced]
        with ExitStack() as samplers:
            for i in drafting:
                samplers.enter_context(contexts[i].sampler.after(forced[i]))
            proposed = call_propose(self.wrapped, [after_forced[i] for i in drafting])
            for i, tree in zip(drafting, proposed, strict=True):
                trees[i] = tree
        return [
            self._add_forced(*arguments) for arguments in zip(contexts, forced, trees, strict=True)
        ]

    def _add_forced(
        self, context: DraftContext[States], forced: Sequence[int], tree: TokenTree
    ) -> TokenTree:
        if context.sampler.guide is None:
            return tree
        combined = _ForcedTree(self.wrapped.name, context, forced, tree)
        with context.sampler.after():
            combined.add_forced_chains()
        return combined.tree()


class _ForcedTree:
    """Tree under construction: forced tokens, the wrapped drafter's tree, more forced chains.

    The last token of the first chain is the root of the drafter's tree. The attributes are those of
    :class:`TokenTree`, but ``verify``, ``probs`` and ``origin`` lack the entries of the chains that
    :meth:`add_forced_chains` adds.
    """

    def __init__(
        self, drafter: str, context: DraftContext[States], forced: Sequence[int], tree: TokenTree
    ) -> None:
        shift = len(forced)  # node i of the drafter's tree becomes node i + shift
        full = tree.hang_below([context.tokens[-1], *forced][:shift])
        self.context = context
        self.tokens = [*full.tokens]
        self.parents = [*full.parents]
        self.depths = [*full.depths]
        self.verify = full.acceptable
        self.probs = full.probs
        unknown_gain = tree.gain is None and tree.num_draft_tokens > 0
        self.gain = None if unknown_gain else [1.0] * (shift + 1) + list((tree.gain or (1.0,))[1:])
        origin = tree.origin or (("", 0), *((drafter, 0),) * tree.num_draft_tokens)
        self.origin = (("", 0), *((Grammar.name, 0),) * shift, *origin[1:])
        # children of each node, without those that are computed but never accepted
        self.children = [[*full.children(node).values()] for node in range(len(full))]

    def add_forced_chains(self) -> None:
        """Add forced tokens below each node whose path the guide allows."""
        guide = self.context.sampler.guide
        assert guide is not None

        def visit_node(node: int) -> bool:  # returns whether to visit the children of ``node``
            if not guide.allows(self.tokens[node]):
                return False
            guide.advance(self.tokens[node])
            chain = guide.forced()
            guide.rollback(1)
            self._add_chain(node, chain)
            return True

        visit(self.tokens, self.children, guide, visit_node)

    def _add_chain(self, node: int, chain: Sequence[int]) -> None:
        """Add the tokens of ``chain`` below ``node``, up to the request's limits.

        Reuse existing nodes.
        """
        for token in chain:
            child = next(
                (child for child in self.children[node] if self.tokens[child] == token), None
            )
            if child is None:
                if (
                    self.depths[node] >= self.context.max_depth
                    or len(self.tokens) > self.context.max_nodes
                ):
                    return
                child = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                if self.gain is not None:
                    self.gain.append(self.gain[node])
                self.children.append([])
                self.children[node].append(child)
            node = child

    def tree(self) -> TokenTree:
        num_added = len(self.tokens) - len(self.verify)
        return TokenTree(
            tuple(self.tokens),
            tuple(self.parents),
            None if all(self.verify) else (*self.verify, *(True,) * num_added),
            None if self.probs is None else (*self.probs, *(None,) * num_added),
            None if self.gain is None else tuple(self.gain),
            (*self.origin, *((Grammar.name, 0),) * num_added),
        )


def _forced_tokens(context: DraftContext[States]) -> list[int]:
    """Return the tokens that the guide forces after the text, within the request's limits."""
    guide = context.sampler.guide
    return [] if guide is None else guide.forced()[: max(0, context.max_tokens)]
