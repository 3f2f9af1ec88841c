"""Keys and values of all requests, in one preallocated pool addressed by slot.

Memory map of one layer's keys (values likewise), with blocks of 16 tokens::

    slot      0       16      32            16·B          16·B + 16
              | block 0 | block 1 | … | block B-1 | margin            |

Beside them the pool may keep the outputs of some layers, for drafters that read them: one row per slot, which moves,
is shared and is forgotten as the keys are.

A request's token ``p`` has slot ``block · 16 + p % 16``. The margin is never owned: a vector of the last slot's values
may be read past its end. What is at a slot, :mod:`pronk.kv_cache.layout` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.kernels.library import TYPES
from pronk.kv_cache.blocks import BlockAllocator, BlockTable
from pronk.kv_cache.layout import OUTPUTS, PANEL, PoolLayout, kv_bytes_per_token, layouts, spoil
from pronk.kv_cache.prefix import PrefixCache

if TYPE_CHECKING:
    from pronk.kernels.library import Kernels

__all__ = ["PagedCache"]

# What a pool has at a slot, as the kernels count it.
_ROW, _VALUE, _KEY = range(3)


class PagedCache:
    """The pool, its allocator, and the moves that commit and roll back.

    Attributes:
        keys: one tensor per layer; see :mod:`pronk.kv_cache.layout`.
        values: likewise.
        hidden: one ``[1, slots, hidden]`` tensor for each layer whose output is kept, by the layer's number: 1 is the
            first one's.
        dtype: of the keys and values that a layer computes, and of the outputs that are kept.
        kv_dtype: of the keys and values that are kept: the same, or int8.
        kernels: who computes with it; ``None`` is torch.
        version: changes whenever the tensors are others than before.
        prefix: which prefixes the blocks hold, or ``None`` if that is not remembered.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        poison: float | None = None,
        kernels: Kernels | None = None,
        share_prefixes: bool = False,
    ) -> None:
        """``poison`` is written over freed blocks; tests use it to prove that nothing reads them."""
        assert kernels is None or block_size % PANEL == 0, "the kernels read keys in panels of 16"
        self.kernels = kernels
        self.version = 0
        self.config = config
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = device
        self.block_size = block_size
        self.poison = poison
        # Dynamic rotations of a prompt's keys depend on its length: the same tokens have others in another prompt.
        dynamic = config.rope is not None and config.rope.kind == "dynamic"
        self.prefix = PrefixCache() if share_prefixes and not dynamic else None
        self.keys: list[Tensor]
        self.values: list[Tensor]
        self.hidden: dict[int, Tensor] = {}
        self._keys, self._values = layouts(dtype, self.kv_dtype, packed=kernels is not None)
        self._owners: dict[int, WeakSet[object]] = {}
        self._moved: tuple[Any, ...] | None = None  # the pools as the kernels move them, for one version
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Begin anew with ``num_blocks`` blocks; no table may be in use."""
        self.allocator = BlockAllocator(num_blocks, self.block_size)
        self.num_slots = num_blocks * self.block_size + PANEL
        kept = tuple(self.hidden)
        self.keys, self.values, self.hidden = [], [], {}  # gone before the new ones need their memory
        heads, size = self.config.num_kv_heads, self.config.head_dim
        keys, values = ((heads, *kept.shape(self.num_slots, size)) for kept in (self._keys, self._values))
        self.keys = [_zeros(keys, self.kv_dtype, self.device) for _ in range(self.config.num_layers)]
        self.values = [_zeros(values, self.kv_dtype, self.device) for _ in range(self.config.num_layers)]
        self.hidden = {layer: self._rows() for layer in kept}
        self._changed()

    def keep_hidden(self, layer: int, owner: object) -> None:
        """From now on, keep the output of layer number ``layer`` (1 is the first) for the tokens of every pass.

        ``owner`` reads it; see :meth:`forget_hidden`.
        """
        self._owners.setdefault(layer, WeakSet()).add(owner)
        if layer not in self.hidden:
            self.hidden[layer] = self._rows()
            self._changed()

    def forget_hidden(self) -> None:
        """Outputs whose owners are all gone are not kept any longer."""
        for layer in [layer for layer in self.hidden if not self._owners[layer]]:
            del self.hidden[layer]
            self._changed()

    def _changed(self) -> None:
        """The tensors are others: what older blocks hold is gone, or lacks the outputs that are kept from now on."""
        self.version += 1
        if self.prefix is not None:
            self.prefix.attach(self.allocator)

    def _rows(self) -> Tensor:
        return _zeros((1, self.num_slots, self.config.hidden_size), self.dtype, self.device)

    @property
    def _pools(self) -> tuple[Tensor, ...]:
        """Everything that has a place for each slot, which is the second dimension."""
        return (*self.keys, *self.values, *self.hidden.values())

    @property
    def in_use(self) -> bool:
        """Whether any block is a request's."""
        return self.allocator.num_free < self.allocator.num_blocks

    @property
    def bytes_per_token(self) -> int:
        """What a token takes: its keys and values in all layers, and the outputs that are kept."""
        hidden = len(self.hidden) * self.config.hidden_size * self.dtype.itemsize
        return kv_bytes_per_token(self.config, self.kv_dtype) + hidden

    def prepare(self, block_table: BlockTable, tokens: int) -> None:
        """Make the places of tokens ``block_table.length .. tokens - 1`` writable: allocated, and not shared.

        Raises:
            CacheFullError: the pool has too few free blocks.
        """
        if not block_table.blocks:
            block_table.version = self.version
        self.allocator.grow(block_table, tokens)
        first = block_table.length // self.block_size - block_table.released
        for index in range(first, len(block_table.blocks)):
            if self.allocator.shared(block_table.blocks[index]):
                self._copy(*self.allocator.replace(block_table, index))
            elif self.prefix is not None:
                # A text that began with a part of it, and outlives the one that filled it, writes its own there.
                self.prefix.forget(block_table.blocks[index])

    def _copy(self, old: int, new: int) -> None:
        """A block gets what is in another."""
        for pool in self._pools:
            pool[:, self._places(pool, new)] = pool[:, self._places(pool, old)]

    def _places(self, pool: Tensor, block: int) -> slice:
        """Where a block is in the second dimension of a pool, which counts slots or panels."""
        size = self.block_size * pool.shape[1] // self.num_slots
        return slice(block * size, (block + 1) * size)

    def slots(self, block_table: BlockTable, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Slots of tokens ``start .. stop - 1``; places that the table does not hold get slot 0."""
        tokens = np.arange(start, stop, dtype=np.int64)
        if block_table.first is not None:
            base = block_table.first * self.block_size
            if base + start >= 0 and base + stop <= self.num_slots:
                return tokens + base
        blocks = np.asarray(block_table.blocks, dtype=np.int64)
        index = tokens // self.block_size - block_table.released
        held = (index >= 0) & (index < len(blocks))
        return np.where(held, blocks[np.where(held, index, 0)] * self.block_size + tokens % self.block_size, 0)

    def where(self, block_table: BlockTable, start: int, stop: int) -> slice | Tensor:
        """How to index the slots of a layer to read tokens ``start .. stop - 1``: a view of a run, or else a gather.

        Places beyond what the table holds are readable and meaningless: mask them.
        """
        slots = self.slots(block_table, start, stop)
        if slots[-1] - slots[0] == stop - start - 1 and (block_table.first is not None):
            return slice(int(slots[0]), int(slots[-1]) + 1)
        return torch.from_numpy(slots).to(self.keys[0].device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows ``[rows, kv_heads, head_dim]`` of a pass at ``slots`` ``[rows]``.

        What has overflowed is stored as zero: torch multiplies what a mask hides by zero, which leaves an infinity a
        NaN. The request itself ends with an error when its logits show it. (The kernels touch only what a row sees.)
        """
        keys, values = (rows.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1) for rows in (k, v))
        self._keys.write(self.keys[layer], slots, keys)
        self._values.write(self.values[layer], slots, values)

    def at(self, layer: int, where: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[kv_heads, tokens, head_dim]`` at some slots, in ``dtype``: a view where they can be."""
        return self._keys.read(self.keys[layer], where), self._values.read(self.values[layer], where)

    def write_hidden(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store outputs ``[rows, hidden]`` of layer number ``layer``, if they are kept, at ``slots`` ``[rows]``."""
        if layer in self.hidden:
            self.hidden[layer].index_copy_(1, slots, rows.nan_to_num(0.0, 0.0, 0.0)[None])

    def read_hidden(self, layer: int, block_table: BlockTable, start: int, stop: int) -> Tensor:
        """Outputs ``[stop - start, hidden]`` of layer number ``layer`` for tokens ``start .. stop - 1``.

        Only of tokens that the table holds and that a pass has computed since :meth:`keep_hidden`.
        """
        rows = self.hidden[layer][0]
        return rows[self.where(block_table, start, stop)] if stop > start else rows[:0]

    def read(self, layer: int, block_table: BlockTable) -> tuple[Tensor, Tensor]:
        """Keys and values ``[kv_heads, tokens, head_dim]`` of the committed tokens that are still held.

        The first is that of token ``block_table.released * block_size``.
        """
        return self.at(layer, self.where(block_table, block_table.released * self.block_size, block_table.length))

    def commit(self, block_table: BlockTable, offsets: Sequence[int]) -> None:
        """Keep the drafted rows at ``block_table.length + offset``, in this order, as the next committed tokens.

        Rows that are already in their place are not moved. ``commit(block_table, range(n))`` therefore costs nothing.
        """
        moves = [(offset, place) for place, offset in enumerate(offsets) if offset != place]
        if moves:
            length = block_table.length
            held = self.slots(block_table, length, length + max(offsets) + 1)
            self.move(held[[offset for offset, _ in moves]], held[[place for _, place in moves]])
        block_table.length += len(offsets)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy what is at the slots ``source`` to the slots ``target``; all is read before anything is written."""
        if self.kernels is None:
            origin, place = (torch.from_numpy(slots).to(self.device) for slots in (source, target))
            for pool in self._pools:
                pool[:, place] = pool[:, origin]
            return
        if self._moved is None or self._moved[0] != self.version:
            config, layers, hidden = self.config, len(self.keys), len(self.hidden)
            row = (config.num_kv_heads, self.num_slots, config.head_dim)
            shapes = [row] * 2 * layers + [(1, self.num_slots, config.hidden_size)] * hidden
            kinds = [_KEY] * layers + [_VALUE] * layers + [_ROW] * hidden
            self._moved = (
                self.version,
                np.array([pool.data_ptr() for pool in self._pools], dtype=np.int64),
                np.array([TYPES[pool.dtype] for pool in self._pools], dtype=np.int32),
                np.array(kinds, dtype=np.int32),
                np.array(shapes, dtype=np.int64),
            )
        # Held until the library has read them: of a view that lies apart these are copies, which nobody else holds.
        arrays = (*self._moved[1:], np.ascontiguousarray(source), np.ascontiguousarray(target))
        places = [array.ctypes.data for array in arrays]
        code = self.kernels.library.pronk_move(*places[:4], len(arrays[0]), *places[4:], len(source))
        if code:
            msg = f"kernels: no memory to move {len(source)} rows"
            raise MemoryError(msg)

    def take(self, slots: NDArray[np.int64]) -> Tensor:
        """All that is kept at some slots, as it is: bytes, ``[len(slots), bytes_per_token]``."""
        where = torch.from_numpy(slots).to(self.device)
        return torch.cat([layout.take(pool, where) for layout, pool in self._laid_out()], dim=1)

    def put(self, slots: NDArray[np.int64], kept: Tensor) -> None:
        """Store what :meth:`take` gave, of a pool of the same form."""
        where, begin = torch.from_numpy(slots).to(self.device), 0
        for layout, pool in self._laid_out():
            size = layout.size(pool)
            layout.put(pool, where, kept[:, begin : begin + size])
            begin += size

    def _laid_out(self) -> Iterator[tuple[PoolLayout, Tensor]]:
        """The pools, each with how it lies in memory."""
        yield from ((self._keys, pool) for pool in self.keys)
        yield from ((self._values, pool) for pool in self.values)
        yield from ((OUTPUTS, self.hidden[layer]) for layer in sorted(self.hidden))

    def rollback(self, block_table: BlockTable, length: int) -> None:
        """Forget everything after the first ``length`` tokens."""
        block_table.length = length
        del block_table.digests[length // self.block_size :]

    def match(self, tokens: Sequence[int], salt: bytes = b"", digests: list[bytes] | None = None) -> BlockTable | None:
        """A table of the longest beginning of a text that the pool still holds; see :meth:`PrefixCache.match`."""
        block_table = None if self.prefix is None else self.prefix.match(tokens, salt, digests)
        if block_table is not None:
            block_table.version = self.version
        return block_table

    def knows(self, digest: bytes) -> bool:
        """Whether the pool still holds the block of a digest that :meth:`match` has added."""
        return self.prefix is not None and self.prefix.knows(digest)

    def learn(
        self, block_table: BlockTable, tokens: Sequence[int], salt: bytes = b"", certain: int | None = None
    ) -> None:
        """Remember the full blocks of a text, unless it began before the tensors were what they are.

        See :meth:`PrefixCache.learn`.
        """
        if self.prefix is not None and block_table.version == self.version:
            self.prefix.learn(block_table, tokens, salt, certain)

    def fork(self, block_table: BlockTable, tokens: int) -> BlockTable:
        """A table of the first ``tokens`` tokens that shares their blocks; whoever writes first gets a copy."""
        return self.allocator.fork(block_table, tokens)

    def release_before(self, block_table: BlockTable, token: int) -> None:
        """Give back the blocks whose tokens all lie before ``token``: no later token sees them."""
        self._poison(self.allocator.release_before(block_table, token))

    def trim(self, block_table: BlockTable, tokens: int) -> None:
        """Give back the blocks behind the first ``tokens`` tokens."""
        self._poison(self.allocator.trim(block_table, tokens))

    def release(self, block_table: BlockTable) -> None:
        """Give back all blocks of a request."""
        self._poison(self.allocator.release(block_table))

    def _poison(self, blocks: Sequence[int]) -> None:
        if self.poison is not None:
            for block in blocks:
                for pool in self._pools:
                    spoil(pool[:, self._places(pool, block)], self.poison)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only once they are written, where the system can do that."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
