"""Memory budget of the KV pools of the target and the draft models."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from weakref import WeakSet

from pronk.base.arrays import DType
from pronk.base.errors import OptionError
from pronk.cache.layout import kv_bytes_per_token, state_bytes
from pronk.cache.paged import PagedCache, SavedFeature
from pronk.cache.states import StateCounts, count_state_bytes, count_states
from pronk.checkpoint.config import ModelConfig

# Tokens per block. Small blocks waste little memory of short requests; large blocks keep the block
# tables short.
BLOCK_SIZE = 32

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

# KV slots for draft tokens, which the default size of a pool has for each request
_DRAFT_SLOTS = 128
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


def full_context_blocks(config: ModelConfig, max_requests: int) -> int:
    """Return the number of blocks for ``max_requests`` full contexts and their draft tokens."""
    blocks_per_request = -(-(config.context + _DRAFT_SLOTS) // BLOCK_SIZE)
    return max_requests * blocks_per_request


def default_kv_bytes(
    config: ModelConfig, dtype: DType, kv_dtype: DType, max_requests: int, limit: int | None
) -> int:
    """Return the size in bytes of a KV pool of the default size, states included.

    Args:
        config: the model.
        dtype: the model's data type.
        kv_dtype: data type of stored keys and values.
        max_requests: number of requests that run at the same time.
        limit: maximum number of bytes, if there is one; the result is that of one block at least.
    """
    per_token = kv_bytes_per_token(config, kv_dtype) + state_bytes(config, dtype)
    num_bytes = full_context_blocks(config, max_requests) * BLOCK_SIZE * per_token
    fixed_bytes = 0
    if config.recurrent is not None:
        most = limit or int((machine_memory() or _ASSUMED_MEMORY) * _MAX_MEMORY_FRACTION)
        counts = count_states(config, max_requests, most // 2)
        fixed_bytes = count_state_bytes(config, counts)
    if limit is not None:
        num_bytes = max(BLOCK_SIZE * per_token, min(num_bytes, limit - fixed_bytes))
    return num_bytes + fixed_bytes


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
    ) -> None:
        """Set the total size of all pools.

        Args:
            kv_memory: the size, as in :func:`parse_memory`. ``None``: enough for ``max_requests``
                requests of the target's full context, but at most ``memory / 4 / processes``.
            max_requests: number of requests that run at the same time.
            processes: number of processes on the machine with such a budget.
            memory: bytes of memory; by default those of the machine.
        """
        self.kv_memory = kv_memory
        self.num_bytes = None if kv_memory is None else parse_memory(kv_memory)
        self.max_requests = max_requests
        total_bytes = memory or machine_memory() or _ASSUMED_MEMORY
        self._max_bytes = int(total_bytes * _MAX_MEMORY_FRACTION) // processes
        # number of blocks for ``max_requests`` full contexts of the target; ``None`` before
        # :meth:`add`
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
            make_pool: called with the arguments of :class:`PagedCache` except ``kernels``; see
                ``Backend.make_cache``.
            kv_dtype: data type of stored keys and values; by default ``dtype``.
            share_prefixes: whether the pool has a prefix cache.

        Raises:
            OptionError: the budget is too small for one block of every pool, or a request uses a
                pool that must shrink.
        """
        if self._max_blocks is None:
            self._max_blocks = full_context_blocks(config, self.max_requests)
        kv_bytes = kv_bytes_per_token(config, kv_dtype or dtype)
        counts = self._count_states(config)
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

    def _count_states(self, config: ModelConfig) -> StateCounts | None:
        """Return how many states of recurrent layers to store, in half of the budget.

        ``None`` for a model without recurrent layers.
        """
        if config.recurrent is None:
            return None
        num_bytes = self._max_bytes if self.num_bytes is None else self.num_bytes
        return count_states(config, self.max_requests, num_bytes // 2)

    def _resize_pools(self, extra_bytes: int, fixed_bytes: int = 0) -> int:
        """Make space for ``extra_bytes`` more bytes per token, and ``fixed_bytes`` of states.

        Returns:
            The new number of blocks of each pool.
        """
        for pool in self._pools:
            pool.drop_unused_features()
        bytes_per_token = extra_bytes + sum(pool.bytes_per_token for pool in self._pools)
        fixed_bytes += sum(pool.fixed_bytes for pool in self._pools)
        num_blocks = self._num_blocks(BLOCK_SIZE * bytes_per_token, fixed_bytes)
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

        ``block_bytes`` is the size of one block of every pool together, and ``fixed_bytes`` that of
        the states of recurrent layers.
        """
        if self.num_bytes is None:
            num_blocks = (self._max_bytes - fixed_bytes) // block_bytes
            return max(1, min(self._max_blocks or 1, num_blocks))
        if self.num_bytes < block_bytes + fixed_bytes:
            states = f" and {fixed_bytes} of states of recurrent layers" if fixed_bytes else ""
            msg = (
                f"kv_memory: expected at least {block_bytes + fixed_bytes} bytes, one block of "
                f"{BLOCK_SIZE} tokens{states}; found {self.kv_memory!r}"
            )
            raise OptionError(msg)
        return (self.num_bytes - fixed_bytes) // block_bytes
