"""How large the KV pool is."""

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

# Places of each request for guesses beyond its text.
_GUESSES = 128

# Share of the machine's memory that the pool may take when nobody says how much.
_DEFAULT_SHARE = 0.25


def parse_memory(value: str | int) -> int:
    """Bytes of ``"2GiB"``, ``"500MB"``, ``"64k"`` or a plain number."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", str(value).upper())
    if match is None or float(match[1]) == 0:
        msg = f'kv_memory: expected a positive number of bytes, or text such as "2GiB" or "500MB"; found {value!r}'
        raise OptionError(msg)
    return int(float(match[1]) * _UNITS[match[2] or ""])


class KVBudget:
    """The memory that keys and values may take: a pool for the target, and one for every draft model beside it.

    All pools have the same number of blocks of the same number of tokens, and a request that gives its places in the
    target's away gives those in the others away as well. So one that has room in the target's has room in a draft's,
    unless it takes less there than its text: where the target keeps a window of it only, and where requests share
    blocks (samples of a prompt; remembered prefixes, until the draft's pool has learned them too); or unless two
    drafters of a request use one draft. One without room in a draft's goes on without its guesses. A pool whose
    drafters are gone gives its share back when the next one joins.
    """

    def __init__(
        self, kv_memory: str | int | None, max_requests: int, device: torch.device, processes: int = 1
    ) -> None:
        """The default is enough for ``max_requests`` full contexts of the target, within a quarter of the memory.

        Of which each of some ``processes`` has a part.
        """
        self.given = kv_memory
        self.memory = None if kv_memory is None else parse_memory(kv_memory)
        self.max_requests = max_requests
        self.device = device
        self._most = int(_memory(device) * _DEFAULT_SHARE) // processes
        self._wanted: int | None = None
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
        """A new pool of a ``kind``, for ``kernels`` or for torch; the others give up their share.

        The first one is the target's.

        Raises:
            OptionError: the budget does not hold a block of every pool, or a pool that has to shrink is in use.
        """
        if self._wanted is None:
            self._wanted = self.max_requests * -(-(config.context + _GUESSES) // BLOCK_SIZE)
        pool = kind(
            config,
            num_blocks=self._share(kv_bytes_per_token(config, kv_dtype or dtype)),
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
        """Let ``pool`` keep the output of a layer as well; see :meth:`~pronk.kv_cache.paged.PagedCache.keep_hidden`.

        Raises:
            OptionError: the budget does not hold a block of every pool, or a pool that has to shrink is in use.
        """
        if layer not in pool.hidden:
            self._share(pool.config.hidden_size * pool.dtype.itemsize)
        pool.keep_hidden(layer, owner)

    def _share(self, more: int) -> int:
        """Make room for ``more`` bytes per token; returns the number of blocks that every pool then has."""
        for pool in self._pools:
            pool.forget_hidden()
        count = self._count(BLOCK_SIZE * (more + sum(pool.bytes_per_token for pool in self._pools)))
        if any(pool.in_use and pool.allocator.num_blocks > count for pool in self._pools):
            msg = "expected no request while a draft model joins, found some that are being decoded; end them first"
            raise OptionError(msg)
        for pool in self._pools:
            if not pool.in_use and pool.allocator.num_blocks != count:
                pool.resize(count)
        return count

    def _count(self, block_bytes: int) -> int:
        if self.memory is None:
            return max(1, min(self._wanted or 1, self._most // block_bytes))
        if self.memory < block_bytes:
            msg = (
                f"kv_memory: expected at least {block_bytes} bytes, one block of {BLOCK_SIZE} tokens; "
                f"found {self.given!r}"
            )
            raise OptionError(msg)
        return self.memory // block_bytes


def _memory(device: torch.device) -> int:
    """Bytes: all of the machine's, or what is free on an accelerator once the weights are there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
