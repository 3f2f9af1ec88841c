"""Attention from packed rows into the paged cache, in torch: the readable reference.

It serves devices without kernels, and tests. The kernels follow the same rule (``kernels/README.md``) without building
a mask: a row sees the tokens that the cache holds of its request, its ancestors in the tree, and itself.
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
    """One request's rows in a pass: ``tree`` below the ``block_table.length`` tokens that its cache holds.

    Attributes:
        block_table: where those tokens are; the tree's nodes go behind them, in order.
        tree: the nodes.
        computed: so many leading nodes are there already, from an earlier pass over the same tree as far as it had
            grown: they are seen, but they are not rows of this pass.
        early: which of them are rows of this pass in its later layers alone, or ``None``.
    """

    block_table: BlockTable
    tree: TokenTree
    computed: int = 0
    early: EarlyRows | None = None

    @property
    def rows(self) -> int:
        """Nodes that the pass computes."""
        return len(self.tree) - self.computed


@dataclass(frozen=True)
class VisibleKeys:
    """What one segment's rows read in the layers that share a window.

    Attributes:
        where: the slots that are read.
        seen: bool ``[rows, slots]``: by which rows.
    """

    where: slice | Tensor
    seen: Tensor

    def attend(self, cache: PagedCache, layer: int, q: Tensor) -> Tensor:
        """``q`` ``[rows, heads, d]`` over what a layer has at these slots.

        The query heads of a group are rows beside each other: one product of ``group · rows`` rows per key/value head.
        Returns ``[rows, heads * d]``.
        """
        c, rows = cache.config, q.shape[0]
        folded = (
            q.view(rows, c.num_kv_heads, c.group, c.head_dim)
            .permute(1, 2, 0, 3)
            .reshape(c.num_kv_heads, -1, c.head_dim)
        )
        k, v = cache.at(layer, self.where)
        out = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=self.seen.repeat(c.group, 1))
        out = out.view(c.num_kv_heads, c.group, rows, c.head_dim).permute(2, 0, 1, 3)
        return out.reshape(rows, c.num_heads * c.head_dim)


class PagedAttention:
    """An :class:`~pronk.models.decoder.Attend` for one pass."""

    def __init__(self, config: ModelConfig, cache: PagedCache, segments: Sequence[Segment]) -> None:
        self.config = config
        self.cache = cache
        self.bounds: list[tuple[int, int]] = []
        slots: list[Tensor] = []
        self.windows: list[dict[int | None, VisibleKeys]] = []
        start = 0
        for segment in segments:
            stop = start + segment.rows
            length = segment.block_table.length + segment.computed
            slots.append(torch.from_numpy(cache.slots(segment.block_table, length, length + stop - start)))
            self.windows.append({span: self._window(segment, span) for span in set(config.windows)})
            self.bounds.append((start, stop))
            start = stop
        self.slots = torch.cat(slots).to(cache.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the rows ``[rows, heads, dim]``; stores ``k`` and ``v`` in the cache on the way."""
        self.cache.write(layer, self.slots, k, v)
        span = self.config.windows[layer]
        outputs = [
            windows[span].attend(self.cache, layer, q[start:stop])
            for (start, stop), windows in zip(self.bounds, self.windows, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _window(self, segment: Segment, span: int | None) -> VisibleKeys:
        block_table, tree = segment.block_table, segment.tree
        # A drafter's lane may begin later than its first rows look back.
        start = max(0 if span is None else block_table.length - span + 1, block_table.released * self.cache.block_size)
        stop = block_table.length + len(tree)
        seen = _visible(tree, block_table.length, span, start)[segment.computed :]
        return VisibleKeys(self.cache.where(block_table, start, stop), seen.to(self.cache.device))


class CrossAttention(PagedAttention):
    """A ``CrossAttend`` for one pass: it also looks into another model's cache.

    That cache ends at the first token of the text that no pass of its model has verified, ``t``. A row at position
    ``p`` sees the tokens before it that are there, in the window of that model's layer::

        p - window < k < min(p, t)

    so all guesses of a step see the same tokens, as many as the first. Where that is none (a text of one token, or a
    row whose window has been given back) the row gets zeros.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: PagedCache,
        segments: Sequence[Segment],
        other: tuple[ModelConfig, PagedCache, Sequence[int]],
        tables: Sequence[BlockTable],
        rotation: tuple[Tensor, Tensor] | None,
    ) -> None:
        """``other``: its shape, its cache, and for each layer the number (from 0) of the layer to ask there."""
        super().__init__(config, cache, segments)
        self.target, self.beside, self.layers = other
        self.rotation = rotation
        spans = {self.target.windows[layer] for layer in self.layers}
        self.views = [
            {span: self._view(segment, block_table, span) for span in spans}
            for segment, block_table in zip(segments, tables, strict=True)
        ]

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """See :class:`~pronk.drafters.from_target.modules.glide.CrossAttend`."""
        number = self.layers[layer]
        rows = q.to(self.beside.dtype)
        rows = rows if self.rotation is None else apply_rope(rows, *self.rotation)
        outputs = []
        for (start, stop), views in zip(self.bounds, self.views, strict=True):
            view, own = views[self.target.windows[number]], rows[start:stop]
            some = view.seen.any(1, keepdim=True)
            if not bool(some.any()):
                outputs.append(own.new_zeros(len(own), own.shape[1] * own.shape[2]))
                continue
            # A row that sees nothing looks at everything and forgets it: a softmax over nothing is not a number.
            everything = VisibleKeys(view.where, view.seen | ~some)
            outputs.append(everything.attend(self.beside, number, own) * some)
        return torch.cat(outputs).to(q.dtype)

    def _view(self, segment: Segment, block_table: BlockTable, span: int | None) -> VisibleKeys:
        places = torch.tensor(segment.tree.depths[segment.computed :]) + segment.block_table.length
        start = block_table.released * self.beside.block_size
        if span is not None:
            start = max(start, int(places.min()) - span + 1)
        tokens = torch.arange(start, max(block_table.length, start))
        seen = tokens < places[:, None]
        seen = seen if span is None else seen & (tokens > places[:, None] - span)
        where = self.beside.where(block_table, start, block_table.length) if seen.numel() else slice(0, 0)
        return VisibleKeys(where, seen.to(self.beside.device))


def _visible(tree: TokenTree, length: int, span: int | None, start: int) -> Tensor:
    """Bool ``[nodes, length + nodes - start]``: which of the tokens from ``start`` on each node sees.

    Columns below ``length`` are committed tokens, the others the tree's nodes in order. A node at position ``p`` with a
    window of ``span`` sees positions above ``p - span``.
    """
    size = len(tree)
    committed = torch.ones(size, length - start, dtype=torch.bool)
    below = torch.from_numpy(tree.visible)
    if span is not None:
        depths = torch.tensor(tree.depths)
        committed = torch.arange(start, length)[None] > (length + depths - span)[:, None]
        below = below & (depths[None] > (depths - span)[:, None])
    return torch.cat((committed, below), dim=1)
