"""Paged attention of token trees: one kernel for all requests of a pass.

A row at position ``p`` of its text sees the keys of the positions ``0 … p``, in this order: first
the committed tokens of its request, found by the block table; then its ancestors in the token tree
and itself, found by a *path*, the slots of the nodes from a root to a leaf::

    tree     0 ─ 1 ─ 2          paths   leaf 2: slots of 0 1 2      rows 0 1 2
             └── 3 ─ 4                  leaf 4: slots of 0 3 4      rows 3 4

So the keys of a row, and the order of its sums, do not depend on whether its text is a chain, a
branch of a tree, a chunk of a prompt, or cached: the online softmax (Milakov and Gimelshein 2018)
goes through blocks of ``KEY_BLOCK`` positions that begin at multiples of it. Keys are divided into
splits of ``SPLIT`` positions (as in Flash-Decoding, Dao et al. 2023), whose results are combined in
order. This is the attention that lookahead decoding fuses (Fu et al. 2024, section 3.3).

The query heads of a key head are the rows of one product, which reads each key once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.gpu.launch import OPTIONS, UPCASTS, ceil_div
from pronk.gpu.layout import RowLayout

KEY_BLOCK = 64
SPLIT = 1024
# Number of blocks of keys and values that are loaded ahead.
NUM_STAGES = 2
# Smallest number of rows of a product of the tensor cores: groups of fewer query heads are padded.
_MIN_GROUP = 16
# Maximum size of the splits' results of a launch, in float32 numbers.
_LAUNCH_SIZE = 1 << 24


class AttentionOptions(NamedTuple):
    """Options of a layer's attention."""

    scale: float  # factor of the scores
    cap: float | None = None  # soft cap ``c``: ``c * tanh(score / c)``
    window: int | None = None  # number of positions that a row sees, its own included
    sinks: Tensor | None = None  # float32 ``[heads]``: scores without a value


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, layout: RowLayout, options: AttentionOptions
) -> Tensor:
    """Return the attention of rows, ``[rows, heads * size]``, in the dtype of the queries.

    Args:
        queries: ``[rows, heads, size]``.
        keys: pool ``[key heads, slots, size]``.
        values: pool of this shape.
        layout: positions and slots of the rows.
        options: scale, cap, window and sinks.
    """
    rows, num_heads, size = queries.shape
    num_splits = ceil_div(layout.max_position + 1, SPLIT)
    output = torch.empty(rows, num_heads * size, dtype=queries.dtype, device=queries.device)
    launch_rows = max(1, _LAUNCH_SIZE // (num_heads * num_splits * size))
    for start in range(0, rows, launch_rows):
        stop = min(start + launch_rows, rows)
        _attend_rows(queries, keys, values, layout, options, output, start, stop, num_splits)
    return output


def _attend_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RowLayout,
    options: AttentionOptions,
    output: Tensor,
    start: int,
    stop: int,
    num_splits: int,
) -> None:
    """Compute the rows ``start … stop - 1``."""
    num_heads, size = queries.shape[1:]
    num_keys, num_slots = keys.shape[:2]
    shape = (stop - start, num_heads, num_splits)
    sums = torch.empty(*shape, size, dtype=torch.float32, device=queries.device)
    # the largest score of a split, and the sum of the exponentials
    states = torch.empty(*shape, 2, dtype=torch.float32, device=queries.device)
    window = options.window or 0
    _attend_split[(stop - start, num_keys, num_splits)](
        queries,
        keys,
        values,
        num_slots,
        layout.positions,
        layout.entries,
        layout.committed,
        layout.tables,
        layout.tables.stride(0),
        layout.row_paths,
        layout.paths,
        layout.paths.stride(0),
        sums,
        states,
        start,
        options.scale,
        options.cap or 0.0,
        window,
        HAS_CAP=options.cap is not None,
        HAS_WINDOW=options.window is not None,
        GROUP=num_heads // num_keys,
        GROUP_BLOCK=max(_MIN_GROUP, triton.next_power_of_2(num_heads // num_keys)),
        SIZE=size,
        SIZE_BLOCK=max(16, triton.next_power_of_2(size)),
        PAGE=layout.block_size,
        KEY_BLOCK=KEY_BLOCK,
        SPLIT=SPLIT,
        UPCASTS=UPCASTS,
        num_warps=4,
        num_stages=NUM_STAGES,
        **OPTIONS,
    )
    _combine_splits[(stop - start,)](
        sums,
        states,
        layout.positions,
        options.sinks,
        output,
        start,
        num_splits,
        window,
        HEADS=num_heads,
        HEADS_BLOCK=triton.next_power_of_2(num_heads),
        SIZE=size,
        SIZE_BLOCK=max(16, triton.next_power_of_2(size)),
        SPLIT=SPLIT,
        HAS_SINKS=options.sinks is not None,
        HAS_WINDOW=options.window is not None,
        num_warps=4,
        **OPTIONS,
    )


@triton.jit
def _product(x: tl.tensor, y: tl.tensor, UPCASTS: tl.constexpr) -> tl.tensor:
    """Return ``x y`` in float32."""
    if UPCASTS:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _attend_split(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    num_slots: tl.tensor,
    positions: tl.tensor,
    entries: tl.tensor,
    committed: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    row_paths: tl.tensor,
    paths: tl.tensor,
    path_stride: tl.tensor,
    sums: tl.tensor,
    states: tl.tensor,
    first_row: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCASTS: tl.constexpr,
) -> None:
    """Compute the attention of one row and key head to the keys of one split."""
    program = tl.program_id(0).to(tl.int64)
    row = first_row + program
    key_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    position = tl.load(positions + row)
    length = tl.load(committed + row)
    table = tables + tl.load(entries + row).to(tl.int64) * table_stride
    path = paths + tl.load(row_paths + row).to(tl.int64) * path_stride
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    begin = tl.maximum(split * SPLIT, first // KEY_BLOCK * KEY_BLOCK)
    end = tl.minimum((split + 1) * SPLIT, position + 1)
    member = tl.arange(0, GROUP_BLOCK)
    column = tl.arange(0, SIZE_BLOCK)
    has_member = (member < GROUP)[:, None]
    has_column = (column < SIZE)[None, :]
    head = key_head * GROUP + member
    address = (row * num_heads + head)[:, None] * SIZE + column[None, :]
    query = tl.load(queries + address, mask=has_member & has_column, other=0.0)
    largest = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    output = tl.zeros((GROUP_BLOCK, SIZE_BLOCK), tl.float32)
    for start in range(begin, end, KEY_BLOCK):
        index = start + tl.arange(0, KEY_BLOCK)
        is_visible = (index >= first) & (index <= position)
        in_tree = index >= length
        page = tl.load(table + index // PAGE, mask=is_visible & ~in_tree, other=0)
        node = tl.load(path + index - length, mask=is_visible & in_tree, other=0)
        slot = tl.where(in_tree, node, page * PAGE + index % PAGE).to(tl.int64)
        number = (key_head * num_slots + slot)[:, None] * SIZE + column[None, :]
        is_read = is_visible[:, None] & has_column
        key = tl.load(keys + number, mask=is_read, other=0.0)
        value = tl.load(values + number, mask=is_read, other=0.0)
        scores = _product(query, tl.trans(key), UPCASTS) * scale
        if HAS_CAP:
            # tanh(z) is 1 - 2 / (exp(2 z) + 1)
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * (scores / cap)) + 1.0))
        scores = tl.where(is_visible[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        output = output * shrink[:, None] + _product(weights.to(value.dtype), value, UPCASTS)
        largest = new_largest
    cell = (program * num_heads + head) * tl.num_programs(2) + split
    is_member = member < GROUP
    tl.store(states + cell * 2, largest, mask=is_member)
    tl.store(states + cell * 2 + 1, total, mask=is_member)
    address = cell[:, None] * SIZE + column[None, :]
    tl.store(sums + address, output, mask=has_member & has_column)


@triton.jit
def _combine_splits(
    sums: tl.tensor,
    states: tl.tensor,
    positions: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    first_row: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    """Combine the splits of all heads of a row, in the order of their positions."""
    program = tl.program_id(0).to(tl.int64)
    row = first_row + program
    position = tl.load(positions + row)
    head = tl.arange(0, HEADS_BLOCK)
    column = tl.arange(0, SIZE_BLOCK)
    has_head = head < HEADS
    is_inside = has_head[:, None] & (column < SIZE)[None, :]
    if HAS_SINKS:
        largest = tl.load(sinks + head, mask=has_head, other=0.0)
        total = tl.full((HEADS_BLOCK,), 1.0, tl.float32)
    else:
        largest = tl.full((HEADS_BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS_BLOCK,), tl.float32)
    result = tl.zeros((HEADS_BLOCK, SIZE_BLOCK), tl.float32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    for split in range(first // SPLIT, position // SPLIT + 1):
        cell = (program * HEADS + head) * num_splits + split
        own_largest = tl.load(states + cell * 2, mask=has_head, other=0.0)
        own_total = tl.load(states + cell * 2 + 1, mask=has_head, other=1.0)
        own = tl.load(sums + cell[:, None] * SIZE + column[None, :], mask=is_inside, other=0.0)
        new_largest = tl.maximum(largest, own_largest)
        shrink = tl.exp(largest - new_largest)
        own_shrink = tl.exp(own_largest - new_largest)
        total = total * shrink + own_total * own_shrink
        result = result * shrink[:, None] + own * own_shrink[:, None]
        largest = new_largest
    result = result / total[:, None]
    address = (row * HEADS + head)[:, None] * SIZE + column[None, :]
    tl.store(output + address, result.to(output.dtype.element_ty), mask=is_inside)
