"""Drafters for tests: random trees, trees that know the answer, and trees that try to break the engine.

A *shape* makes one tree from what it knows of a request: its root, and the text that plain decoding gives after it,
if the test has put it in. The drafter has no state, and its dice depend on the request's seed and length alone, so
what it proposes does not depend on what else is in the batch.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from laws import Same, Table, TreeSampler
from pronk.drafters import DraftContext, Outcome, Proposer
from pronk.speculation.tree import TokenTree

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class DraftCase:
    """What a shape may use.

    Attributes:
        root: the last token of the text.
        truth: the tokens that plain decoding gives after it; may be empty.
        depth: the engine's limits, which a shape may ignore.
        nodes: likewise.
        vocab: size of the vocabulary.
        stop_token_ids: token ids that end the text.
        dice: for choices at random.
    """

    root: int
    truth: Sequence[int]
    depth: int
    nodes: int
    vocab: int
    stop_token_ids: Sequence[int]
    dice: random.Random

    def wrong(self, depth: int) -> int:
        """A token that is not the right one ``depth`` tokens below the root, where depth 1 is next to it."""
        right = self.truth[depth - 1] if depth <= len(self.truth) else -1
        return self.dice.choice([token for token in range(self.vocab) if token != right])


Shape = Callable[[DraftCase], TokenTree]


@dataclass
class Growing:
    """A tree under construction, in which a token occurs once among the acceptable children of a node."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    verify: list[bool] = field(default_factory=lambda: [True])
    right: list[bool] = field(default_factory=lambda: [True])
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])

    def add(self, parent: int, token: int, truth: Sequence[int] = (), *, verify: bool = True) -> int:
        """The child of ``parent`` that carries ``token``, new or old; always a new one if it may not be accepted."""
        if verify and token in self.children[parent]:
            return self.children[parent][token]
        depth, node = self.depths[parent], len(self.tokens)
        if verify:
            self.children[parent][token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth + 1)
        self.verify.append(verify)
        self.right.append(verify and self.right[parent] and depth < len(truth) and token == truth[depth])
        self.children.append({})
        return node

    def chain(self, parent: int, tokens: Sequence[int], truth: Sequence[int] = ()) -> int:
        """Hang ``tokens`` below ``parent``, one below the other; returns the last node."""
        for token in tokens:
            parent = self.add(parent, token, truth)
        return parent

    def done(self) -> TokenTree:
        return TokenTree(tuple(self.tokens), tuple(self.parents), None if all(self.verify) else tuple(self.verify))


def random_trees(guess: DraftCase) -> TokenTree:
    """Any shape and any tokens; once in a while more of them than the engine allows."""
    dice, tree = guess.dice, Growing([guess.root])
    size = dice.choice((0, 1, 2, 5, 9, 14, 14, 14, 2 * guess.nodes + 3))
    for _ in range(size):
        parent = dice.randrange(len(tree.tokens)) if dice.random() < 0.5 else len(tree.tokens) - 1
        tree.add(parent, dice.randrange(guess.vocab), guess.truth)
    return tree.done()


def oracle_trees(right: float, size: int = 12) -> Shape:
    """Each node right with probability ``right`` where its parent is; wherever in the tree that is."""

    def shape(guess: DraftCase) -> TokenTree:
        dice, tree = guess.dice, Growing([guess.root])
        for _ in range(dice.randrange(size + 1)):
            parent = dice.randrange(len(tree.tokens))
            if dice.random() < 0.6:
                parent = max(node for node, fine in enumerate(tree.right) if fine or node == parent)
            depth = tree.depths[parent]
            hit = tree.right[parent] and depth < len(guess.truth) and dice.random() < right
            tree.add(parent, guess.truth[depth] if hit else guess.wrong(depth + 1), guess.truth)
        return tree.done()

    return shape


def explore_trees(guess: DraftCase) -> TokenTree:
    """Right guesses among nodes that may not be accepted, which may carry the right token too, and have children."""
    dice, tree = guess.dice, Growing([guess.root])
    node = 0
    for token in guess.truth[: dice.randrange(6)]:
        for _ in range(dice.randrange(3)):
            explorer = tree.add(node, dice.choice((token, guess.wrong(1))), verify=False)
            tree.chain(explorer, guess.truth[tree.depths[explorer] :][: dice.randrange(3)])
        node = tree.add(node, token, guess.truth)
    for _ in range(3):
        parent = dice.randrange(len(tree.tokens))
        right = guess.truth[tree.depths[parent] :][:1]
        tree.add(parent, right[0] if right else guess.root, verify=False)
    return tree.done()


def last_branch(guess: DraftCase) -> TokenTree:
    """The main chain is wrong at once; what is right is the last and deepest branch."""
    tree = Growing([guess.root])
    tree.chain(0, [guess.wrong(1), *(guess.wrong(9) for _ in range(4))])
    tree.chain(0, [guess.wrong(1), guess.wrong(9)])
    tree.chain(0, guess.truth[:6], guess.truth)
    return tree.done()


def wide_star(guess: DraftCase) -> TokenTree:
    """Many children of the root, the right one last, and one more level below it."""
    tree = Growing([guess.root])
    for _ in range(20):
        tree.add(0, guess.wrong(1), guess.truth)
    node = tree.chain(0, guess.truth[:1], guess.truth)
    for _ in range(5):
        tree.add(node, guess.wrong(2), guess.truth)
    tree.chain(node, guess.truth[1:2])
    return tree.done()


