"""KV cache of the torch backend, attention from a batch of rows to the cache, and pass buffers.

The class :class:`~pronk.backends.KVSource` states which keys a row sees. The kernels follow the
same rule without building a mask (``kernels/README.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pronk import OptionError
from pronk.backends import (
    ROWS,
    BlockTable,
    ForwardBatch,
    ModelConfig,
    PagedCache,
    PoolLayout,
    SavedFeature,
)
from pronk.base.arrays import Array
from pronk.checkpoint import RopeTable
from pronk.torch.convert import to_array, to_tensor, torch_dtype


class TorchCache(PagedCache):
    """A KV cache of torch tensors on ``device``.

    Keys and values of a layer are ``[kv_heads, slots, head_dim]``. A saved feature, such as the
    output of a layer, is ``[1, slots, width]``.

    Raises:
        OptionError: ``kv_dtype`` is int8, which only the kernels support.
    """

    def __init__(self, config: ModelConfig, *, device: str, **options: Any) -> None:
        self.device = torch.device(device)
        if options.get("kv_dtype") not in (None, options["dtype"]):
            msg = (
                f"kv_dtype: expected auto with torch, found {options['kv_dtype']}, which needs "
                "pronk's kernels"
            )
            raise OptionError(msg)
        super().__init__(config, kernels=None, **options)

    def _choose_layouts(self) -> tuple[PoolLayout, PoolLayout]:
        return ROWS, ROWS

    def _new_pool(self, heads: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return torch.zeros(heads, *shape, dtype=torch_dtype(dtype), device=self.device)

    def to_index(self, slots: NDArray[np.int64]) -> Tensor:
        """Return slots ``[n]`` as an int64 tensor on the device."""
        return torch.from_numpy(slots).to(self.device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of a layer (from 0) in the slots of their rows.

        Infinities and NaN are stored as 0: torch multiplies masked values by 0, and 0 times
        infinity would be NaN in the rows of other requests. The request itself fails, because its
        logits are not finite.

        Args:
            layer: number of the layer, from 0.
            slots: int64 ``[rows]``, a slot for each row of ``k`` and ``v``.
            k: keys ``[rows, kv_heads, head_dim]``.
            v: values ``[rows, kv_heads, head_dim]``.
        """
        for pool, rows in ((self.keys[layer], k), (self.values[layer], v)):
            pool[:, slots] = rows.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1)

    def write_feature(self, feature: SavedFeature, slots: Tensor, rows: Tensor) -> None:
        """Store the values ``[rows, width]`` of a feature at ``slots`` ``[rows]``."""
        pool = self.features[feature]
        pool[0, slots] = rows.nan_to_num(0.0, 0.0, 0.0).to(pool.dtype)

    def read_feature(
        self, feature: SavedFeature, block_table: BlockTable, start: int, stop: int
    ) -> Array:
        slots = self.to_index(self.slots(block_table, start, stop))
        return to_array(self.features[feature][0, slots])

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        source_index = self.to_index(source)
        target_index = self.to_index(target)
        for pool in self._pools:
            pool[:, target_index] = pool[:, source_index]


class VisibleKeys(NamedTuple):
    """The keys that the rows of an entry see, the same for all layers with the same window."""

    num_rows: int  # number of rows of the entry
    slots: Tensor  # slot of each key in the cache, int64 ``[keys]``
    # Bool ``[rows, keys]``: whether a row sees a key. The mask of a row that sees no key is True
    # for all keys, because a softmax over no keys is NaN; ``sees_any`` sets its output to zero.
    mask: Tensor
    sees_any: Tensor | None  # bool ``[rows, 1]``: whether a row sees a key; ``None`` if all do


