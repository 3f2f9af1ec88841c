"""Attention from packed rows to the paged KV cache, in torch.

A row sees the cached tokens of its request, its ancestors in the tree, and itself; the kernels follow the same rule
without building a mask (``kernels/README.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.arrays import Array
from pronk.kv_cache.blocks import BlockTable
from pronk.models.program_rows import ProgramRows
from pronk.speculation.tree import TokenTree
from pronk.torch_backend.cache import TorchCache

__all__ = ["VisibleKeys", "attend_rows", "capped_attention", "path_slots", "visible_keys"]


class VisibleKeys(NamedTuple):
    """The keys that the rows of a segment see, the same for all layers with the same window."""

    num_rows: int
    slots: Tensor  # int64 ``[keys]``
    # Bool ``[rows, keys]``: whether a row sees a key. A row that sees none has only True here: a softmax over no keys
    # is NaN, so its output over all keys is computed and set to zero.
    mask: Tensor
    sees_any: Tensor | None  # bool ``[rows, 1]``: whether a row sees a key; ``None`` if all do


def visible_keys(rows: ProgramRows, cache: TorchCache, window: int | None, *, cross: bool) -> list[VisibleKeys]:
    """Return the visible keys of each segment.

    Args:
        rows: segments, and with ``cross`` the block tables of the other model.
        cache: cache that is read; with ``cross`` that of the other model.
        window: sliding window of the layers, in tokens; ``None``: none.
        cross: whether ``cache`` belongs to another model; a row sees its tokens before the row's own position.
    """
    found = []
    for number, (table, tree, computed) in enumerate(rows.segments):
        if cross:
            source = rows.cross_block_tables[number]
            positions = np.asarray(tree.depths[computed:]) + table.length
            start, mask = _cross_mask(positions, source, source.num_released * cache.block_size, window)
            slots = cache.slots(source, start, max(source.length, start))
        else:
            start = max(0 if window is None else table.length - window + 1, table.num_released * cache.block_size)
            mask = _mask(tree, table.length, window, start)[computed:]
            slots = cache.slots(table, start, table.length + len(tree))
        sees_any = mask.any(1, keepdims=True)
        every = None if sees_any.all() else torch.from_numpy(sees_any).to(cache.device)
        seen = torch.from_numpy(mask | ~sees_any).to(cache.device)
        found.append(VisibleKeys(len(mask), cache.to_index(slots), seen, every))
    return found


def path_slots(cache: TorchCache, table: BlockTable, tree: TokenTree, computed: int, count: int) -> Array:
    """Return the slots of the last ``count`` tokens of each row's path, int64 ``[rows, count]``.

    The row's own token is the last one. A token before the text has the slot -1.
    """
    first = max(0, table.length - count + 1)
    slots = cache.slots(table, first, table.length + len(tree))
    committed, own = slots[: table.length - first], slots[table.length - first :]
    start = np.concatenate((np.full(count, -1), committed))[-count:]  # the path of a root's parent
    paths = np.empty((len(tree), count), np.int64)
    for node, parent in enumerate(tree.parents):
        before = start if parent < 0 else paths[parent]
        paths[node] = *before[1:], own[node]
    return paths[computed:]


def attend_rows(
    queries: Tensor,
    visible: Sequence[VisibleKeys],
    cache: TorchCache,
    layer: int,
    scale: float,
    cap: float | None = None,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from queries ``[rows, heads, d]`` to a layer (from 0); return ``[rows, heads * d]``.

    ``scale`` is the factor of the scores, and ``cap`` their soft cap. ``sinks`` ``[heads]`` are scores without a value.
    """
    (keys, values), outputs = cache.tensors(layer), []
    for q, seen in zip(queries.split([each.num_rows for each in visible]), visible, strict=True):
        k, v = keys[:, seen.slots], values[:, seen.slots]
        outputs.append(_attend(q.to(k.dtype), k, v, seen, scale, cap, sinks=sinks).to(queries.dtype))
    return torch.cat(outputs)


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, *, sinks: Tensor | None = None
) -> Tensor:
    """Return attention ``[…, rows, d]`` whose scores have a soft cap; ``mask``: bool ``[rows, keys]``.

    ``sinks`` ``[…, rows, 1]`` are scores that take part in the softmax without a value.
    """
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(v.dtype) @ v
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1].to(v.dtype) @ v


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: VisibleKeys,
    scale: float,
    cap: float | None,
    *,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from ``q`` ``[rows, heads, d]`` to ``k`` and ``v`` ``[kv_heads, keys, d]``.

    The query heads of each key/value head are stacked as rows, so that one matrix product serves all. A row that sees
    no key (in a text of one token, or if the tokens of its window have been released) gets zeros.
    """
    rows, heads, size = q.shape
    kv_heads = len(k)
    if not k.shape[1]:
        return q.new_zeros(rows, heads * size)
    folded = q.view(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3).reshape(kv_heads, -1, size)
    mask = visible.mask.repeat(heads // kv_heads, 1)
    if cap is None and sinks is None:
        out = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=mask, scale=scale)
    else:
        by_row = None if sinks is None else sinks.view(kv_heads, -1, 1).repeat_interleave(rows, dim=1).float()
        out = capped_attention(folded, k, v, mask, scale, cap, sinks=by_row)
    out = out.view(kv_heads, heads // kv_heads, rows, size).permute(2, 0, 1, 3).reshape(rows, -1)
    return out if visible.sees_any is None else out * visible.sees_any


def _mask(tree: TokenTree, length: int, window: int | None, start: int) -> Array:
    """Return the mask ``[nodes, length + nodes - start]`` of the tokens that each node sees.

    The columns are the committed tokens ``start .. length - 1``, then the tree's nodes in order. A node at position
    ``p`` with a window sees, of these, only positions above ``p - window``.
    """
    depths = np.asarray(tree.depths)
    committed, drafted = np.ones((len(tree), length - start), bool), tree.visible
    if window is not None:
        committed = np.arange(start, length) > (length + depths - window)[:, None]
        drafted = drafted & (depths > (depths - window)[:, None])
    return np.concatenate((committed, drafted), axis=1)


def _cross_mask(positions: Array, source: BlockTable, first: int, window: int | None) -> tuple[int, Array]:
    """Return the first position that a row may see in another model's cache, and the mask.

    A row at position ``p`` sees the positions ``k`` with ``p - window < k < p`` of those that the cache has, from
    ``first`` on. Without a window, all draft tokens of a step therefore see the same tokens.
    """
    start = first if window is None else max(first, int(positions.min()) - window + 1)
    tokens = np.arange(start, max(source.length, start))
    mask = tokens < positions[:, None]
    return start, mask if window is None else mask & (tokens > positions[:, None] - window)
