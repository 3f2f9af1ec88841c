"""RoPE tables of the kernels."""

import pytest
import torch

from pronk.architecture.rope import RopeConfig, RopeTable


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_entries_do_not_depend_on_how_many_are_computed(head_dim: int, theta: float) -> None:
    """Exactness needs it: the table is computed again when a text outgrows it."""
    table = RopeTable(RopeConfig(head_dim=head_dim, theta=theta))
    whole = table.compute_entries(range(20_000), ())
    assert len({tuple(entry.flatten().tolist()) for entry in whole[::500]}) == 40
    for count in (1, 3, 17, 513, 4096, 5001):
        assert torch.equal(table.compute_entries(range(count), ()), whole[:count])
