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
from pronk.drafters.from_draft._branches import Branches, compute, model_context
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
class _Growth:
    """One request's tree while it grows.

    Attributes:
        branches: the nodes in the draft's cache.
        calibration: calibration of the draft's probabilities.
        breadth: most children of a node.
        most: most nodes of the tree.
        depth: largest depth of a node.
        passes: number of forward passes of the draft so far.
        waiting: the last node added to the tree, if the draft must compute it before the next one is added.
    """

    branches: Branches
    calibration: Calibration
    breadth: int
    most: int
    depth: int
    passes: int = 0
    waiting: int | None = 0

    def __post_init__(self) -> None:
        self.trie = Trie(self.branches.tokens[0])
        self._reach = [1.0]
        self._places: list[int | None] = [0]  # branch node of each node of the tree
        self._frontier: Frontier[tuple[int, int, float]] = Frontier()

    @property
    def place(self) -> int:
        """Branch node of the waiting node."""
        place = None if self.waiting is None else self._places[self.waiting]
        assert place is not None, "a node waits only if the draft can compute it"
        return place

    def advance(self) -> None:
        """Add nodes after a forward pass, best first, until the tree is full or a node must be computed."""
        while self.waiting is not None and self._is_computed(self.waiting):
            self._offer(self.waiting)
            self.waiting = None
            while self.waiting is None and self._frontier and len(self.trie) <= self.most:
                self._take()

    def request_nodes(self, width: int) -> None:
        """Request the ``width - 1`` likeliest candidates, beside the waiting node."""
        for parent, token, _ in self._frontier.best(width - 1):
            place = self._places[parent]
            if place is not None and self.trie.depths[parent] + 1 < self.depth:
                self.speculate(place, token)

    def speculate(self, place: int, token: int) -> int | None:
        """Request a node that may never enter the tree, while the cache has slots to spare."""
        missing = self.most + 1 - len(self.trie)
        return self.branches.ask(place, token) if self.branches.room > missing else None

    def tree(self) -> TokenTree:
        while self._frontier and len(self.trie) <= self.most:
            self._take()
        return self.trie.tree(self.most)

    def expected(self) -> tuple[int, float, float]:
        """Return the tree's nodes, its expected tokens, and the tokens that another forward pass may add."""
        known = self._frontier.best(self.most + 1 - len(self.trie))
        gains = [self._gain(parent, self.calibration.origin(share)) for parent, _, share in known]
        waiting = 0.0 if self.waiting is None else self.trie.gains[self.waiting]
        return len(self.trie) - 1 + len(known), sum(self.trie.gains) + sum(gains), waiting + sum(gains)

    def _gain(self, parent: int, origin: Origin) -> float:
        return self.trie.gains[parent] * self.calibration.rate(origin, self.trie.depths[parent] + 1)

    def _is_computed(self, node: int) -> bool:
        place = self._places[node]
        return place is not None and self.branches.knows(place)

    def _offer(self, node: int) -> None:
        place = self._places[node]
        chosen = None if place is None else self.branches.draft_token(place)
        for token, share in [] if chosen is None else chosen.ranked(self.breadth):
            self._frontier.offer(self._reach[node] * share, (node, token, share))

    def _take(self) -> None:
        reach, (parent, token, share) = self._frontier.take()
        origin = self.calibration.origin(share)
        node = self.trie.add(parent, token, self._gain(parent, origin), origin)
        self._reach.append(reach)
        place, leaf = self._places[parent], self.trie.depths[node] >= self.depth or len(self.trie) > self.most
        self._places.append(None if place is None or leaf else self.branches.ask(place, token))
        if self._is_computed(node):
            self._offer(node)
        elif self._places[node] is not None:
            self.waiting = node


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
        growths = self._begin(contexts)
        live = list(growths)
        while live:
            self._speculate([growths[number] for number in live], [contexts[number] for number in live])
            compute(self.model.draft, [growths[number].branches for number in live])
            for number in live:
                growths[number].passes += 1
                growths[number].advance()
            live = [
                n for n in live if growths[n].waiting is not None and self._pays(growths[n], contexts[n], len(live))
            ]
            for number in live:
                growths[number].request_nodes(self.options.width)
        for number, growth in growths.items():
            trees[number] = growth.tree()
        return trees

    def _begin(self, contexts: Sequence[DraftContext[Parts]]) -> dict[int, _Growth]:
        options, within = self.options, [model_context(context) for context in contexts]
        growths: dict[int, _Growth] = {}
        for number, branches in Branches.begin(self.model, within).items():
            context = within[number]
            nodes, depth = min(options.num_nodes, context.max_nodes), min(options.depth, context.max_depth)
            growths[number] = _Growth(branches, context.state.calibration, options.breadth, nodes, depth)
        return growths

    def _speculate(self, growths: Sequence[_Growth], contexts: Sequence[DraftContext[Parts]]) -> None:
        """Request the nodes that the smaller drafter proposes below the waiting node."""
        if not self.options.lead:
            return
        below = [growth.branches.path(growth.place) for growth in growths]
        views = [
            replace(
                context,
                state=context.state[1],
                tokens=TokenView(context.tokens, path),
                max_depth=growth.depth - len(path) - 1,
                max_nodes=self.options.lead,
                thrifty=False,
                draws=False,
            )
            for growth, context, path in zip(growths, contexts, below, strict=True)
        ]
        with ExitStack() as stack:
            for view, path in zip(views, below, strict=True):
                stack.enter_context(view.sampler.after(path))
            proposals = self.smaller.propose(views)
        for growth, tree in zip(growths, proposals, strict=True):
            places: list[int | None] = [growth.place]
            for node in range(1, len(tree)):
                above = places[tree.parents[node]]
                places.append(
                    None if above is None or not tree.acceptable[node] else growth.speculate(above, tree.tokens[node])
                )

    def _pays(self, growth: _Growth, context: DraftContext[Parts], requests: int) -> bool:
        step_cost = self.model.step_cost(context, requests)
        if step_cost is None:
            return True
        nodes, tokens, more = growth.expected()
        more *= context.state[0].length_tracker.rate
        now = tokens / step_cost.seconds(nodes, growth.passes)
        return (tokens + more) / step_cost.seconds(
            min(nodes + self.options.width, growth.most), growth.passes + 1
        ) > now
