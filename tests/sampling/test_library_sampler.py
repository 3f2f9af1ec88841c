"""Token trees verified in the library: the tokens that NumPy chooses, for all options of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pronk.base.arrays import Array
from pronk.engine.request_step import verify_in_library
from pronk.kernels.library import candidates
from pronk.sampling import truncation
from pronk.sampling.acceptance import acceptance_rule
from pronk.sampling.logits_processors import BannedTokens, TokenContext
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import NotFiniteError, Sampler
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import VerifiedPath, verify_tree

VOCAB = 700  # more than the 512 candidates of top-p, and no multiple of the kernels' blocks
KERNELS = candidates()


@pytest.fixture(autouse=True)
def _numpy_truncates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation, "find_library", lambda: None)


OPTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.3, 1.0, 40.0),
    "top_k": (0, 1, 7, 300, 699, 5000),
    "top_p": (1.0, 0.02, 0.8, 0.999),
    "min_p": (0.0, 0.05, 1.0),
    "repetition_penalty": (1.0, 1.3, 0.5, 1e-30),
    "presence_penalty": (0.0, 1.5),
    "frequency_penalty": (0.0, -0.7),
}


def random_params(dice: random.Random) -> SamplingParams:
    return SamplingParams(**{name: dice.choice(values) for name, values in OPTIONS.items()})


def random_logits(dice: random.Random, nodes: int) -> Array:
    """Return logits ``[nodes, VOCAB]``, some of them equal, which are flat or steep."""
    numbers = np.random.default_rng(dice.randrange(2**32)).normal(size=(nodes, VOCAB))
    steps = dice.choice([4, 64, 1e6])
    scale = dice.choice([0.5, 4.0, 30.0])
    return (np.round(numbers * steps) / steps * scale).astype(np.float32)


def make_sampler(params: SamplingParams, kernels: Any, seed: int = 3) -> Sampler:
    text = [*range(0, 60, 3), 5, 5, 9]
    context = TokenContext(text, num_prompt=len(text) - 6)
    return Sampler(params, seed, context, VOCAB, kernels=kernels)


def likely_tree(sampler: Sampler, logits: Array, dice: random.Random) -> TokenTree:
    """Return a tree that follows the target's tokens for a while, with siblings."""
    tokens = [0]
    parents = [-1]
    verify = [True]
    right = 0
    for _ in range(len(logits) - 1):
        parent = right if dice.random() < 0.8 else dice.randrange(len(tokens))
        token = sampler.choose(logits[parent]) if parent == right else dice.randrange(VOCAB)
        taken = [tokens[i] for i in range(1, len(tokens)) if parents[i] == parent]
        if token in taken:
            token = next(each for each in range(VOCAB) if each not in taken)
        tokens.append(token)
        parents.append(parent)
        verify.append(dice.random() < 0.9)
        if parent == right and verify[-1]:
            right = len(tokens) - 1
            sampler.advance(token)
    sampler.recover()
    return TokenTree(tuple(tokens), tuple(parents), tuple(verify))


def general_path(sampler: Sampler, tree: TokenTree, logits: Array) -> VerifiedPath:
    return verify_tree(tree, acceptance_rule(sampler, tree, logits))


@pytest.mark.few(2)
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
def test_tokens_are_those_of_the_general_path(kernels: Any) -> None:
    dice = random.Random(kernels.name)
    num_accepted = 0
    num_rejected = 0
    for seed in range(150):
        params = random_params(dice)
        sampler = make_sampler(params, kernels, seed)
        logits = random_logits(dice, dice.randrange(1, 9))
        tree = likely_tree(sampler, logits, dice)
        counts = [each.counts.copy() for each in sampler.processors]  # type: ignore[attr-defined]
        path = verify_in_library(sampler, tree, logits)
        assert path is not None
        assert sampler.context.tentative == list(path.tokens)
        sampler.recover()
        for before, processor in zip(counts, sampler.processors, strict=True):
            assert (before == processor.counts).all()  # type: ignore[attr-defined]
        assert path == general_path(make_sampler(params, None, seed), tree, logits), params
        num_accepted += len(path.path)
        num_rejected += len(tree) - 1 - len(path.path)
    assert num_accepted > 100
    assert num_rejected > 100


def test_top_p_of_a_flat_distribution_needs_all_tokens() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    logits = np.zeros((1, VOCAB), np.float32)  # 630 tokens reach 0.9, and 512 do not
    tree = TokenTree.chain([0])
    found = set[int]()
    for seed in range(300):
        path = verify_in_library(make_sampler(params, KERNELS[0], seed), tree, logits)
        assert path == general_path(make_sampler(params, None, seed), tree, logits)
        found.update(path.tokens)
    assert 512 < max(found) < 640


@pytest.mark.parametrize("count", [31, 32, 33, 511, 512, 513])
def test_top_p_of_a_number_of_equal_tokens(count: int) -> None:
    """Top-p sorts 32 tokens first, then 512, then all."""
    logits = np.full((1, VOCAB), -1000.0, np.float32)
    logits[0, 50 : 50 + count] = 0.0
    params = SamplingParams(temperature=1.0, top_p=(count - 0.5) / count)
    for seed in range(40):
        path = verify_in_library(
            make_sampler(params, KERNELS[0], seed), TokenTree.chain([0]), logits
        )
        assert path == general_path(make_sampler(params, None, seed), TokenTree.chain([0]), logits)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"presence_penalty": 1.0}])
def test_logits_that_are_not_finite(value: float, options: dict[str, Any]) -> None:
    params = replace(SamplingParams(temperature=0.5), **options)
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, 77] = value
    sampler = make_sampler(params, KERNELS[0])
    first = sampler.choose(logits[0])
    wrong = TokenTree.chain([0, (first + 1) % VOCAB])
    assert verify_in_library(sampler, wrong, logits) == VerifiedPath((), (first,))
    sampler.recover()
    with pytest.raises(NotFiniteError):
        verify_in_library(sampler, TokenTree.chain([0, first]), logits)
    assert not sampler.context.tentative


def test_options_of_the_general_path() -> None:
    tree = TokenTree.chain([0])
    logits = np.zeros((1, VOCAB), np.float32)
    for options in ({"logit_bias": {1: 2.0}}, {"temperature": 1.0, "rule": "rejection"}):
        assert (
            verify_in_library(make_sampler(SamplingParams(**options), KERNELS[0]), tree, logits)
            is None
        )
    assert verify_in_library(make_sampler(SamplingParams(), None), tree, logits) is None
    banned = BannedTokens(bad_words=[[1]])
    sampler = Sampler(
        SamplingParams(), 0, TokenContext([1]), VOCAB, banned=banned, kernels=KERNELS[0]
    )
    assert verify_in_library(sampler, tree, logits) is None
