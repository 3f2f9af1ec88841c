"""Prices of chains in the policy: the seconds of a proposal besides its draft tokens."""

from typing import Any

import pytest

from drafting.helpers import context
from drafting.simulation import VOCAB, Source, World, always
from pronk.drafting.policy import RequestPolicy
from pronk.drafting.step_value import ChainPrice
from pronk.models.cost_model import CostCurve
from pronk.sampling.tree import TokenTree

PRICE = ChainPrice(CostCurve(1.0, 1.0, 0.0), 0.1)


class Chain(Source):
    """A drafter whose draft tokens cost 0.1 seconds each."""

    def chain_price(self, context: Any) -> ChainPrice:
        return PRICE


def begun() -> tuple[Chain, RequestPolicy]:
    policy = RequestPolicy()
    policy.begin()
    policy.set_prices(PRICE.curve, 1, float("inf"))
    return Chain(World(length=1), "draft", 0.0, always(0.0)), policy


@pytest.mark.parametrize(
    ("parents", "depth"), [((-1, 0), 1), ((-1, 0, 1), 2), ((-1, 0, 1, 0, 0, 1), 2)]
)
def test_the_start_of_a_proposal_is_what_its_passes_do_not_take(
    parents: tuple[int, ...], depth: int
) -> None:
    """A pass takes 0.1 seconds, and there is one per depth: siblings cost no pass."""
    proposer, policy = begun()
    assert policy.reason(proposer, context(None, [1], 9, 9, vocab=VOCAB, policy=policy)) == "pays"
    policy.take(proposer, "pays", 0.5, TokenTree(tuple(range(1, len(parents) + 1)), parents), [1])
    assert policy.policy.sources["draft"].start == pytest.approx(0.5 - 0.1 * depth)


def test_an_empty_proposal_is_no_measure_of_a_start() -> None:
    """Its duration may be that of finding the KV cache full."""
    proposer, policy = begun()
    assert policy.reason(proposer, context(None, [1], 9, 9, vocab=VOCAB, policy=policy)) == "pays"
    policy.take(proposer, "pays", 0.5, TokenTree((1,), (-1,)), [1])
    assert not policy.policy.sources["draft"].starts


def test_the_inner_drafter_of_a_wrapper_takes_no_part_of_the_time_for_learning() -> None:
    """A wrapper is the source that the policy asks; its inner drafter asks only whether to extend a
    chain.
    """
    proposer, policy = begun()
    assert policy.extends(proposer, context(None, [1], 9, 9, vocab=VOCAB, policy=policy), ())
    assert not policy.policy.sources
