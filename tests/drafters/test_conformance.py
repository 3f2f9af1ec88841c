"""What every drafter must do; a new one gets these tests by being in the registry.

Its name alone has to be enough to make it, or else ``SPECS`` of ``engine/cases.py`` says how tests make it. That no
text depends on it is in ``engine/test_equality.py``.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cases import SPECS
from pronk.drafters import REGISTRY, DraftContext, Drafter, Outcome, Proposer, make_drafter
from pronk.errors import OptionError
from pronk.execution.attention import Segment
from pronk.execution.model_runner import ForwardJob
from pronk.kv_cache.blocks import BlockTable
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.speculation.acceptance_rates import AcceptanceRates
from pronk.speculation.tree import TokenTree
from tiny_models import VOCAB, make_engine, tiny_decoder

STATEFUL = list(REGISTRY)

# Drafters whose state has more than rates that is learned from guesses.
PACED = {"draft_model", "threshold", "staged", "cape", "beam", "multi_token", "kangaroo", "glide", "vanilla"}

# Drafters that read the target's cache: it must have computed the text.
READERS = {"multi_token", "kangaroo", "glide", "vanilla"}


def make(name: str) -> Drafter:
    own = {"merged": "merged(prompt_lookup(min_ngram=1), lookahead(window=3), recycling)"}  # tables are not shared
    return make_drafter((SPECS | own).get(name, name))


def rows(path: Sequence[int], width: int) -> Tensor:
    """A row of numbers that depends on the tokens of ``path`` alone, as hidden states and logits do."""
    return torch.randn(width, generator=torch.Generator().manual_seed(hash(tuple(path)) % 2**60))


def outcome(
    drafter: Proposer[Any], state: Any, before: Sequence[int], tree: TokenTree, path: Sequence[int], new: Sequence[int]
) -> Outcome[Any]:
    """What the engine would say of ``tree`` below the text ``before``."""
    nodes = [[*before, *(tree.tokens[i] for i in tree.path(node))] for node in range(len(tree))]
    config = tiny_decoder().config
    logits = torch.stack([rows(node, VOCAB) for node in nodes]) if drafter.capabilities.logits else None
    hidden = {
        layer: torch.stack([rows([layer, *node], config.hidden_size) for node in nodes])
        for layer in drafter.capabilities.hidden
    }
    return Outcome(state, tree, tuple(path), tuple(new), len(before) - 1, SamplingParams(), logits, hidden)


class Stage:
    """A drafter and its target, outside the engine: one table for every state, computed as far as the text is."""

    def __init__(self, name: str) -> None:
        engine = make_engine(tiny_decoder())
        self.runner = engine.runner
        self.drafter = make(name).bind(engine.target)
        self.reads = name in READERS
        self.tables: dict[int, BlockTable] = {}

    def context(
        self, state: Any, tokens: Sequence[int], guessed: int = 0, max_depth: int = 40, max_nodes: int = 40
    ) -> DraftContext:
        """What the engine would say of a request; or a composite, ``guessed`` of whose tokens are others' guesses."""
        params = SamplingParams()
        sampler = Sampler(params, 0, tokens, VOCAB)
        block_table = self._table(state, tokens, len(tokens) - 1 - guessed)
        return DraftContext(state, list(tokens), max_depth, max_nodes, params, sampler, block_table)

    def _table(self, state: Any, tokens: Sequence[int], length: int) -> BlockTable:
        if not self.reads:
            return BlockTable(length=length)
        block_table = self.tables.setdefault(id(state), BlockTable())
        block_table.length = 0
        self.runner.cache.prepare(block_table, length + 100)
        if length:
            tree = TokenTree.chain(tokens[:length])
            self.runner.forward([ForwardJob(Segment(block_table, tree), range(0), length)])
        block_table.length = length
        return block_table

    def start(self, tokens: Sequence[int]) -> Any:
        """The state of a request after a step that said the last token."""
        state = self.drafter.start(tokens)
        if self.drafter.capabilities.hidden and len(tokens) > 1:
            root = TokenTree.chain(tokens[-2:-1])
            self.drafter.observe(outcome(self.drafter, state, tokens[:-1], root, (), tokens[-1:]))
        return state

    def stop(self, state: Any) -> None:
        """The request has ended."""
        self.drafter.stop(state)
        self.runner.cache.release(self.tables.pop(id(state), BlockTable()))


