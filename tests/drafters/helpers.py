"""A model that is asked at every node, and the shortest way to let a drafter decode with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from pronk.cache.blocks import BlockTable
from pronk.choosing.chooser import Chooser
from pronk.choosing.params import SamplingParams
from pronk.choosing.walk import walk
from pronk.drafters import DraftContext, Drafter, Outcome
from pronk.passes.costs import PassCosts
from pronk.tree import TokenTree

VOCAB = 11


def named(vocabulary: str | None) -> Any:
    """A tokenizer of which nothing is known but its fingerprint; ``None`` for none."""
    return None if vocabulary is None else SimpleNamespace(fingerprint=vocabulary)


Model = Callable[[Sequence[int]], int]


def scrambled(tokens: Sequence[int]) -> int:
    """A model: the next token depends on the last three."""
    a, b, c = ([0, 0, 0, *tokens])[-3:]
    return (5 * a + 3 * b * b + c + 1) % VOCAB


def looping(tokens: Sequence[int]) -> int:
    """A model that counts, so that most guesses are right."""
    return (tokens[-1] + 1) % 5


def markov(tokens: Sequence[int]) -> int:
    """A model whose next token depends on the last one alone."""
    return (7 * tokens[-1] + 3) % VOCAB


def context(
    state: Any,
    tokens: Sequence[int],
    depth: int = 99,
    nodes: int = 99,
    *,
    params: SamplingParams | None = None,
    costs: PassCosts | None = None,
) -> DraftContext[Any]:
    """What a drafter sees of a text that is all committed."""
    params = params or SamplingParams()
    chooser = Chooser(params, 0, tokens, VOCAB)
    return DraftContext(state, list(tokens), depth, nodes, params, chooser, BlockTable(length=len(tokens) - 1), costs)


def hear(
    drafter: Drafter[Any],
    state: Any,
    tree: TokenTree,
    tokens: list[int],
    model: Model,
    params: SamplingParams | None = None,
) -> tuple[int, ...]:
    """Verify a tree below ``tokens``, which grows; the drafter hears of it. Returns the accepted nodes."""
    paths = [[*tokens, *(tree.tokens[i] for i in tree.path(node))] for node in range(len(tree))]
    logits = torch.nn.functional.one_hot(torch.tensor([model(path) for path in paths]), VOCAB).float()
    found = walk(tree, lambda node, _: int(logits[node].argmax()))
    position = len(tokens) - 1
    tokens += found.tokens
    outcome = Outcome(state, tree, found.path, found.tokens, position, params or SamplingParams(), logits)
    drafter.observe([outcome])
    return found.path


def step(drafter: Drafter[Any], state: Any, tokens: list[int], model: Model, **options: Any) -> TokenTree:
    """One step of decoding; ``tokens`` grows."""
    (tree,) = drafter.propose([context(state, tokens, **options)])
    hear(drafter, state, tree, tokens, model)
    return tree
