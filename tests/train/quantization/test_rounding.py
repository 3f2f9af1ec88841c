"""Rounding to the nearest codes for the stored scales, and group sizes that divide every matrix."""

from dataclasses import replace

import numpy as np
import pytest

from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, DType, is_finite
from pronk.base.errors import OptionError
from pronk.checkpoint.config import ModelConfig, llama_config
from pronk.checkpoint.formats.matrix import Bits
from pronk.kernels.library import candidates
from pronk.kernels.rounding import round_weights
from pronk.train.quantization.rounding import WHOLE_ROW, RoundingRule, choose_group, matrix_inputs

KERNELS = candidates()[0]


def some_weight(outputs: int = 24, inputs: int = 96) -> Array:
    weight = (
        np.random.default_rng(inputs).normal(size=(outputs, inputs))
        * np.logspace(-3, 1, outputs)[:, None]
    )
    return weight.astype(np.float32)


def shape(hidden: int, mlp: int, heads: int = 2) -> ModelConfig:
    return llama_config(
        hidden=hidden, layers=1, heads=heads, kv_heads=1, mlp=mlp, vocab=8, context=8, eos_ids=(0,)
    )


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, WHOLE_ROW), (8, 96), (8, 8)])
def test_codes_are_nearest_for_the_stored_scale(bits: Bits, group: int, dtype: DType) -> None:
    weight = some_weight()
    weight[3] = 0.0
    made = RoundingRule(KERNELS, bits, group, dtype).nearest(weight)
    assert np.array_equal(made.scale, made.scale.astype(dtype).astype(FLOAT32))
    clipped = round_weights(KERNELS, weight, bits, group or 96)
    assert np.array_equal(made.scale, clipped.scale.astype(dtype).astype(FLOAT32))
    if dtype == FLOAT32:
        assert np.array_equal(made.codes, clipped.codes)
    scale = np.repeat(made.scale, made.group, axis=1)
    codes = np.arange(-made.zero, made.zero, dtype=np.float32)
    for n in range(len(weight)):
        wrong = np.abs(weight[n, :, None] - scale[n, :, None] * codes).min(1)
        np.testing.assert_allclose(
            np.abs(made.dequantize()[n] - weight[n]), wrong, rtol=1e-4, atol=1e-7
        )
    assert not made.dequantize()[3].any()


def test_scales_beyond_float16() -> None:
    """Scales below the smallest number become 0, and so do their weights; large scales become the
    largest number.
    """
    weight = some_weight() * np.float32(1e-8)
    assert not RoundingRule(KERNELS, 8, 32, FLOAT16).nearest(weight).dequantize()[0].any()
    large = RoundingRule(KERNELS, 8, 32, FLOAT16).nearest(some_weight() * np.float32(1e9))
    assert is_finite(large.dequantize())


@pytest.mark.parametrize(
    ("hidden", "mlp", "bits", "group", "found"),
    [
        (256, 512, 8, None, 128),
        (320, 832, 8, None, 64),
        (320, 832, 4, None, 32),
        (48, 80, 4, None, 16),
        (320, 832, 4, 16, 16),
        (96, 192, 4, 24, 24),
        (96, 200, 8, 0, WHOLE_ROW),
    ],
)
def test_groups(hidden: int, mlp: int, bits: int, group: int | None, found: int) -> None:
    assert choose_group(matrix_inputs(shape(hidden, mlp)), bits, group) == (bits, found)


@pytest.mark.parametrize(
    ("hidden", "mlp", "bits", "group", "message"),
    [
        (64, 128, 3, 32, "bits: expected 4 or 8, found 3"),
        (
            320,
            832,
            4,
            128,
            "divides the matrices' 320 and 832 inputs, found 128; use 64, 32, 16, 8, or 0 for a",
        ),
        (64, 128, 4, 12, "expected a multiple of 8"),
        (64, 128, 4, -1, "found -1"),
        (60, 128, 4, None, "found inputs of no common multiple of 8"),
        (60, 128, 4, 0, "found 0"),
    ],
)
def test_impossible_groups_are_refused(
    hidden: int, mlp: int, bits: int, group: int | None, message: str
) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        choose_group(matrix_inputs(shape(hidden, mlp)), bits, group)
    assert "\n" not in str(caught.value)


def test_group_divides_the_inputs_of_the_output_projection() -> None:
    config = replace(shape(64, 128), head_dim=20)
    assert choose_group(matrix_inputs(config), 4, None) == (4, 8)