def visible_keys(
    batch: ForwardBatch, cache: TorchCache, number: int, window: int | None
) -> list[VisibleKeys]:
    """Return the visible keys of each entry of a batch.

    The keys of an entry are its cached tokens that a row's window reaches, then the nodes of its
    tree if the pass writes their keys to ``cache``.

    Args:
        batch: the rows of the pass.
        cache: the cache with the keys.
        number: number of ``cache`` in :class:`KVSource`; 0 is the cache that the pass writes.
        window: number of tokens that a row sees, its own included; ``None`` sets no limit.
    """
    found = []
    for entry in batch.entries:
        table = entry.block_table
        tree = entry.tree
        computed = entry.num_computed
        cached = entry.other_tables[number - 1] if number else table
        node_positions = table.length + np.asarray(tree.depths)
        positions = node_positions[computed:, None]
        start = max(
            0 if window is None else int(positions.min()) - window + 1,
            cached.num_released * cache.block_size,
        )
        start = min(start, cached.length)
        keys = np.arange(start, cached.length)
        mask = keys < positions
        if number == 0:
            keys = np.concatenate((keys, node_positions))
            mask = np.concatenate((mask, tree.visible[computed:]), axis=1)
        if window is not None:
            mask &= keys > positions - window
        slots = cache.slots(cached, start, start + len(keys))
        sees_any = mask.any(1, keepdims=True)
        every = None if sees_any.all() else torch.from_numpy(sees_any).to(cache.device)
        seen = torch.from_numpy(mask | ~sees_any).to(cache.device)
        found.append(VisibleKeys(len(mask), cache.to_index(slots), seen, every))
    return found


