"""Reads of KV blocks from disk, a part in each step, so that other requests go on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.engine.request import Request
from pronk.models.cost_model import CostModel


@dataclass
class DiskReads:
    """Requests whose blocks are being read from disk.

    A request is in no forward pass as long as blocks of it are left to read.
    """

    cache: PagedCache  # the target's; its ``prompt_cache`` has the blocks on disk
    # measured durations: blocks are read only if reading is faster than computing them
    costs: CostModel
    # for each request, a generator that reads the next blocks and yields the number of tokens left
    _parts: dict[Request, Iterator[int]] = field(default_factory=dict)
    # for each request, the number of tokens that are left to read
    _num_left: dict[Request, int] = field(default_factory=dict)

    def load(
        self, block_table: BlockTable, tokens: Sequence[int], salt: bytes, digests: list[bytes]
    ) -> Iterator[int]:
        """Return an iterator that reads the blocks after a cached prefix in parts.

        Each item is the number of tokens left to read. Arguments are those of
        :meth:`.PromptCache.load`; without a prompt cache, the iterator is empty.
        """
        prompts = self.cache.prompt_cache
        if prompts is None:
            return iter(())
        return prompts.load(block_table, tokens, salt, digests, self.costs.prompt_row)

    def start(self, request: Request) -> None:
        """Begin to read the blocks that follow a request's cached prefix, which is in memory."""
        request.stats.cached_tokens += request.block_table.length
        if not request.computes_whole_prompt:
            self._parts[request] = self.load(
                request.block_table, request.tokens, request.cache_salt, request.digests
            )
            self._read_part(request)

    def read_parts(self) -> None:
        """Read the next part of each request."""
        for request in [*self._parts]:
            self._read_part(request)

    def is_reading(self, request: Request) -> bool:
        """Return whether blocks of a request are left to read."""
        return request in self._parts

    def reads_for(self, request: Request) -> bool:
        """Return whether a waiting request needs blocks that are being read for another."""
        size = self.cache.block_size
        salt = request.cache_salt
        stops = [
            (each, each.block_table.length + size)
            for each in self._parts
            if each.cache_salt == salt
        ]
        return any(each.tokens[:stop] == request.tokens[:stop] for each, stop in stops)

    def num_to_compute(self, request: Request) -> int:
        """Return the number of a request's tokens to compute: neither in memory nor to be read."""
        return request.num_pending - self._num_left.get(request, 0)

    def all_wait(self, running: Sequence[Request]) -> bool:
        """Return whether requests wait for blocks from disk and no other one can go on."""
        return bool(self._parts) and all(self.is_reading(each) or each.ended for each in running)

    def stop(self, request: Request) -> None:
        """Forget a request that is no longer running."""
        self._parts.pop(request, None)
        self._num_left.pop(request, None)

    def _read_part(self, request: Request) -> None:
        length = request.block_table.length
        num_left = 0 if request.ended else next(self._parts[request], 0)
        self._num_left[request] = num_left
        # Negative if a block that the sliding window needs is missing on disk: then even the cached
        # prefix that was in memory is released.
        num_read = request.block_table.length - length
        request.stats.disk_tokens += max(0, num_read)
        request.stats.cached_tokens += num_read
        if not num_left:
            self.stop(request)