def replay(stage: Stage, tokens: Sequence[int], prompt: int, dice: random.Random, *, disturbed: bool = False) -> Any:
    """The state after the engine's way through ``tokens``: guesses, some of which do not pay, right and wrong.

    ``disturbed``: with another request in the same batches, and proposals below others' guesses, right and wrong, that
    nobody hears of again.
    """
    drafter, context = stage.drafter, stage.context
    state = drafter.start(tokens[:prompt])
    other = drafter.start(tokens[:1])
    length = prompt
    while length < len(tokens):
        before = tokens[:length]
        if disturbed:
            drafter.propose([context(state, [*before, *tokens[length : length + 1], 1, 2], 3, 3, 5)])
        company = [context(other, tokens[:1])] if disturbed else []
        *_, tree = drafter.propose([*company, context(state, before)])
        tree = tree.limit(dice.randint(0, 9), 40)
        path, node = list[int](), tree.child(0, tokens[length])
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
    """Whether two states are equal, whatever they are made of."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.compare)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def forget_rates(state: Any) -> None:
    """What was learned from guesses alone goes."""
    if isinstance(state, AcceptanceRates):
        state.offered.clear()
        state.taken.clear()
    elif is_dataclass(state):
        for field in fields(state):
            forget_rates(getattr(state, field.name))
    elif isinstance(state, tuple):  # a composite's: its parts'
        for part in state:
            forget_rates(part)


@pytest.mark.parametrize("name", STATEFUL)
def test_state_depends_on_the_text_and_on_what_the_target_said(name: str) -> None:
    """Rates are made of guesses; all else, for a drafter that hears no logits, is made of committed tokens alone."""
    stage = Stage(name)
    drafter, context = stage.drafter, stage.context
    for seed in range(3 if name in PACED else 6):
        dice = random.Random(seed)
        # Few letters, so that much is guessed, and some of it right.
        tokens, prompt = [dice.randrange(4) for _ in range(80)], dice.randint(1, 60)
        again = random.Random()
        again.setstate(dice.getstate())
        state = replay(stage, tokens, prompt, dice)
        if drafter.capabilities.logits or drafter.capabilities.hidden or name in PACED:
            fresh = replay(stage, tokens, prompt, again, disturbed=True)
        else:
            fresh = drafter.start(tokens[:prompt])
            root = TokenTree.chain(tokens[prompt - 1 : prompt])
            drafter.observe(outcome(drafter, fresh, tokens[:prompt], root, (), tokens[prompt:]))
            forget_rates(state)
            forget_rates(fresh)
        # First, as what only guessing needs may be read when guesses are asked for.
        (one,), (other,) = (drafter.propose([context(s, tokens)]) for s in (state, fresh))
        assert same(state, fresh)
        assert (one.tokens, one.parents, one.verify) == (other.tokens, other.parents, other.verify)
        for each in (state, fresh):
            stage.stop(each)


@pytest.mark.parametrize("name", STATEFUL)
def test_proposals_are_trees_within_the_limits(name: str) -> None:
    stage = Stage(name)
    drafter, context = stage.drafter, stage.context
    dice, largest = random.Random(0), 0
    for _ in range(20):
        tokens = [dice.randrange(3) for _ in range(dice.randint(1, 60))]
        guessed = dice.randint(0, min(3, len(tokens) - 1))  # so many at the end are others' guesses
        limits = [(depth, nodes) for depth in (0, 1, 2, 40) for nodes in (0, 1, 2, 40)]
        states = [stage.start(tokens[: len(tokens) - guessed]) for _ in limits]
        contexts = [context(state, tokens, guessed, *limit) for state, limit in zip(states, limits, strict=True)]
        trees = drafter.propose(contexts)
        assert len(trees) == len(contexts)
        for (depth, nodes), tree in zip(limits, trees, strict=True):
            assert tree.tokens[0] == tokens[-1]
            assert tree.num_draft_tokens <= nodes
            assert max(tree.depths) <= depth
            assert all(0 <= token < VOCAB for token in tree.tokens)
            assert tree.probs is None or all(q is None or len(q) == VOCAB for q in tree.probs)
            assert tree.gain is None or all(
                tree.gain[i] <= tree.gain[tree.parents[i]] for i in range(2, len(tree)) if tree.parents[i] > 0
            )
            largest = max(largest, tree.num_draft_tokens)
        for each in contexts:
            stage.stop(each.state)
    assert (largest > 1) == (name != "autoregressive")


@pytest.mark.parametrize("name", STATEFUL)
def test_proposing_leaves_no_trace_and_ignores_company(name: str) -> None:
    """A tree depends on its own context, not on the others of the batch nor on proposals before."""
    stage = Stage(name)
    drafter, context = stage.drafter, stage.context
    dice = random.Random(1)
    texts = [[dice.randrange(3) for _ in range(length)] for length in (30, 1, 12)]
    contexts = [context(stage.start(tokens), tokens) for tokens in texts]
    together = drafter.propose(contexts)
    alone = [drafter.propose([one])[0] for one in reversed(contexts)][::-1]
    assert [(tree.tokens, tree.parents) for tree in together] == [(tree.tokens, tree.parents) for tree in alone]


@pytest.mark.parametrize("name", STATEFUL)
def test_a_drafter_is_a_value_that_meets_models(name: str) -> None:
    made, again = make(name), make(name)
    one, other = (make_engine(tiny_decoder()).target for _ in range(2))
    proposers = []
    for drafter, target, stranger in ((made, one, other), (made, other, one), (again, one, other)):
        proposer = drafter.bind(target)
        proposers.append(proposer)
        assert isinstance(proposer, Proposer)
        assert proposer.name == name
        assert proposer.bind(target) is proposer
        if isinstance(made, Proposer):  # neither a model nor a memory
            assert proposer.bind(stranger) is proposer
        else:
            with pytest.raises(OptionError, match="expected its own model, found another"):
                proposer.bind(stranger)
        assert made == again
        assert hash(made) == hash(again)
    assert len(set(map(id, proposers))) == (3 if not isinstance(made, Proposer) else 2)
