"""Shares of experts and of states in the bytes of a forward pass of one row."""

import pytest

from pronk.base.arrays import FLOAT32
from pronk.models.decoder import FixedCosts, expert_bytes, fixed_costs, forward_weights
from pronk.models.model_runner import ModelRunner
from tiny_models import make_cache, tiny_decoder


def test_a_dense_model_has_neither() -> None:
    assert fixed_costs(tiny_decoder(FLOAT32)) == FixedCosts(0.0, 1.0, 0.0)


def test_states_are_read_and_written() -> None:
    decoder = tiny_decoder(FLOAT32, special="recurrent", windows=(None,) * 3)
    cache = make_cache(decoder.config, FLOAT32)
    traffic = 2 * cache.state_bytes
    share = traffic / (forward_weights(decoder).nbytes + traffic)
    assert 0.0 < share < 1.0
    found = fixed_costs(decoder, cache.state_bytes)
    assert found == pytest.approx(FixedCosts(states=share))
    costs = ModelRunner(decoder, cache).cost_model
    costs.learn(1, 0, 1.0)
    one = costs.costs(0)
    two = costs.costs(0, 2)
    assert one is not None
    assert two is not None
    assert two.at(2) - one.at(2) == pytest.approx(share)


def test_experts_beside_states() -> None:
    """A row reads 3 of 9 experts, and its state."""
    decoder = tiny_decoder(FLOAT32, special="experts", windows=(None,) * 3)
    read = forward_weights(decoder).nbytes - expert_bytes(decoder) * 2 / 3
    alone = fixed_costs(decoder)
    assert alone == pytest.approx(FixedCosts(expert_bytes(decoder) / 3 / read, 1 / 3))
    half = fixed_costs(decoder, int(read) // 2)
    assert half.states == pytest.approx(0.5, rel=1e-3)
    assert half.experts == pytest.approx(alone.experts / 2, rel=1e-3)
