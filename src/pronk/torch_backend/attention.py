"""Attention from packed rows to the paged KV cache, in torch.

A row sees the cached tokens of its request, its ancestors in the tree, and itself; the kernels follow the same rule
without building a mask (``kernels/README.md``).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.arrays import Array
from pronk.kv_cache.blocks import BlockTable
from pronk.models.program import ProgramRows
from pronk.speculation.tree import TokenTree
from pronk.torch_backend.cache import TorchCache

__all__ = ["attend_rows"]


def attend_rows(
    rows: ProgramRows, queries: Tensor, config: ModelConfig, cache: TorchCache, layer: int, *, cross: bool
) -> Tensor:
    """Attend from the rows of all segments to a layer (from 0) of the cache.

    Args:
        rows: segments, and with ``cross`` the block tables of the other model.
        queries: ``[rows, heads, head_dim]``.
        config: sizes of the heads, and the window of the layer.
        cache: keys and values; with ``cross`` those of the other model.
        layer: layer (from 0) of ``cache``.
        cross: whether ``cache`` belongs to another model, of which rows see only tokens before them.

    Returns:
        The outputs, ``[rows, heads * head_dim]``.
    """
    window = config.windows[layer] if config.windows else None
    (keys, values), outputs, begin = cache.tensors(layer), [], 0
    for number, (table, tree, computed) in enumerate(rows.segments):
        end = begin + len(tree) - computed
        q = queries[begin:end].to(keys.dtype)
        if cross:
            source = rows.cross_block_tables[number]
            positions = np.asarray(tree.depths[computed:]) + table.length
            start, mask = _cross_mask(positions, source, source.num_released * cache.block_size, window)
            slots = cache.slots(source, start, source.length)
        else:
            start = max(0 if window is None else table.length - window + 1, table.num_released * cache.block_size)
            mask = _mask(tree, table.length, window, start)[computed:]
            slots = cache.slots(table, start, table.length + len(tree))
        index = cache.to_index(slots)
        k, v = keys[:, index], values[:, index]
        outputs.append(_attend(q, k, v, torch.from_numpy(mask).to(cache.device)).to(queries.dtype))
        begin = end
    return torch.cat(outputs)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend from ``q`` ``[rows, heads, d]`` to ``k`` and ``v`` ``[kv_heads, keys, d]``.

    The query heads of each key/value head are stacked as rows, so that one matrix product serves all. A row that sees
    no key (in a text of one token, or if the tokens of its window have been released) gets zeros.
    """
    rows, heads, size = q.shape
    kv_heads = len(k)
    sees_any = mask.any(1) if mask.shape[1] else mask.new_zeros(rows)
    if not bool(sees_any.any()):
        return q.new_zeros(rows, heads * size)
    folded = q.view(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3).reshape(kv_heads, -1, size)
    # A softmax over no keys is NaN: a row without visible keys attends to all, and its output is set to zero.
    never_empty = (mask | ~sees_any[:, None]).repeat(heads // kv_heads, 1)
    out = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=never_empty)
    out = out.view(kv_heads, heads // kv_heads, rows, size).permute(2, 0, 1, 3).reshape(rows, -1)
    return out * sees_any[:, None]


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
