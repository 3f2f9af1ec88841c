"""Short convolutions on every instruction set: outputs, bits, and states of ancestors in chunks,
trees and batches.
"""

from dataclasses import replace

import numpy as np
import pytest

from kernels.layer_texts import LayerTexts, same, some_rows
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import ConvolutionConfig
from pronk.kernels.library import Kernels, candidates
from pronk.kernels.threads import num_threads, set_threads
from pronk.models.decoder import Layer
from pronk.models.linear import Linear
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree
from tiny_models import tiny_config

EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
SHAPES = pytest.mark.parametrize(
    ("hidden", "taps", "bias"), [(64, 3, False), (40, 4, True), (22, 1, True), (48, 16, False)]
)
LENGTH = 70
NAN = float("nan")


class Convolution(LayerTexts):
    """A short convolution and texts in its cache.

    The projections copy the stream: ``b = 2 x``, ``c = x``, and the output is added as it is. So
    they are exact on every instruction set, and the output of a row is ``x + x · (bias + sum of
    weight · 2 x²)``.
    """

    def __init__(self, by: Kernels, hidden: int, taps: int, dtype: DType, *, bias: bool) -> None:
        self.kernels = by
        self.hidden = hidden
        self.taps = taps
        self.dtype = dtype
        self.config = replace(
            tiny_config(hidden=hidden),
            num_layers=1,
            convolution=ConvolutionConfig(taps, (True,), bias),
        )
        self.layer = Layer(self.config)
        copies = np.eye(hidden, dtype=np.float32)
        for name, weight in (
            ("gates", np.concatenate((2 * copies, copies, copies))),
            ("out", copies),
        ):
            linear = Linear(by, weight.astype(dtype), None, self.layer.layout(name), None)
            setattr(self.layer, name, linear)
        dice = np.random.default_rng(taps)
        self.layer.filter = dice.standard_normal((hidden, 1, taps)).astype(dtype)
        self.layer.filter_bias = dice.standard_normal(hidden).astype(dtype) if bias else None
        self.cache = PagedCache(self.config, num_blocks=40, block_size=16, dtype=dtype, kernels=by)
        self.cache.keys[0][...] = NAN
        self.program = Program(by, hidden, dtype, self.cache)
        self.program.convolution(self.layer, 0)

    def expected(self, x: Array) -> Array:
        """Return the outputs of a text, computed by NumPy in float64."""
        x = x.astype(self.dtype).astype(np.float64)
        states = np.concatenate((np.zeros((self.taps - 1, self.hidden)), 2 * x * x))
        weights = self.layer.filter[:, 0].astype(np.float64).T
        total = np.zeros_like(x)
        if self.layer.filter_bias is not None:
            total = total + self.layer.filter_bias.astype(np.float64)
        for tap in range(self.taps):
            total += weights[tap] * states[tap : tap + len(x)]
        return np.asarray(x + x * total)


@SHAPES
@DTYPES
@pytest.mark.parametrize("by", candidates(), ids=lambda by: by.name)
def test_outputs_are_those_of_numpy(
    by: Kernels, dtype: DType, hidden: int, taps: int, *, bias: bool
) -> None:
    made = Convolution(by, hidden, taps, dtype, bias=bias)
    x = some_rows(LENGTH, hidden)
    expected = made.expected(x)
    error = np.abs(made.read(x, [LENGTH]).astype(np.float64) - expected).max()
    assert error < (1e-5 if dtype == FLOAT32 else 0.02 * np.abs(expected).max())
    assert np.abs(expected - x.astype(np.float64)).max() > 0.5


@SHAPES
@EVERY
def test_chunks_trees_batches_and_threads_change_no_bit(
    kernels: Kernels, hidden: int, taps: int, *, bias: bool
) -> None:
    before = num_threads()
    for dtype, threads in ((FLOAT32, 1), (FLOAT32, 3), (BFLOAT16, 2)):
        made = Convolution(kernels, hidden, taps, dtype, bias=bias)
        x = some_rows(LENGTH, hidden)
        try:
            set_threads(1, 1)
            alone = made.read(x, [1] * LENGTH)
            set_threads(threads, threads)
            for chunks in ([LENGTH], [2, 3, 65], [17] * 4 + [2]):
                assert same(made.read(x, chunks), alone)
            made.check_tree_and_batch(x, alone)
        finally:
            set_threads(before, before)


def test_bits_are_equal_on_all_instruction_sets() -> None:
    for hidden, taps in ((64, 3), (40, 4)):
        x = some_rows(LENGTH, hidden)
        found = [
            Convolution(kernels, hidden, taps, FLOAT32, bias=True).read(x, [LENGTH])
            for kernels in candidates()
        ]
        assert all(same(each, found[0]) for each in found)


@EVERY
def test_rows_that_are_not_finite_leave_other_requests_alone(kernels: Kernels) -> None:
    made = Convolution(kernels, 64, 3, FLOAT32, bias=False)
    x = some_rows(8, 64)
    chain = TokenTree.chain([0] * 4)
    expected = made.read(x[4:], [4])
    x[:4] = np.nan
    found = made.run([(BlockTable(), chain, 0), (BlockTable(), chain, 0)], x)
    assert np.isnan(found[:4].astype(np.float32)).all()
    assert same(found[4:], expected)


@EVERY
def test_too_many_taps_are_refused(kernels: Kernels) -> None:
    made = Convolution(kernels, 64, 17, FLOAT32, bias=False)
    with pytest.raises(AssertionError, match="kernels"):
        made.read(some_rows(2, 64), [2])
