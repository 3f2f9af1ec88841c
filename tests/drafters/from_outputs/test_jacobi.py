"""Jacobi iteration and its sliding variant: what is guessed, and how fast they converge."""

import random

import pytest

from drafters.helpers import VOCAB, Model, context, looping, markov, scrambled, step
from pronk.drafters import GaussSeidel, Jacobi, Proposer
from pronk.drafters.from_outputs.jacobi import JacobiState


def plain(prompt: list[int], length: int, model: Model) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(model(tokens))
    return tokens


def test_a_fixed_point_is_accepted_at_once() -> None:
    """Once the iterate is right it stays right: a model that does not look back is solved in two passes."""
    drafter, tokens = Jacobi(num_tokens=6), [9]
    state = drafter.start(tokens)
    by_place: Model = lambda text: (3 * len(text) + 1) % VOCAB  # noqa: E731 - a model in a line
    step(drafter, state, tokens, by_place)
    assert len(tokens) == 2
    step(drafter, state, tokens, by_place)
    assert len(tokens) == 1 + 6 + 1  # the five that were left, and the bonus token


def test_outputs_are_the_next_iterate() -> None:
    drafter, tokens = Jacobi(num_tokens=4), [1, 2, 3]
    state = drafter.start(tokens)
    first = step(drafter, state, tokens, scrambled)
    draft_tokens = first.tokens[1:]
    assert len(draft_tokens) == 4
    assert set(draft_tokens) <= {1, 2, 3}  # unknowns begin as tokens of the prompt
    outputs = [scrambled([1, 2, 3, *draft_tokens[:i]]) for i in range(5)]
    assert tokens[3] == outputs[0]
    assert len(tokens) == 4
    (second,) = drafter.propose([context(state, tokens)])
    assert list(second.tokens) == [outputs[0], *outputs[1:4]]


@pytest.mark.parametrize(
    ("drafter", "lengths"), [(Jacobi(num_tokens=4), [4, 3, 2, 1, 4]), (GaussSeidel(num_tokens=4), [4] * 5)]
)
def test_the_system_ends_or_slides(drafter: Proposer[JacobiState], lengths: list[int]) -> None:
    """With a model that takes one token at a time: the chain gets shorter until the next system begins, or does not."""
    tokens, counter = [1], iter(range(10**6))
    state = drafter.start(tokens)
    never: Model = lambda _: 5 + next(counter) % 6  # noqa: E731 - never what it was before
    found = [step(drafter, state, tokens, never).num_draft_tokens for _ in lengths]
    assert len(tokens) == 1 + len(lengths)
    assert found == lengths


def slow(prompt: list[int], steps: int, size: int, model: Model, *, slides: bool) -> list[int]:
    """Lengths of the text after each pass of a Jacobi iteration: by absolute positions, asking once per position."""
    tokens, draft_tokens, end, lengths = list(prompt), dict[int, int](), 0, []
    for _ in range(steps):
        first = len(tokens)
        if slides or first >= end:
            end = first + size
        iterate = [draft_tokens.get(place, prompt[place * 7919 % len(prompt)]) for place in range(first, end)]
        outputs = [model([*tokens, *iterate[:i]]) for i in range(len(iterate) + 1)]
        right = 0
        while right < len(iterate) and iterate[right] == outputs[right]:
            right += 1
        tokens += outputs[: right + 1]
        draft_tokens = {first + i: output for i, output in enumerate(outputs)}
        lengths.append(len(tokens))
    return lengths


@pytest.mark.parametrize("model", [scrambled, looping, markov])
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("kind", [Jacobi, GaussSeidel])
def test_every_pass_is_that_of_a_slow_loop(kind: type[Jacobi], size: int, model: Model) -> None:
    """So ``m`` unknowns take at most ``m`` passes, and become the greedy tokens."""
    for seed in range(8):
        dice = random.Random(seed)
        prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 9))]
        drafter, tokens, lengths = kind(num_tokens=size), list(prompt), []
        state = drafter.start(prompt)
        for _ in range(25):
            step(drafter, state, tokens, model)
            lengths.append(len(tokens))
        assert lengths == slow(prompt, 25, size, model, slides=kind is GaussSeidel)
        assert tokens == plain(prompt, len(tokens), model)
        assert lengths[size - 1] >= len(prompt) + size
