"""EAGLE-3 and MTP for a target that torch computes."""

import pytest

from covering import covering
from drafting.from_target.test_eagle3 import KINDS, SHAPES, check_texts
from drafting.from_target.trained_eagle import bigram_decoder
from pronk.sampling.params import Rule


@pytest.mark.parametrize(
    ("kind", "shape", "temperature", "rule"),
    covering(KINDS, [*SHAPES], [0.0, 0.8], ["coupled", "rejection", "block"], strength=2),
)
def test_texts_are_equal_and_draft_tokens_right(
    kind: str, shape: str, temperature: float, rule: Rule
) -> None:
    check_texts(kind, shape, bigram_decoder(packed=False), temperature, rule)
