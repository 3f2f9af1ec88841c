"""Stacking of quantized matrices with equal and different forms, without a change of any bit."""

import numpy as np
import pytest

from pronk.base.arrays import Array
from pronk.checkpoint.formats.matrix import QuantizedMatrix, fusible_runs, stack_matrices
from pronk.checkpoint.formats.scheme import LinearModule, parse_scheme
from quantized_formats import FORMATS, Format, gptq


def read(kind: Format, seed: int, codes: Array, **tensors: Array) -> QuantizedMatrix:
    weight = parse_scheme(kind.config).weight(
        LinearModule("model.layers.0.mlp.up_proj", *codes.shape)
    )
    assert weight is not None
    found = weight.read(kind.make(np.random.default_rng(seed), *codes.shape) | tensors, codes)
    assert isinstance(found, QuantizedMatrix)
    return found


@pytest.mark.parametrize(
    "names",
    [
        ("gptq-4", "gptq-4"),
        ("gptq-4", "gptq-4-zeros"),
        ("gptq-4", "gptq-8"),
        ("gptq-8-zeros", "packed-4-channel", "packed-4-group"),
        ("awq", "int-8-channel"),
        ("gptq-4-rows", "int-8-tensor", "gptq-4"),
    ],
)
@pytest.mark.parametrize("inputs", [64, 96])
def test_stacked(names: tuple[str, ...], inputs: int) -> None:
    codes = np.empty((16 * len(names), inputs), np.uint8)
    parts = [
        read(FORMATS[name], seed, codes[16 * seed : 16 * (seed + 1)])
        for seed, name in enumerate(names)
    ]
    expected = np.concatenate([part.dequantize() for part in parts])
    stacked = stack_matrices(parts, codes)
    assert stacked is not None
    assert stacked.bits == max(part.bits for part in parts)
    assert np.array_equal(stacked.dequantize(), expected)


def test_matrices_with_different_input_orders_are_not_stacked() -> None:
    kind = gptq(4, order=True)
    codes = np.empty((32, 64), np.uint8)
    above = codes[:16]
    below = codes[16:]
    index = kind.make(np.random.default_rng(0), 16, 64)["g_idx"]
    first = read(kind, 0, above)
    assert stack_matrices([first, read(kind, 1, below)], codes) is None
    assert stack_matrices([first, read(gptq(4), 1, below)], codes) is None
    assert stack_matrices([read(gptq(4), 1, below), first], codes) is None
    second = read(kind, 1, below, g_idx=index)
    expected = np.concatenate([first.dequantize(), second.dequantize()])
    stacked = stack_matrices([first, second], codes)
    assert stacked is not None
    assert stacked.order is not None
    assert np.array_equal(stacked.dequantize(), expected)


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        (["gptq-4", "gptq-4", "gptq-4"], [3]),
        (["gptq-4", "gptq-4", "gptq-8"], [2, 1]),
        (["gptq-8", "gptq-4", "gptq-4"], [1, 2]),
        (["gptq-4", "gptq-8", "gptq-4"], [1, 1, 1]),
        (["gptq-4", "gptq-4-zeros", "awq"], [1, 2]),
        (["gptq-4-rows", "packed-4-channel", "packed-4-group"], [1, 1, 1]),
        (["gptq-4-order", "gptq-4-order", "gptq-4"], [1, 1, 1]),
        ([None, None, "gptq-4"], [2, 1]),
        (["gptq-4", None, None], [1, 2]),
        ([None], [1]),
    ],
)
def test_runs(names: list[str | None], runs: list[int]) -> None:
    """A run of weights is plain, or has equal bits, groups, input orders and equal use of
    minima.
    """
    weights = [
        np.zeros((16, 96))
        if name is None
        else read(FORMATS[name], seed, np.empty((16, 96), np.uint8))
        for seed, name in enumerate(names)
    ]
    found = fusible_runs(weights)
    assert [len(weights[run]) for run in found] == runs
    assert [weight for run in found for weight in weights[run]] == weights


def test_runs_with_one_input_order() -> None:
    kind = gptq(4, order=True)
    index = kind.make(np.random.default_rng(0), 16, 64)["g_idx"]
    weights = [read(kind, seed, np.empty((16, 64), np.uint8), g_idx=index) for seed in range(2)]
    assert fusible_runs(weights) == [slice(0, 2)]
