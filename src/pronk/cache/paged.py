"""Keys and values of all requests, in preallocated arrays (pools) addressed by slot.

Memory map of one layer's keys (values likewise), with blocks of 16 tokens::

    slot      0       16      32            16·B          16·B + 16
              | block 0 | block 1 | … | block B-1 | margin            |

Token ``p`` of a request has slot ``block · 16 + p % 16``. The margin is never allocated: a vector
load of the last slot may read past its end. :mod:`pronk.cache.layout` defines the bytes of a slot.

A layer with a short convolution has states of ``hidden`` numbers in place of keys, in rows, and no
values. For drafters, the cache may also save *features* of each token: outputs of some layers, or
functions of them. The features of a token have the token's slot, so that whatever copies, moves,
caches or drops keys does the same with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import UINT8, Array, DType, mapped_zeros
from pronk.cache.blocks import BlockAllocator, BlockTable
from pronk.cache.layout import (
    PANEL,
    ROWS,
    PoolLayout,
    choose_layouts,
    fill_poison,
    kv_bytes_per_token,
    state_bytes,
)
from pronk.cache.prefix import PrefixCache
from pronk.cache.prompt_cache import PromptCache
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import RopeConfig, RopeTable
from pronk.kernels.library import TYPES, Kernels

# Numbers that the kernel ``pronk_move`` uses for kinds of arrays: features, values, keys.
_ROW, _VALUE, _KEY = range(3)


class Feature(Protocol):
    """A function of the outputs of several layers at one token, whose value the cache saves."""

    layers: tuple[int, ...]  # the layers, from 1; 0 is the embedding
    width: int  # size of a value

    @property
    def identity(self) -> str:
        """Digest of everything that the values depend on besides the model."""
        ...

    def compute(self, outputs: Sequence[Array]) -> Array:
        """Return values ``[rows, width]``, given the output ``[rows, hidden]`` of each of ``layers``."""


# What the cache saves of each token besides keys and values: the output of a layer (by its number,
# from 1), or a function of several.
SavedFeature = int | Feature


class PagedCache:
    """Paged KV cache of one model: arrays, block allocator, and commit and rollback of draft tokens."""

    # whether features that are functions can be saved: not if several processes share a forward pass
    can_compute_features = True

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: DType,
        kernels: Kernels | None,
        kv_dtype: DType | None = None,
        poison: float | None = None,
        share_prefixes: bool = False,
    ) -> None:
        """Allocate the arrays.

        Tests pass ``poison``, a number written over freed blocks, to detect reads.

        ``kernels`` move the rows of accepted draft tokens; they are ``None`` only in a subclass
        with its own ``move``.
        """
        assert block_size % PANEL == 0, "the kernels read keys in panels of 16"
        self.kernels = kernels
        # increases with every change of the arrays ``keys``, ``values`` and ``features``
        self.version = 0
        self.config = config
        # data type of keys and values before they are stored, of states and of ``features``
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype  # data type of stored keys and values: ``dtype`` or int8
        self.block_size = block_size
        self.poison = poison
        # Under dynamic RoPE scaling, keys depend on the prompt's length, so prompts cannot share
        # them.
        self.prefix_cache = (
            PrefixCache() if share_prefixes and not config.has_dynamic_rope else None
        )
        self.prompt_cache: PromptCache | None = None  # blocks of the prefix cache on disk
        # one array per layer; ``values`` likewise; see ``pronk.cache.layout``
        self.keys: list[Array]
        self.values: list[Array]
        self.features: dict[SavedFeature, Array] = {}  # their pools, ``[1, slots, width]``
        self._key_layout, self._value_layout = self._choose_layouts()
        self._owners: dict[SavedFeature, WeakSet[object]] = {}  # the objects that read them
        self._rope_tables: dict[RopeConfig, RopeTable] = {}
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Replace the arrays by empty ones of ``num_blocks`` blocks.

        No request may hold a block.
        """
        self.allocator = BlockAllocator(num_blocks, self.block_size)
        self.num_slots = num_blocks * self.block_size + PANEL
        features = tuple(self.features)
        # frees the arrays before others are allocated
        self.keys = []
        self.values = []
        self.features = {}
        config = self.config
        width = self.config.hidden_size
        key_shape, value_shape = (
            each.shape(self.num_slots, config.head_dim)
            for each in (self._key_layout, self._value_layout)
        )
        for layer in range(config.num_layers):
            heads = 0 if config.convolution_of(layer) else config.num_kv_heads
            self.keys.append(
                self._new_pool(heads, key_shape, self.kv_dtype)
                if heads
                else self._new_feature_pool(width)
            )
            self.values.append(self._new_pool(heads, value_shape, self.kv_dtype))
        for feature in features:
            self.features[feature] = self._new_feature_pool(self.feature_width(feature))
        self._on_pool_change()

    def rope_table(self, rope: RopeConfig) -> RopeTable:
        """Return the table of a rotation of keys; all programs that use this cache share it."""
        if rope not in self._rope_tables:
            self._rope_tables[rope] = RopeTable(rope)
        return self._rope_tables[rope]

    def save_feature(self, feature: SavedFeature, owner: object) -> None:
        """Save a feature of the tokens of every later forward pass.

        After the deletion of ``owner``, which reads it, :meth:`drop_unused_features` frees the
        memory.
        """
        self._owners.setdefault(feature, WeakSet()).add(owner)
        if feature not in self.features:
            self.features[feature] = self._new_feature_pool(self.feature_width(feature))
            self._on_pool_change()

    def feature_width(self, feature: SavedFeature) -> int:
        """Return the number of values of a feature of one token."""
        return self.config.hidden_size if isinstance(feature, int) else feature.width

    @property
    def computed_features(self) -> list[Feature]:
        """The saved features that :class:`~pronk.models.model_runner.ModelRunner` computes.

        Outputs of layers are stored by the forward pass itself.
        """
        return [feature for feature in self.features if not isinstance(feature, int)]

    def drop_unused_features(self) -> None:
        """Free the features whose owners have all been deleted."""
        for feature in [each for each in self.features if not self._owners[each]]:
            del self.features[feature], self._owners[feature]
            self._on_pool_change()

    def _on_pool_change(self) -> None:
        """Increase ``version``.

        Clear the prefix cache: its blocks are lost or lack a new layer output.
        """
        self.version += 1
        # those of ``pronk_move`` that describe the arrays
        self._move_arguments: tuple[Array, ...] | None = None
        if self.prefix_cache is not None:
            self.prefix_cache.attach(self.allocator)

    def _choose_layouts(self) -> tuple[PoolLayout, PoolLayout]:
        """Return the layouts of keys and of values."""
        return choose_layouts(self.kv_dtype)

    def _new_pool(self, heads: int, shape: tuple[int, ...], dtype: DType) -> Array:
        # Few tokens touch every pool: with huge pages, a short text would take 2 MiB for each layer
        # and head.
        return mapped_zeros((heads, *shape), dtype, huge_pages=False)

    def _new_feature_pool(self, width: int) -> Array:
        return self._new_pool(1, (self.num_slots, width), self.dtype)

    @property
    def _pools(self) -> tuple[Array, ...]:
        """All arrays of the cache; dimension 1 is the slot, or in keys the panel of 16 slots."""
        return (*self.keys, *(pool for pool in self.values if len(pool)), *self.features.values())

    @property
    def in_use(self) -> bool:
        """Whether any request holds a block."""
        return self.allocator.num_free < self.allocator.num_blocks

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes of one token: its keys and values in all layers, and its features."""
        features = sum(map(self.feature_width, self.features)) * self.dtype.itemsize
        return (
            kv_bytes_per_token(self.config, self.kv_dtype)
            + state_bytes(self.config, self.dtype)
            + features
        )

    def prepare(self, block_table: BlockTable, tokens: int) -> None:
        """Make the slots of tokens ``block_table.length .. tokens - 1`` writable.

        Missing blocks are allocated, and blocks that several tables hold are replaced by copies.
        Raises ``CacheFullError`` if too few blocks are free.
        """
        if not block_table.blocks:
            block_table.version = self.version
        self.allocator.allocate(block_table, tokens)
        first = block_table.length // self.block_size - block_table.num_released
        for index in range(first, self.allocator.num_blocks_for(tokens) - block_table.num_released):
            if self.allocator.is_shared(block_table.blocks[index]):
                self._copy(*self.allocator.replace_shared(block_table, index))
            elif self.prefix_cache is not None:
                # This block is about to be written. It may be cached: if this table was forked in
                # the middle of the block, and the other table filled it, cached it and was
                # released.
                self.prefix_cache.evict(block_table.blocks[index])

    def feature_name(self, feature: SavedFeature) -> str:
        """Return a name that means the same in every process."""
        return f"layer {feature}" if isinstance(feature, int) else feature.identity

    def read_block(self, block: int) -> bytes:
        """Return the stored bytes of a block, ``block_size * bytes_per_token``."""
        pools = (pool for _, pool in self._layouts_and_pools())
        return b"".join(pool[:, self._block_range(pool, block)].tobytes() for pool in pools)

    def write_block(self, block: int, data: bytes, tokens: Sequence[int]) -> None:
        """Store the result of :meth:`read_block` of a cache with this layout.

        ``tokens`` are the block's.
        """
        del tokens  # only a cache with mirrors needs them
        begin = 0
        for _, pool in self._layouts_and_pools():
            part = pool[:, self._block_range(pool, block)]
            part[...] = np.frombuffer(data, pool.dtype, part.size, begin).reshape(part.shape)
            begin += part.nbytes

    def _copy(self, old: int, new: int) -> None:
        for pool in self._pools:
            pool[:, self._block_range(pool, new)] = pool[:, self._block_range(pool, old)]

    def _block_range(self, pool: Array, block: int) -> slice:
        """Return the range of a block's slots, or panels, in the second dimension of ``pool``."""
        size = self.block_size * pool.shape[1] // self.num_slots
        return slice(block * size, (block + 1) * size)

    def slots(
        self, block_table: BlockTable, start: int, stop: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the slots of tokens ``start .. stop - 1``.

        An arbitrary slot for tokens without a block.
        """
        tokens = np.arange(start, stop, dtype=np.int64)
        if block_table.first_block is not None:
            base = block_table.first_block * self.block_size
            if base + start >= 0 and base + stop <= self.num_slots:
                return tokens + base
        blocks = np.asarray(block_table.blocks, dtype=np.int64)
        index = tokens // self.block_size - block_table.num_released
        in_table = (index >= 0) & (index < len(blocks))
        return np.where(
            in_table,
            blocks[np.where(in_table, index, 0)] * self.block_size + tokens % self.block_size,
            0,
        )

    def read_feature(
        self, feature: SavedFeature, block_table: BlockTable, start: int, stop: int
    ) -> Array:
        """Return a feature of tokens ``start .. stop - 1``, ``[stop - start, width]``.

        The tokens must have blocks, and must have been computed after :meth:`save_feature`.
        """
        return self.features[feature][0, self.slots(block_table, start, stop)]

    def write_feature(self, feature: Feature, slots: NDArray[np.int64], values: Array) -> None:
        """Store values ``[rows, width]`` of a feature at ``slots`` ``[rows]``."""
        self.features[feature][0, slots] = values

    def commit_slots(self, block_table: BlockTable, offsets: Sequence[int]) -> None:
        """Commit draft tokens: the one at index ``length + offsets[i]`` becomes token ``length + i``.

        Only tokens with ``offsets[i] != i`` are moved; ``commit_slots(block_table, range(n))`` moves
        none.
        """
        moves = [(offset, target) for target, offset in enumerate(offsets) if offset != target]
        if moves:
            length = block_table.length
            slots = self.slots(block_table, length, length + max(offsets) + 1)
            self.move(
                slots[[offset for offset, _ in moves]], slots[[target for _, target in moves]]
            )
        block_table.length += len(offsets)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy the slots ``source`` to ``target``.

        A slot in both is read before it is overwritten.
        """
        assert self.kernels is not None
        if self._move_arguments is None:
            row = self.config.num_kv_heads, self.num_slots, self.config.head_dim
            kinds = [
                _ROW if self.config.convolution_of(layer) else _KEY
                for layer in range(self.config.num_layers)
            ]
            kinds += [_VALUE] * kinds.count(_KEY) + [_ROW] * len(self.features)
            shapes = [
                pool.shape if kind == _ROW else row
                for kind, pool in zip(kinds, self._pools, strict=True)
            ]
            self._move_arguments = (
                np.array([pool.ctypes.data for pool in self._pools], dtype=np.int64),
                np.array([TYPES[pool.dtype] for pool in self._pools], dtype=np.int32),
                np.array(kinds, dtype=np.int32),
                np.array(shapes, dtype=np.int64),
            )
        # `arrays` keeps contiguous copies of the arguments alive during the call, which gets
        # addresses only.
        arrays = (*self._move_arguments, np.ascontiguousarray(source), np.ascontiguousarray(target))
        addresses = [array.ctypes.data for array in arrays]
        code = self.kernels.library.pronk_move(
            *addresses[:4], len(arrays[0]), *addresses[4:], len(source)
        )
        if code:
            msg = f"kernels: no memory to move {len(source)} rows"
            raise MemoryError(msg)

    def export_slots(self, slots: NDArray[np.int64]) -> Array:
        """Return the stored bytes of ``slots``, ``[len(slots), bytes_per_token]``, to copy to another process."""
        parts = [
            part[:, slots // layout.panel, :, slots % layout.panel]
            for layout, pool in self._layouts_and_pools()
            for part in layout.parts(pool)
        ]
        return np.concatenate(
            [np.ascontiguousarray(x).reshape(len(slots), -1).view(UINT8) for x in parts], axis=1
        )

    def import_slots(self, slots: NDArray[np.int64], data: Array) -> None:
        """Store bytes that :meth:`export_slots` of a cache with the same layout returned."""
        begin = 0
        for layout, pool in self._layouts_and_pools():
            for part in layout.parts(pool):
                slot = part[:, 0, :, 0]
                values = np.ascontiguousarray(data[:, begin : begin + slot.nbytes]).view(part.dtype)
                part[:, slots // layout.panel, :, slots % layout.panel] = values.reshape(
                    len(slots), *slot.shape
                )
                begin += slot.nbytes

    def _layouts_and_pools(self) -> Iterator[tuple[PoolLayout, Array]]:
        for layer, pool in enumerate(self.keys):
            yield ROWS if self.config.convolution_of(layer) else self._key_layout, pool
        yield from ((self._value_layout, pool) for pool in self.values if len(pool))
        for feature in sorted(self.features, key=self.feature_name):
            yield ROWS, self.features[feature]

    def rollback(self, block_table: BlockTable, length: int) -> None:
        """Drop all tokens but the first ``length``; the blocks stay allocated."""
        block_table.length = length
        del block_table.digests[length // self.block_size :]
        block_table.num_stored = min(block_table.num_stored, len(block_table.digests))

    def match_prefix(
        self, tokens: Sequence[int], salt: bytes = b"", digests: list[bytes] | None = None
    ) -> BlockTable | None:
        """Return a table with the longest cached prefix of a text.

        See :meth:`PrefixCache.match`.
        """
        block_table = (
            None if self.prefix_cache is None else self.prefix_cache.match(tokens, salt, digests)
        )
        if block_table is not None:
            block_table.version = self.version
        return block_table

    def has_cached_block(self, digest: bytes) -> bool:
        """Return whether the prefix cache holds a block with this digest."""
        return self.prefix_cache is not None and self.prefix_cache.contains(digest)

    def cache_blocks(
        self,
        block_table: BlockTable,
        tokens: Sequence[int],
        salt: bytes = b"",
        num_committed: int | None = None,
    ) -> None:
        """Add a table's full blocks to the prefix cache, unless ``version`` changed after their allocation."""
        if self.prefix_cache is not None and block_table.version == self.version:
            self.prefix_cache.insert(block_table, tokens, salt, num_committed)
            if self.prompt_cache is not None:
                self.prompt_cache.store_blocks(block_table)

    def release_before(self, block_table: BlockTable, token: int) -> None:
        """Release the blocks that hold only tokens before ``token``, which have left the sliding window."""
        self._poison_blocks(self.allocator.release_before(block_table, token))

    def release_outside_window(self, block_table: BlockTable) -> None:
        """Release the blocks whose tokens have left the sliding windows of all layers."""
        window = self.config.window
        if window is not None:
            self.release_before(block_table, block_table.length - window + 1)

    def trim(self, block_table: BlockTable, tokens: int) -> None:
        """Release all blocks but those of the first ``tokens`` tokens."""
        self._poison_blocks(self.allocator.trim(block_table, tokens))

    def release(self, block_table: BlockTable) -> None:
        """Release all blocks of a request."""
        self._poison_blocks(self.allocator.release(block_table))

    def _poison_blocks(self, blocks: Sequence[int]) -> None:
        if self.poison is not None:
            for block in blocks:
                for pool in self._pools:
                    fill_poison(pool[:, self._block_range(pool, block)], self.poison)
