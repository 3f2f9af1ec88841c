"""GEMM with weights of 8 and 4 bits: every instruction set gives the bits of an exact loop."""

from types import SimpleNamespace

import numpy as np
import pytest

from checkpoint.formats.codes import CODED, Minima, coded_product, some_codes
from kernels.test_products import ROWS, same, some_rows
from own_process import in_own_process
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix
from pronk.kernels.library import Kernels, candidates
from pronk.kernels.rounding import round_weights
from pronk.kernels.threads import set_threads
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.linear import Linear, WeightLayout
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree

SETS = candidates()
KINDS = pytest.mark.parametrize(
    "kind", CODED, ids=lambda kind: f"{kind[0]} bits, minima {kind[1]}, order {kind[2]}"
)
# (outputs, inputs, group size): partial and several blocks of 16 outputs, partial last groups,
# groups of whole rows.
SHAPES = [
    (5, 8, 8),
    (5, 25, 56),
    (17, 40, 16),
    (97, 100, 32),
    (33, 640, 64),
    (48, 1100, 128),
    (20, 576, 576),
]


def products(weight: QuantizedMatrix, bias: Array | None = None) -> list[Linear]:
    return [Linear(kernels, weight, bias, WeightLayout(), None) for kernels in SETS]


@pytest.mark.few(4)
@KINDS
def test_outputs_equal_the_loop(kind: tuple[Bits, Minima, bool]) -> None:
    for outputs, inputs, group in SHAPES:
        weight = some_codes((min(outputs, 20), inputs), *kind, group)
        x = some_rows(3, inputs)
        x[1] *= 1000.0
        x[2, : inputs // 2] = 0.0
        want = coded_product(weight, x)
        for product in products(weight):
            assert same(product.logits(x), want), (product.packed.kernels.name, inputs, group)


@pytest.mark.few(4)
@KINDS
@in_own_process
def test_a_row_depends_on_neither_the_batch_nor_the_instruction_set(
    kind: tuple[Bits, Minima, bool],
) -> None:
    for outputs, inputs, group in SHAPES:
        weight = some_codes((outputs, inputs), *kind, group)
        bias = some_rows(1, outputs, seed=2)[0]
        x = some_rows(1040, inputs)
        set_threads(1, 1)
        whole = products(weight, bias)[0].logits(x)
        for product in products(weight, bias):
            assert same(product.logits(x), whole)
            for rows in ROWS[::5]:
                assert same(product.logits(x[:rows]), whole[:rows]), (inputs, rows)
            for rows in (1, 5, 33):
                assert same(product.logits(x[-rows:]), whole[-rows:]), (inputs, rows)
        for threads, rows in ((2, 4), (2, 600), (3, 600), (5, 4)):
            set_threads(threads, 1)
            found = products(weight, bias)[0].logits(x[:rows])
            assert same(found, whole[:rows]), (inputs, rows, threads)


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
def test_rows_that_are_not_finite_leave_the_others_alone(kernels: Kernels) -> None:
    weight = some_codes((50, 70), 4, True, False, 32)
    product = Linear(kernels, weight, None, WeightLayout(), None)
    x = some_rows(30, 70)
    want = product.logits(x)
    x[3] = float("inf")
    x[17, 5] = float("nan")
    x[29] = float("-inf")
    found = product.logits(x)
    fine = [row for row in range(30) if row not in (3, 17, 29)]
    assert same(found[fine], want[fine])
    assert not np.isfinite(found[[3, 17, 29]]).any()


@KINDS
def test_embedding_of_quantized_rows(kind: tuple[Bits, Minima, bool]) -> None:
    """Rows are dequantized to the stream's dtype."""
    weight = some_codes((50, 72), *kind, 32)
    tokens = [3, 49, 0, 3, 17]
    for product in products(weight):
        for dtype in (FLOAT32, BFLOAT16):
            program = Program(product.kernels, 72, dtype)
            config = SimpleNamespace(embedding_scale=1.0)
            embedding = np.empty((0, 72), np.float32)
            decoder = SimpleNamespace(
                config=config, table=product, positions=None, embedding=embedding
            )
            program.embed(decoder)
            rows = ForwardBatch([BatchEntry(BlockTable(), TokenTree.chain(tokens))])
            out = np.empty((5, 72), dtype)
            program.run(rows, out)
            assert np.array_equal(out, weight.dequantize()[tokens].astype(dtype))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.012), (4, 0.12)])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_outputs_are_close_to_those_of_unquantized_weights(
    dtype: DType, bits: Bits, most: float
) -> None:
    weight = some_rows(300, 700, seed=1) * np.logspace(-2, 1, 300, dtype=np.float32)[:, None]
    x = (some_rows(9, 700) * np.logspace(-2, 1, 9, dtype=np.float32)[:, None]).astype(dtype)
    x[4] = 0.0
    bias = some_rows(1, 300, seed=2)[0]
    found = products(round_weights(SETS[0], weight, bits), bias)[0].logits(x)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    assert 0.0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < most
    assert np.array_equal(found[4], bias)


@pytest.mark.parametrize("group", [8, 32, 64])
@pytest.mark.parametrize("minima", [False, True, "zeros"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_sums_do_not_overflow(bits: Bits, minima: Minima, group: int) -> None:
    """Codes are the smallest or the largest, and all inputs are equal, so that no product cancels
    another.
    """
    weight = some_codes((32, 128), bits, minima, False, group)
    weight.codes[:16] = 0
    weight.codes[16:] = (1 << bits) - 1
    x = np.array([[1.0], [-1.0]], np.float32).repeat(128, axis=1)
    expected = coded_product(weight, x)
    for product in products(weight):
        for copies in (1, 20):  # AMX uses tiles for the copies
            found = product.logits(np.tile(x, (copies, 1)))
            assert same(found, np.tile(expected, (copies, 1))), (
                product.packed.kernels.name,
                copies,
            )


def test_multiplying_counts_products() -> None:
    for kernels in SETS:
        one = kernels.multiply(1)
        assert one > 0
        assert kernels.multiply(5) == 5 * one
