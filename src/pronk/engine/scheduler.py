"""Who takes part in the next pass, and with how many of its tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.engine.request import Request
from pronk.errors import CacheFullError

__all__ = ["Scheduler", "Turn"]


@dataclass(frozen=True)
class Turn:
    """``count`` of a request's pending tokens go through the next pass."""

    request: Request
    count: int

    @property
    def decodes(self) -> bool:
        """Whether the pass reaches the last certain token, so that a new one can be chosen after it."""
        return self.count == self.request.num_pending


@dataclass
class Scheduler:
    """First come, first served.

    A request is admitted when the cache can hold it to its end, so a running request never lacks room; one that the
    whole cache could not hold is refused when it is added.

    Attributes:
        cache: where the requests' keys and values go.
        window: positions after which no layer looks back, or ``None``.
        max_batch: most requests in a pass.
        prefill_chunk: most prompt tokens in a pass.
        max_tree: most rows of a request in a pass that decodes.
    """

    cache: PagedCache
    window: int | None
    max_batch: int
    prefill_chunk: int
    max_tree: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            CacheFullError: the cache is too small for it even when empty.
        """
        if self._bound(request) > self.cache.allocator.num_blocks:
            raise CacheFullError(self._too_small(request))
        self.waiting.append(request)

    def _too_small(self, request: Request) -> str:
        needed, blocks, size = self._bound(request), self.cache.allocator.num_blocks, self.cache.block_size
        return (
            f"the request needs room for {needed * size} tokens in the KV cache, which has {blocks * size}; "
            "raise kv_memory or lower max_tokens"
        )

    def schedule(self) -> list[Turn]:
        """The next pass: every running request that decodes, and prompts by chunks."""
        self._admit()
        turns: list[Turn] = []
        budget = self.prefill_chunk
        for request in self.running:
            pending = request.num_pending
            count = 1 if pending == 1 else min(pending, budget)
            if count:
                turns.append(Turn(request, count))
                budget -= count if pending > 1 else 0
        return turns

    def remove(self, request: Request) -> bool:
        """The request leaves, wherever it is, and its blocks are free. Returns whether it was here at all."""
        queue = next((queue for queue in (self.running, self.waiting) if request in queue), None)
        if queue is None:
            return False
        queue.remove(request)
        self.cache.release(request.table)
        if not self.running and not self.waiting:
            # An interruption may strike between taking a block and writing it down.
            self.cache.allocator.reset()
        return True

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            if not self.running and self._bound(request) > self.cache.allocator.num_blocks:
                # A drafter that has joined since has taken its share of the memory.
                self.waiting.popleft().fail(CacheFullError(self._too_small(request)))
                continue
            promised = sum(self._bound(other) for other in self.running)
            if promised + self._bound(request) > self.cache.allocator.num_blocks:
                return
            shared, of_prompt = self._shared(request), len(request.prompt) - 1
            if shared is not None and shared.length < of_prompt:
                return  # it is being computed
            if shared is not None:
                request.table = self.cache.fork(shared, of_prompt)
            self.running.append(self.waiting.popleft())
            if self.window is None:
                # All at once, so that the blocks lie in a run; a window's blocks come and go.
                self.cache.prepare(request.table, self._span(request))

    def _shared(self, request: Request) -> BlockTable | None:
        """The table of an earlier sample of the same prompt that a request can start from, if there is one."""
        parent = request.parent
        if parent is None or parent.ended or parent.table.released or not parent.table.blocks:
            return None
        return parent.table

    def _tail(self, request: Request) -> int:
        """Tokens after the prompt that may be written: the output, and a tree beyond it."""
        return request.params.max_tokens + self.max_tree

    def _span(self, request: Request) -> int:
        """Tokens that the cache holds of a request at a time."""
        total = len(request.prompt) + self._tail(request)
        chunk = self.prefill_chunk if request.num_pending > 1 else 1
        return total if self.window is None else min(total, self.window + chunk + self.max_tree)

    def _bound(self, request: Request) -> int:
        # One block more where the window starts in the middle of one.
        return self.cache.allocator.blocks_for(self._span(request)) + (self.window is not None)
