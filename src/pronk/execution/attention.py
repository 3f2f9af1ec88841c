"""Attention from packed rows to the paged KV cache, in torch.

It is used on devices without kernels, and as a reference in tests. The kernels follow the same rule without building a
mask (``kernels/README.md``): a row sees the cached tokens of its request, its ancestors in the tree, and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.architecture.rope import apply_rope
from pronk.execution.early_rows import EarlyRows
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.speculation.tree import TokenTree

__all__ = ["CrossAttention", "PagedAttention", "Segment", "VisibleKeys"]


class Segment(NamedTuple):
    """One request's rows in a forward pass: the nodes of ``tree``, which follow the committed tokens."""

    block_table: BlockTable  # KV slots of the committed tokens, then of the nodes in order
    tree: TokenTree
    # Number of leading nodes that earlier forward passes have computed, as when a drafter adds one depth per pass. They
    # get no rows, and the other nodes attend to them.
    num_computed: int = 0
    # Leading nodes that skip the first layers, because a drafter has already computed these; ``None``: no such nodes.
    early: EarlyRows | None = None

    @property
    def num_rows(self) -> int:
        """Number of nodes that the forward pass computes."""
        return len(self.tree) - self.num_computed


@dataclass(frozen=True)
class VisibleKeys:
    """KV slots that one segment's rows read; one object serves all layers with the same window."""

    slots: slice | Tensor
    mask: Tensor  # bool ``[rows, slots]``: whether the row attends to the token in the slot

    def attend(self, cache: PagedCache, layer: int, q: Tensor) -> Tensor:
        """Attend from ``q`` ``[rows, heads, d]`` to the visible keys of a layer; return ``[rows, heads * d]``.

        The ``group`` query heads of each key/value head are stacked as rows, so that one matrix product serves all.
        """
        config, rows = cache.config, q.shape[0]
        by_head = q.view(rows, config.num_kv_heads, config.group, config.head_dim).permute(1, 2, 0, 3)
        folded = by_head.reshape(config.num_kv_heads, -1, config.head_dim)
        k, v = cache.read_slots(layer, self.slots)
        mask = self.mask.repeat(config.group, 1)
        out = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=mask)
        out = out.view(config.num_kv_heads, config.group, rows, config.head_dim).permute(2, 0, 1, 3)
        return out.reshape(rows, config.num_heads * config.head_dim)


