"""GPTQ against a slow equivalent method, and against nearest rounding by the error of outputs."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pronk.base.arrays import BFLOAT16
from pronk.base.convert import to_array, to_tensor
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix
from pronk.kernels.library import candidates
from pronk.train.quantization.calibration import gptq, output_error
from pronk.train.quantization.rounding import WHOLE_ROW, RoundingRule

KERNELS = candidates()[0]


def some_layer(outputs: int, inputs: int, samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a weight and ``X Xᵀ`` of correlated inputs, as in a language model."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    mixing = torch.randn(inputs // 4, inputs, generator=generator)
    x = torch.randn(samples, inputs // 4, generator=generator) @ mixing
    x += 0.3 * torch.randn(samples, inputs, generator=generator)
    return weight, x.t() @ x


def nearest(weight: Tensor, rule: RoundingRule) -> QuantizedMatrix:
    return rule.nearest(to_array(weight))


def dequantized(made: QuantizedMatrix) -> Tensor:
    return to_tensor(made.dequantize())


def slow_gptq(weight: Tensor, hessian: Tensor, rule: RoundingRule) -> Tensor:
    """Round one column after the other and correct the later ones (equations 2 and 3 of the
    paper).
    """
    left = weight.double().clone()
    h = hessian.double().clone()
    h.diagonal().add_(0.01 * h.diagonal().mean())
    inverse = torch.linalg.inv(h)
    inputs = weight.shape[1]
    group = rule.group or inputs
    result = torch.zeros_like(left)
    for j in range(inputs):
        if j % group == 0:
            scale = to_tensor(rule.scales(to_array(left[:, j : j + group].float())))[:, 0].double()
        low = -rule.zero
        high = rule.zero - 1
        result[:, j] = (left[:, j] / scale).round().clamp(low, high) * scale
        error = (left[:, j] - result[:, j]) / inverse[j, j]
        left[:, j:] -= error[:, None] * inverse[j, j:]
        inverse -= inverse[:, j : j + 1] * inverse[j : j + 1] / inverse[j, j]
    return result.float()


@pytest.mark.parametrize(
    ("bits", "group", "inputs"),
    [(4, 8, 24), (4, 24, 24), (8, 8, 32), (4, WHOLE_ROW, 32), (4, 64, 192), (4, 136, 272)],
)
def test_codes_equal_those_of_the_slow_method(bits: Bits, group: int, inputs: int) -> None:
    weight, hessian = some_layer(6, inputs, 4 * inputs)
    rule = RoundingRule(KERNELS, bits, group, BFLOAT16)
    before = weight.clone(), hessian.clone()
    made = gptq(weight, hessian, rule)
    expected = slow_gptq(weight, hessian, rule)
    torch.testing.assert_close(dequantized(made), expected, rtol=1e-6, atol=1e-6)
    assert not np.array_equal(made.codes, nearest(weight, rule).codes)
    assert torch.equal(before[0], weight)
    assert torch.equal(before[1], hessian)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, WHOLE_ROW), (8, 128)])
def test_error_is_smaller_than_with_nearest_codes(bits: Bits, group: int) -> None:
    weight, hessian = some_layer(64, 256, 1024)
    rule = RoundingRule(KERNELS, bits, group, BFLOAT16)
    mine, other = (
        output_error(weight, dequantized(made), hessian)
        for made in (gptq(weight, hessian, rule), nearest(weight, rule))
    )
    assert mine < 0.5 * other


def test_output_error() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, other = torch.randn(2, 5, 12, generator=generator)
    x = torch.randn(40, 12, generator=generator)
    wrong = (x @ weight.t() - x @ other.t()).square().sum()
    assert output_error(weight, other, x.t() @ x) == pytest.approx(float(wrong), rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(3, 3), (3, 5)], ids=["diagonal", "beside"])
def test_products_that_are_not_finite_are_refused(place: tuple[int, int], value: float) -> None:
    weight, hessian = some_layer(8, 32, 64)
    hessian[place] = hessian[place[::-1]] = value
    with pytest.raises(
        ValueError, match="expected finite products of the inputs, found NaN or inf; quant"
    ) as caught:
        gptq(weight, hessian, RoundingRule(KERNELS, 4, 8, BFLOAT16))
    assert "\n" not in str(caught.value)


def test_a_matrix_far_from_positive_definite_is_refused() -> None:
    """The damping is increased a limited number of times."""
    hessian = torch.eye(32)
    hessian[3, 5] = hessian[5, 3] = 1e30
    with pytest.raises(ValueError, match="found a matrix that is far from positive definite"):
        gptq(torch.ones(8, 32), hessian, RoundingRule(KERNELS, 4, 8, BFLOAT16))


def test_zero_inputs_and_too_few_samples() -> None:
    """The nearest codes are used for inputs that are always 0."""
    weight, hessian = some_layer(16, 64, 3)
    hessian[8:16] = 0.0
    hessian[:, 8:16] = 0.0
    rule = RoundingRule(KERNELS, 4, 8, BFLOAT16)
    made = gptq(weight, hessian, rule)
    assert np.array_equal(made.codes[:, 8:16], nearest(weight, rule).codes[:, 8:16])
    mine, other = (
        output_error(weight, dequantized(each), hessian) for each in (made, nearest(weight, rule))
    )
    assert mine < other
    nothing = gptq(weight, torch.zeros(64, 64), rule)
    assert np.array_equal(nothing.codes, nearest(weight, rule).codes)
