"""Multi-head latent attention on every instruction set: outputs, and bits in chunks, trees and
batches.
"""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.layer_texts import LayerTexts, same, some_rows
from oracle import int4_numbers
from pronk.base.arrays import BFLOAT16, FLOAT32, INT4, INT8, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import LatentConfig
from pronk.checkpoint.rope import RopeConfig
from pronk.kernels.library import Kernels, candidates
from pronk.kernels.threads import num_threads, set_threads
from pronk.models.decoder import Layer
from pronk.models.linear import Linear, Norm
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree
from tiny_models import tiny_config

Double = NDArray[np.float64]

EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
CACHES = pytest.mark.parametrize("kv_dtype", [None, INT8, INT4], ids=str)
# Number of heads, and sizes: below, at and above what the kernels compute together, and such that
# are not multiples of a vector.
SIZES = {
    "several tiles": (20, LatentConfig(48, 8, 12, 32, query_rank=24)),
    "one head": (1, LatentConfig(16, 2, 1, 16)),
    "odd sizes": (3, LatentConfig(32, 6, 7, 48, query_rank=70)),
    "DeepSeek-V2-Lite": (2, LatentConfig(512, 64, 128, 128)),
}
HIDDEN = 40
LENGTH = 80
NAN = float("nan")


class LatentAttention(LayerTexts):
    """One layer of latent attention with random weights, and texts in its cache."""

    def __init__(
        self,
        kernels: Kernels,
        name: str,
        dtype: DType = FLOAT32,
        kv_dtype: DType | None = None,
    ) -> None:
        self.heads, self.sizes = SIZES[name]
        sizes = self.sizes
        self.hidden = HIDDEN
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.config = replace(
            tiny_config(hidden=HIDDEN, heads=self.heads, kv_heads=1, windows=(None,)),
            latent=sizes,
            head_dim=sizes.rank + sizes.rope_dim,
            attention_scale=0.9 * sizes.query_dim**-0.5,
            rope=RopeConfig(sizes.rope_dim, 100.0),
        )
        self.dice = np.random.default_rng(len(name))
        self.kernels = kernels
        self.layer = Layer(self.config)
        self.layer.attention_norm = self.norm(HIDDEN, self.config.norm_eps)
        if sizes.query_rank is not None:
            self.layer.q_a = self.linear("q_a", sizes.query_rank, HIDDEN)
            self.layer.q_a_norm = self.norm(sizes.query_rank, sizes.norm_eps)
        inputs = sizes.query_rank or HIDDEN
        self.layer.q_b = self.linear("q_b", self.heads * sizes.query_dim, inputs)
        self.layer.kv_a = self.linear("kv_a", self.config.head_dim, HIDDEN)
        self.layer.kv_a_norm = self.norm(sizes.rank, sizes.norm_eps)
        self.layer.k_b = self.linear("k_b", self.heads * sizes.rank, sizes.plain_dim)
        self.layer.v_b = self.linear("v_b", self.heads * sizes.value_dim, sizes.rank)
        self.layer.out = self.linear("out", HIDDEN, self.heads * sizes.value_dim)
        self.cache = PagedCache(
            self.config,
            kernels=kernels,
            num_blocks=60,
            block_size=16,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
        self.cache.values[0][...] = NAN if kv_dtype is None else -1
        self.program = Program(self.kernels, HIDDEN, dtype, self.cache)
        self.program.latent_attention(self.layer, 0)

    def norm(self, size: int, eps: float) -> Norm:
        return Norm(self.dice.uniform(0.5, 1.5, size).astype(np.float32), None, eps)

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        weight = (2 * inputs**-0.5 * self.dice.standard_normal((outputs, inputs))).astype(
            self.dtype
        )
        return Linear(self.kernels, weight, None, self.layer.layout(name), None)

    def expected(self, x: Array) -> Double:
        """Return the outputs of a text by the formulas, with keys and values of each head."""
        sizes = self.sizes
        rows = x.astype(self.dtype).astype(np.float64)
        normed = rms(rows, self.layer.attention_norm)
        inputs = normed
        if self.layer.q_a is not None:
            inputs = rms(inputs @ weights(self.layer.q_a).T, self.layer.q_a_norm)
        queries = inputs @ weights(self.layer.q_b).T
        plain, rotated = np.split(queries, [self.heads * sizes.plain_dim], axis=1)
        plain = plain.reshape(len(x), self.heads, sizes.plain_dim)
        rotated = rotated.reshape(len(x), self.heads, sizes.rope_dim)
        latent, key = np.split(normed @ weights(self.layer.kv_a).T, [sizes.rank], axis=1)
        latent = rms(latent, self.layer.kv_a_norm)
        stored = np.concatenate((latent, rotate(key)), axis=1)
        if self.kv_dtype == INT4:
            stored = int4_numbers(stored, sizes.rank)
        elif self.kv_dtype == INT8:
            step = np.abs(stored).max(1, keepdims=True) / 127
            stored = np.round(stored / step) * step
        latent, key = np.split(stored, [sizes.rank], axis=1)
        k_b = weights(self.layer.k_b).reshape(self.heads, sizes.rank, sizes.plain_dim)
        v_b = weights(self.layer.v_b).reshape(self.heads, sizes.value_dim, sizes.rank)
        outputs = []
        for head in range(self.heads):
            scores = plain[:, head] @ (latent @ k_b[head]).T
            scores += rotate(rotated[:, head]) @ key.T
            scores = scores * self.config.query_scale
            scores[~np.tri(len(x), dtype=bool)] = -np.inf
            weight = np.exp(scores - scores.max(1, keepdims=True))
            weight /= weight.sum(1, keepdims=True)
            outputs.append(weight @ (latent @ v_b[head].T))
        return np.asarray(rows + np.concatenate(outputs, axis=1) @ weights(self.layer.out).T)


def weights(linear: Linear) -> Double:
    return linear.packed.unpack().astype(np.float64)


def rms(rows: Double, norm: Norm | None) -> Double:
    assert norm is not None
    mean = (rows * rows).mean(1, keepdims=True)
    return np.asarray(rows / np.sqrt(mean + norm.eps) * norm.weight)


def rotate(rows: Double) -> Double:
    """Rotate row ``t`` by the angles of position ``t``; values i and i + size / 2 are a pair."""
    half = rows.shape[1] // 2
    angles = np.arange(len(rows))[:, None] * 100.0 ** (-np.arange(half) / half)
    first = rows[:, :half]
    second = rows[:, half:]
    cos = np.cos(angles)
    sin = np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)


