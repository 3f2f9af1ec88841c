"""Drafters for tests: random trees, trees of right draft tokens, and trees that try to break the
engine.

A *shape* makes one tree from the root and the tokens that plain decoding gives after it, if the
test provides these. The drafter has no state. Its dice depend on the request's seed and length
alone, and so a proposal does not depend on the rest of the batch.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exact_distributions import Same, Table, TreeSampler
from pronk.drafting import DraftContext, Outcome, Proposer
from pronk.sampling.tree import TokenTree

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class DraftCase:
    """The input of a shape.

    Attributes:
        root: the last token of the text.
        truth: the tokens of plain decoding after the root; may be empty.
        depth: the engine's limit of the depth, which a shape may ignore.
        nodes: the engine's limit of the number of draft tokens, likewise.
        vocab: size of the vocabulary.
        stop_token_ids: token ids that end the text.
        dice: source of random choices.
    """

    root: int
    truth: Sequence[int]
    depth: int
    nodes: int
    vocab: int
    stop_token_ids: Sequence[int]
    dice: random.Random

    def wrong(self, depth: int) -> int:
        """Return a token other than the right one at a depth, 1 for the children of the root."""
        right = self.truth[depth - 1] if depth <= len(self.truth) else -1
        return self.dice.choice([token for token in range(self.vocab) if token != right])


Shape = Callable[[DraftCase], TokenTree]


@dataclass
class Growing:
    """A tree under construction; a node's children that are verified (``verify``) have different
    tokens.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    verify: list[bool] = field(default_factory=lambda: [True])
    right: list[bool] = field(default_factory=lambda: [True])
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])

    def add(
        self, parent: int, token: int, truth: Sequence[int] = (), *, verify: bool = True
    ) -> int:
        """Return the child of ``parent`` with ``token``; a child with ``verify=False`` is always a
        new node.
        """
        if verify and token in self.children[parent]:
            return self.children[parent][token]
        depth = self.depths[parent]
        node = len(self.tokens)
        if verify:
            self.children[parent][token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth + 1)
        self.verify.append(verify)
        self.right.append(
            verify and self.right[parent] and depth < len(truth) and token == truth[depth]
        )
        self.children.append({})
        return node

    def chain(self, parent: int, tokens: Sequence[int], truth: Sequence[int] = ()) -> int:
        """Append a chain of ``tokens`` below ``parent`` and return the last node."""
        for token in tokens:
            parent = self.add(parent, token, truth)
        return parent

    def done(self) -> TokenTree:
        return TokenTree(
            tuple(self.tokens),
            tuple(self.parents),
            None if all(self.verify) else tuple(self.verify),
        )


def random_trees(case: DraftCase) -> TokenTree:
    """Any shape and any tokens, sometimes beyond the engine's limits."""
    dice = case.dice
    tree = Growing([case.root])
    size = dice.choice((0, 1, 2, 5, 9, 14, 14, 14, 2 * case.nodes + 3))
    for _ in range(size):
        parent = dice.randrange(len(tree.tokens)) if dice.random() < 0.5 else len(tree.tokens) - 1
        tree.add(parent, dice.randrange(case.vocab), case.truth)
    return tree.done()


def oracle_trees(right: float, size: int = 12) -> Shape:
    """Each node below a right one is right with probability ``right``, anywhere in the tree."""

    def shape(case: DraftCase) -> TokenTree:
        dice = case.dice
        tree = Growing([case.root])
        for _ in range(dice.randrange(size + 1)):
            parent = dice.randrange(len(tree.tokens))
            if dice.random() < 0.6:
                parent = max(node for node, fine in enumerate(tree.right) if fine or node == parent)
            depth = tree.depths[parent]
            hit = tree.right[parent] and depth < len(case.truth) and dice.random() < right
            tree.add(parent, case.truth[depth] if hit else case.wrong(depth + 1), case.truth)
        return tree.done()

    return shape


def explore_trees(case: DraftCase) -> TokenTree:
    """Right draft tokens among nodes that are not verified, whose tokens may be right and have
    children.
    """
    dice = case.dice
    tree = Growing([case.root])
    node = 0
    for token in case.truth[: dice.randrange(6)]:
        for _ in range(dice.randrange(3)):
            explorer = tree.add(node, dice.choice((token, case.wrong(1))), verify=False)
            tree.chain(explorer, case.truth[tree.depths[explorer] :][: dice.randrange(3)])
        node = tree.add(node, token, case.truth)
    for _ in range(3):
        parent = dice.randrange(len(tree.tokens))
        right = case.truth[tree.depths[parent] :][:1]
        tree.add(parent, right[0] if right else case.root, verify=False)
    return tree.done()


def last_branch(case: DraftCase) -> TokenTree:
    """A wrong main chain; the right tokens are the last and deepest branch."""
    tree = Growing([case.root])
    tree.chain(0, [case.wrong(1), *(case.wrong(9) for _ in range(4))])
    tree.chain(0, [case.wrong(1), case.wrong(9)])
    tree.chain(0, case.truth[:6], case.truth)
    return tree.done()


def wide_star(case: DraftCase) -> TokenTree:
    """Many children of the root, the right one last, and one more level below it."""
    tree = Growing([case.root])
    for _ in range(20):
        tree.add(0, case.wrong(1), case.truth)
    node = tree.chain(0, case.truth[:1], case.truth)
    for _ in range(5):
        tree.add(node, case.wrong(2), case.truth)
    tree.chain(node, case.truth[1:2])
    return tree.done()


