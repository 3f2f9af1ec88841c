"""Memory budget of the KV pools of the target and the draft models."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from pronk.architecture.config import ModelConfig
from pronk.errors import OptionError
from pronk.kv_cache.layout import kv_bytes_per_token
from pronk.kv_cache.paged import PagedCache

if TYPE_CHECKING:
    from pronk.kernels.library import Kernels

__all__ = ["BLOCK_SIZE", "KVBudget", "parse_memory"]

# Tokens per block: small enough that a short request wastes little, large enough that tables stay short.
BLOCK_SIZE = 32

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

# Slots per request for draft tokens beyond its context.
_DRAFT_SLOTS = 128

# Share of the machine's memory that the pools may take if kv_memory is not set.
_DEFAULT_SHARE = 0.25


def parse_memory(value: str | int) -> int:
    """Return the bytes of ``"2GiB"``, ``"500MB"``, ``"64k"`` or a plain number."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", str(value).upper())
    if match is None or float(match[1]) == 0:
        msg = f'kv_memory: expected a positive number of bytes, or text such as "2GiB" or "500MB"; found {value!r}'
        raise OptionError(msg)
    return int(float(match[1]) * _UNITS[match[2] or ""])


class KVBudget:
    """Memory budget of the KV pools: one pool for the target and one for each draft model.

    All pools have the same number of blocks of the same size, and a request that releases blocks of the target's pool
    releases those of the other pools too. A request with enough blocks in the target's pool therefore has enough in a
    draft's pool, except if it needs fewer in the target's: the target has a sliding window; requests share blocks
    (samples of one prompt, or cached prefixes before the draft's pool has learned them); or two drafters of one request
    use the same draft model. A request without blocks in a draft's pool continues without its draft tokens. The share
    of a pool whose drafters are gone is reclaimed when the next pool is added.
    """

    def __init__(
        self, kv_memory: str | int | None, max_requests: int, device: torch.device, processes: int = 1
    ) -> None:
        """Set the memory of all pools together.

        Without ``kv_memory``, it holds ``max_requests`` full contexts of the target, at most a quarter of the machine's
        memory. That quarter is divided among ``processes`` processes.
        """
        self.kv_memory = kv_memory
        self.num_bytes = None if kv_memory is None else parse_memory(kv_memory)
        self.max_requests = max_requests
        self.device = device
        self._max_bytes = int(_memory(device) * _DEFAULT_SHARE) // processes
        self._max_blocks: int | None = None
        self._pools: WeakSet[PagedCache] = WeakSet()

    def add(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        kernels: Kernels | None = None,
        kv_dtype: torch.dtype | None = None,
        *,
        share_prefixes: bool = False,
        kind: type[PagedCache] = PagedCache,
    ) -> PagedCache:
        """Return a new pool of class ``kind``; the other pools shrink to make space.

        The first pool is the target's.

        Raises:
            OptionError: the budget is too small for one block of every pool, or a pool that has to shrink is in use.
        """
        if self._max_blocks is None:
            self._max_blocks = self.max_requests * -(-(config.context + _DRAFT_SLOTS) // BLOCK_SIZE)
        pool = kind(
            config,
            num_blocks=self._resize_pools(kv_bytes_per_token(config, kv_dtype or dtype)),
            block_size=BLOCK_SIZE,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=self.device,
            kernels=kernels,
            share_prefixes=share_prefixes,
        )
        self._pools.add(pool)
        return pool

    def keep_hidden(self, pool: PagedCache, layer: int, owner: object) -> None:
        """Let ``pool`` keep the output of a layer; errors are those of :meth:`add`."""
        if layer not in pool.hidden:
            self._resize_pools(pool.config.hidden_size * pool.dtype.itemsize)
        pool.keep_hidden(layer, owner)

    def _resize_pools(self, extra_bytes: int) -> int:
        """Resize the pools for ``extra_bytes`` bytes per token; return the number of blocks of every pool."""
        for pool in self._pools:
            pool.drop_unused_hidden()
        count = self._num_blocks(BLOCK_SIZE * (extra_bytes + sum(pool.bytes_per_token for pool in self._pools)))
        if any(pool.in_use and pool.allocator.num_blocks > count for pool in self._pools):
            msg = "expected no running request while a draft model is added, found some; finish or abort them first"
            raise OptionError(msg)
        for pool in self._pools:
            if not pool.in_use and pool.allocator.num_blocks != count:
                pool.resize(count)
        return count

    def _num_blocks(self, block_bytes: int) -> int:
        if self.num_bytes is None:
            return max(1, min(self._max_blocks or 1, self._max_bytes // block_bytes))
        if self.num_bytes < block_bytes:
            msg = (
                f"kv_memory: expected at least {block_bytes} bytes, one block of {BLOCK_SIZE} tokens; "
                f"found {self.kv_memory!r}"
            )
            raise OptionError(msg)
        return self.num_bytes // block_bytes


def _memory(device: torch.device) -> int:
    """Return the machine's memory, or the free memory of an accelerator that already holds the weights."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
