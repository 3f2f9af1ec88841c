"""Is this sample from that distribution?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pronk.verification import chi_square


def p_value(counts: Sequence[int] | torch.Tensor, probs: Sequence[float] | torch.Tensor) -> float:
    """Pearson's test: the probability of counts at least as far from ``probs``. Nothing may occur that cannot."""
    observed = torch.as_tensor(counts, dtype=torch.float64).flatten()
    expected = torch.as_tensor(probs, dtype=torch.float64).flatten()
    expected = expected / expected.sum() * observed.sum()
    assert not bool((observed[expected == 0] > 0).any()), "something occurred that has probability 0"
    possible = expected > 0
    assert bool((expected[possible] >= chi_square.LEAST_EXPECTED).all()), "too few draws for this test"
    return chi_square.p_value(*chi_square.chi_square(observed[possible].tolist(), expected[possible].tolist()))
