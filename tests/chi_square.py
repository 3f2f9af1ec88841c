"""Is this sample from that distribution?"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def p_value(counts: Sequence[int] | torch.Tensor, probs: Sequence[float] | torch.Tensor) -> float:
    """Pearson's test: the probability of counts at least as far from ``probs``. Nothing may occur that cannot."""
    observed = torch.as_tensor(counts, dtype=torch.float64).flatten()
    expected = torch.as_tensor(probs, dtype=torch.float64).flatten()
    expected = expected / expected.sum() * observed.sum()
    assert not bool((observed[expected == 0] > 0).any()), "something occurred that has probability 0"
    possible = expected > 0
    assert bool((expected[possible] >= 5).all()), "too few draws for this test"
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    if freedom == 0:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), (statistic / 2).float()))