def right_then_wrong(case: DraftCase) -> TokenTree:
    """A chain that is right for some tokens and then wrong, sometimes with a right branch from
    there.
    """
    count = case.dice.randrange(6)
    tree = Growing([case.root])
    fork = tree.chain(0, case.truth[:count], case.truth)
    tree.chain(fork, [case.wrong(count + 1), *case.truth[count + 1 : count + 4]], case.truth)
    if case.dice.random() < 0.5:
        tree.chain(fork, case.truth[count : count + 4], case.truth)
    return tree.done()


def repeats(case: DraftCase) -> TokenTree:
    """The same token again and again, in depth and as a child of every node."""
    tree = Growing([case.root])
    right = case.truth[:1] or [case.root]
    tree.chain(0, [case.root] * 4)
    tree.chain(0, [*right] * 5)
    for node in range(len(tree.tokens)):
        tree.add(node, case.root, case.truth)
    return tree.done()


def past_the_end(case: DraftCase) -> TokenTree:
    """Stop tokens with tokens after them, also below right tokens."""
    tree = Growing([case.root])
    node = 0
    for token in case.truth[:5]:
        node = tree.add(node, token, case.truth)
        for end in case.stop_token_ids:
            tree.chain(node, [end, end, case.root, *case.truth[:2]])
    for end in case.stop_token_ids:
        tree.chain(0, [end, case.wrong(9), end, case.root])
    return tree.done()


def too_large(case: DraftCase) -> TokenTree:
    """A tree deeper and wider than the engine allows, right beyond its limits."""
    tree = Growing([case.root])
    tree.chain(0, case.truth[:4] + [case.wrong(999) for _ in range(case.depth + 3)], case.truth)
    for _ in range(case.nodes + 3):
        tree.add(case.dice.randrange(len(tree.tokens)), case.dice.randrange(case.vocab), case.truth)
    return tree.done()


def off_chain(case: DraftCase) -> TokenTree:
    """A wrong first child and a right branch beside it: the rows of all accepted tokens must
    move.
    """
    tree = Growing([case.root])
    tree.add(0, case.wrong(1), case.truth)
    tree.chain(0, case.truth[:4], case.truth)
    return tree.done()


def outside(case: DraftCase) -> TokenTree:
    """Right draft tokens beside and below tokens outside the vocabulary."""
    tree = Growing([case.root])
    tree.chain(0, [case.vocab, *case.truth[1:3]])
    tree.chain(0, [-1, 10**9])
    tree.chain(0, [*case.truth[:2], case.vocab + 7, *case.truth[3:5]], case.truth)
    tree.add(0, case.wrong(1))
    return tree.done()


ADVERSARIAL: tuple[Shape, ...] = (
    last_branch,
    wide_star,
    right_then_wrong,
    repeats,
    past_the_end,
    too_large,
    off_chain,
    outside,
)


def adversarial(case: DraftCase) -> TokenTree:
    """One of the adversarial shapes at each step."""
    return case.dice.choice(ADVERSARIAL)(case)


class Rolled:
    """Draws from dice, for :class:`exact_distributions.TreeSampler`."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def take(self, probabilities: Sequence[float]) -> int:
        return self.dice.choices(range(len(probabilities)), probabilities)[0]


def drawn_trees(parents: tuple[int, ...], drawn: float = 1.0, *, honest: bool = True) -> Shape:
    """Trees of one shape; each node is drawn from a distribution of its own with probability
    ``drawn``.

    The other nodes are the likeliest tokens. Without ``honest`` the trees report uniform
    distributions instead.
    """
    dice = random.Random(str(parents))
    q = dict[int, Table]()
    flat = dict[int, Table]()
    random_nodes = tuple(dice.random() < drawn for _ in parents)

    def shape(case: DraftCase) -> TokenTree:
        table = q.setdefault(case.vocab, Table("drawn", case.vocab, 0.0))
        claim = None if honest else flat.setdefault(case.vocab, Same(*[1] * case.vocab))
        tree = TreeSampler(parents, random_nodes, table, claim)(Rolled(case.dice), (case.root,))
        return replace(tree, tokens=(case.root, *tree.tokens[1:]))

    return shape


@dataclass(frozen=True, eq=False)
class TreeDrafter(Proposer[Prompt]):
    """Proposes the trees of ``shape``.

    Attributes:
        shape: makes a tree.
        texts: the whole text of plain decoding for each (prompt, seed).
        vocab: size of the vocabulary.
        stop_token_ids: token ids that end a text.
        dice: seed of random choices.
    """

    name = "trees"

    shape: Shape
    texts: dict[tuple[Prompt, int], list[int]] = field(default_factory=dict)
    vocab: int = 131
    stop_token_ids: tuple[int, ...] = ()
    dice: int = 0

    def start(self, prompt: Sequence[int]) -> Prompt:
        return tuple(prompt)

    def propose(self, contexts: Sequence[DraftContext[Prompt]]) -> list[TokenTree]:
        return [self.shape(self.case(context, context.state)) for context in contexts]

    def observe(self, outcome: Outcome[Prompt]) -> None:
        """Ignore the outcome."""

    def case(self, context: DraftContext[Any], prompt: Prompt) -> DraftCase:
        """Return the input of the shape."""
        length = len(context.tokens)
        text = self.texts.get((prompt, context.sampler.seed), [])
        # After a wrong draft token of another drafter the right tokens are unknown.
        truth = text[length:] if list(context.tokens) == text[:length] else []
        dice = random.Random(f"{self.dice} {context.sampler.seed} {length}")
        return DraftCase(
            context.tokens[-1],
            truth,
            context.max_depth,
            context.max_nodes,
            self.vocab,
            self.stop_token_ids,
            dice,
        )
