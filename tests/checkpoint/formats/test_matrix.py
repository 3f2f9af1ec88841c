"""``QuantizedMatrix``: dequantization and refused values."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from checkpoint.formats.codes import CODED, Minima, some_codes
from pronk.base.arrays import Array
from pronk.checkpoint.formats.matrix import Bits


@pytest.mark.parametrize("group", [8, 32, 48])
@pytest.mark.parametrize("kind", CODED, ids=str)
def test_dequantized(kind: tuple[Bits, Minima, bool], group: int) -> None:
    made = some_codes((7, 45), *kind, group)
    found = made.dequantize()
    assert found.shape == made.shape
    for n in range(7):
        for column in range(45):
            code = int(made.codes[n, column])
            g = column // group
            want = made.scale[n, g] * (code - made.zero)
            want += 0.0 if made.minimum is None else made.minimum[n, g]
            assert found[n, column if made.order is None else int(made.order[column])] == want


def test_rows() -> None:
    made = some_codes((24, 64), 4, True, True, 32)
    parts = [made.slice_outputs(0, 5), made.slice_outputs(5, 16), made.slice_outputs(16, 24)]
    assert np.array_equal(np.concatenate([part.dequantize() for part in parts]), made.dequantize())


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"codes": np.zeros((4, 64), np.int8)},
            "of 5 bits in groups of 32, as uint8, found 8 bits as int8",
        ),
        ({"bits": 3}, "of 5 bits in groups of 32, as uint8, found 3 bits"),
        ({"group": 12}, "expected groups of a multiple of 8"),
        ({"group": 0}, "expected groups of a multiple of 8"),
        (
            {"group": 96, "scale": ones(4, 1)},
            "expected groups of at most 95 for 64 inputs, found 96",
        ),
        (
            {"group": 65536, "scale": ones(4, 1)},
            "expected groups of at most 95 for 64 inputs, found 65536",
        ),
        ({"scale": ones(4, 3)}, r"expected scale \[4, 2\] in float32, found \[4, 3\]"),
        ({"scale": np.ones((4, 2), np.float16)}, "in float32, found .* in float16"),
        ({"scale": np.nan * ones(4, 2)}, "expected finite numbers in scale"),
        ({"minimum": np.inf * ones(4, 2)}, "expected finite numbers in minimum"),
        (
            {"order": np.zeros(64, np.int64)},
            "expected an order that is a permutation of the 64 inputs",
        ),
        ({"order": np.arange(63)}, "expected an order that is a permutation of the 64 inputs"),
    ],
    ids=str,
)
def test_inconsistent_values_are_refused(changed: dict[str, Any], message: str) -> None:
    made = some_codes((4, 64), 8, False, False, 32)
    with pytest.raises(ValueError, match=message) as caught:
        replace(made, **changed)
    assert "\n" not in str(caught.value)
