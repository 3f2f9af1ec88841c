"""Rules for every drafter.

Tests make a drafter of the engine by its name alone or by its entry in ``SPECS`` of
``engine/cases.py``; guests call them with specifications of their drafters.
``engine/test_equality.py`` checks that no drafter changes a text.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from engine.cases import SPECS
from pronk.base.arrays import Array
from pronk.base.errors import OptionError
from pronk.cache.blocks import BlockTable
from pronk.drafting import DraftContext, Drafter, Outcome, Proposer, make_drafter
from pronk.drafting.registry import DRAFTERS
from pronk.drafting.shared.draft_cache import DraftCache
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree
from tiny_models import VOCAB, context_of, make_engine, tiny_decoder

# Drafters whose state depends on which draft tokens were accepted; ``cape`` is the lab's, around
# ``threshold``.
ADAPTIVE = {"threshold", "cape"}


# Expected output of every request, of the three tokens that the texts have.
PREDICTION = (0, 1, 2, 0, 0, 1, 1, 2, 2, 1, 0) * 4


def make(name: str) -> Drafter:
    # requests share nothing
    own = {"merged": "merged(prompt_lookup(min_ngram=1), suffix(store_tokens=0), recycling)"}
    return make_drafter((SPECS | own).get(name, name))


def rows(path: Sequence[int], width: int) -> Array:
    """Return ``width`` random numbers that depend on ``path`` only, in place of a hidden state or
    logits.
    """
    return np.random.default_rng(hash(tuple(path)) % 2**60).standard_normal(width, np.float32)


def outcome(
    drafter: Proposer[Any],
    state: Any,
    before: Sequence[int],
    tree: TokenTree,
    path: Sequence[int],
    new: Sequence[int],
) -> Outcome[Any]:
    """Return the outcome that the engine reports for ``tree`` below the text ``before``."""
    nodes = [[*before, *(tree.tokens[i] for i in tree.path(node))] for node in range(len(tree))]
    config = tiny_decoder().config
    logits = (
        np.stack([rows(node, VOCAB) for node in nodes]) if drafter.capabilities.logits else None
    )
    hidden = {
        layer: np.stack([rows([layer, *node], config.hidden_size) for node in nodes])
        for layer in drafter.capabilities.hidden
    }
    return Outcome(
        state, tree, tuple(path), tuple(new), len(before) - 1, SamplingParams(), logits, hidden
    )


class Stage:
    """A proposer and its target without engine steps; the target's cache holds a text without its
    last token.
    """

    def __init__(self, name: str) -> None:
        engine = make_engine(tiny_decoder())
        self.runner = engine.runner
        self.drafter = make(name).bind(engine.target)
        # A model of a drafter may read the target's KV cache, which then must hold the text.
        self.reads = bool(self.drafter.models)
        self.tables: dict[int, BlockTable] = {}

    def context(
        self,
        state: Any,
        tokens: Sequence[int],
        drafted: int = 0,
        max_depth: int = 40,
        max_nodes: int = 40,
    ) -> DraftContext:
        """Return the context of a request, whose last ``drafted`` tokens are another drafter's
        draft tokens.
        """
        params = SamplingParams(prediction=PREDICTION)
        sampler = Sampler(params, 0, TokenContext(tokens, num_prompt=1), VOCAB)
        block_table = self._table(state, tokens, len(tokens) - 1 - drafted)
        return DraftContext(state, list(tokens), max_depth, max_nodes, params, sampler, block_table)

    def _table(self, state: Any, tokens: Sequence[int], length: int) -> BlockTable:
        if not self.reads:
            return BlockTable(length=length)
        block_table = self.tables.setdefault(id(state), BlockTable())
        block_table.length = 0
        self.runner.cache.prepare(block_table, length + 100)
        if length:
            tree = TokenTree.chain(tokens[:length])
            # Outputs of the last row are saved as in the step that chose the token after it.
            entry = BatchEntry(block_table, tree, range(length - 1, length), length)
            self.runner.forward(ForwardBatch([entry]))
        block_table.length = length
        return block_table

    def start(self, tokens: Sequence[int]) -> Any:
        """Return the state of a request after the step that chose the last token."""
        state = self.drafter.start(tokens)
        if self.drafter.capabilities.hidden and len(tokens) > 1:
            root = TokenTree.chain(tokens[-2:-1])
            self.drafter.observe(outcome(self.drafter, state, tokens[:-1], root, (), tokens[-1:]))
        return state

    def stop(self, state: Any) -> None:
        """End the request."""
        self.drafter.stop(state)
        self.runner.cache.release(self.tables.pop(id(state), BlockTable()))


def replay(
    stage: Stage,
    tokens: Sequence[int],
    prompt: int,
    dice: random.Random,
    *,
    disturbed: bool = False,
) -> Any:
    """Return the state after decoding ``tokens``, with right, wrong and dropped draft tokens.

    With ``disturbed`` another request shares the batches, and some proposals follow another
    drafter's draft tokens, right or wrong, whose outcome is not observed.
    """
    drafter = stage.drafter
    context = stage.context
    state = drafter.start(tokens[:prompt])
    other = drafter.start(tokens[:1])
    length = prompt
    while length < len(tokens):
        before = tokens[:length]
        if disturbed:
            drafter.propose(
                [context(state, [*before, *tokens[length : length + 1], 1, 2], 3, 3, 5)]
            )
        company = [context(other, tokens[:1])] if disturbed else []
        *_, tree = drafter.propose([*company, context(state, before)])
        tree = tree.limit(dice.randint(0, 9), 40)
        path = list[int]()
        node = tree.child(0, tokens[length])
        while node is not None:
            path.append(node)
            place = length + len(path)
            node = tree.child(node, tokens[place]) if place < len(tokens) else None
        new = tokens[length : length + len(path) + 1]
        drafter.observe(outcome(drafter, state, before, tree, path, new))
        length += len(new)
    stage.stop(other)
    return state


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal; states are nested dataclasses, containers and arrays.

    Caches are equal: a cache makes a proposal cheaper and does not change it.
    """
    if isinstance(a, DraftCache):
        return type(a) is type(b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.compare
        )
    if isinstance(a, Mapping):
        return (
            isinstance(b, Mapping) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, list | tuple):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )
    return bool(a == b)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 9), marks=pytest.mark.slow)], ids=str
)
def test_state_depends_on_the_text_and_the_targets_outputs_alone(name: str, seeds: range) -> None:
    """Draft tokens do not change a state, except in drafters that read the outputs for them or are
    ``ADAPTIVE``.
    """
    stage = Stage(name)
    drafter = stage.drafter
    context = stage.context
    for seed in seeds:
        dice = random.Random(seed)
        # Few letters, so that drafters propose much and some of it is right.
        tokens = [dice.randrange(4) for _ in range(80)]
        prompt = dice.randint(1, 60)
        again = random.Random()
        again.setstate(dice.getstate())
        state = replay(stage, tokens, prompt, dice, disturbed=True)
        if drafter.capabilities.logits or drafter.capabilities.hidden or drafter.name in ADAPTIVE:
            fresh = replay(stage, tokens, prompt, again)
        else:
            fresh = drafter.start(tokens[:prompt])
            root = TokenTree.chain(tokens[prompt - 1 : prompt])
            drafter.observe(outcome(drafter, fresh, tokens[:prompt], root, (), tokens[prompt:]))
        # Propose before comparing, because a proposal may bring a state up to date.
        (one,), (other,) = (drafter.propose([context(s, tokens)]) for s in (state, fresh))
        assert same(state, fresh)
        assert (one.tokens, one.parents, one.verify) == (other.tokens, other.parents, other.verify)
        for each in (state, fresh):
            stage.stop(each)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", DRAFTERS)