def path_slots(batch: ForwardBatch, cache: TorchCache, count: int) -> tuple[Tensor, Tensor]:
    """Return the slots of the last ``count`` tokens of each row's path, and which of them exist.

    Both tensors are ``[rows, count]``, int64 and bool. The last column is the row's own token. The
    slot of a token before the beginning of the text is 0.
    """
    found = []
    for entry in batch.entries:
        table = entry.block_table
        tree = entry.tree
        first = max(0, table.length - count + 1)
        slots = cache.slots(table, first, table.length + len(tree))
        committed = slots[: table.length - first]
        own = slots[table.length - first :]
        # Slots of the last committed tokens, which precede a root; -1 before the text.
        start = np.concatenate((np.full(count, -1), committed))[-count:]
        paths = np.empty((len(tree), count), np.int64)
        for node, parent in enumerate(tree.parents):
            before = start if parent < 0 else paths[parent]
            paths[node] = *before[1:], own[node]
        found.append(paths[entry.num_computed :])
    every = np.concatenate(found)
    return cache.to_index(np.maximum(every, 0)), torch.from_numpy(every >= 0).to(cache.device)


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
    """Return the attention of all rows to the keys and values of a layer, ``[rows, heads · d]``.

    The query heads of each key/value head are stacked as rows, so that one matrix product serves
    all of them. The output of a row that sees no key is zero. A row sees none in cross-attention if
    it is the first token of the text, or if the blocks of its window are released.

    Args:
        queries: ``[rows, heads, d]``.
        visible: keys that the rows of each request see.
        cache: cache with the keys and values.
        layer: number of the layer, from 0.
        scale: factor of the scores.
        cap: soft cap of the scores; ``None`` for none.
        sinks: scores without a value, ``[heads]``; ``None`` for none.
    """
    keys: Any = cache.keys[layer]  # tensors ``[kv_heads, slots, head_dim]``, as the values
    values: Any = cache.values[layer]
    (_, heads, size) = queries.shape
    kv_heads = len(keys)
    outputs = []
    for q, seen in zip(queries.split([each.num_rows for each in visible]), visible, strict=True):
        k = keys[:, seen.slots]
        v = values[:, seen.slots]
        if not k.shape[1]:
            outputs.append(q.new_zeros(len(q), heads * size))
            continue
        grouped = q.to(k.dtype).view(len(q), kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
        folded = grouped.reshape(kv_heads, -1, size)
        mask = seen.mask.repeat(heads // kv_heads, 1)
        if cap is None and sinks is None:
            out = F.scaled_dot_product_attention(
                folded[None], k[None], v[None], attn_mask=mask, scale=scale
            )
        else:
            by_row = (
                None
                if sinks is None
                else sinks.view(kv_heads, -1, 1).repeat_interleave(len(q), dim=1).float()
            )
            out = capped_attention(folded, k, v, mask, scale, cap, sinks=by_row)
        out = (
            out.view(kv_heads, heads // kv_heads, len(q), size)
            .permute(2, 0, 1, 3)
            .reshape(len(q), -1)
        )
        outputs.append((out if seen.sees_any is None else out * seen.sees_any).to(queries.dtype))
    return torch.cat(outputs)


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    cap: float | None,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention with a soft cap of the scores, or with sinks, ``[…, rows, d]``.

    Args:
        q: queries ``[…, rows, d]``.
        k: keys ``[…, keys, d]``.
        v: values ``[…, keys, d]``.
        mask: whether a row sees a key, bool ``[rows, keys]``.
        scale: factor of the scores.
        cap: soft cap ``c``: a score ``s`` becomes ``c · tanh(s / c)``; ``None`` for none.
        sinks: scores that take part in the softmax without a value, ``[…, rows, 1]``.
    """
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(v.dtype) @ v
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1].to(v.dtype) @ v


class TorchPass:
    """State of one run of a program: its rows, and the tensors ("buffers") of its operations.

    An operation reads and writes buffers by name. ``batch`` is ``None`` for a program that reads
    neither tokens nor the cache, only the hidden states in the buffer ``stream``.
    """

    def __init__(
        self,
        batch: ForwardBatch | None,
        stream: Tensor,
        cache: PagedCache | None,
        collected: Array | None,
        device: str,
    ) -> None:
        self._batch = batch
        self.cache = cache
        self.collected = collected
        self.device = device
        self._made: dict[object, Any] = {}  # results of once(), which all layers share, by key
        self.buffers: dict[str, Tensor] = {"stream": stream}
        # Parts of the buffer ``A`` by index, until store() has all of them.
        self._parts: dict[int, Tensor] = {}
        self.pairs_per_expert: list[int] = []
        self.num_experts_read = 0  # number of experts with at least one row, summed over layers

    @property
    def batch(self) -> ForwardBatch:
        """The batch that this run computes; an assertion fails if there is none."""
        assert self._batch is not None, "expected a batch for tokens and attention, found none"
        return self._batch

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """Return ``make()``, called once in this pass for each ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def store(self, name: str, part: tuple[int, int] | None, x: Tensor) -> None:
        """Store ``x`` as the buffer ``name``, or as one part of the buffer ``A``.

        ``part`` is ``None`` for a whole buffer. Otherwise it is (index of the part, number of
        parts), and ``name`` has no effect. Once all parts are stored, they are joined along the
        last dimension.
        """
        if part is None:
            self.buffers[name] = x
            return
        self._parts[part[0]] = x
        if len(self._parts) == part[1]:
            self.buffers["A"] = torch.cat(
                [self._parts.pop(index) for index in range(part[1])], dim=-1
            )

    def rotate(self, x: Tensor, rope: RopeTable) -> Tensor:
        """Apply rotary position embeddings to ``x`` ``[rows, heads, head_dim]``.

        ``rope`` has the cosines and sines of each position.
        """

        def entries_of_rows() -> Tensor:
            entries, by_row = self.batch.rope_entries(rope)
            if not by_row:
                entries = entries[self.batch.positions]
            return to_tensor(entries).to(self.device, x.dtype)

        entries = self.once(("rope", rope.config), entries_of_rows)
        cos, sin = entries.unsqueeze(2).unbind(1)
        half = cos.shape[-1]
        first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    @cached_property
    def adapted_rows(self) -> list[tuple[int, Tensor]]:
        """For each adapter of the batch's requests: its number, and the indices of its rows."""
        if self._batch is None:
            return []
        numbers = [entry.block_table.adapter for entry in self.batch.entries]
        by_row = torch.from_numpy(np.repeat(numbers, self.batch.row_counts)).to(self.device)
        return [
            (number, (by_row == number).nonzero()[:, 0]) for number in sorted({*numbers} - {-1})
        ]

    def growth(self, growth: float, period: int) -> Tensor:
        """Return a factor for the queries of each row, ``[rows, 1, 1]``.

        The factor ``1 + growth · log(1 + position // period)`` grows with the row's position; see
        ``ModelConfig.query_growth``.
        """
        factors = 1.0 + growth * np.log1p(self.batch.positions // period)
        return torch.from_numpy(factors).to(self.device, self.buffers["stream"].dtype)[
            :, None, None
        ]

    @cached_property
    def slots(self) -> Tensor:
        """The slot of each row in the program's cache."""
        assert isinstance(self.cache, TorchCache)
        return self.cache.to_index(self.batch.slots(self.cache))