@pytest.mark.few(24)
@CACHES
@DTYPES
@pytest.mark.parametrize("name", SIZES)
@EVERY
def test_outputs_are_those_of_a_slow_loop(
    kernels: Kernels, name: str, dtype: DType, kv_dtype: DType | None
) -> None:
    made = LatentAttention(kernels, name, dtype, kv_dtype)
    x = some_rows(LENGTH, HIDDEN)
    expected = made.expected(x)
    error = np.abs(made.read(x, [LENGTH]).astype(np.float64) - expected).max()
    scale = np.abs(expected).max()
    # A code of a quantized cache can be the next one where a number is between two codes.
    tolerances = {None: 2e-5, INT8: 2e-3, INT4: 3e-2}
    tolerance = tolerances[kv_dtype]
    if dtype == BFLOAT16:
        tolerance = 0.25 if kv_dtype == INT4 else 0.06
    assert error < tolerance * scale
    assert np.abs(expected - x.astype(np.float64)).max() > 0.3 * scale


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["several tiles", "odd sizes"])
@EVERY
def test_chunks_trees_batches_and_threads_change_no_bit(kernels: Kernels, name: str) -> None:
    before = num_threads()
    cases = ((FLOAT32, 3, None), (BFLOAT16, 2, None), (BFLOAT16, 1, INT8), (FLOAT32, 2, INT4))
    for dtype, threads, kv_dtype in cases:
        made = LatentAttention(kernels, name, dtype, kv_dtype)
        x = some_rows(LENGTH, HIDDEN)
        try:
            set_threads(1, 1)
            alone = made.read(x, [1] * LENGTH)
            set_threads(threads, threads)
            for chunks in ([LENGTH], [2, 3, LENGTH - 5], [17] * 4 + [12]):
                assert same(made.read(x, chunks), alone)
            made.check_tree_and_batch(x, alone)
        finally:
            set_threads(before, before)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, INT8], ids=str)
def test_the_cache_has_one_row_per_token(dtype: DType) -> None:
    """The latent is stored once, though it is the key and the value of every head."""
    made = LatentAttention(candidates()[0], "several tiles")
    config = made.config
    cache = PagedCache(
        config,
        num_blocks=2,
        block_size=16,
        dtype=made.dtype,
        kernels=made.kernels,
        kv_dtype=dtype,
    )
    assert len(cache.keys[0]) == 0
    row_bytes = config.head_dim * dtype.itemsize + (4 if dtype == INT8 else 0)
    assert cache.bytes_per_token == row_bytes
    assert cache.values[0].nbytes == row_bytes * cache.num_slots


@EVERY
def test_rows_that_are_not_finite_leave_other_requests_alone(kernels: Kernels) -> None:
    made = LatentAttention(kernels, "several tiles")
    x = some_rows(8, HIDDEN)
    chain = TokenTree.chain([0] * 4)
    expected = made.read(x[4:], [4])
    x[:4] = np.nan
    found = made.run([(BlockTable(), chain, 0), (BlockTable(), chain, 0)], x)
    assert np.isnan(found[:4].astype(np.float32)).all()
    assert same(found[4:], expected)


@EVERY
def test_sizes_that_are_no_whole_blocks_are_refused(kernels: Kernels) -> None:
    made = LatentAttention(kernels, "one head")
    made.layer.v_b.packed.struct.unit = 8
    with pytest.raises(AssertionError, match="kernels"):
        made.read(some_rows(2, HIDDEN), [2])
