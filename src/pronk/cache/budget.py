"""Memory budget of the KV pools of the target and the draft models."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import NamedTuple
from weakref import WeakSet

from pronk.base.arrays import DType
from pronk.base.errors import OptionError
from pronk.cache.blocks import max_held_blocks
from pronk.cache.layout import kv_bytes_per_token, state_bytes
from pronk.cache.paged import PagedCache, SavedFeature
from pronk.cache.states import StateCounts, count_state_bytes, count_states
from pronk.checkpoint.config import ModelConfig
from pronk.sampling.tree_size import DEFAULT_MAX_TREE

# Tokens per block. Small blocks waste little memory of short requests; large blocks keep the block
# tables short.
BLOCK_SIZE = 32

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

_MAX_MEMORY_FRACTION = 0.25  # maximum share of the machine's memory for pools of the default size
_ASSUMED_MEMORY = 8 << 30  # bytes of the machine's memory, if the system does not report them


def machine_memory() -> int | None:
    """Return the machine's memory in bytes; ``None`` on Windows, which does not report it."""
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def parse_memory(value: str | int, option: str = "kv_memory") -> int:
    """Return a memory size in bytes: of ``"2GiB"``, ``"500MB"``, ``"64k"`` or an integer.

    Raises:
        OptionError: the size is not positive, or the text has another form; ``option`` is the name
            in the message.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", str(value).upper())
    num_bytes = 0 if match is None else int(Decimal(match[1]) * _UNITS[match[2] or ""])
    if num_bytes == 0:
        msg = (
            f'{option}: expected a positive number of bytes, or text such as "2GiB" or "500MB"; '
            f"found {value!r:.60}"
        )
        raise OptionError(msg)
    return num_bytes


def full_context_blocks(
    config: ModelConfig, max_requests: int, max_tree: int = DEFAULT_MAX_TREE
) -> int:
    """Return the number of blocks for ``max_requests`` full contexts and trees of ``max_tree``."""
    blocks_per_request = -(-(config.context + max_tree) // BLOCK_SIZE)
    return max_requests * blocks_per_request


class RequestMemory(NamedTuple):
    """Memory of a request in a pool, in bytes."""

    kv_bytes: int  # blocks: keys, values, and states of short convolutions
    state_bytes: int  # the state of recurrent layers, which does not grow with the text


def request_memory(
    config: ModelConfig,
    dtype: DType,
    length: int,
    prefill_chunk: int,
    kv_dtype: DType | None = None,
) -> RequestMemory:
    """Return the most memory that a request has at one time in a pool, without draft tokens.

    Args:
        config: the model.
        dtype: the model's data type.
        length: number of tokens of the text, prompt and output.
        prefill_chunk: maximum number of prompt tokens per forward pass. A model whose layers all
            have a sliding window stores a chunk besides the window.
        kv_dtype: data type of stored keys and values; by default ``dtype``.
    """
    per_token = kv_bytes_per_token(config, kv_dtype or dtype) + state_bytes(config, dtype)
    num_blocks = max_held_blocks(length, config.window, prefill_chunk, BLOCK_SIZE)
    kv_bytes = num_blocks * BLOCK_SIZE * per_token
    if config.recurrent is None:
        return RequestMemory(kv_bytes, 0)
    one_state = StateCounts(requests=1, checkpoints=0, updates=0)
    return RequestMemory(kv_bytes, count_state_bytes(config, one_state))


def default_kv_bytes(
    config: ModelConfig,
    dtype: DType,
    kv_dtype: DType,
    max_requests: int,
    limit: int | None,
    *,
    share_prefixes: bool = False,
) -> int:
    """Return the default size in bytes of a KV pool, states of recurrent layers included.

    It has room for ``max_requests`` full contexts and their draft tokens, up to ``limit``.

    Args:
        config: the model.
        dtype: the model's data type.
        kv_dtype: data type of stored keys and values.
        max_requests: number of requests that run at the same time.
        limit: maximum number of bytes, if there is one. A pool has at least one block, and the
            states that one request needs, even if they exceed the limit.
        share_prefixes: whether the pool has a prefix cache.
    """
    per_token = kv_bytes_per_token(config, kv_dtype) + state_bytes(config, dtype)
    num_bytes = full_context_blocks(config, max_requests) * BLOCK_SIZE * per_token
    available = _default_limit() if limit is None else limit
    counts = _count_states(config, max_requests, available, share_prefixes=share_prefixes)
    fixed_bytes = 0 if counts is None else count_state_bytes(config, counts)
    # The states of a pool get at most half of its budget.
    num_bytes = max(num_bytes, fixed_bytes) + fixed_bytes
    if limit is not None:
        num_bytes = max(BLOCK_SIZE * per_token + fixed_bytes, min(num_bytes, limit))
    return num_bytes


def _default_limit(memory: int | None = None) -> int:
    """Return the maximum number of bytes of pools of the default size.

    ``memory`` is the number of bytes of memory; by default that of the machine.
    """
    return int((memory or machine_memory() or _ASSUMED_MEMORY) * _MAX_MEMORY_FRACTION)


def _count_states(
    config: ModelConfig,
    max_requests: int,
    available: int,
    *,
    share_prefixes: bool,
    max_tree: int = DEFAULT_MAX_TREE,
) -> StateCounts | None:
    """Return the numbers of states of a pool; ``None`` for a model without recurrent layers.

    Half of the ``available`` bytes is for states, the other half for blocks. A pool has the minimum
    of states (:func:`count_states`) even if they need more.
    """
    if config.recurrent is None:
        return None
    num_bytes = available // 2
    return count_states(
        config, max_requests, num_bytes, share_prefixes=share_prefixes, max_tree=max_tree
    )


class KVBudget:
    """Memory budget of the KV pools: one pool for the target and one for each draft model.

    All pools have the same number of blocks, and blocks of the same number of tokens. A request
    releases its blocks of all pools together. A draft model's pool therefore usually has enough
    blocks for the target's requests. It may have too few if the target has a sliding window, if
    requests share blocks, or if two drafters of a request use one draft model. A drafter that gets
    no blocks proposes nothing. The pool of a deleted drafter is freed when the next pool is added.
    """

    def __init__(
        self,
        kv_memory: str | int | None,
        max_requests: int,
        processes: int = 1,
        memory: int | None = None,
        max_tree: int = DEFAULT_MAX_TREE,
    ) -> None:
        """Set the total size of all pools.

        Args:
            kv_memory: the size, as in :func:`parse_memory`. ``None``: enough for ``max_requests``
                requests of the target's full context, but at most ``memory / 4 / processes``.
            max_requests: number of requests that run at the same time.
            processes: number of processes on the machine with such a budget.
            memory: bytes of memory; by default those of the machine.
            max_tree: rows of a request in a forward pass, for which there is room besides the text.
        """
        self.kv_memory = kv_memory
        self.num_bytes = None if kv_memory is None else parse_memory(kv_memory)
        self.max_requests = max_requests
        self.max_tree = max_tree
        self._max_bytes = _default_limit(memory) // processes
        # Blocks of ``max_requests`` full contexts; ``None`` before :meth:`add`.
        self._max_blocks: int | None = None
        self._pools: WeakSet[PagedCache] = WeakSet()

    def add(
        self,
        config: ModelConfig,
        dtype: DType,
        make_pool: Callable[..., PagedCache],
        kv_dtype: DType | None = None,
        *,
        share_prefixes: bool = False,
    ) -> PagedCache:
        """Return a new pool; all other pools shrink to make space.

        The first call is for the target, whose context determines the default size.

        Args:
            config: the model of the pool.
            dtype: the model's data type.
            make_pool: called with the arguments of :class:`PagedCache` except ``kernels``.
            kv_dtype: data type of stored keys and values; by default ``dtype``.
            share_prefixes: whether the pool has a prefix cache.

        Raises:
            OptionError: the budget is too small for the states and one block of every pool, or a
                request uses a pool that must shrink.
        """
        if self._max_blocks is None:
            self._max_blocks = full_context_blocks(config, self.max_requests, self.max_tree)
        kv_bytes = kv_bytes_per_token(config, kv_dtype or dtype)
        available = self._total_bytes - self._fixed_bytes
        counts = _count_states(
            config,
            self.max_requests,
            available,
            share_prefixes=share_prefixes,
            max_tree=self.max_tree,
        )
        fixed_bytes = 0 if counts is None else count_state_bytes(config, counts)
        num_blocks = self._resize_pools(kv_bytes + state_bytes(config, dtype), fixed_bytes)
        options = {
            "num_blocks": num_blocks,
            "block_size": BLOCK_SIZE,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
        }
        try:
            pool = make_pool(config, **options, share_prefixes=share_prefixes)
        except MemoryError as error:
            msg = f"kv_memory: {error}; set less"
            raise OptionError(msg) from error
        if counts is not None:
            pool.resize_states(counts)
        self._pools.add(pool)
        return pool

    def save_feature(self, pool: PagedCache, feature: SavedFeature, owner: object) -> None:
        """Let a pool store a feature of every token besides keys and values, within the budget.

        For drafters that read the target's hidden states. All pools shrink to make space, then
        :meth:`PagedCache.save_feature` is called; the feature is stored as long as ``owner``
        exists.

        Raises:
            OptionError: as in :meth:`add`.
        """
        if feature not in pool.features:
            self._resize_pools(pool.feature_width(feature) * pool.dtype.itemsize)
        pool.save_feature(feature, owner)

    @property
    def _total_bytes(self) -> int:
        """Maximum number of bytes of all pools."""
        return self._max_bytes if self.num_bytes is None else self.num_bytes

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of all pools' states of recurrent layers."""
        return sum(pool.fixed_bytes for pool in self._pools)

    def _resize_pools(self, extra_bytes: int, fixed_bytes: int = 0) -> int:
        """Make space for ``extra_bytes`` more bytes per token, and ``fixed_bytes`` of states.

        Returns:
            The new number of blocks of each pool.
        """
        for pool in self._pools:
            pool.drop_unused_features()
        bytes_per_token = extra_bytes + sum(pool.bytes_per_token for pool in self._pools)
        num_blocks = self._num_blocks(BLOCK_SIZE * bytes_per_token, fixed_bytes + self._fixed_bytes)
        if any(pool.in_use and pool.allocator.num_blocks > num_blocks for pool in self._pools):
            msg = (
                "expected no running request while a draft model is added, found some; finish or "
                "abort them first"
            )
            raise OptionError(msg)
        for pool in self._pools:
            if not pool.in_use and pool.allocator.num_blocks != num_blocks:
                pool.resize(num_blocks)
        return num_blocks

    def _num_blocks(self, block_bytes: int, fixed_bytes: int) -> int:
        """Return the number of blocks per pool.

        ``block_bytes`` are those of one block of each pool, ``fixed_bytes`` those of all states. If
        all layers of all models are recurrent, blocks need no memory.
        """
        max_blocks = self._max_blocks or 1
        available = self._total_bytes - fixed_bytes
        # Without states, a pool of the default size has one block even if memory is short.
        if available < block_bytes and (fixed_bytes or self.num_bytes is not None):
            raise OptionError(self._too_small(block_bytes, fixed_bytes))
        if not block_bytes:
            return max_blocks
        num_blocks = available // block_bytes
        return num_blocks if self.num_bytes is not None else max(1, min(max_blocks, num_blocks))

    def _too_small(self, block_bytes: int, fixed_bytes: int) -> str:
        """Return the message that the budget is too small for one block and the states."""
        states = f" and {fixed_bytes} of states of recurrent layers" if fixed_bytes else ""
        needed = (
            f"kv_memory: expected at least {block_bytes + fixed_bytes} bytes, one block of "
            f"{BLOCK_SIZE} tokens{states}"
        )
        if self.num_bytes is not None:
            return f"{needed}; found {self.kv_memory!r}"
        return f"{needed}; found {self._max_bytes} by default; set kv_memory"
