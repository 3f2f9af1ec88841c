"""A model that is asked at every node, and the shortest way to let a drafter decode with it."""

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from pronk.drafters import DraftContext, Drafter, Outcome, Proposer
from pronk.kv_cache.blocks import BlockTable
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.verify import verify_tree
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

Kind = TypeVar("Kind")

VOCAB = 11


def named(vocabulary: str | None) -> Any:
    """A tokenizer of which nothing is known but its fingerprint; ``None`` for none."""
    return None if vocabulary is None else SimpleNamespace(fingerprint=vocabulary)


@cache
def stranger(vocabulary: str | None, size: int) -> Target:
    """A model of which nothing is known but its vocabulary, and the size of it."""
    decoder = SimpleNamespace(config=SimpleNamespace(vocab_size=size))
    return cast(Target, SimpleNamespace(vocabulary=vocabulary, decoder=decoder, acceptance_stats=None))


def met(drafter: Drafter, vocabulary: str | None = None, size: int = VOCAB) -> Any:
    """What guesses for such a model."""
    return drafter.bind(stranger(vocabulary, size))


def within(drafter: Any, kind: type[Kind]) -> list[Kind]:
    """The guessers of a kind that one is made of, first to last; it may be one itself."""
    if isinstance(drafter, kind):
        return [drafter]
    inside = getattr(drafter, "parts", None) or ([drafter.inner] if hasattr(drafter, "inner") else [])
    return [found for each in inside for found in within(each, kind)]


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
    guessed: int = 0,
    params: SamplingParams | None = None,
    vocab: int = VOCAB,
    **more: Any,
) -> DraftContext[Any]:
    """What a drafter sees of a text, the last ``guessed`` tokens of which are another one's guesses."""
    params, text = params or SamplingParams(), list(tokens)
    sampler, block_table = Sampler(params, params.seed or 0, text, vocab), BlockTable(length=len(text) - 1 - guessed)
    return DraftContext(state, text, depth, nodes, params, sampler, block_table, **more)


def said_of(tree: TokenTree, path: Sequence[int], **more: Any) -> Outcome[Any]:
    """What a drafter hears of a tree of which a path was accepted."""
    committed = (*(tree.tokens[node] for node in path), VOCAB)
    return Outcome(None, tree, tuple(path), committed, 0, **{"params": SamplingParams(), **more})


def hear(
    drafter: Proposer[Any],
    state: Any,
    tree: TokenTree,
    tokens: list[int],
    model: Model,
    params: SamplingParams | None = None,
) -> tuple[int, ...]:
    """Verify a tree below ``tokens``, which grows; the drafter hears of it. Returns the accepted nodes."""
    paths = [[*tokens, *(tree.tokens[i] for i in tree.path(node))] for node in range(len(tree))]
    logits = torch.nn.functional.one_hot(torch.tensor([model(path) for path in paths]), VOCAB).float()
    found = verify_tree(tree, lambda node, _: int(logits[node].argmax()))
    position = len(tokens) - 1
    tokens += found.tokens
    outcome = Outcome(state, tree, found.path, found.tokens, position, params or SamplingParams(), logits)
    drafter.observe(outcome)
    return found.path


def step(drafter: Proposer[Any], state: Any, tokens: list[int], model: Model, **options: Any) -> TokenTree:
    """One step of decoding; ``tokens`` grows."""
    (tree,) = drafter.propose([context(state, tokens, **options)])
    hear(drafter, state, tree, tokens, model)
    return tree
