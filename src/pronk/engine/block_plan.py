"""KV blocks of a request: how many it needs for its next tokens, and how many later at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pronk.cache.paged import PagedCache
from pronk.engine.request import Request


class BlockPlan(NamedTuple):
    """Blocks that a request lacks, counted once for a decision of the scheduler."""

    # Free blocks for the pending tokens and one more; negative if the request holds more than these
    # need. A block that other requests share counts if it has to be copied before it is written.
    now: int
    later: int  # further blocks, up to the request's maximum length

    def wanted(self, share: float) -> int:
        """Return the number of blocks for now, and a share, 0..1, of those for later."""
        return self.now + int(share * self.later)


@dataclass(frozen=True)
class BlockPlanner:
    """Counts blocks of one KV cache."""

    cache: PagedCache
    # largest sliding window of a layer in tokens; ``None`` if a layer has full attention
    window: int | None
    prefill_chunk: int  # maximum number of prompt tokens per forward pass
    max_tree: int  # maximum number of rows per decoding request and forward pass

    def plan(self, request: Request) -> BlockPlan:
        """Return how many blocks a request lacks; a waiting one may hold a cached prefix."""
        allocator = self.cache.allocator
        table = request.block_table
        length = table.length + self._in_window(request.num_pending + 1)
        unused = max(0, self.num_held(request) - allocator.num_blocks_for(length))
        end_of_text = (
            allocator.num_blocks_for(table.length + request.num_pending) - table.num_released
        )
        return BlockPlan(
            now=allocator.num_missing(table, length) - unused,
            later=max(0, self.maximum(request) - end_of_text),
        )

    def num_held(self, request: Request) -> int:
        """Return the number of blocks that a request has had so far, released ones included."""
        return request.block_table.num_released + len(request.block_table.blocks)

    def maximum(self, request: Request) -> int:
        """Return the maximum number of blocks that a request holds at once."""
        return self.maximum_of(max_length(request))

    def maximum_of(self, length: int) -> int:
        """Return the most blocks that a text of up to ``length`` tokens holds at once."""
        num_blocks = self.cache.allocator.num_blocks_for(self._in_window(length))
        # One more block, because a window can start in the middle of a block.
        return num_blocks + (self.window is not None)

    def can_reserve_all(self, request: Request) -> bool:
        """Return whether a request may reserve the blocks of all its tokens at once.

        It may if half of the empty blocks suffice for them and a step's draft tokens. A request
        with a sliding window never does: it releases its first blocks while it runs.
        """
        allocator = self.cache.allocator
        num_empty = allocator.num_free - len(allocator.evictable)
        missing = allocator.num_missing(request.block_table, max_length(request) + self.max_tree)
        return self.window is None and missing <= num_empty // 2

    def num_draft_slots(self, request: Request, num_sharing: int) -> int:
        """Return the number of KV slots for draft tokens after the pending token of a request.

        The empty blocks are divided evenly among ``num_sharing`` requests. Without empty blocks, a
        block of the prefix cache is evicted if the request has at most ``block_size`` free slots
        and its text may need a next block.
        """
        allocator = self.cache.allocator
        size = self.cache.block_size
        length = request.block_table.length
        num_held = self.num_held(request)
        num_new = (allocator.num_free - len(allocator.evictable)) // num_sharing
        num_free_slots = num_held * size - length
        num_of_text = allocator.num_blocks_for(max_length(request))
        may_need_next = num_free_slots <= size and num_held < num_of_text
        if not num_new and allocator.num_free and may_need_next:
            num_new = 1
        num_slots = num_free_slots + num_new * size
        return max(0, min(self.max_tree, num_slots) - 1)

    def _in_window(self, length: int) -> int:
        """Return ``length``, or less with a sliding window, which older tokens have left."""
        return length if self.window is None else min(length, self.window + self.prefill_chunk + 1)


def max_length(request: Request) -> int:
    """Return the maximum number of tokens of a request's text, prompt and output."""
    return len(request.prompt) + request.params.max_tokens
