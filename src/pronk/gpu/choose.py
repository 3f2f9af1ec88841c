"""Choice of tokens on the device, with the noise of :mod:`pronk.sampling.noise`.

A row's token is the first argmax of ``logits / temperature + Gumbel noise``, as in
``kernels/csrc/sample.inc``, with equal bits: the hash is of integers, and the logarithm
(:mod:`pronk.base.exact_math`) consists of operations of float64 that are rounded once each, so
multiply-adds are not fused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from pronk.backends import StatelessSampler, noise_key
from pronk.gpu.launch import OPTIONS, ceil_div

_BLOCK = 1024  # tokens of a program


class Noise(NamedTuple):
    """How the tokens of rows are chosen; arrays ``[rows]``, or tensors on the device.

    Attributes:
        keys: int64, the bits of the noise keys.
        temperatures: float32; 0 chooses the largest logit.
    """

    keys: NDArray[np.int64]
    temperatures: NDArray[np.float32]


def noise_of(
    samplers: Sequence[StatelessSampler | None], positions: Sequence[int], rows: int
) -> Noise:
    """Return the noise of rows; those without a sampler choose the largest logit.

    Args:
        samplers: samplers of the first rows.
        positions: for each of them, the index in the text of the token to choose.
        rows: number of rows.
    """
    keys = np.zeros(rows, np.uint64)
    temperatures = np.zeros(rows, np.float32)
    for row, (sampler, position) in enumerate(zip(samplers, positions, strict=True)):
        if sampler is not None and sampler.temperature > 0.0:
            keys[row] = noise_key(sampler.seed, position)
            temperatures[row] = sampler.temperature
    return Noise(keys.view(np.int64), temperatures)


def choose(logits: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
    """Return the token of each row, int32 ``[rows]``; -1 if a logit is not finite.

    Args:
        logits: float32 ``[rows, vocab]``.
        keys: int64 ``[rows]``.
        temperatures: float32 ``[rows]``.
    """
    rows, vocab = logits.shape
    num_blocks = ceil_div(vocab, _BLOCK)
    best = torch.empty(rows, num_blocks, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _choose_in_block[(rows, num_blocks)](
        logits, keys, temperatures, best, tokens, vocab, BLOCK=_BLOCK, **OPTIONS
    )
    _choose_block[(rows,)](
        best, tokens, chosen, num_blocks, BLOCK=triton.next_power_of_2(num_blocks), **OPTIONS
    )
    return chosen


def score(logits: Tensor, keys: Tensor, temperatures: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return the scores by which a draft model's tokens are ranked, float32 ``[rows, vocab]``.

    They are those of :class:`~pronk.drafting.DraftToken`: the logits, at temperatures above 0
    divided by the temperature, plus noise.

    Args:
        logits: float32 ``[rows, vocab]``.
        keys: int64 ``[rows]``.
        temperatures: float32 ``[rows]``.
        ids: int32 ``[vocab]``: the target's token of each logit; ``None`` for 0, 1, ….
    """
    rows, vocab = logits.shape
    scores = torch.empty_like(logits)
    _score[(rows, ceil_div(vocab, _BLOCK))](
        logits,
        keys,
        temperatures,
        ids,
        scores,
        vocab,
        HAS_IDS=ids is not None,
        BLOCK=_BLOCK,
        **OPTIONS,
    )
    return scores


@triton.jit
def _log(x: tl.tensor) -> tl.tensor:
    """Return the logarithm of positive normal numbers, as ``pronk.base.exact_math.log``."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    fraction = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    is_small = fraction < 0.7071067811865476
    fraction = tl.where(is_small, 2.0 * fraction, fraction)
    power = (exponent - is_small.to(tl.int64)).to(tl.float64)
    f = fraction - 1.0
    s = f / (2.0 + f)
    z = s * s
    half_square = 0.5 * f * f
    series = 1.479819860511658591e-01 * (z * 0 + 1.0)
    series = 1.531383769920937332e-01 + z * series
    series = 1.818357216161805012e-01 + z * series
    series = 2.222219843214978396e-01 + z * series
    series = 2.857142874366239149e-01 + z * series
    series = 3.999999999940941908e-01 + z * series
    series = 6.666666666666735130e-01 + z * series
    series = z * series
    tail = half_square - (s * (half_square + series) + power * 1.90821492927058770002e-10)
    return power * 6.93147180369123816490e-01 - (tail - f)


@triton.jit
def _gumbel(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return the noise of tokens, float64."""
    x = key + token.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    bits = (x >> 12) | 0x3FF0000000000000
    uniform = bits.to(tl.float64, bitcast=True) - (1.0 - 1.1102230246251565e-16)
    return -_log(-_log(uniform))


@triton.jit
def _choose_in_block(
    logits: tl.tensor,
    keys: tl.tensor,
    temperatures: tl.tensor,
    best: tl.tensor,
    tokens: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find the best token of a row in a block of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_inside = token < vocab
    logit = tl.load(logits + row * vocab + token, mask=is_inside, other=0.0)
    is_finite = tl.abs(logit) < float("inf")
    temperature = tl.load(temperatures + row)
    value = logit.to(tl.float64)
    if temperature > 0.0:
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        value = tl.div_rn(logit, temperature).to(tl.float64) + _gumbel(key, token)
    value = tl.where(is_inside, value, float("-inf"))
    largest = tl.max(value, axis=0)
    first = tl.min(tl.where(value == largest, token, vocab), axis=0)
    num_finite = tl.sum(is_finite.to(tl.int32), axis=0)
    cell = row * tl.num_programs(1) + block
    tl.store(best + cell, largest)
    tl.store(tokens + cell, tl.where(num_finite == BLOCK, first, -1))


@triton.jit
def _score(
    logits: tl.tensor,
    keys: tl.tensor,
    temperatures: tl.tensor,
    ids: tl.tensor,
    scores: tl.tensor,
    vocab: tl.tensor,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the scores of a row in a block of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < vocab
    value = tl.load(logits + row * vocab + index, mask=is_inside, other=0.0)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        token = index
        if HAS_IDS:
            token = tl.load(ids + index, mask=is_inside, other=0)
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        value = (tl.div_rn(value, temperature).to(tl.float64) + _gumbel(key, token)).to(tl.float32)
    tl.store(scores + row * vocab + index, value, mask=is_inside)


@triton.jit
def _choose_block(
    best: tl.tensor,
    tokens: tl.tensor,
    chosen: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Choose the best of the blocks' tokens of a row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    is_inside = block < num_blocks
    cell = row * num_blocks + block
    value = tl.load(best + cell, mask=is_inside, other=float("-inf"))
    token = tl.load(tokens + cell, mask=is_inside, other=0)
    largest = tl.max(value, axis=0)
    first = tl.min(tl.where((value == largest) & is_inside, token, 2147483647), axis=0)
    tl.store(chosen + row, tl.where(tl.min(token, axis=0) < 0, -1, first))
