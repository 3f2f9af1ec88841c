"""Threshold decoding inside ``cape``."""

import pytest

from drafting.from_draft import test_threshold as threshold


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_whole_decoding_equals_the_survey(temperature: float) -> None:
    """Accepted siblings, which ``cape`` adds to the chain, do not move the threshold."""
    threshold.test_a_whole_decoding_equals_the_survey(temperature, "cape({})")
