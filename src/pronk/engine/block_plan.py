"""Number of KV blocks that a request still needs: for its next tokens, and until its end.

The scheduler plans with this module; :mod:`pronk.cache.blocks` allocates. In vLLM, both are parts
of the KV cache manager: :attr:`BlockPlan.num_new_blocks` is the result of its
``get_num_blocks_to_allocate``, and :meth:`BlockPlanner.num_draft_slots` its
``num_lookahead_tokens``, which vary here with the number of empty blocks.

Blocks are counted in two ways, which differ only for a model whose layers all have a sliding
window: such a request releases the blocks that its window has left.

- *Logical blocks* are those from the first token of the text on, released ones included. vLLM keeps
  a null block in the block table for a released one; here ``BlockTable.num_released`` counts them.
- *Held blocks* are those that the request occupies at one time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pronk.cache.blocks import max_held_blocks, max_held_tokens
from pronk.cache.paged import PagedCache
from pronk.engine.request import Request


class BlockPlan(NamedTuple):
    """Numbers of KV blocks that a request still needs, by which the scheduler decides."""

    # Blocks to allocate for the pending tokens and for the one that the forward pass generates. A
    # held block that is shared with another request counts if it has to be copied before a write.
    # Negative if the request holds more blocks than these tokens need.
    num_new_blocks: int
    # Blocks to allocate afterwards, if the request generates ``max_tokens`` tokens; at least 0.
    num_later_blocks: int

    def with_reserve(self, share: float) -> int:
        """Return ``num_new_blocks`` plus the fraction ``share``, 0..1, of ``num_later_blocks``."""
        return self.num_new_blocks + int(share * self.num_later_blocks)


@dataclass(frozen=True)
class BlockPlanner:
    """Counts blocks of one KV cache without allocating or releasing any.

    Attributes:
        cache: the KV cache, with its allocator.
        window: largest sliding window of a layer in tokens; ``None`` if a layer has full attention,
            so that no block is released before the end of a request.
        prefill_chunk: maximum number of prompt tokens per forward pass.
        max_tree: maximum number of rows per decoding request and forward pass: the pending token
            and its draft tokens.
    """

    cache: PagedCache
    window: int | None
    prefill_chunk: int
    max_tree: int

    def plan(self, request: Request) -> BlockPlan:
        """Return how many blocks must be allocated for a request, now and later.

        A running request holds the blocks of its computed tokens. A waiting one may hold those of a
        cached prefix.
        """
        allocator = self.cache.allocator
        table = request.block_table
        num_next = request.num_pending + 1
        next_length = table.length + max_held_tokens(num_next, self.window, self.prefill_chunk)
        num_needed = allocator.num_blocks_for(next_length)
        num_unused = max(0, self.num_logical_blocks(request) - num_needed)
        num_text_blocks = allocator.num_blocks_for(table.length + request.num_pending)
        num_held_by_text = num_text_blocks - table.num_released
        return BlockPlan(
            num_new_blocks=allocator.num_missing(table, next_length) - num_unused,
            num_later_blocks=max(0, self.max_blocks(request) - num_held_by_text),
        )

    def num_logical_blocks(self, request: Request) -> int:
        """Return the number of blocks from the first token on, released ones included."""
        return request.block_table.num_released + len(request.block_table.blocks)

    def max_blocks(self, request: Request) -> int:
        """Return the maximum number of blocks that a request holds at one time."""
        return self.max_blocks_for(max_length(request))

    def max_blocks_for(self, length: int) -> int:
        """Return the maximum number of blocks held at one time by a text that grows to ``length``.

        ``length`` is in tokens.
        """
        return max_held_blocks(length, self.window, self.prefill_chunk, self.cache.block_size)

    def can_reserve_all(self, request: Request) -> bool:
        """Return whether a request may reserve the blocks of all its tokens at once.

        Consecutive blocks are read faster. The request may reserve them if half of the empty blocks
        suffice for all its tokens and for the draft tokens of a step. A request with a sliding
        window never does: it releases its first blocks while it runs.
        """
        allocator = self.cache.allocator
        num_empty = allocator.num_free - len(allocator.evictable)
        missing = allocator.num_missing(request.block_table, max_length(request) + self.max_tree)
        return self.window is None and missing <= num_empty // 2

    def num_draft_slots(self, request: Request, num_sharing: int) -> int:
        """Return the number of KV slots for draft tokens after the pending token of a request.

        The empty blocks are divided evenly among ``num_sharing`` requests: this one and those whose
        slots are not reserved yet. Without empty blocks, a block of the prefix cache is evicted if
        the request has at most ``block_size`` free slots and its text may need a next block.

        Returns:
            0 to ``max_tree - 1``.
        """
        allocator = self.cache.allocator
        block_size = self.cache.block_size
        num_blocks = self.num_logical_blocks(request)
        num_free_slots = num_blocks * block_size - request.block_table.length
        num_empty = allocator.num_free - len(allocator.evictable)
        num_new_blocks = num_empty // num_sharing
        num_final_blocks = allocator.num_blocks_for(max_length(request))
        may_need_next = num_free_slots <= block_size and num_blocks < num_final_blocks
        if not num_new_blocks and allocator.num_free and may_need_next:
            num_new_blocks = 1
        num_slots = num_free_slots + num_new_blocks * block_size
        # One slot is that of the pending token, the root of the tree.
        return max(0, min(self.max_tree, num_slots) - 1)


def max_length(request: Request) -> int:
    """Return the maximum number of tokens of a request's text, prompt and output."""
    return len(request.prompt) + request.params.max_tokens