def right_then_wrong(guess: DraftCase) -> TokenTree:
    """A chain that is right for some tokens and then wrong, sometimes with a right branch where it goes wrong."""
    count = guess.dice.randrange(6)
    tree = Growing([guess.root])
    fork = tree.chain(0, guess.truth[:count], guess.truth)
    tree.chain(fork, [guess.wrong(count + 1), *guess.truth[count + 1 : count + 4]], guess.truth)
    if guess.dice.random() < 0.5:
        tree.chain(fork, guess.truth[count : count + 4], guess.truth)
    return tree.done()


def repeats(guess: DraftCase) -> TokenTree:
    """The same token again and again, in depth and as the child of every node."""
    tree = Growing([guess.root])
    right = guess.truth[:1] or [guess.root]
    tree.chain(0, [guess.root] * 4)
    tree.chain(0, [*right] * 5)
    for node in range(len(tree.tokens)):
        tree.add(node, guess.root, guess.truth)
    return tree.done()


def past_the_end(guess: DraftCase) -> TokenTree:
    """Ends of the text everywhere, and tokens after them; and the right tokens with an end after each."""
    tree = Growing([guess.root])
    node = 0
    for token in guess.truth[:5]:
        node = tree.add(node, token, guess.truth)
        for end in guess.stop_token_ids:
            tree.chain(node, [end, end, guess.root, *guess.truth[:2]])
    for end in guess.stop_token_ids:
        tree.chain(0, [end, guess.wrong(9), end, guess.root])
    return tree.done()


def too_large(guess: DraftCase) -> TokenTree:
    """Deeper and wider than the engine allows; right beyond its limits."""
    tree = Growing([guess.root])
    tree.chain(0, guess.truth[:4] + [guess.wrong(999) for _ in range(guess.depth + 3)], guess.truth)
    for _ in range(guess.nodes + 3):
        tree.add(guess.dice.randrange(len(tree.tokens)), guess.dice.randrange(guess.vocab), guess.truth)
    return tree.done()


def off_chain(guess: DraftCase) -> TokenTree:
    """One wrong child, and everything right beside it: all that is accepted has to be moved."""
    tree = Growing([guess.root])
    tree.add(0, guess.wrong(1), guess.truth)
    tree.chain(0, guess.truth[:4], guess.truth)
    return tree.done()


def outside(guess: DraftCase) -> TokenTree:
    """Right guesses beside and below tokens that the vocabulary does not have."""
    tree = Growing([guess.root])
    tree.chain(0, [guess.vocab, *guess.truth[1:3]])
    tree.chain(0, [-1, 10**9])
    tree.chain(0, [*guess.truth[:2], guess.vocab + 7, *guess.truth[3:5]], guess.truth)
    tree.add(0, guess.wrong(1))
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


def adversarial(guess: DraftCase) -> TokenTree:
    """Another trick at every step."""
    return guess.dice.choice(ADVERSARIAL)(guess)


class Rolled:
    """The dice, as a source of draws for :class:`laws.TreeSampler`."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def take(self, probabilities: Sequence[float]) -> int:
        return self.dice.choices(range(len(probabilities)), probabilities)[0]


def drawn_trees(parents: tuple[int, ...], drawn: float = 1.0, *, honest: bool = True) -> Shape:
    """Trees of one shape, each node drawn from a distribution of its own with probability ``drawn``.

    The others are point masses. Without ``honest`` the trees say that all tokens were as likely.
    """
    dice, q, flat = random.Random(str(parents)), dict[int, Table](), dict[int, Table]()
    random_nodes = tuple(dice.random() < drawn for _ in parents)

    def shape(guess: DraftCase) -> TokenTree:
        law = q.setdefault(guess.vocab, Table("drawn", guess.vocab, 0.0))
        claim = None if honest else flat.setdefault(guess.vocab, Same(*[1] * guess.vocab))
        tree = TreeSampler(parents, random_nodes, law, claim)(Rolled(guess.dice), (guess.root,))
        return replace(tree, tokens=(guess.root, *tree.tokens[1:]))

    return shape


@dataclass(frozen=True, eq=False)
class TreeDrafter(Proposer[Prompt]):
    """Proposes what ``shape`` makes.

    Attributes:
        shape: makes a tree.
        texts: what plain decoding gives: (prompt, seed) to the whole text.
        vocab: size of the vocabulary.
        stop_token_ids: token ids that end a text.
        dice: seed of the choices at random.
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
        """Nothing to learn."""

    def case(self, context: DraftContext[Any], prompt: Prompt) -> DraftCase:
        """What the shape is told."""
        length = len(context.tokens)
        text = self.texts.get((prompt, context.sampler.seed), [])
        # Provisional tokens may be wrong; then nothing is known of what follows.
        truth = text[length:] if list(context.tokens) == text[:length] else []
        dice = random.Random(f"{self.dice} {context.sampler.seed} {length}")
        return DraftCase(
            context.tokens[-1], truth, context.max_depth, context.max_nodes, self.vocab, self.stop_token_ids, dice
        )
