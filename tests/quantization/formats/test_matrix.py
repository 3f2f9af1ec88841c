"""``QuantizedMatrix``: dequantization and refused values."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pronk.quantization.formats.matrix import Bits
from quantization.formats.codes import CODED, Minima, some_codes


@pytest.mark.parametrize("group", [8, 32, 48])
@pytest.mark.parametrize("kind", CODED, ids=str)
def test_dequantized(kind: tuple[Bits, Minima, bool], group: int) -> None:
    made = some_codes((7, 45), *kind, group)
    found = made.dequantize()
    assert found.shape == made.shape
    for n in range(7):
        for column in range(45):
            code, g = int(made.codes[n, column]), column // group
            want = made.scale[n, g] * (code - made.zero)
            want += 0.0 if made.minimum is None else made.minimum[n, g]
            assert found[n, column if made.order is None else int(made.order[column])] == want


def test_rows() -> None:
    made = some_codes((24, 64), 4, True, True, 32)
    parts = [made.slice_outputs(0, 5), made.slice_outputs(5, 16), made.slice_outputs(16, 24)]
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), made.dequantize())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codes": torch.zeros(4, 64)}, "expected codes of 8 or 4 bits as uint8"),
        ({"bits": 3}, "expected codes of 8 or 4 bits as uint8, found 3 bits"),
        ({"group": 12}, "expected groups of a multiple of 8"),
        ({"group": 0}, "expected groups of a multiple of 8"),
        ({"group": 96, "scale": torch.ones(4, 1)}, "expected groups of at most 95 for 64 inputs, found 96"),
        ({"group": 65536, "scale": torch.ones(4, 1)}, "expected groups of at most 95 for 64 inputs, found 65536"),
        ({"scale": torch.ones(4, 3)}, r"expected scale \[4, 2\] in float32, found \[4, 3\]"),
        ({"scale": torch.ones(4, 2).half()}, "in float32, found"),
        ({"scale": torch.full((4, 2), torch.nan)}, "expected finite numbers in scale"),
        ({"minimum": torch.full((4, 2), torch.inf)}, "expected finite numbers in minimum"),
        ({"order": torch.zeros(64, dtype=torch.int64)}, "expected an order that is a permutation of the 64 inputs"),
        ({"order": torch.arange(63)}, "expected an order that is a permutation of the 64 inputs"),
    ],
    ids=str,
)
def test_inconsistent_values_are_refused(changed: dict[str, Any], message: str) -> None:
    made = some_codes((4, 64), 8, False, False, 32)
    with pytest.raises(ValueError, match=message) as caught:
        replace(made, **changed)
    assert "\n" not in str(caught.value)
