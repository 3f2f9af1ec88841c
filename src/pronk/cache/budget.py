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
from pronk.checkpoint.config import ModelConfig

# Tokens per block: small, so that short requests waste little memory, but large enough for short
# block tables.
BLOCK_SIZE = 32

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

# number of slots for draft tokens that the default size adds to each full context
_DRAFT_SLOTS = 128
_MAX_MEMORY_FRACTION = 0.25  # maximum share of the machine's memory for pools of the default size
_ASSUMED_MEMORY = 8 << 30  # bytes of the machine's memory, if the system does not report them


def machine_memory() -> int | None:
    """Return the bytes of memory of the machine.

    ``None`` if the system (Windows) does not report them.
    """
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def parse_memory(value: str | int, option: str = "kv_memory") -> int:
    """Return the bytes that ``option`` gives as ``"2GiB"``, ``"500MB"``, ``"64k"`` or an integer."""
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
    return max_requests * -(-(config.context + _DRAFT_SLOTS) // BLOCK_SIZE)


class KVBudget:
    """Memory budget of the KV pools: one pool for the target and one for each draft model.

    All pools have the same number of blocks of equal size, and a request that releases blocks of
    the target's pool releases those of the other pools too. A draft model's pool therefore usually
    has enough blocks for the target's requests. Exceptions: the target has a sliding window,
    requests share blocks, or two drafters of a request use one draft model. A drafter without
    blocks proposes nothing. The pool of a deleted drafter is freed when the next is added.
    """

    def __init__(
        self,
        kv_memory: str | int | None,
        max_requests: int,
        processes: int = 1,
        memory: int | None = None,
    ) -> None:
        """Set the total size of all pools to ``kv_memory``.

        ``None`` means enough for ``max_requests`` requests of the target's full context, but at
        most ``memory / 4 / processes``: the bytes of (by default) the machine's memory, and the
        number of processes with such a budget.
        """
        self.kv_memory = kv_memory
        self.num_bytes = None if kv_memory is None else parse_memory(kv_memory)
        self.max_requests = max_requests
        self._max_bytes = (
            int((memory or machine_memory() or _ASSUMED_MEMORY) * _MAX_MEMORY_FRACTION) // processes
        )
        # blocks of ``max_requests`` full contexts; ``None`` before :meth:`add`
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

        ``make_pool`` gets the arguments of :class:`PagedCache` without ``kernels``; see
        ``Backend.make_cache``. The first call is for the target: its context determines the default
        size. Raises ``OptionError`` if the budget is too small for one block of every pool, or a
        pool that has to shrink is in use.
        """
        if self._max_blocks is None:
            self._max_blocks = full_context_blocks(config, self.max_requests)
        num_blocks = self._resize_pools(
            kv_bytes_per_token(config, kv_dtype or dtype) + state_bytes(config, dtype)
        )
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
        self._pools.add(pool)
        return pool

    def save_feature(self, pool: PagedCache, feature: SavedFeature, owner: object) -> None:
        """Shrink all pools, and let ``pool`` save a feature for the object ``owner``.

        The errors are those of :meth:`add`.
        """
        if feature not in pool.features:
            self._resize_pools(pool.feature_width(feature) * pool.dtype.itemsize)
        pool.save_feature(feature, owner)

    def _resize_pools(self, extra_bytes: int) -> int:
        """Make space for ``extra_bytes`` more bytes per token.

        Return the new number of blocks of each pool.
        """
        for pool in self._pools:
            pool.drop_unused_features()
        num_blocks = self._num_blocks(
            BLOCK_SIZE * (extra_bytes + sum(pool.bytes_per_token for pool in self._pools))
        )
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

    def _num_blocks(self, block_bytes: int) -> int:
        if self.num_bytes is None:
            return max(1, min(self._max_blocks or 1, self._max_bytes // block_bytes))
        if self.num_bytes < block_bytes:
            msg = (
                f"kv_memory: expected at least {block_bytes} bytes, one block of {BLOCK_SIZE} "
                "tokens; "
                f"found {self.kv_memory!r}"
            )
            raise OptionError(msg)
        return self.num_bytes // block_bytes
