"""The noise of tests equals the noise of requests."""

import random

import numpy as np

from pronk.sampling.noise import gumbel_noise
from quick_noise import noise_over


def test_noise_over_many_places() -> None:
    dice = random.Random(0)
    places = [(dice.randrange(2**63), dice.randrange(5000)) for _ in range(50)]
    want = np.stack([gumbel_noise(*place, np.arange(40)) for place in places])
    np.testing.assert_allclose(noise_over(places, 40), want, rtol=1e-12, atol=1e-12)
