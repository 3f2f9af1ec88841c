"""Quantizing to 8 and 4 bits: equal on every instruction set, and the best of the tried scales."""

import numpy as np
import pytest

from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, DType
from pronk.checkpoint.formats.matrix import Bits
from pronk.kernels.library import TYPES, Kernels, candidates
from pronk.kernels.rounding import default_group, round_weights
from pronk.kernels.threads import set_threads
from pronk.kernels.weights import pack

SETS = candidates()
BITS = pytest.mark.parametrize("bits", [8, 4])


def some_weight(outputs: int, inputs: int) -> Array:
    return np.random.default_rng(outputs).standard_normal((outputs, inputs), np.float32)


@BITS
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_every_instruction_set_quantizes_alike(dtype: DType, bits: Bits) -> None:
    for shape in ((1, 8), (7, 45), (40, 200), (33, 1100)):
        for group in (8, 24, 32, 128, 4096):
            weight = some_weight(*shape).astype(dtype)
            made = [round_weights(kernels, weight, bits, group) for kernels in SETS]
            set_threads(3, 1)
            made.append(round_weights(SETS[0], weight, bits, group))
            set_threads(1, 1)
            for each in made[1:]:
                assert np.array_equal(each.codes, made[0].codes)
                assert np.array_equal(each.scale, made[0].scale)


@BITS
@pytest.mark.parametrize("group", [None, 8, 32, 64, 128, 1024])
def test_codes_are_nearest_and_no_tried_scale_is_better(bits: Bits, group: int | None) -> None:
    weight = some_weight(40, 200) * np.logspace(-3, 2, 40, dtype=np.float32)[:, None]
    weight[5], weight[6, 3], weight[7] = 0.0, 9.0, -np.abs(weight[7])
    made = round_weights(SETS[0], weight, bits, group)
    assert made.group == min(group or default_group(bits, 200), 224)
    zero = 1 << (bits - 1)
    for start in range(0, 200, made.group):
        part = weight[:, start : start + made.group]
        scale = made.scale[:, start // made.group, None]
        codes = made.codes[:, start : start + made.group].astype(np.float32) - zero
        inverse = 1 / np.where(scale == 0, np.inf, scale)
        assert np.array_equal(codes, np.rint(part * inverse).clip(-zero, zero - 1))
        mine = squares(codes * scale - part)
        farthest = np.take_along_axis(part, np.abs(part).argmax(1, keepdims=True), 1)
        for step in range(6 if bits == 4 else 0):
            for tried in (
                np.abs(farthest) * (1 - 0.05 * step) / (zero - 1),
                -farthest * (1 - 0.05 * step) / zero,
            ):
                quotients = np.divide(part, tried, out=np.zeros_like(part), where=tried != 0)
                other = np.rint(quotients).clip(-zero, zero - 1) * tried - part
                assert (mine <= squares(other) * 1.0001).all()
    assert not made.dequantize()[5].any()


def squares(errors: Array) -> Array:
    """Return the sum of the squares of each row, in float64."""
    return np.square(errors.astype(np.float64)).sum(1)


def test_a_row_too_large_for_memory() -> None:
    """The float32 copy of a bfloat16 row cannot be allocated; with 0 rows the null pointers are not
    read.
    """
    asked = (None, TYPES[BFLOAT16], 0, 1 << 55, 1 << 55, 4, 32, 0, None, None, 1, 0)
    assert SETS[0].library.pronk_round(*asked) == -1


def test_a_failed_allocation_raises() -> None:
    class Full:
        def pronk_round(self, *_: object) -> int:
            return -1

    full = Kernels(Full(), SETS[0].path, SETS[0].isa)
    with pytest.raises(MemoryError, match="rounding a matrix of 3 by 8 failed"):
        round_weights(full, some_weight(3, 8), 4)


@pytest.mark.parametrize(
    ("inputs", "group"),
    # In turn: whole groups, smaller groups that save padding, padding below the cost of more
    # scales, short rows.
    [
        (128, 128),
        (896, 128),
        (320, 64),
        (576, 64),
        (160, 32),
        (200, 32),
        (250, 128),
        (12832, 128),
        (80, 96),
        (8, 32),
    ],
)
def test_default_groups_take_the_fewest_bytes(inputs: int, group: int) -> None:
    assert default_group(8, inputs) == group
    assert default_group(4, inputs) == 32
    sizes = {size: kernels_bytes(inputs, size) for size in (32, 64, 128)}
    assert kernels_bytes(inputs, group) <= min(sizes.values())
    assert round_weights(SETS[0], some_weight(3, inputs), 8).group == group


def kernels_bytes(inputs: int, group: int) -> int:
    """Return the bytes of 16 packed rows of 8-bit codes with their scales."""
    weight = round_weights(SETS[0], some_weight(16, inputs), 8, group)
    return pack(SETS[0], weight).data.nbytes


def test_weights_on_the_grid_are_exact() -> None:
    for bits in (8, 4):
        most = (1 << (bits - 1)) - 1
        weight = np.tile(np.arange(-most, most + 1, dtype=np.float32), (3, 1)) * 0.25
        made = round_weights(SETS[0], weight, bits, 1024)
        np.testing.assert_allclose(made.dequantize(), weight, rtol=1e-6, atol=0.0)


def test_clipping_has_a_smaller_error_than_the_full_range() -> None:
    """The best scale may clip the largest weight, because a smaller scale rounds all other weights
    less.
    """
    weight = some_weight(300, 256)
    made = round_weights(SETS[0], weight, 4)
    grouped = weight.reshape(300, -1, 32)
    scale = np.abs(grouped).max(-1, keepdims=True) / 7
    whole = (np.rint(grouped / scale) * scale).reshape(weight.shape)
    mine, plain = (np.linalg.norm(each - weight) for each in (made.dequantize(), whole))
    assert mine < 0.92 * plain


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = some_weight(4, 64)
    weight[2, 3] = bad
    with pytest.raises(ValueError, match="expected finite numbers"):
        round_weights(SETS[0], weight, 8)
