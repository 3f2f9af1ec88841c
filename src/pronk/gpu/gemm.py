"""One matrix product for all numbers of rows: ``y = x Wᵀ + b``.

The order of each sum depends on the shape ``[outputs, inputs]`` of the matrix alone, never on the
number of rows ``M``, so that the bits of a row do not depend on the other rows of a pass:

- The tile is always ``TILE_ROWS`` rows; rows that a pass lacks are zeros. 64 rows is the smallest
  tile of Hopper's tensor cores, and a product with so few rows is still limited by the bytes of the
  weights.
- The inputs are divided into splits of whole blocks (:func:`plan_product`). A split adds its blocks
  in order; the partial sums of the splits are then added in order.

Quantized weights are dequantized to the dtype of the activations in registers, and multiplied like
plain ones. Formats of :class:`~pronk.gpu.weights.GpuMatrix`::

    plain   values ``[outputs, padded inputs]``
    int8    codes, one per byte
    int4    codes, two per byte: in each run of 128 inputs, byte j has input j in its low half and
            input j + 64 in its high half
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.gpu.launch import OPTIONS, UPCASTS, ceil_div
from pronk.gpu.weights import INPUT_BLOCK, GpuMatrix

TILE_ROWS = 64
# Maximum number of outputs of a tile.
_TILE_OUTPUTS = 128
# Number of programs that a product of few rows is divided into, if the matrix is large enough:
# about two for each of the 132 multiprocessors of an H100 or H200. It is the same for all GPUs, so
# that they add blocks in the same order. Sums inside of their tensor cores may still differ.
_PROGRAMS = 256
_MAX_SPLITS = 8
# Minimum number of blocks of inputs in a split: shorter ones would mostly wait for a first load.
_MIN_BLOCKS = 4
# Number of blocks of a product that are loaded ahead, by the bytes of an activation: as many as fit
# the shared memory.
NUM_STAGES = {2: 3, 4: 2}
# Maximum number of rows of a launch, which limits the memory of partial sums.
_LAUNCH_ROWS = 512


class ProductPlan(NamedTuple):
    """Order of the sums of a product.

    Attributes:
        tile_outputs: number of outputs of a tile, a power of 2.
        split_blocks: number of blocks of ``INPUT_BLOCK`` inputs in a split.
        num_splits: number of splits.
    """

    tile_outputs: int
    split_blocks: int
    num_splits: int


def plan_product(outputs: int, inputs: int) -> ProductPlan:
    """Return the plan for a matrix ``[outputs, inputs]``; it does not depend on the rows."""
    tile_outputs = min(_TILE_OUTPUTS, max(16, triton.next_power_of_2(outputs)))
    num_blocks = ceil_div(inputs, INPUT_BLOCK)
    wanted = _PROGRAMS // ceil_div(outputs, tile_outputs)
    num_splits = max(1, min(_MAX_SPLITS, wanted, num_blocks // _MIN_BLOCKS))
    split_blocks = ceil_div(num_blocks, num_splits)
    return ProductPlan(tile_outputs, split_blocks, ceil_div(num_blocks, split_blocks))


def multiply(x: Tensor, matrix: GpuMatrix, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x Wᵀ + b``, ``[rows, outputs]``.

    Args:
        x: ``[rows, inputs]``; the products are of its dtype, the sums float32.
        matrix: the weights and the bias.
        dtype: dtype of the result; by default that of ``x``.
    """
    if matrix.order is not None:
        x = x[:, matrix.order]
    x = x.contiguous()
    y = torch.empty(len(x), matrix.outputs, dtype=dtype or x.dtype, device=x.device)
    for start in range(0, len(x), _LAUNCH_ROWS):
        stop = start + _LAUNCH_ROWS
        _multiply_rows(x[start:stop], matrix, y[start:stop])
    return y


def _multiply_rows(x: Tensor, matrix: GpuMatrix, y: Tensor) -> None:
    plan = plan_product(matrix.outputs, matrix.inputs)
    rows = len(x)
    shape = (plan.num_splits, rows, matrix.outputs)
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    grid = (
        ceil_div(rows, TILE_ROWS),
        ceil_div(matrix.outputs, plan.tile_outputs),
        plan.num_splits,
    )
    _multiply_tile[grid](
        x,
        matrix.values,
        matrix.scale,
        matrix.minimum,
        matrix.factor,
        matrix.minimum_factor,
        sums,
        rows,
        matrix.outputs,
        matrix.inputs,
        matrix.values.stride(0),
        FORMAT=matrix.format,
        GROUP=matrix.group,
        ZERO=matrix.zero,
        HAS_MINIMUM=matrix.minimum is not None,
        HAS_FACTOR=matrix.factor is not None,
        TILE_ROWS=TILE_ROWS,
        TILE_OUTPUTS=plan.tile_outputs,
        INPUT_BLOCK=INPUT_BLOCK,
        SPLIT_BLOCKS=plan.split_blocks,
        UPCASTS=UPCASTS,
        num_warps=4,
        num_stages=NUM_STAGES[x.element_size()],
        **OPTIONS,
    )
    block = 1024
    _add_splits[(ceil_div(rows * matrix.outputs, block),)](
        sums,
        matrix.bias,
        y,
        rows * matrix.outputs,
        matrix.outputs,
        NUM_SPLITS=plan.num_splits,
        HAS_BIAS=matrix.bias is not None,
        BLOCK=block,
        **OPTIONS,
    )