class PagedAttention:
    """Implementation of :class:`~pronk.models.decoder.Attend` for one forward pass."""

    def __init__(self, config: ModelConfig, cache: PagedCache, segments: Sequence[Segment]) -> None:
        self.config = config
        self.cache = cache
        self.row_ranges: list[tuple[int, int]] = []
        slots: list[Tensor] = []
        self.visible_keys: list[dict[int | None, VisibleKeys]] = []
        start = 0
        for segment in segments:
            stop = start + segment.num_rows
            length = segment.block_table.length + segment.num_computed
            slots.append(torch.from_numpy(cache.slots(segment.block_table, length, length + stop - start)))
            self.visible_keys.append({span: self._visible_keys(segment, span) for span in set(config.windows)})
            self.row_ranges.append((start, stop))
            start = stop
        self.slots = torch.cat(slots).to(cache.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store ``k`` and ``v`` in the cache, and return the attention output of ``q`` ``[rows, heads, dim]``."""
        self.cache.write(layer, self.slots, k, v)
        span = self.config.windows[layer]
        outputs = [
            visible_keys[span].attend(self.cache, layer, q[start:stop])
            for (start, stop), visible_keys in zip(self.row_ranges, self.visible_keys, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _visible_keys(self, segment: Segment, span: int | None) -> VisibleKeys:
        block_table, tree = segment.block_table, segment.tree
        # A drafter's block table may lack the first blocks of the window (see ``SideCache.reserve``).
        start = max(
            0 if span is None else block_table.length - span + 1, block_table.num_released * self.cache.block_size
        )
        stop = block_table.length + len(tree)
        mask = _visibility_mask(tree, block_table.length, span, start)[segment.num_computed :]
        return VisibleKeys(self.cache.slot_index(block_table, start, stop), mask.to(self.cache.device))


class CrossAttention(PagedAttention):
    """Implementation of ``CrossAttend`` for one forward pass: attention to another model's cache as well.

    The other cache holds the committed tokens at positions 0 to ``t - 1``. A row at position ``p`` sees the tokens
    before it, in the window of the other model's layer. These are the positions ``k`` with ::

        p - window < k < min(p, t)

    Without a window, all draft tokens of a step therefore see the same tokens. A row that sees no token (in a text of
    one token, or if the tokens of its window have been released) gets zeros.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: PagedCache,
        segments: Sequence[Segment],
        source: tuple[ModelConfig, PagedCache, Sequence[int]],
        cross_block_tables: Sequence[BlockTable],
        rotation: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Find the KV slots that the rows read in both caches.

        ``source`` is the other model's config and cache, and for each layer of this model the other's layer to read.
        """
        super().__init__(config, cache, segments)
        self.cross_config, self.cross_cache, self.cross_layers = source
        self.rotation = rotation
        spans = {self.cross_config.windows[layer] for layer in self.cross_layers}
        self.cross_keys = [
            {span: self._cross_keys(segment, block_table, span) for span in spans}
            for segment, block_table in zip(segments, cross_block_tables, strict=True)
        ]

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Attend to the other cache; see :class:`~pronk.drafters.from_target.modules.glide.CrossAttend`."""
        cross_layer = self.cross_layers[layer]
        rows = q.to(self.cross_cache.dtype)
        rows = rows if self.rotation is None else apply_rope(rows, *self.rotation)
        outputs = []
        for (start, stop), visible_by_span in zip(self.row_ranges, self.cross_keys, strict=True):
            visible, row_queries = visible_by_span[self.cross_config.windows[cross_layer]], rows[start:stop]
            sees_any = visible.mask.any(1, keepdim=True)
            if not bool(sees_any.any()):
                outputs.append(row_queries.new_zeros(len(row_queries), row_queries.shape[1] * row_queries.shape[2]))
                continue
            # A softmax over no keys is NaN: a row without visible keys attends to all, and its output is set to zero.
            never_empty = VisibleKeys(visible.slots, visible.mask | ~sees_any)
            outputs.append(never_empty.attend(self.cross_cache, cross_layer, row_queries) * sees_any)
        return torch.cat(outputs).to(q.dtype)

    def _cross_keys(self, segment: Segment, block_table: BlockTable, span: int | None) -> VisibleKeys:
        positions = torch.tensor(segment.tree.depths[segment.num_computed :]) + segment.block_table.length
        start = block_table.num_released * self.cross_cache.block_size
        if span is not None:
            start = max(start, int(positions.min()) - span + 1)
        tokens = torch.arange(start, max(block_table.length, start))
        mask = tokens < positions[:, None]
        mask = mask if span is None else mask & (tokens > positions[:, None] - span)
        slots = self.cross_cache.slot_index(block_table, start, block_table.length) if mask.numel() else slice(0, 0)
        return VisibleKeys(slots, mask.to(self.cross_cache.device))


def _visibility_mask(tree: TokenTree, length: int, span: int | None, start: int) -> Tensor:
    """Return the mask ``[nodes, length + nodes - start]`` of the tokens that each node sees.

    The columns are the committed tokens ``start .. length - 1``, then the tree's nodes in order. A node at position
    ``p`` with a window of ``span`` sees, of these, only positions above ``p - span``.
    """
    size = len(tree)
    committed_mask = torch.ones(size, length - start, dtype=torch.bool)
    tree_mask = torch.from_numpy(tree.visible)
    if span is not None:
        depths = torch.tensor(tree.depths)
        committed_mask = torch.arange(start, length)[None] > (length + depths - span)[:, None]
        tree_mask = tree_mask & (depths[None] > (depths - span)[:, None])
    return torch.cat((committed_mask, tree_mask), dim=1)
