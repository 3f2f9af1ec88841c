"""Low-rank adapters of one matrix: every instruction set against NumPy, and bits of rows alone and
in batches.
"""

from typing import Any

import numpy as np
import pytest

from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.kernels.adapters import LowRank, pack_adapter
from pronk.kernels.library import Kernels, candidates
from pronk.kernels.threads import set_threads
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.linear import Linear, WeightLayout
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree

INPUTS = 72
# Outputs of the parts of a matrix. A part that ends inside a block of 16 outputs is joined with the
# next one.
PARTS = {"one": (50,), "inside a block": (20, 30), "blocks": (32, 48), "gated": (40, 40)}
RANKS = ((3,), (5, 64), (16, 16), (33, 1))
# Adapters of the segments of a pass and their numbers of rows; -1 is none, and adapter 2 does not
# change the matrix.
SEGMENTS = ((0, 1), (-1, 2), (1, 30), (1, 3), (0, 13), (2, 5), (3, 1), (-1, 1), (0, 2))


def matrix(kernels: Kernels, name: str, dtype: DType) -> tuple[Linear, Array, list[Array | None]]:
    """Return a layer with adapters, its weights, and what each adapter adds to them, in float64."""
    numbers = np.random.default_rng(0)
    sizes = PARTS[name]
    weight = (numbers.normal(size=(sum(sizes), INPUTS)) * INPUTS**-0.5).astype(dtype)
    linear = Linear(kernels, weight, None, WeightLayout(gated=name == "gated"), None)
    added: list[Array | None] = []
    for adapter, ranks in enumerate(RANKS):
        parts = list[LowRank]()
        start = 0
        total = np.zeros(weight.shape)
        for size, rank in zip(sizes, ranks * 2, strict=False):
            down = numbers.normal(size=(rank, INPUTS)).astype(FLOAT32) * np.float32(INPUTS**-0.5)
            up = numbers.normal(size=(size, rank)).astype(FLOAT32) * np.float32(rank**-0.5)
            # the last adapter leaves the first part as it is
            if not (adapter == 3 and start == 0 and len(sizes) > 1):
                parts.append(LowRank(start, down, up))
                total[start : start + size] = up.astype(np.float64) @ down
            start += size
        changes = adapter != 2
        linear.adapters.append(pack_adapter(linear.packed, parts) if changes else None)
        added.append(total if changes else None)
    return linear, weight.astype(np.float64), added


def compute(linear: Linear, x: Array, segments: Any, dtype: DType) -> Array:
    """Return the outputs of rows, ``[rows, outputs]``, in one pass."""
    program = Program(linear.kernels, INPUTS, dtype)
    gated = linear.layout.gated
    program.linear(linear, to="logits", activation="silu" if gated else None)
    entries = [
        BatchEntry(BlockTable(blocks=[0, 1, 2], adapter=adapter), TokenTree.chain([1] * rows))
        for adapter, rows in segments
    ]
    y = np.empty((len(x), linear.out_features // (2 if gated else 1)), np.float32)
    program.run(ForwardBatch(entries), np.array(x), y)
    return y


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kernels", candidates(), ids=lambda each: each.name)
def test_outputs(kernels: Kernels, name: str, dtype: DType) -> None:
    linear, weight, added = matrix(kernels, name, dtype)
    rows = sum(count for _, count in SEGMENTS)
    x = np.random.default_rng(1).normal(size=(rows, INPUTS)).astype(dtype)
    results = []
    for threads in (1, 3):
        set_threads(threads, 1)
        results.append(compute(linear, x, SEGMENTS, dtype))
    set_threads(1, 1)
    assert np.array_equal(*results)
    adapters = linear.adapters
    linear.adapters = []
    plain = compute(linear, x, SEGMENTS, dtype)
    linear.adapters = adapters
    start = 0
    for adapter, count in SEGMENTS:
        for row in range(start, start + count):
            got = results[0][row]
            alone = compute(linear, x[row : row + 1], ((adapter, 1),), dtype)
            assert np.array_equal(alone[0], got)
            change = None if adapter < 0 else added[adapter]
            assert np.array_equal(got, plain[row]) == (change is None)
            expected = (weight if change is None else weight + change) @ x[row].astype(np.float64)
            if name == "gated":
                gate, up = np.split(expected, 2)
                expected = gate / (1.0 + np.exp(-gate)) * up
            assert (
                np.abs(got - expected).max() <= 2e-6 * max(1.0, float(np.abs(expected).max())) * 10
            )
        start += count


def test_a_number_beyond_the_adapters_is_refused() -> None:
    linear, _, _ = matrix(candidates()[0], "one", FLOAT32)
    with pytest.raises(AssertionError, match="unsupported shape"):
        compute(linear, np.zeros((1, INPUTS), FLOAT32), ((4, 1),), FLOAT32)