@triton.jit
def _group_values(
    pointer: tl.tensor,
    output: tl.tensor,
    has_output: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Load a value for each group of ``WIDTH`` inputs from ``first`` on, and repeat it.

    Returns ``[outputs, WIDTH]`` in float32; ``count`` is the number of groups of an output.
    """
    outputs: tl.constexpr = output.shape[0]
    if GROUP < WIDTH:
        groups = first // GROUP + tl.arange(0, WIDTH // GROUP)
        address = pointer + output[:, None] * count + groups[None, :]
        values = tl.load(address, mask=has_output[:, None], other=0).to(tl.float32)
        repeated = tl.broadcast_to(values[:, :, None], (outputs, WIDTH // GROUP, GROUP))
        result = tl.reshape(repeated, (outputs, WIDTH))
    else:
        values = tl.load(pointer + output * count + first // GROUP, mask=has_output, other=0)
        result = tl.broadcast_to(values.to(tl.float32)[:, None], (outputs, WIDTH))
    return result


@triton.jit
def _dequantize(
    codes: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    factor: tl.tensor,
    minimum_factor: tl.tensor,
    output: tl.tensor,
    has_output: tl.tensor,
    first: tl.tensor,
    num_groups: tl.tensor,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return the weights of codes ``[outputs, WIDTH]`` of the inputs from ``first`` on, float32."""
    scales = _group_values(scale, output, has_output, first, num_groups, GROUP, WIDTH)
    if HAS_FACTOR:
        scales *= _group_values(
            factor, output, has_output, first, num_groups // 8, 8 * GROUP, WIDTH
        )
    weights = scales * (codes.to(tl.int32) - ZERO).to(tl.float32)
    if HAS_MINIMUM:
        minima = _group_values(minimum, output, has_output, first, num_groups, GROUP, WIDTH)
        if HAS_FACTOR:
            minima *= _group_values(
                minimum_factor, output, has_output, first, num_groups // 8, 8 * GROUP, WIDTH
            )
        weights += minima
    return weights


@triton.jit
def _add_product(
    sums: tl.tensor, x: tl.tensor, weights: tl.tensor, UPCASTS: tl.constexpr
) -> tl.tensor:
    """Return ``sums + x weightsᵀ`` in float32."""
    weights = weights.to(x.dtype)
    if UPCASTS:
        x = x.to(tl.float32)
        weights = weights.to(tl.float32)
    # A product of float32 numbers is computed as three products of their parts in TF32, with an
    # error near that of float32.
    return tl.dot(x, tl.trans(weights), sums, input_precision="tf32x3")


@triton.jit
def _multiply_tile(
    x_pointer: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    factor: tl.tensor,
    minimum_factor: tl.tensor,
    sums_pointer: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    stride: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    UPCASTS: tl.constexpr,
) -> None:
    """Compute one split's sums of a tile of rows and outputs."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = (tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)).to(tl.int64)
    split = tl.program_id(2)
    has_row = row < num_rows
    has_output = output < num_outputs
    half: tl.constexpr = INPUT_BLOCK // 2
    num_groups = tl.cdiv(num_inputs, INPUT_BLOCK) * (INPUT_BLOCK // GROUP if GROUP else 1)
    if GROUP > INPUT_BLOCK:
        num_groups = tl.cdiv(tl.cdiv(num_inputs, INPUT_BLOCK) * INPUT_BLOCK, GROUP)
    sums = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    column = tl.arange(0, half)
    num_blocks = tl.cdiv(num_inputs, INPUT_BLOCK) - split * SPLIT_BLOCKS
    for block in range(tl.minimum(num_blocks, SPLIT_BLOCKS)):
        first = (split * SPLIT_BLOCKS + block) * INPUT_BLOCK
        if FORMAT == "int4":
            address = values + output[:, None] * stride + first // 2 + column[None, :]
            packed = tl.load(address, mask=has_output[:, None], other=0)
        for part in tl.static_range(2):
            start = first + part * half
            inputs = start + column
            x = tl.load(
                x_pointer + row[:, None] * num_inputs + inputs[None, :],
                mask=has_row[:, None] & (inputs < num_inputs)[None, :],
                other=0.0,
            )
            if FORMAT == "int4":
                weights = packed & 15 if part == 0 else packed >> 4
            else:
                address = values + output[:, None] * stride + inputs[None, :]
                weights = tl.load(address, mask=has_output[:, None], other=0)
            if FORMAT != "plain":
                weights = _dequantize(
                    weights,
                    scale,
                    minimum,
                    factor,
                    minimum_factor,
                    output,
                    has_output,
                    start,
                    num_groups,
                    GROUP,
                    ZERO,
                    HAS_MINIMUM,
                    HAS_FACTOR,
                    half,
                )
            sums = _add_product(sums, x, weights, UPCASTS)
    address = (split * num_rows + row).to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(sums_pointer + address, sums, mask=has_row[:, None] & has_output[None, :])


@triton.jit
def _add_splits(
    sums_pointer: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    size: tl.tensor,
    num_outputs: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the partial sums of the splits in order, then the bias."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < size
    total = tl.load(sums_pointer + index, mask=is_inside, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(sums_pointer + split * size + index, mask=is_inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + index % num_outputs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y + index, total.to(y.dtype.element_ty), mask=is_inside)