def test_proposals_are_trees_within_the_limits(name: str) -> None:
    stage = Stage(name)
    drafter = stage.drafter
    context = stage.context
    dice = random.Random(0)
    largest = 0
    for _ in range(20):
        tokens = [dice.randrange(3) for _ in range(dice.randint(1, 60))]
        drafted = dice.randint(0, min(3, len(tokens) - 1))
        limits = [(depth, nodes) for depth in (0, 1, 2, 40) for nodes in (0, 1, 2, 40)]
        states = [stage.start(tokens[: len(tokens) - drafted]) for _ in limits]
        contexts = [
            context(state, tokens, drafted, *limit)
            for state, limit in zip(states, limits, strict=True)
        ]
        trees = drafter.propose(contexts)
        assert len(trees) == len(contexts)
        for (depth, nodes), tree in zip(limits, trees, strict=True):
            assert tree.tokens[0] == tokens[-1]
            assert tree.num_draft_tokens <= nodes
            assert max(tree.depths) <= depth
            assert all(0 <= token < VOCAB for token in tree.tokens)
            assert tree.probs is None or all(q is None or len(q) == VOCAB for q in tree.probs)
            assert tree.gain is None or all(
                tree.gain[i] <= tree.gain[tree.parents[i]]
                for i in range(2, len(tree))
                if tree.parents[i] > 0
            )
            largest = max(largest, tree.num_draft_tokens)
        for each in contexts:
            assert context_of(each.sampler) == tokens
            stage.stop(each.state)
    assert (largest > 1) == (drafter.name != "autoregressive")


@pytest.mark.parametrize("name", DRAFTERS)
def test_proposals_do_not_depend_on_the_batch_or_on_earlier_proposals(name: str) -> None:
    stage = Stage(name)
    drafter = stage.drafter
    context = stage.context
    dice = random.Random(1)
    texts = [[dice.randrange(3) for _ in range(length)] for length in (30, 1, 12)]
    contexts = [context(stage.start(tokens), tokens) for tokens in texts]
    together = drafter.propose(contexts)
    alone = [drafter.propose([one])[0] for one in reversed(contexts)][::-1]
    assert [(tree.tokens, tree.parents) for tree in together] == [
        (tree.tokens, tree.parents) for tree in alone
    ]


@pytest.mark.parametrize("name", DRAFTERS)
def test_equal_options_bind_to_equal_proposers_of_each_target(name: str) -> None:
    made = make(name)
    again = make(name)
    one, other = (make_engine(tiny_decoder()).target for _ in range(2))
    proposers = []
    for drafter, target, stranger in ((made, one, other), (made, other, one), (again, one, other)):
        proposer = drafter.bind(target)
        proposers.append(proposer)
        assert isinstance(proposer, Proposer)
        assert proposer.name == made.name
        assert proposer.bind(target) is proposer
        if isinstance(made, Proposer):  # a drafter without model and memory is its own proposer
            assert proposer.bind(stranger) is proposer
        else:
            with pytest.raises(OptionError, match="expected its own model, found another"):
                proposer.bind(stranger)
        assert made == again
        assert hash(made) == hash(again)
    assert len(set(map(id, proposers))) == (3 if not isinstance(made, Proposer) else 2)
    first, other_target, second = ({*map(id, proposer.models)} for proposer in proposers)
    assert first == second
    assert not first & other_target
