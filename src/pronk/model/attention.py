"""Attention from packed rows into the paged cache.

What relates the rows of a pass to the cache is worked out once per pass, from the trees and the block tables, and
handed to every layer as one value. The query heads that share a key/value head are folded into the row axis: for 8
heads over 2 and 3 rows, one product of ``[2, 4 · 3, d]`` queries with ``[2, keys, d]`` keys, instead of eight of
one row each.

Two paddings make a row's result independent of what shares its pass, to the last bit: the folded rows are padded to a
multiple of 4, and the keys to whole aligned blocks of :data:`~pronk.cache.paged.KV_ALIGNMENT`. Padding is masked and
contributes exact zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.cache.blocks import BlockTable
from pronk.cache.paged import KV_ALIGNMENT, PagedCache
from pronk.model.config import ModelConfig
from pronk.tree import TokenTree

__all__ = ["ROW_ALIGNMENT", "PagedAttention", "Segment", "Window", "aligned", "padded"]

# Matrix kernels on a CPU treat a remainder of fewer rows than this in another order of summation.
ROW_ALIGNMENT = 4


@dataclass(frozen=True)
class Segment:
    """One request's rows in a pass: ``tree`` below the ``table.length`` tokens that its cache holds.

    Attributes:
        table: where those tokens are; the tree's nodes go behind them, in order.
        tree: the nodes.
        computed: so many leading nodes are there already, from an earlier pass over the same tree as far as it had
            grown: they are seen, but they are not rows of this pass.
    """

    table: BlockTable
    tree: TokenTree
    computed: int = 0

    @property
    def rows(self) -> int:
        """Nodes that the pass computes."""
        return len(self.tree) - self.computed


@dataclass(frozen=True)
class Window:
    """What one segment's rows read in the layers that share a window: keys ``where``, under ``mask``."""

    where: slice | Tensor
    mask: Tensor

    @classmethod
    def of(cls, config: ModelConfig, cache: PagedCache, table: BlockTable, start: int, seen: Tensor) -> Window:
        """The window onto tokens ``start ..`` of ``table``; ``seen`` ``[rows, tokens]`` says who sees what.

        Both ends have to lie at whole blocks of keys (:func:`aligned`), and every row has to see something.
        """
        rows, size = seen.shape
        device = cache.keys[0].device
        mask = torch.zeros(seen.shape, dtype=cache.dtype).masked_fill_(~seen, -math.inf).to(device)
        mask = mask.repeat(config.group, 1)
        mask = F.pad(mask, (0, 0, 0, _folded_rows(rows, config) - len(mask)))
        mask = mask.view(1, _tasks(config) // config.num_kv_heads, -1, size)
        return cls(cache.where(table, start, start + size), mask)

    def attend(self, config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``q`` ``[rows, heads, d]`` over a layer's ``keys``, ``values`` ``[kv_heads, slots, d]``.

        Returns ``[rows, heads * d]``.
        """
        c, rows = config, q.shape[0]
        k, v = keys[:, self.where], values[:, self.where]
        folded = q.view(rows, c.num_kv_heads, c.group, c.head_dim).permute(1, 2, 0, 3)
        folded = folded.reshape(c.num_kv_heads, c.group * rows, c.head_dim)
        padding = _folded_rows(rows, c) - c.group * rows
        if padding:
            folded = F.pad(folded, (0, 0, 0, padding))
        tasks = _tasks(c)
        if tasks > c.num_kv_heads:
            k, v = k.expand(tasks, -1, -1), v.expand(tasks, -1, -1)
        folded = folded.view(1, tasks, -1, c.head_dim)
        out = F.scaled_dot_product_attention(folded, k[None], v[None], attn_mask=self.mask)
        out = out.reshape(c.num_kv_heads, -1, c.head_dim)[:, : c.group * rows].unflatten(1, (c.group, rows))
        return out.permute(2, 0, 1, 3).reshape(rows, c.num_heads * c.head_dim)


class PagedAttention:
    """An :class:`~pronk.model.decoder.Attend` for one pass."""

    def __init__(self, config: ModelConfig, cache: PagedCache, segments: Sequence[Segment], rows: int) -> None:
        """``rows`` is the padded number of packed rows; the segments' rows come first, in order."""
        self.config = config
        self.cache = cache
        self.bounds: list[tuple[int, int]] = []
        self.slots = torch.full((rows,), cache.spare_slot, dtype=torch.int64)
        self.windows: list[dict[int | None, Window]] = []
        start = 0
        for segment in segments:
            stop = start + segment.rows
            length = segment.table.length + segment.computed
            self.slots[start:stop] = torch.from_numpy(cache.slots(segment.table, length, length + stop - start))
            self.windows.append({span: self._window(segment, span) for span in set(config.windows)})
            self.bounds.append((start, stop))
            start = stop
        self.slots = self.slots.to(cache.keys[0].device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See :class:`~pronk.model.decoder.Attend`; stores ``k`` and ``v`` in the cache on the way."""
        self.cache.write(layer, self.slots, k, v)
        span = self.config.windows[layer]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        outputs = []
        for (start, stop), windows in zip(self.bounds, self.windows, strict=True):
            outputs.append(windows[span].attend(self.config, q[start:stop], keys, values))
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return F.pad(rows, (0, 0, 0, q.shape[0] - rows.shape[0])) if len(rows) < len(q) else rows

    def _window(self, segment: Segment, span: int | None) -> Window:
        table, tree = segment.table, segment.tree
        start, stop = aligned(0 if span is None else max(0, table.length - span + 1), table.length + len(tree))
        seen = _visible(tree, table.length, span, start, stop)[segment.computed :]
        # A drafter's lane may begin later than its first rows look back.
        oldest = table.released * self.cache.block_size
        if start < oldest:
            seen[:, : oldest - start] = False
        return Window.of(self.config, self.cache, table, start, seen)


def aligned(start: int, stop: int) -> tuple[int, int]:
    """The smallest run of whole blocks of keys that has tokens ``start .. stop - 1``."""
    start = start // KV_ALIGNMENT * KV_ALIGNMENT
    return start, start + math.ceil((stop - start) / KV_ALIGNMENT) * KV_ALIGNMENT


def _tasks(config: ModelConfig) -> int:
    """Heads that the kernel is shown: a single one (multi-query attention) is split in two by its rows.

    With one head and few rows the kernel would have one task; that runs outside its parallel loop, where the products
    inside it split their sums over threads, and for more rows they would not.
    """
    return max(2, config.num_kv_heads)


def padded(rows: Tensor) -> Tensor:
    """``rows`` ``[rows, …]`` and as many rows of zeros as make them a multiple of :data:`ROW_ALIGNMENT`."""
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, -len(rows) % ROW_ALIGNMENT))


def _folded_rows(rows: int, config: ModelConfig) -> int:
    """Rows that each key/value head attends with, ``group`` of them per row, padded to whole units for each task."""
    unit = ROW_ALIGNMENT * _tasks(config) // config.num_kv_heads
    return math.ceil(rows * config.group / unit) * unit


def _visible(tree: TokenTree, length: int, span: int | None, start: int, stop: int) -> Tensor:
    """``[nodes, stop - start]``: which of the tokens ``start .. stop - 1`` each node sees.

    Columns below ``length`` are committed tokens, the next ``nodes`` are the tree's nodes in order. A node at position
    ``p`` with a window of ``span`` sees positions above ``p - span``.
    """
    size = len(tree)
    seen = torch.zeros(size, stop - start, dtype=torch.bool)
    seen[:, : length - start] = True
    below = torch.from_numpy(tree.visible)
    if span is not None:
        depths = torch.tensor(tree.depths)
        committed = torch.arange(start, length)
        seen[:, : length - start] = committed[None] > (length + depths - span)[:, None]
        below = below & (depths[None] > (depths - span)[:, None])
    seen[:, length - start : length - start + size] = below
    return seen
