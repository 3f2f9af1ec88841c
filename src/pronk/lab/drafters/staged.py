"""Staged speculative decoding (Spector & Re 2023): a smaller drafter speeds up the draft model.

The draft model grows a tree best first: the likeliest candidate becomes a node, and the children of
that node become candidates. The children are known only after the draft model has computed the
node; until then the node is *pending*. One forward pass of the draft model computes the pending
node, the ``width - 1`` likeliest candidates, and the nodes that a smaller drafter (``parts[1]``)
proposes below the pending node. For example, ``the cat sat`` occurs earlier in the text, so prompt
lookup proposes ``cat sat`` below ``the``::

    pass 1   computes the, cat, sat      the → cat .6, dog .3      cat → sat .8      sat → on .9
    pass 2   computes on, dog            on is pending (.6 · .8 · .9 = .43), dog is a candidate (.3)

Growth ends before a forward pass of the draft that would not pay; then the likeliest candidates
fill the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from pronk import Drafter, DraftModel, OptionError, PromptLookup, Proposer, TokenTree
from pronk.base import known_keywords
from pronk.base.checks import check_integer
from pronk.drafting import (
    DEFAULT_RATE,
    MAX_TREE,
    ChainCosts,
    Composite,
    DraftContext,
    DrafterRates,
    DraftPlan,
    Frontier,
    ModelDrafter,
    ModelProposer,
    States,
    StepCosts,
    Target,
    TokenView,
    Trie,
    bind_proposer,
    call_propose,
)
from pronk.lab.drafters.cached_tree import CachedTree, compute_new_nodes


@dataclass
class _TreeSearch:
    """Best-first search for one request's tree.

    The *cached tree* has the nodes in the KV cache of the draft model. The *pending* node is the
    one that the next forward pass of the draft model computes. The proposed tree (``trie``) and
    ``cached_tree`` number their nodes differently. ``cached_tree`` also has nodes that were
    computed in advance. It lacks the nodes of ``trie`` that get no children: those at
    ``max_depth``, and the last node.
    """

    context: DraftContext[States]
    # Nodes that are in the draft model's KV cache, or will be after the next forward pass.
    cached_tree: CachedTree
    rates: DrafterRates  # acceptance rates by the draft model's probability of a token
    breadth: int  # maximum number of children of a node
    max_nodes: int  # maximum number of draft tokens of the tree
    max_depth: int  # largest depth of a node
    num_passes: int = 0  # number of forward passes of the draft model so far, in this step
    # Node of ``trie`` that waits for the next forward pass; ``None`` if the tree is complete.
    pending: int | None = 0

    def __post_init__(self) -> None:
        self.trie = Trie(self.cached_tree.tokens[0])
        # For each node of ``trie``: product of the draft model's probabilities on the node's path.
        self._probabilities = [1.0]
        # For each node of ``trie``: its index in ``cached_tree``; ``None`` if it is only in
        # ``trie``.
        self._cached_nodes: list[int | None] = [0]
        # Candidates (parent's index in ``trie``, token id, the draft's probability of the token),
        # likeliest path first.
        self._frontier: Frontier[tuple[int, int, float]] = Frontier()

    @property
    def pending_cached_node(self) -> int:
        """Index in ``cached_tree`` of the node that the next forward pass computes."""
        cached_node = None if self.pending is None else self._cached_nodes[self.pending]
        assert cached_node is not None, "a node is pending only if the draft can compute it"
        return cached_node

    def advance(self) -> None:
        """Add the likeliest candidates to the tree.

        Stop when the tree is full, or when the draft model must compute the added node first.
        """
        while self.pending is not None and self._is_computed(self.pending):
            self._push_children(self.pending)
            self.pending = None
            while self.pending is None and self._frontier and len(self.trie) <= self.max_nodes:
                self._add_best()

    def schedule_candidates(self, width: int) -> None:
        """Add the ``width - 1`` likeliest candidates to the next forward pass, except leaves."""
        for parent, token, _ in self._frontier.peek(width - 1):
            cached_parent = self._cached_nodes[parent]
            if cached_parent is not None and self.trie.depths[parent] + 1 < self.max_depth:
                self.add_cached_node(cached_parent, token)

    def add_cached_node(self, cached_parent: int, token: int) -> int | None:
        """Add a node to ``cached_tree`` only; return its index, or ``None`` if there is no room.

        The last free nodes of ``cached_tree`` are reserved for nodes of ``trie``.
        """
        has_room = self.cached_tree.num_free_nodes > self.max_nodes + 1 - len(self.trie)
        return self.cached_tree.add_node(cached_parent, token) if has_room else None

    def finish(self) -> TokenTree:
        """Fill the tree up to ``max_nodes`` with the likeliest candidates, and return it."""
        while self._frontier and len(self.trie) <= self.max_nodes:
            self._add_best()
        return self.trie.tree(self.max_nodes)

    def estimate(self) -> tuple[list[float], list[float]]:
        """Return two lists of gains, from which :meth:`StagedProposer._pays` decides.

        The gain of a node is the probability that the target accepts all draft tokens on its path.
        The first list has the gains of all draft tokens if growth ends now. The second has those of
        the nodes that the next forward passes can give children, the largest first: the pending
        node and the likeliest candidates.
        """
        likeliest = self._frontier.peek(self.max_nodes + 1 - len(self.trie))
        gains = [self._gain(parent, prob) for parent, _, prob in likeliest]
        pending_gain = 0.0 if self.pending is None else self.trie.gains[self.pending]
        extendable = sorted([pending_gain, *gains], reverse=True)
        return [*self.trie.gains[1:], *gains], extendable

    def _gain(self, parent: int, prob: float) -> float:
        """Return the gain of a child of ``parent``: the probability that its path is accepted.

        ``prob`` is the draft model's probability of the child's token.
        """
        kind = self.rates.confidence_kind(prob)
        return self.trie.gains[parent] * self.rates.rate(kind, self.trie.depths[parent] + 1)

    def _is_computed(self, node: int) -> bool:
        cached_node = self._cached_nodes[node]
        return cached_node is not None and cached_node < len(self.cached_tree.logits)

    def _push_children(self, node: int) -> None:
        """Add the ``breadth`` likeliest tokens after a computed node to the candidates."""
        cached_node = self._cached_nodes[node]
        if cached_node is None:
            return
        draft_token = self.cached_tree.draft_token(cached_node)
        if draft_token is None:
            return
        for token, prob in draft_token.top_tokens(self.breadth):
            self._frontier.push(self._probabilities[node] * prob, (node, token, prob))

    def _add_best(self) -> None:
        """Add the likeliest candidate to the tree and, unless it is a leaf, to the cached tree."""
        probability, (parent, token, prob) = self._frontier.pop()
        origin = self.rates.label, self.rates.confidence_kind(prob)
        node = self.trie.add(parent, token, self._gain(parent, prob), origin)
        self._probabilities.append(probability)
        cached_parent = self._cached_nodes[parent]
        is_leaf = self.trie.depths[node] >= self.max_depth or len(self.trie) > self.max_nodes
        cached_node: int | None = None
        if cached_parent is not None and not is_leaf:
            cached_node = self.cached_tree.add_node(cached_parent, token)
        self._cached_nodes.append(cached_node)
        if self._is_computed(node):
            self._push_children(node)
        elif cached_node is not None:
            self.pending = node


@known_keywords
@dataclass(frozen=True)
class Staged(Composite):
    """Options of staged decoding: a draft model grows a tree, which a smaller drafter speeds up.

    Attributes:
        parts: the draft model and the smaller drafter, by default ``prompt_lookup``. The draft
            model's options ``num_tokens`` and ``min_confidence`` are ignored.
        num_nodes: maximum number of draft tokens of a tree, 1..1023.
        breadth: maximum number of children of a node, 1..16.
        depth: largest depth of a node, 1..64.
        width: maximum number of rows per request in a forward pass of the draft model, 1..32: one
            for the pending node, the others for the likeliest candidates.
        lead: maximum number of further rows for nodes of the smaller drafter, 0..32; 0 turns the
            smaller drafter off.
    """

    name = "staged"
    row_options = ("num_nodes",)

    parts: tuple[Drafter, ...] = field(default_factory=lambda: (DraftModel(), PromptLookup()))
    num_nodes: int = 16
    breadth: int = 4
    depth: int = 8
    width: int = 4
    lead: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.parts) > 2 or not isinstance(self.parts[0], ModelDrafter):
            found = ", ".join(part.name for part in self.parts)
            msg = (
                f"{self.name}: expected a draft_model and a smaller drafter, as in "
                f"staged(draft_model), found {found}"
            )
            raise OptionError(msg)
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, MAX_TREE - 1)
        check_integer(f"{self.name}: breadth", self.breadth, 1, 16)
        check_integer(f"{self.name}: depth", self.depth, 1, 64)
        check_integer(f"{self.name}: width", self.width, 1, 32)
        check_integer(f"{self.name}: lead", self.lead, 0, 32)

    def bind(self, target: Target) -> StagedProposer:
        model, *rest = self.parts
        assert isinstance(model, ModelDrafter)
        smaller = rest[0] if rest else PromptLookup()
        return StagedProposer(self, model.bind(target), bind_proposer(smaller, target))


class StagedProposer(Proposer[States]):
    """Grows trees with a draft model; ``smaller_proposer`` proposes nodes to compute in advance."""

    name = Staged.name

    def __init__(
        self, options: Staged, model: ModelProposer, smaller_proposer: Proposer[Any]
    ) -> None:
        self.set_parts([model, smaller_proposer])
        self.options = options
        self.model = model
        self.smaller_proposer = smaller_proposer

    def chain_costs(self, context: DraftContext[States], costs: StepCosts) -> ChainCosts | None:
        return self.model.chain_costs(context.with_state(context.state[0]), costs)

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        searches = self._start_searches(contexts)
        live = [*searches.values()]
        while live:
            self._add_smaller_drafts(live)
            compute_new_nodes(self.model.draft, [search.cached_tree for search in live])
            for search in live:
                search.num_passes += 1
                search.advance()
            live = [search for search in live if search.pending is not None and self._pays(search)]
            for search in live:
                search.schedule_candidates(self.options.width)
        for number, search in searches.items():
            trees[number] = search.finish()
        return trees

    def _start_searches(self, contexts: Sequence[DraftContext[States]]) -> dict[int, _TreeSearch]:
        """Return new searches by index in ``contexts``, for the requests that can draft."""
        options = self.options
        searches = dict[int, _TreeSearch]()
        for number, cached_tree in CachedTree.create(self.model, contexts).items():
            context = contexts[number]
            max_nodes = min(options.num_nodes, context.max_nodes)
            max_depth = min(options.depth, context.max_depth)
            rates = context.acceptance.rates(self.model.label)
            searches[number] = _TreeSearch(
                context, cached_tree, rates, options.breadth, max_nodes, max_depth
            )
        return searches

    def _add_smaller_drafts(self, searches: Sequence[_TreeSearch]) -> None:
        """Let the smaller drafter propose nodes below the pending ones, to compute in advance.

        They are added to the cached trees only: the draft model decides what is proposed.
        """
        if not self.options.lead:
            return
        paths = [search.cached_tree.path(search.pending_cached_node) for search in searches]
        smaller_contexts = [
            replace(
                search.context,
                state=search.context.state[1],
                tokens=TokenView(search.context.tokens, path),
                max_depth=search.max_depth - len(path) - 1,
                max_nodes=self.options.lead,
                plan=DraftPlan(),
                draws=False,
            )
            for search, path in zip(searches, paths, strict=True)
        ]
        with ExitStack() as stack:
            for context, path in zip(smaller_contexts, paths, strict=True):
                stack.enter_context(context.sampler.after(path))
            proposals = call_propose(self.smaller_proposer, smaller_contexts)
        for search, tree in zip(searches, proposals, strict=True):
            # For each node of ``tree``: its index in the cached tree, or ``None``.
            cached_nodes: list[int | None] = [search.pending_cached_node]
            for node in range(1, len(tree)):
                parent = cached_nodes[tree.parents[node]]
                if parent is None or not tree.acceptable[node]:
                    cached_nodes.append(None)
                else:
                    cached_nodes.append(search.add_cached_node(parent, tree.tokens[node]))

    def _pays(self, search: _TreeSearch) -> bool:
        """Return whether another forward pass of the draft model pays.

        It pays if the additional draft tokens are expected to save more time than the pass takes;
        the step's draft plan estimates both.
        """
        plan = search.context.plan
        gains, extendable = search.estimate()
        rate = search.context.acceptance.rates(self.model.chain_label).mean(DEFAULT_RATE)
        num_more = min(self.options.width, search.max_nodes - len(gains))
        more = [gain * rate for gain in extendable][: max(0, num_more)]
        return plan.another_pass_pays(gains, more, plan.chain, search.num_passes)
