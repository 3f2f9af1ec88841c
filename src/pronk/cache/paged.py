"""Keys and values of all requests, in preallocated arrays (pools) addressed by slot.

Memory map of one layer's keys (values likewise), with blocks of 16 tokens::

    slot      0       16      32            16·B          16·B + 16
              | block 0 | block 1 | … | block B-1 | margin            |

Token ``p`` of a request has slot ``block · 16 + p % 16``. The margin is never allocated: a vector
load of the last slot may read past its end. :mod:`pronk.cache.layout` defines the bytes of a slot.

The numbers and sizes of heads may differ by layer. A layer that reads the keys and values of an
earlier one stores none. A layer with a short convolution has no values; its states, rows of
``hidden`` numbers, take the place of keys. For drafters, the cache also saves *features*: outputs
of some layers, or functions of several outputs, in arrays with the same slots. An operation that
copies, moves, caches or drops a token's keys therefore does the same with its features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import UINT8, Array, DType, mapped_zeros
from pronk.cache.blocks import BlockAllocator, BlockTable
from pronk.cache.layout import (
    PANEL,
    ROWS,
    PoolLayout,
    array_dtype,
    choose_layouts,
    fill_poison,
    kv_bytes_per_token,
    state_bytes,
)
from pronk.cache.prefix import PrefixCache
from pronk.cache.prompt_cache import PromptCache
from pronk.cache.states import DEFAULT_COUNTS, StateCounts, StatePool
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import RopeConfig, RopeTable
from pronk.kernels.library import TYPES, Kernels

# Kinds of arrays in calls of the kernel ``pronk_move``: saved layer outputs, values, keys.
_ROW, _VALUE, _KEY = range(3)


class Feature(Protocol):
    """A function of several layers' outputs at one token; the cache saves its value for drafters.

    The model's own forward pass computes it (:meth:`compile`).

    Attributes:
        layers: the layers, from 1; 0 is the embedding.
        width: number of elements of a value.
        only_logits_rows: whether drafters read the values of those rows only whose logits a forward
            pass returns; the others may have none. Such a feature has one layer.
    """

    layers: tuple[int, ...]
    width: int
    only_logits_rows: bool

    @property
    def identity(self) -> str:
        """Digest of everything besides the model that the function's values depend on."""
        ...

    def compile(self, program: Any, collected: Mapping[int, int]) -> None:
        """Append the operations that compute the values of all rows, and save them in the cache.

        They follow the last of ``layers``, whose output is in the residual stream. They may change
        the buffer ``A``, but not the stream.

        Args:
            program: a :class:`~pronk.models.program.Program`.
            collected: for each of the other layers, the number of its output in ``collected`` of
                ``Program.run``.
        """


# Feature that the cache saves for each token: the output of a layer (by its number, from 1), or a
# function of several outputs.
SavedFeature = int | Feature


class KeyBias(NamedTuple):
    """A bias that the keys of a layer are stored without (:mod:`pronk.models.key_biases`).

    Attributes:
        values: the bias before RoPE, float32 ``[kv_heads, head_dim]``; 0 outside of the pairs.
        pairs: numbers of the pairs, int32: pair ``i`` has the elements ``i`` and ``i + dim / 2``.
    """

    values: Array
    pairs: Array


