"""Staged speculative decoding: the draft model grows a tree and is itself sped up (Spector & Re 2023).

*The tree.* The children of a node are the ``breadth`` tokens that the draft finds likeliest there. The tree has the
``num_nodes`` nodes of largest probability (the product along the path), down to ``depth``. It grows best first: the
likeliest node outside comes next, and its children become candidates once the draft has computed it.

*The draft's forward passes.* One forward pass computes the ``width`` likeliest nodes, and the nodes that a smaller
drafter (``parts[1]``) proposes below the best of them. If the draft agrees with the smaller drafter, one forward pass
yields several levels of the tree. The number of forward passes changes, the tree does not. ::

    pass 1   the → cat .6, dog .3           computed: the, and below it what followed earlier in the text: cat, sat
             cat → sat .8                   computed already
             sat → on .9, .5
    pass 2   dog → …                        the likeliest node that is not computed yet

A forward pass of the draft that does not pay is left out (``length_tracker``), except with ``budget="all"``; the tree
then consists of the nodes known so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from pronk.checks import check_integer
from pronk.drafters.from_draft._branches import Branches, compute_new_nodes, model_context
from pronk.drafters.from_draft.draft_model import DraftModel, ModelDrafter, ModelProposer
from pronk.drafters.from_text.prompt_lookup import PromptLookup
from pronk.drafters.shared.composite import Composite, CompositeProposer, Parts
from pronk.drafters.shared.trie import Frontier, Trie
from pronk.errors import OptionError
from pronk.speculation.calibration import Calibration
from pronk.speculation.proposer import DraftContext, Drafter, Proposer, bind_proposer
from pronk.speculation.target import Target
from pronk.speculation.token_view import TokenView
from pronk.speculation.tree import Origin, TokenTree

__all__ = ["Staged"]


@dataclass
class _TreeSearch:
    """Best-first search for one request's tree.

    Attributes:
        branches: the nodes in the draft's cache.
        calibration: calibration of the draft's probabilities.
        breadth: most children of a node.
        max_nodes: most nodes of the tree.
        max_depth: largest depth of a node.
        passes: number of forward passes of the draft so far.
        pending: the last node added to the tree, if the draft must compute it before the next one is added.
    """

    branches: Branches
    calibration: Calibration
    breadth: int
    max_nodes: int
    max_depth: int
    passes: int = 0
    pending: int | None = 0

    def __post_init__(self) -> None:
        self.trie = Trie(self.branches.tokens[0])
        self._probabilities = [1.0]
        self._branch_nodes: list[int | None] = [0]  # branch node of each node of the tree
        self._frontier: Frontier[tuple[int, int, float]] = Frontier()

    @property
    def pending_branch(self) -> int:
        """Branch node of the pending node."""
        branch = None if self.pending is None else self._branch_nodes[self.pending]
        assert branch is not None, "a node is pending only if the draft can compute it"
        return branch

    def advance(self) -> None:
        """Add nodes after a forward pass, best first, until the tree is full or a node must be computed."""
        while self.pending is not None and self._is_computed(self.pending):
            self._push_children(self.pending)
            self.pending = None
            while self.pending is None and self._frontier and len(self.trie) <= self.max_nodes:
                self._add_best()

    def request_nodes(self, width: int) -> None:
        """Request the ``width - 1`` likeliest candidates, in addition to the pending node."""
        for parent, token, _ in self._frontier.peek(width - 1):
            branch = self._branch_nodes[parent]
            if branch is not None and self.trie.depths[parent] + 1 < self.max_depth:
                self.request_node(branch, token)

    def request_node(self, branch: int, token: int) -> int | None:
        """Request a node that may never enter the tree, while the cache has slots to spare."""
        missing = self.max_nodes + 1 - len(self.trie)
        return self.branches.add_node(branch, token) if self.branches.num_free_nodes > missing else None

    def tree(self) -> TokenTree:
        while self._frontier and len(self.trie) <= self.max_nodes:
            self._add_best()
        return self.trie.tree(self.max_nodes)

    def estimate(self) -> tuple[int, float, float]:
        """Return the tree's nodes, its expected tokens, and the tokens that another forward pass may add."""
        best = self._frontier.peek(self.max_nodes + 1 - len(self.trie))
        gains = [self._gain(parent, self.calibration.origin(prob)) for parent, _, prob in best]
        pending = 0.0 if self.pending is None else self.trie.gains[self.pending]
        return len(self.trie) - 1 + len(best), sum(self.trie.gains) + sum(gains), pending + sum(gains)

    def _gain(self, parent: int, origin: Origin) -> float:
        return self.trie.gains[parent] * self.calibration.rate(origin, self.trie.depths[parent] + 1)

    def _is_computed(self, node: int) -> bool:
        branch = self._branch_nodes[node]
        return branch is not None and self.branches.is_computed(branch)

    def _push_children(self, node: int) -> None:
        branch = self._branch_nodes[node]
        chosen = None if branch is None else self.branches.draft_token(branch)
        for token, prob in [] if chosen is None else chosen.ranked(self.breadth):
            self._frontier.push(self._probabilities[node] * prob, (node, token, prob))

    def _add_best(self) -> None:
        probability, (parent, token, prob) = self._frontier.pop()
        origin = self.calibration.origin(prob)
        node = self.trie.add(parent, token, self._gain(parent, origin), origin)
        self._probabilities.append(probability)
        branch, leaf = (
            self._branch_nodes[parent],
            self.trie.depths[node] >= self.max_depth or len(self.trie) > self.max_nodes,
        )
        self._branch_nodes.append(None if branch is None or leaf else self.branches.add_node(branch, token))
        if self._is_computed(node):
            self._push_children(node)
        elif self._branch_nodes[node] is not None:
            self.pending = node


