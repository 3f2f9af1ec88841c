"""Gates of the outputs of heads, on every instruction set: values, and bits of single rows."""

import numpy as np
import pytest

from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.kernels.library import Kernels, candidates
from pronk.models.linear import Linear, WeightLayout
from pronk.models.program import Program

HIDDEN = 40


@pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "size"), [(1, 24), (3, 16), (5, 12), (4, 1), (2, 33)])
def test_each_head_has_a_gate(kernels: Kernels, dtype: DType, heads: int, size: int) -> None:
    """Sizes of heads are multiples of a vector, and others."""
    dice = np.random.default_rng(heads)
    width = heads * size

    def linear(outputs: int, inputs: int, *, exact: bool = False) -> Linear:
        weight = dice.standard_normal((outputs, inputs)).astype(np.float32) * inputs**-0.5
        weight = weight.astype(FLOAT32 if exact else dtype)
        return Linear(kernels, weight, None, WeightLayout(exact=exact), None)

    values = linear(width, HIDDEN)
    gates = linear(heads, HIDDEN, exact=True)
    out = linear(7, width)
    program = Program(kernels, HIDDEN, dtype)
    program.linear(values, to="A")
    program.linear(gates, to="scores")
    program.gate("A", "scores", width, heads=heads)
    program.linear(out, source="A", to="logits")

    def run(x: Array) -> Array:
        y = np.empty((len(x), 7), np.float32)
        program.run(None, x.copy(), y)
        return y

    x = dice.standard_normal((9, HIDDEN)).astype(dtype)
    wide = x.astype(np.float64)
    factors = 1 / (1 + np.exp(-wide @ gates.packed.unpack().T))
    gated = wide @ values.packed.unpack().T * np.repeat(factors, size, axis=1)
    expected = gated @ out.packed.unpack().T
    found = run(x)
    assert np.abs(found - expected).max() < (2e-5 if dtype == FLOAT32 else 0.05)
    alone = np.concatenate([run(x[row : row + 1]) for row in range(len(x))])
    assert np.array_equal(found, alone)
