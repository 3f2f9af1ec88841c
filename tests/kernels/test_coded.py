"""GEMM with weights of 8 and 4 bits: every instruction set gives the bits of an exact loop."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.test_products import ROWS, same, some_rows
from pronk.kernels.library import Kernels, candidates
from pronk.kernels.rounding import round_weights
from pronk.kv_cache.blocks import BlockTable
from pronk.models.linear import KernelLinear, WeightLayout
from pronk.models.program import Program, ProgramRows
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix
from pronk.speculation.tree import TokenTree
from quantization.formats.codes import CODED, Minima, coded_product, some_codes

SETS = candidates()
KINDS = pytest.mark.parametrize("kind", CODED, ids=lambda kind: f"{kind[0]} bits, minima {kind[1]}, order {kind[2]}")
# (outputs, inputs, group size): partial and several blocks of 16 outputs, partial last groups, groups of whole rows.
SHAPES = [(5, 8, 8), (5, 25, 56), (17, 40, 16), (97, 100, 32), (33, 640, 64), (48, 1100, 128), (20, 576, 576)]


def products(weight: QuantizedMatrix, bias: Tensor | None = None) -> list[KernelLinear]:
    return [KernelLinear(kernels, weight, bias, WeightLayout()) for kernels in SETS]


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


@KINDS
def test_a_row_depends_on_neither_the_batch_nor_the_instruction_set(kind: tuple[Bits, Minima, bool]) -> None:
    for outputs, inputs, group in SHAPES:
        weight, bias = some_codes((outputs, inputs), *kind, group), some_rows(1, outputs, seed=2)[0]
        x = some_rows(1040, inputs)
        torch.set_num_threads(1)
        whole = products(weight, bias)[0].logits(x)
        for product in products(weight, bias):
            assert same(product.logits(x), whole)
            for rows in ROWS[::3]:
                assert same(product.logits(x[:rows]), whole[:rows]), (inputs, rows)
            for rows in (1, 2, 5, 13, 33, 511):
                assert same(product.logits(x[-rows:]), whole[-rows:]), (inputs, rows)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            for rows in (1, 4, 17, 600):
                assert same(products(weight, bias)[0].logits(x[:rows]), whole[:rows]), (inputs, rows, threads)


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
def test_rows_that_are_not_finite_leave_the_others_alone(kernels: Kernels) -> None:
    product = KernelLinear(kernels, some_codes((50, 70), 4, True, False, 32), None, WeightLayout())
    x = some_rows(30, 70)
    want = product.logits(x)
    x[3], x[17, 5], x[29] = float("inf"), float("nan"), float("-inf")
    found, fine = product.logits(x), [row for row in range(30) if row not in (3, 17, 29)]
    assert same(found[fine], want[fine])
    assert not found[[3, 17, 29]].isfinite().any()


@KINDS
def test_embedding_of_quantized_rows(kind: tuple[Bits, Minima, bool]) -> None:
    """Rows are dequantized to the stream's dtype."""
    weight = some_codes((50, 72), *kind, 32)
    tokens = [3, 49, 0, 3, 17]
    for product in products(weight):
        for dtype in (torch.float32, torch.bfloat16):
            program = Program(product.packed.kernels, 72, dtype)
            program.embed(SimpleNamespace(table=product, positions=None, embedding=torch.empty(0, 72)))
            rows, out = (
                ProgramRows().set_segments([(BlockTable(), TokenTree.chain(tokens), 0)], tokens),
                torch.empty(5, 72, dtype=dtype),
            )
            program.run(rows, out)
            assert torch.equal(out, weight.dequantize()[tokens].to(dtype))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.012), (4, 0.12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_are_close_to_those_of_unquantized_weights(dtype: torch.dtype, bits: Bits, most: float) -> None:
    weight = some_rows(300, 700, seed=1) * torch.logspace(-2, 1, 300)[:, None]
    x = (some_rows(9, 700) * torch.logspace(-2, 1, 9)[:, None]).to(dtype)
    x[4] = 0.0
    bias = some_rows(1, 300, seed=2)[0]
    found = products(round_weights(SETS[0], weight, bits), bias)[0].logits(x)
    exact = x.double() @ weight.double().t() + bias.double()
    assert 0.0 < float((found - exact).norm() / exact.norm()) < most
    assert torch.equal(found[4], bias)


@pytest.mark.parametrize("group", [8, 32, 64])
@pytest.mark.parametrize("minima", [False, True, "zeros"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_sums_do_not_overflow(bits: Bits, minima: Minima, group: int) -> None:
    """Codes are the smallest or the largest, and all inputs are equal, so that no product cancels another."""
    weight = some_codes((32, 128), bits, minima, False, group)
    weight.codes[:16], weight.codes[16:] = 0, (1 << bits) - 1
    x = torch.cat([torch.ones(1, 128), -torch.ones(1, 128)])
    expected = coded_product(weight, x)
    for product in products(weight):
        assert same(product.logits(x), expected), product.packed.kernels.name


def test_multiplying_counts_products() -> None:
    for kernels in SETS:
        one = kernels.multiply(1)
        assert one > 0
        assert kernels.multiply(5) == 5 * one
