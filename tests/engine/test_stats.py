"""Statistics of a request's steps."""

import pytest

from pronk.engine.stats import Stats, StepStats


def stats(depths: list[int], accepted: list[int]) -> Stats:
    steps = [
        StepStats(d + 1, d, d, a, a + 1, 0.0, 0.0, 0.0)
        for d, a in zip(depths, accepted, strict=True)
    ]
    return Stats(steps=steps, generated_tokens=sum(step.tokens for step in steps))


def test_acceptance_counts_steps_with_a_draft_token_of_that_depth() -> None:
    # 7 steps have draft tokens of depth 1, 6 of depth 2, 5 of depth 3, 1 of depth 4.
    found = stats([3, 3, 3, 0, 2, 4, 1, 3], [0, 3, 1, 0, 2, 3, 0, 1])
    assert found.acceptance == [5 / 7, 3 / 6, 2 / 5, 0 / 1]
    assert found.step_compression == 18 / 8
    assert stats([2], [0]).acceptance == [0, 0]


@pytest.mark.parametrize("depths", [[], [0, 0, 0]])
def test_acceptance_of_nothing_is_empty(depths: list[int]) -> None:
    assert stats(depths, depths).acceptance == []


def test_plain_decoding_has_one_token_per_step() -> None:
    """Lookahead, table 3, row 1."""
    assert stats([0] * 128, [0] * 128).step_compression == 1
    assert Stats().step_compression == 0