class PagedCache:
    """Paged KV cache of one model: arrays, block allocator, commit and rollback of draft tokens.

    Attributes:
        can_compute_features: whether features can be functions; false if several processes share
            the forward passes.
        is_in_memory: whether keys and values are in the machine's memory, where drafters can read
            them.
        version: number that increases with every change of ``keys``, ``values`` and ``features``.
        dtype: data type of the model, of states and of saved layer outputs.
        kv_dtype: data type of stored keys and values: ``dtype``, int8 or int4.
        keys: one array per layer; see :mod:`pronk.cache.layout`.
        values: one array per layer, empty for a layer without attention, and for one that reads the
            keys of another. Then ``keys`` is empty, too, unless the layer has a short convolution.
            With latent attention, ``keys`` is empty, and a row of ``values`` is the key, whose
            first elements are the value.
        features: arrays ``[1, slots, width]`` of saved features.
        prefix_cache: blocks that later prompts can reuse; ``None`` if prompts share no blocks.
        prompt_cache: blocks of the prefix cache on disk, if any.
        states: states of recurrent layers; ``None`` for a model without such layers.
        key_biases: for layers of an int4 cache, from 0: what keys are stored without.
    """

    can_compute_features = True
    is_in_memory = True

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: DType,
        kernels: Kernels,
        kv_dtype: DType | None = None,
        poison: float | None = None,
        share_prefixes: bool = False,
    ) -> None:
        """Allocate the arrays.

        Args:
            config: the model.
            num_blocks: number of blocks.
            block_size: tokens per block, a multiple of 16.
            dtype: data type of the model.
            kernels: move the rows of accepted draft tokens.
            kv_dtype: data type of stored keys and values: ``dtype``, int8 or int4; by default
                ``dtype``.
            poison: number that is written over freed blocks, so that tests detect reads of them.
            share_prefixes: whether prompts reuse blocks of earlier texts with the same prefix.
        """
        assert block_size % PANEL == 0, "the kernels read keys in panels of 16"
        self.kernels = kernels
        self.version = 0
        self.config = config
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.block_size = block_size
        self.poison = poison
        self.prefix_cache: PrefixCache | None = None
        # Under dynamic RoPE scaling, keys depend on the prompt's length, so prompts cannot share
        # them.
        if share_prefixes and not config.has_dynamic_rope:
            self.prefix_cache = PrefixCache()
        self.prompt_cache: PromptCache | None = None
        self.states: StatePool | None = None
        if config.recurrent is not None:
            self.resize_states(DEFAULT_COUNTS)
        self.keys: list[Array]
        self.values: list[Array]
        self.features: dict[SavedFeature, Array] = {}
        self.key_biases: Mapping[int, KeyBias] = {}
        self._key_layout, self._value_layout = self._choose_layouts()
        # The drafters that read a feature.
        self._owners: dict[SavedFeature, WeakSet[object]] = {}
        self._rope_tables: dict[RopeConfig, RopeTable] = {}
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Replace all arrays by new ones of ``num_blocks`` blocks; no request may hold a block."""
        self.allocator = BlockAllocator(num_blocks, self.block_size)
        self.num_slots = num_blocks * self.block_size + PANEL
        features = tuple(self.features)
        # The old arrays are freed before the new ones are allocated.
        self.keys = []
        self.values = []
        self.features = {}
        config = self.config
        kv_array_dtype = array_dtype(self.kv_dtype)
        for layer in range(config.num_layers):
            shape = config.shape_of(layer)
            num_heads = shape.num_kv_heads if config.stores_keys(layer) else 0
            key_shape = self._key_layout.shape(self.num_slots, shape.head_dim)
            value_shape = self._value_layout.shape(self.num_slots, shape.head_dim)
            num_keys = 0 if config.has_values_in_keys else num_heads
            keys = self._new_pool(num_keys, key_shape, kv_array_dtype)
            if config.convolution_of(layer):
                keys = self._new_feature_pool(config.hidden_size)  # states in place of keys
            self.keys.append(keys)
            self.values.append(self._new_pool(num_heads, value_shape, kv_array_dtype))
        for feature in features:
            self.features[feature] = self._new_feature_pool(self.feature_width(feature))
        self._on_pool_change()

    def resize_states(self, counts: StateCounts) -> None:
        """Change the numbers of states of recurrent layers; no request may have a state.

        All states and checkpoints are dropped.
        """
        self.states = StatePool(self.config, counts, self.block_size, self.poison)
        self.version += 1
        if self.prefix_cache is not None:
            self.states.caches_prefixes = True
            self.prefix_cache.on_evict = self.states.drop_checkpoint

    def rope_table(self, rope: RopeConfig) -> RopeTable:
        """Return the table of a rotation of keys; all programs that use this cache share it."""
        if rope not in self._rope_tables:
            self._rope_tables[rope] = RopeTable(rope)
        return self._rope_tables[rope]

    def save_feature(self, feature: SavedFeature, owner: object) -> None:
        """Save a feature of the tokens of every later forward pass.

        ``owner`` is the drafter that reads the saved numbers. After its deletion,
        :meth:`drop_unused_features` frees their memory.
        """
        self._owners.setdefault(feature, WeakSet()).add(owner)
        if feature not in self.features:
            self.features[feature] = self._new_feature_pool(self.feature_width(feature))
            self._on_pool_change()

    def feature_width(self, feature: SavedFeature) -> int:
        """Return how many numbers are saved per token: the hidden size, or a function's width."""
        return self.config.hidden_size if isinstance(feature, int) else feature.width

    @property
    def computed_features(self) -> list[Feature]:
        """Saved features that are functions of several layers' outputs.

        The outputs of single layers are saved, too.
        """
        return [feature for feature in self.features if not isinstance(feature, int)]

    def drop_unused_features(self) -> None:
        """Free the features whose owners have all been deleted."""
        unused = [feature for feature in self.features if not self._owners[feature]]
        for feature in unused:
            del self.features[feature]
            del self._owners[feature]
            self._on_pool_change()

    def _on_pool_change(self) -> None:
        """Increase ``version``, and clear the prefix cache.

        The blocks of the prefix cache are lost, or lack a layer output that is saved from now on.
        """
        self.version += 1
        # The arguments of ``pronk_move`` that describe the arrays.
        self._move_arguments: tuple[Array, ...] | None = None
        if self.prefix_cache is not None:
            self.prefix_cache.attach(self.allocator)
        if self.states is not None:
            self.states.drop_checkpoints()

    def _choose_layouts(self) -> tuple[PoolLayout, PoolLayout]:
        """Return the layouts of keys and of values."""
        return choose_layouts(self.kv_dtype)

    def _new_pool(self, heads: int, shape: tuple[int, ...], dtype: DType) -> Array:
        # Even a short text writes to every pool: with huge pages, it would take 2 MiB for each
        # layer and head.
        return mapped_zeros((heads, *shape), dtype, huge_pages=False)

    def _new_feature_pool(self, width: int) -> Array:
        return self._new_pool(1, (self.num_slots, width), self.dtype)

    @property
    def _pools(self) -> tuple[Array, ...]:
        """All arrays of the cache; dimension 1 is the slot, or for keys the panel of 16 slots."""
        keys_and_values = [pool for pool in (*self.keys, *self.values) if len(pool)]
        return (*keys_and_values, *self.features.values())

    @property
    def in_use(self) -> bool:
        """Whether any request holds a block."""
        return self.allocator.num_free < self.allocator.num_blocks

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token: keys, values and states of all layers, and saved outputs."""
        kv_bytes = kv_bytes_per_token(self.config, self.kv_dtype)
        width = sum(map(self.feature_width, self.features))
        return kv_bytes + state_bytes(self.config, self.dtype) + width * self.dtype.itemsize

    def prepare(self, block_table: BlockTable, tokens: int) -> None:
        """Make the slots of tokens ``block_table.length .. tokens - 1`` writable.

        Missing blocks are allocated, and blocks that several tables hold are replaced by copies.

        Raises:
            CacheFullError: too few blocks are free.
        """
        if not block_table.blocks:
            block_table.version = self.version
        if self.states is not None:
            self.states.reserve(block_table)
        self.allocator.allocate(block_table, tokens)
        first = block_table.length // self.block_size - block_table.num_released
        stop = self.allocator.num_blocks_for(tokens) - block_table.num_released
        references = self.allocator.references
        for index in range(first, stop):
            block = block_table.blocks[index]
            if references[block] > 1:  # several tables hold the block
                old, new = self.allocator.replace_shared(block_table, index)
                self._copy(old, new)
            elif self.prefix_cache is not None and self.prefix_cache.is_cached(block):
                # This table was forked in the middle of the block, and the other table filled the
                # block, cached it and was released.
                self.prefix_cache.evict(block)

    def feature_name(self, feature: SavedFeature) -> str:
        """Return a name of a feature that is the same in every process."""
        return f"layer {feature}" if isinstance(feature, int) else feature.identity

    def read_block(self, block: int) -> bytes:
        """Return the stored bytes of a block, ``block_size * bytes_per_token``."""
        pools = (pool for _, pool in self._layouts_and_pools())
        return b"".join(pool[:, self._block_range(pool, block)].tobytes() for pool in pools)

    def write_block(self, block: int, data: bytes, tokens: Sequence[int]) -> None:
        """Overwrite a block with the result of :meth:`read_block` of a cache with the same layout.

        ``tokens`` are the token ids in the block.
        """
        del tokens  # used by the cache of several processes, which overrides this method
        begin = 0
        for _, pool in self._layouts_and_pools():
            part = pool[:, self._block_range(pool, block)]
            part[...] = np.frombuffer(data, pool.dtype, part.size, begin).reshape(part.shape)
            begin += part.nbytes

    def _copy(self, old: int, new: int) -> None:
        for pool in self._pools:
            pool[:, self._block_range(pool, new)] = pool[:, self._block_range(pool, old)]

    def _block_range(self, pool: Array, block: int) -> slice:
        """Return the range of a block's slots, or panels of slots, in dimension 1 of ``pool``."""
        size = self.block_size * pool.shape[1] // self.num_slots
        return slice(block * size, (block + 1) * size)

    def slots(
        self, block_table: BlockTable, start: int, stop: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the slots of tokens ``start .. stop - 1``; any number for one without a block."""
        first = self._first_slot(block_table, start, stop)
        if first is not None:
            return np.arange(first, first + stop - start, dtype=np.int64)
        tokens = np.arange(start, stop, dtype=np.int64)
        blocks = np.asarray(block_table.blocks, dtype=np.int64)
        index = tokens // self.block_size - block_table.num_released
        in_table = (index >= 0) & (index < len(blocks))
        token_blocks = blocks[np.where(in_table, index, 0)]
        slots = token_blocks * self.block_size + tokens % self.block_size
        return np.where(in_table, slots, 0)

    def _first_slot(self, block_table: BlockTable, start: int, stop: int) -> int | None:
        """Return the slot of token ``start`` if those up to ``stop - 1`` follow; else ``None``."""
        if block_table.first_block is None:
            return None
        first = block_table.first_block * self.block_size + start
        return first if first >= 0 and first + stop - start <= self.num_slots else None

    def read_feature(
        self, feature: SavedFeature, block_table: BlockTable, start: int, stop: int
    ) -> Array:
        """Return the feature of tokens ``start .. stop - 1``.

        The tokens must have blocks, and must have been computed after :meth:`save_feature`.

        Returns:
            A new array ``[stop - start, width]`` of the model's data type.
        """
        pool = self.features[feature][0]
        first = self._first_slot(block_table, start, stop)
        if first is not None:
            return pool[first : first + stop - start].copy()
        return pool[self.slots(block_table, start, stop)]

    def commit_slots(self, block_table: BlockTable, offsets: Sequence[int]) -> None:
        """Commit draft tokens: token ``length + offsets[i]`` becomes token ``length + i``.

        A token is moved only if ``offsets[i] != i``; ``range(n)`` moves none.
        """
        if self.states is not None:
            self.states.commit(block_table, offsets)
        if offsets != range(len(offsets)):
            self._move_rows(block_table, offsets)
        block_table.length += len(offsets)

    def _move_rows(self, block_table: BlockTable, offsets: Sequence[int]) -> None:
        """Move the rows that :meth:`commit_slots` moves."""
        moved_to = [index for index, offset in enumerate(offsets) if offset != index]
        if moved_to:
            length = block_table.length
            slots = self.slots(block_table, length, length + max(offsets) + 1)
            moved_from = [offsets[index] for index in moved_to]
            self.move(slots[moved_from], slots[moved_to])

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy the content of the slots ``source`` to the slots ``target``.

        All slots are read before any is overwritten.

        Raises:
            MemoryError: there is no memory for a copy of the content.
        """
        if self._move_arguments is None:
            self._move_arguments = self._describe_pools()
        # The kernel gets addresses only; ``arrays`` keeps contiguous copies alive during the call.
        arrays = (*self._move_arguments, np.ascontiguousarray(source), np.ascontiguousarray(target))
        addresses = [array.ctypes.data for array in arrays]
        code = self.kernels.library.pronk_move(
            *addresses[:4], len(arrays[0]), *addresses[4:], len(source)
        )
        if code:
            msg = f"kernels: no memory to move {len(source)} rows"
            raise MemoryError(msg)

    def _describe_pools(self) -> tuple[Array, ...]:
        """Return the arguments of ``pronk_move`` that describe the arrays.

        Returns:
            For each array: address, number of its data type, kind, and shape as rows (heads, slots,
            width).
        """
        config = self.config
        kinds = list[int]()
        types = list[int]()
        shapes = list[tuple[int, ...]]()
        for kind, pools in ((_KEY, self.keys), (_VALUE, self.values)):
            for layer, pool in enumerate(pools):
                if not len(pool):
                    continue
                if config.stores_keys(layer):
                    shape = config.shape_of(layer)
                    kinds.append(kind)
                    types.append(TYPES[self.kv_dtype])
                    shapes.append((shape.num_kv_heads, self.num_slots, shape.head_dim))
                else:
                    kinds.append(_ROW)
                    types.append(TYPES[self.dtype])
                    shapes.append(pool.shape)
        kinds += [_ROW] * len(self.features)
        types += [TYPES[self.dtype]] * len(self.features)
        shapes += [pool.shape for pool in self.features.values()]
        every = self._pools
        return (
            np.array([pool.ctypes.data for pool in every], dtype=np.int64),
            np.array(types, dtype=np.int32),
            np.array(kinds, dtype=np.int32),
            np.array(shapes, dtype=np.int64),
        )

    def export_slots(self, slots: NDArray[np.int64]) -> Array:
        """Return the content of ``slots``, to copy it to the cache of another process.

        Returns:
            Bytes ``[len(slots), bytes_per_token]``, uint8.
        """
        rows = []
        for layout, pool in self._layouts_and_pools():
            for part in layout.parts(pool):
                values = part[:, slots // layout.panel, :, slots % layout.panel]
                values = np.ascontiguousarray(values).reshape(len(slots), -1)
                rows.append(values.view(UINT8))
        return np.concatenate(rows, axis=1)

    def import_slots(self, slots: NDArray[np.int64], data: Array) -> None:
        """Overwrite ``slots`` with the result of :meth:`export_slots`, with the same layout."""
        begin = 0
        for layout, pool in self._layouts_and_pools():
            for part in layout.parts(pool):
                slot = part[:, 0, :, 0]
                stop = begin + slot.nbytes
                values = np.ascontiguousarray(data[:, begin:stop]).view(part.dtype)
                values = values.reshape(len(slots), *slot.shape)
                part[:, slots // layout.panel, :, slots % layout.panel] = values
                begin = stop

    def _layouts_and_pools(self) -> Iterator[tuple[PoolLayout, Array]]:
        """Yield all arrays with their layouts, in the same order in every process."""
        for layer, pool in enumerate(self.keys):
            if not len(pool):
                continue
            yield ROWS if self.config.convolution_of(layer) else self._key_layout, pool
        for pool in self.values:
            if len(pool):
                yield self._value_layout, pool
        for feature in sorted(self.features, key=self.feature_name):
            yield ROWS, self.features[feature]

    def rollback(self, block_table: BlockTable, length: int) -> int:
        """Drop all tokens after the first ``length``; the blocks stay allocated.

        Return the number of tokens that need not be computed again: ``length``, or 0 if the states
        of recurrent layers include a dropped token (:meth:`StatePool.rollback`).
        """
        if self.states is not None:
            length = self.states.rollback(block_table, length)
        block_table.length = length
        del block_table.digests[length // self.block_size :]
        block_table.num_stored = min(block_table.num_stored, len(block_table.digests))
        return length

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of blocks: states of recurrent layers."""
        return 0 if self.states is None else self.states.nbytes

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's states of recurrent layers; a pass reads and writes them once."""
        return 0 if self.states is None else self.states.state_bytes

    @property
    def max_requests(self) -> int | None:
        """Maximum number of requests with states of recurrent layers; ``None``: no limit."""
        return None if self.states is None else self.states.counts.requests

    @property
    def has_free_state(self) -> bool:
        """Whether another request can get states of recurrent layers, if the model has them."""
        return self.states is None or self.states.has_free_state

    @property
    def num_free_updates(self) -> int | None:
        """Number of draft tokens that recurrent layers have room for; ``None``: no limit."""
        return None if self.states is None else self.states.num_free_updates

    def want_checkpoints(
        self, block_table: BlockTable, positions: tuple[int, ...], fork_at: int | None = None
    ) -> None:
        """Ask for copies of the states of recurrent layers.

        Args:
            block_table: table of the text.
            positions: numbers of tokens; checkpoints are wanted at the ends of the last blocks
                before them.
            fork_at: number of tokens after which :meth:`fork` will be called; ``None``: it will not
                be.
        """
        if block_table.states is not None:
            block_table.states.wanted = positions
            block_table.states.fork_at = fork_at

    def fork(self, block_table: BlockTable, tokens: int) -> BlockTable | None:
        """Return a new table that shares the blocks of the first ``tokens`` tokens.

        ``None`` if the states of recurrent layers after these tokens are not known; see
        :meth:`want_checkpoints`.
        """
        forked = self.allocator.fork(block_table, tokens)
        if self.states is not None and not self.states.fork(block_table, forked):
            self.release(forked)
            return None
        return forked

    def has_states(self, block_table: BlockTable) -> bool:
        """Return whether the states of recurrent layers are those of the committed tokens.

        An interrupted step can leave others; then the text must be read again.
        """
        return self.states is None or self.states.is_complete(block_table)

    def match_prefix(
        self, tokens: Sequence[int], salt: bytes = b"", digests: list[bytes] | None = None
    ) -> BlockTable | None:
        """Return a table with the longest cached prefix of ``tokens``; ``None`` if it is empty.

        The arguments are those of :meth:`PrefixCache.match`.
        """
        if self.prefix_cache is None:
            return None
        block_table = self.prefix_cache.match(tokens, salt, digests)
        if block_table is None or not self._restore_states(block_table):
            return None
        block_table.version = self.version
        return block_table

    def _restore_states(self, block_table: BlockTable) -> bool:
        """Cut a table of cached blocks at its last checkpoint, and restore the states there.

        Without a checkpoint, or a free state, the blocks are released; then return False.
        """
        if self.states is None:
            return True
        found = self.states.checkpoints.find(block_table.digests)
        if found is None or not self.states.has_free_state:
            self.release(block_table)
            return False
        number, slot = found
        length = number * self.block_size
        self.trim(block_table, length)
        self.rollback(block_table, length)
        self.states.restore(block_table, slot)
        return True

    def has_cached_block(self, digest: bytes) -> bool:
        """Return whether the prefix cache holds a block with this digest."""
        return self.prefix_cache is not None and self.prefix_cache.contains(digest)

    def write_state(self, block_table: BlockTable, data: bytes) -> None:
        """Give a table the state after all its tokens, read from disk.

        See :meth:`StatePool.read_state`. The table's own state, if it has one, is dropped.
        """
        assert self.states is not None
        self.states.release(block_table)
        self.states.write_state(block_table, data)

    def cache_blocks(
        self,
        block_table: BlockTable,
        tokens: Sequence[int],
        salt: bytes = b"",
        num_committed: int | None = None,
    ) -> None:
        """Add a table's full blocks to the prefix cache, and to the prompt cache, if there are any.

        Nothing is added if the cache's ``version`` changed after the allocation of the blocks: a
        layer output that is saved now may be missing. The arguments are those of
        :meth:`PrefixCache.insert`.
        """
        if self.prefix_cache is not None and block_table.version == self.version:
            self.prefix_cache.insert(block_table, tokens, salt, num_committed)
            if self.states is not None:
                self.states.add_checkpoints(block_table)
            if self.prompt_cache is not None:
                self.prompt_cache.store_blocks(block_table)
                self.prompt_cache.store_states(block_table)

    def release_before(self, block_table: BlockTable, token: int) -> None:
        """Release the blocks that hold only tokens before ``token``."""
        self._poison_blocks(self.allocator.release_before(block_table, token))

    def release_outside_window(self, block_table: BlockTable) -> None:
        """Release the blocks whose tokens have left the sliding window of every layer."""
        window = self.config.window
        if window is not None:
            self.release_before(block_table, block_table.length - window + 1)

    def trim(self, block_table: BlockTable, tokens: int) -> None:
        """Release all blocks except the blocks of the first ``tokens`` tokens."""
        self._poison_blocks(self.allocator.trim(block_table, tokens))

    def release(self, block_table: BlockTable) -> None:
        """Release all blocks and states of a request."""
        if self.states is not None:
            if self.prompt_cache is not None:
                self.prompt_cache.store_states(block_table, is_released=True)
            self.states.release(block_table)
        self._poison_blocks(self.allocator.release(block_table))

    def reset(self) -> None:
        """Free all blocks and states; existing tables must not be used any more."""
        self.allocator.reset()
        if self.states is not None:
            self.states.reset()

    def _poison_blocks(self, blocks: Sequence[int]) -> None:
        if self.poison is None:
            return
        for block in blocks:
            for pool in self._pools:
                fill_poison(pool[:, self._block_range(pool, block)], self.poison)
