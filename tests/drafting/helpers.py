"""Toy models, and the shortest way to decode with one drafter outside the engine."""

import atexit
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from pronk.cache.blocks import BlockTable
from pronk.drafting import DraftContext, Drafter, Outcome, Proposer
from pronk.drafting.from_text._suffix_store import SuffixStore
from pronk.drafting.planner import DraftPlan
from pronk.drafting.step_costs import StepCosts
from pronk.drafting.target import Target
from pronk.models.cost_model import CostCurve
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import verify_tree

Kind = TypeVar("Kind")

VOCAB = 11
_TEMPORARY = TemporaryDirectory()
atexit.register(_TEMPORARY.cleanup)
# Folder of the checkpoints and data that tests write once per process.
CHECKPOINTS = Path(_TEMPORARY.name)


def tokenizer_stub(vocabulary: str | None) -> Any:
    """Return a tokenizer stub with this fingerprint, or ``None`` as the tokenizer of a target
    without one.
    """
    return None if vocabulary is None else SimpleNamespace(fingerprint=vocabulary)


@cache
def target_stub(vocabulary: str | None, size: int) -> Target:
    """Return a target with nothing but a vocabulary."""
    decoder = SimpleNamespace(config=SimpleNamespace(vocab_size=size, num_layers=8))
    stub = SimpleNamespace(tokenizer_fingerprint=vocabulary, decoder=decoder)
    stub.check_rows = lambda option, rows: None
    return cast(Target, stub)


def bind(drafter: Drafter, vocabulary: str | None = None, size: int = VOCAB) -> Any:
    """Return the proposer for a target stub."""
    return drafter.bind(target_stub(vocabulary, size))


def within(drafter: Any, kind: type[Kind]) -> list[Kind]:
    """Return the proposers of class ``kind`` in ``drafter``: itself or, in order, those that it
    combines.
    """
    if isinstance(drafter, kind):
        return [drafter]
    inside = getattr(drafter, "parts", None) or (
        [drafter.inner] if hasattr(drafter, "inner") else []
    )
    return [found for each in inside for found in within(each, kind)]


Model = Callable[[Sequence[int]], int]


def scrambled(tokens: Sequence[int]) -> int:
    """Return a token that depends on the last three tokens."""
    a, b, c = ([0, 0, 0, *tokens])[-3:]
    return (5 * a + 3 * b * b + c + 1) % VOCAB


def looping(tokens: Sequence[int]) -> int:
    """Count up to 4 in a loop, so that most draft tokens are right."""
    return (tokens[-1] + 1) % 5


def markov(tokens: Sequence[int]) -> int:
    """Return a token that depends on the last token alone."""
    return (7 * tokens[-1] + 3) % VOCAB


def context(
    state: Any,
    tokens: Sequence[int],
    depth: int = 99,
    nodes: int = 99,
    *,
    drafted: int = 0,
    params: SamplingParams | None = None,
    vocab: int = VOCAB,
    **more: Any,
) -> DraftContext[Any]:
    """Return the context of a text, whose last ``drafted`` tokens are another drafter's draft
    tokens.
    """
    params = params or SamplingParams()
    text = list(tokens)
    sampler = Sampler(params, params.seed or 0, TokenContext(text), vocab)
    block_table = BlockTable(length=len(text) - 1 - drafted)
    return DraftContext(state, text, depth, nodes, params, sampler, block_table, **more)


def priced(curve: CostCurve | None, requests: int = 1) -> DraftPlan:
    """Return the plan of a step of ``requests`` requests with these costs; what may be lost has no
    limit.
    """
    if curve is None:
        return DraftPlan()
    costs = StepCosts(curve, requests)
    return DraftPlan("pays", costs, before=costs.plain())


def outcome_of(tree: TokenTree, path: Sequence[int], **more: Any) -> Outcome[Any]:
    """Return the outcome of a tree of which a path was accepted."""
    committed = (*(tree.tokens[node] for node in path), VOCAB)
    return Outcome(None, tree, tuple(path), committed, 0, **{"params": SamplingParams(), **more})


def verify_step(
    drafter: Proposer[Any],
    state: Any,
    tree: TokenTree,
    tokens: list[int],
    model: Model,
    params: SamplingParams | None = None,
) -> tuple[int, ...]:
    """Verify a tree below ``tokens``, append the committed tokens, inform the drafter; return the
    accepted nodes.
    """
    paths = [[*tokens, *(tree.tokens[i] for i in tree.path(node))] for node in range(len(tree))]
    logits = np.eye(VOCAB, dtype=np.float32)[[model(path) for path in paths]]
    found = verify_tree(tree, lambda node: int(logits[node].argmax()))
    position = len(tokens) - 1
    tokens += found.tokens
    outcome = Outcome(
        state, tree, found.path, found.tokens, position, params or SamplingParams(), logits
    )
    drafter.observe(outcome)
    return found.path


def step(
    drafter: Proposer[Any], state: Any, tokens: list[int], model: Model, **options: Any
) -> TokenTree:
    """Decode one step and append its tokens to ``tokens``; return the tree."""
    (tree,) = drafter.propose([context(state, tokens, **options)])
    verify_step(drafter, state, tree, tokens, model)
    return tree


def num_stored(store: SuffixStore) -> int:
    """Return the number of tokens in the store of ``suffix``."""
    return sum(index.num_tokens for index in store.generations)
