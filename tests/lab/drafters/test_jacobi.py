"""Jacobi and Gauss-Seidel decoding against a slow reference: proposals, accepted tokens,
convergence.
"""

import random

import pytest

from drafting.helpers import VOCAB, Model, looping, markov, scrambled, step
from pronk import GaussSeidel, Jacobi


def by_position(tokens: list[int]) -> int:
    """Return a token that depends on the position alone: one forward pass solves all unknowns."""
    return (3 * len(tokens) + 1) % VOCAB


def plain(prompt: list[int], length: int, model: Model) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(model(tokens))
    return tokens


def slow(
    prompt: list[int], steps: int, size: int, model: Model, *, slides: bool
) -> list[tuple[list[int], int]]:
    """Return each step's proposal and length of the text; every position takes a model call of its
    own.
    """
    tokens = list(prompt)
    draft_tokens = dict[int, int]()
    end = 0
    found = []
    for _ in range(steps):
        first = len(tokens)
        if slides or first >= end:
            end = first + size
        iterate = [
            draft_tokens.get(place, prompt[place * 7919 % len(prompt)])
            for place in range(first, end)
        ]
        outputs = [model([*tokens, *iterate[:i]]) for i in range(len(iterate) + 1)]
        right = 0
        while right < len(iterate) and iterate[right] == outputs[right]:
            right += 1
        tokens += outputs[: right + 1]
        draft_tokens = {first + i: output for i, output in enumerate(outputs)}
        found.append((iterate, len(tokens)))
    return found


@pytest.mark.parametrize("model", [scrambled, looping, markov, by_position])
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("kind", [Jacobi, GaussSeidel])
def test_every_step_equals_that_of_a_slow_reference(
    kind: type[Jacobi], size: int, model: Model
) -> None:
    """``size`` unknowns take at most ``size`` forward passes and become the greedy tokens."""
    for seed in range(8):
        dice = random.Random(seed)
        prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 9))]
        drafter = kind(num_tokens=size)
        tokens = list(prompt)
        found = []
        state = drafter.start(prompt)
        for _ in range(25):
            tree = step(drafter, state, tokens, model)
            found.append((list(tree.tokens[1:]), len(tokens)))
        assert found == slow(prompt, 25, size, model, slides=kind is GaussSeidel)
        assert tokens == plain(prompt, len(tokens), model)
        assert found[size - 1][1] >= len(prompt) + size