@dataclass(frozen=True)
class Staged(Composite):
    """Options of the tree.

    Attributes:
        parts: the draft model, and the smaller drafter that speculates for it, by default ``prompt_lookup``. The limits
            of the draft model's chain are not used.
        num_nodes: draft tokens of a tree, 1..127.
        breadth: most children of a node, 1..16.
        depth: most tokens of a branch, 1..64.
        width: nodes of a forward pass of the draft, beside those of the smaller drafter, 1..32.
        lead: most draft tokens of the smaller drafter in a forward pass, 0..32.
    """

    name = "staged"

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
            msg = f"{self.name}: expected a draft_model and a smaller drafter, as in staged(draft_model), found {found}"
            raise OptionError(msg)
        for option, low, high in (
            ("num_nodes", 1, 127),
            ("breadth", 1, 16),
            ("depth", 1, 64),
            ("width", 1, 32),
            ("lead", 0, 32),
        ):
            check_integer(f"{self.name}: {option}", getattr(self, option), low, high)

    def bind(self, target: Target) -> StagedProposer:
        """Return the proposer, with the draft model loaded beside the target."""
        model, *rest = self.parts
        assert isinstance(model, ModelDrafter)
        smaller = rest[0] if rest else PromptLookup()
        return StagedProposer(self, model.bind(target), bind_proposer(smaller, target))


class StagedProposer(CompositeProposer):
    """Grows trees with a draft model; ``smaller`` proposes nodes for its forward passes."""

    name = Staged.name

    def __init__(self, options: Staged, model: ModelProposer, smaller: Proposer[Any]) -> None:
        super().__init__((model, smaller))
        self.options, self.model, self.smaller = options, model, smaller

    def propose(self, contexts: Sequence[DraftContext[Parts]]) -> list[TokenTree]:
        """Return a tree of the draft's likeliest nodes for each context."""
        trees = [TokenTree.chain(context.tokens[-1:]) for context in contexts]
        searches = self._start_searches(contexts)
        live = list(searches)
        while live:
            self._request_smaller_drafts([searches[number] for number in live], [contexts[number] for number in live])
            compute_new_nodes(self.model.draft, [searches[number].branches for number in live])
            for number in live:
                searches[number].passes += 1
                searches[number].advance()
            live = [
                n for n in live if searches[n].pending is not None and self._pays(searches[n], contexts[n], len(live))
            ]
            for number in live:
                searches[number].request_nodes(self.options.width)
        for number, search in searches.items():
            trees[number] = search.tree()
        return trees

    def _start_searches(self, contexts: Sequence[DraftContext[Parts]]) -> dict[int, _TreeSearch]:
        options, model_contexts = self.options, [model_context(context) for context in contexts]
        searches: dict[int, _TreeSearch] = {}
        for number, branches in Branches.create(self.model, model_contexts).items():
            context = model_contexts[number]
            nodes, depth = min(options.num_nodes, context.max_nodes), min(options.depth, context.max_depth)
            searches[number] = _TreeSearch(branches, context.state.calibration, options.breadth, nodes, depth)
        return searches

    def _request_smaller_drafts(self, searches: Sequence[_TreeSearch], contexts: Sequence[DraftContext[Parts]]) -> None:
        """Request the nodes that the smaller drafter proposes below the waiting node."""
        if not self.options.lead:
            return
        paths = [search.branches.path(search.pending_branch) for search in searches]
        views = [
            replace(
                context,
                state=context.state[1],
                tokens=TokenView(context.tokens, path),
                max_depth=search.max_depth - len(path) - 1,
                max_nodes=self.options.lead,
                prune_unprofitable=False,
                draws=False,
            )
            for search, context, path in zip(searches, contexts, paths, strict=True)
        ]
        with ExitStack() as stack:
            for view, path in zip(views, paths, strict=True):
                stack.enter_context(view.sampler.after(path))
            proposals = self.smaller.propose(views)
        for search, tree in zip(searches, proposals, strict=True):
            branches: list[int | None] = [search.pending_branch]
            for node in range(1, len(tree)):
                parent = branches[tree.parents[node]]
                branches.append(
                    None
                    if parent is None or not tree.acceptable[node]
                    else search.request_node(parent, tree.tokens[node])
                )

    def _pays(self, search: _TreeSearch, context: DraftContext[Parts], requests: int) -> bool:
        step_cost = self.model.step_cost(context, requests)
        if step_cost is None:
            return True
        nodes, tokens, extra = search.estimate()
        extra *= context.state[0].length_tracker.rate
        now = tokens / step_cost.seconds(nodes, search.passes)
        return (tokens + extra) / step_cost.seconds(
            min(nodes + self.options.width, search.max_nodes), search.passes + 1
        ) > now
