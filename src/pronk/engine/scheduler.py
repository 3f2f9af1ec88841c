"""Who takes part in the next pass, with how many of its tokens, and with room for how many guesses.

Every step is scheduled anew. Blocks of the cache are taken as they are needed: a turn has places for its pending tokens
and for its guesses before the step begins, so that nothing runs out in the middle of it. Where blocks are short, these
give way, in this order: guesses, requests that would start, and running requests, the last in order first. Such a
request is *preempted*: its blocks are free, it waits in its old place, and later its text is read again, all of it,
which gives the same keys and values, so that its tokens do not change.

Priorities are strict: while those of a higher one keep coming, a lower one may wait for ever. Among equals the tenant
starts that was served least, and among a tenant's own whoever came first. Who runs is served in the order of having
started, and the last one gives way, whosever it is: that order never changes, so that the first one always gets on and
no two push each other out in turns, as they would if the tenant served most had to give way, which is another one after
every few tokens. What a tenant waits for is therefore the end of requests that had started before, and no more.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

from pronk.engine.fair_share import FairShare
from pronk.engine.request import AdmissionRefusal, Request
from pronk.errors import CacheFullError, DeadlineError
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache

__all__ = ["ScheduledRequest", "Scheduler"]

# The share of what running requests may still say that is kept free for them: more after each preemption for lack of
# blocks, and a little less with every step.
_MORE, _FADE = 1 / 8, 0.99


@dataclass(frozen=True)
class ScheduledRequest:
    """A request's part of the next pass.

    Attributes:
        request: whose.
        count: so many of its pending tokens go through.
        num_draft_slots: places that the cache has for guesses behind them.
    """

    request: Request
    count: int
    num_draft_slots: int = 0

    @property
    def decodes(self) -> bool:
        """Whether the pass reaches the last certain token, so that a new one can be chosen after it."""
        return self.count == self.request.num_pending


@dataclass
class Scheduler:
    """Requests of higher priority first; among equals tenants by turns, and each tenant's as they came.

    Attributes:
        cache: where the requests' keys and values go.
        window: positions after which no layer looks back, or ``None``.
        max_batch: most requests in a pass.
        prefill_chunk: most rows of a pass without guesses: one for each request that decodes, and prompts share the
            rest, of which there is always a half.
        max_tree: most rows of a request in a pass that decodes.
        waiting: in the order in which they came.
        running: in the order in which they are served.
        preempted: those that had to give way in the last schedule.
        fair_share: what they have been served.
    """

    cache: PagedCache
    window: int | None
    max_batch: int
    prefill_chunk: int
    max_tree: int
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    fair_share: FairShare = field(default_factory=FairShare)
    _arrivals: Iterator[int] = field(default_factory=count)
    _starts: Iterator[int] = field(default_factory=count)
    _share: float = 0.0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            CacheFullError: the cache is too small for it even when empty.
        """
        if self._most(request) > self.cache.allocator.num_blocks:
            raise CacheFullError(self._too_small(request))
        request.arrival = next(self._arrivals)
        self.fair_share.join(request.tenant)
        bisect.insort(self.waiting, request, key=_came)

    def schedule(self) -> list[ScheduledRequest]:
        """The next pass: every running request that decodes, prompts by chunks, and room for guesses."""
        self._share *= _FADE
        self.preempted.clear()
        for request in self.running:
            self._account(request)
        self._admit()
        counts: dict[Request, int] = {}
        decoding = sum(request.num_pending == 1 for request in self.running)
        left = max(self.prefill_chunk - decoding, self.prefill_chunk // 2)
        for request in [*self.running]:
            pending = request.num_pending
            tokens = 1 if pending == 1 else min(pending, left)
            if not request.ended and tokens and self._hold(request, tokens, counts):
                counts[request] = tokens
                left -= tokens if pending > 1 else 0
        draft_slots = self._draft_tokens(
            [request for request in counts if request.num_pending == 1 and request.draft_tokens]
        )
        return [ScheduledRequest(request, tokens, draft_slots.get(request, 0)) for request, tokens in counts.items()]

    def remove(self, request: Request) -> bool:
        """The request leaves, wherever it is, and its blocks are free. Returns whether it was here at all."""
        queue = next((queue for queue in (self.running, self.waiting) if request in queue), None)
        if queue is None:
            return False
        queue.remove(request)
        self.cache.release(request.block_table)
        self._account(request)
        self.fair_share.leave(request.tenant)
        if not self.running and not self.waiting:
            # An interruption may strike between taking a block and writing it down.
            self.cache.allocator.reset()
        return True

    def expire(self) -> None:
        """Requests whose time is over end with an error; whoever removes them then gives others their places."""
        now = perf_counter()
        for request in (*self.running, *self.waiting):
            if request.deadline is not None and now > request.deadline and not request.ended:
                waited = now - request.began
                request.fail(DeadlineError(f"the request was not done by its deadline, after {waited:.1f} s"))

    def reserve(self, block_table: BlockTable, tokens: int) -> None:
        """Make the KV slots of tokens ``block_table.length .. tokens - 1`` writable.

        The engine's only call of :meth:`~pronk.kv_cache.paged.PagedCache.prepare`: nothing later in a step takes blocks.

        Raises:
            CacheFullError: the pool has too few free blocks.
        """
        self.cache.prepare(block_table, tokens)

    def leave_window(self, block_table: BlockTable) -> None:
        """Release the blocks that no layer looks back to."""
        if self.window is not None:
            self.cache.release_before(block_table, block_table.length - self.window + 1)

    def blocks_needed(self, length: int) -> int:
        """Return the blocks for a text of ``length`` tokens, or for what is held of it at a time if there is a window."""
        if self.window is not None:
            length = min(length, self.window + self.prefill_chunk + 1)
        # One block more where the window starts in the middle of one.
        return self.cache.allocator.blocks_for(length) + (self.window is not None)

    def _account(self, request: Request) -> None:
        """Count what its tenant was served since the last time."""
        self.fair_share.serve(request.tenant, said=request.num_generated - request.accounted)
        request.accounted = request.num_generated

    def _admit(self) -> None:
        """Let requests start, until the next one in turn cannot."""
        waiting = [request for request in self.waiting if not request.ended]
        while waiting:
            request = min(waiting, key=self._turn)
            waiting.remove(request)
            if not self.running and self._most(request) > self.cache.allocator.num_blocks:
                # A drafter that has joined since has taken its share of the memory.
                request.fail(CacheFullError(self._too_small(request)))
                continue
            parent = request.parent
            if (
                parent in self.running
                and parent.block_table.length < len(request.prompt) - 1
                and not request.num_generated
            ):
                continue  # what it will start from is being computed
            if not self._begin(request):
                return
            if request.start is None:
                request.start = next(self._starts)
                self.fair_share.serve(request.tenant, read=request.num_pending)
            self.waiting.remove(request)
            bisect.insort(self.running, request, key=_started)

    def _turn(self, request: Request) -> tuple[int, int, int]:
        return -request.priority, self.fair_share.served[request.tenant], request.arrival

    def _begin(self, request: Request) -> bool:
        """Let a request start from what the cache has of its text, if there is a place for it and for the rest."""
        lower = [each for each in self.running if each.priority < request.priority]
        if len(self.running) >= self.max_batch and not lower:
            return False
        alone = len(self.running) == len(lower)
        if not alone and self._in_vain(request, lower):
            return False
        self._find(request)
        if not alone and self._wanted(request) > self._room(lower):
            found = request.block_table.blocks
            following = next(iter(request.digests[len(found) :]), b"")
            request.refused = AdmissionRefusal(found, following, self.cache.version)
            self.cache.release(request.block_table)
            return False
        request.refused = None
        allocator = self.cache.allocator
        if self._wanted(request) > allocator.num_free:
            self._give_back({})
        while lower and (len(self.running) >= self.max_batch or self._wanted(request) > allocator.num_free):
            self._preempt(lower.pop())
        request.stats.cached_tokens += request.block_table.length
        self._look_ahead(request)
        return True

    def _in_vain(self, request: Request, lower: Sequence[Request]) -> bool:
        """Whether it would be refused as it was the last time: there is too little room, and no more of its text."""
        refused = request.refused
        if refused is None or self.window is not None or request.parent is not None:
            return False
        if refused.version != self.cache.version:
            return False
        shared = sum(self.cache.allocator.references[block] > 0 for block in refused.found)
        return self._wanted(request) - shared > self._room(lower) and not self.cache.knows(refused.following)

    def _find(self, request: Request) -> None:
        """What the cache has of a text, but for its last token: of the same prompt's first sample, or of any text."""
        parent, of_prompt = request.parent, len(request.prompt) - 1
        alive = (
            parent is not None and not parent.ended and parent.block_table.blocks and not parent.block_table.released
        )
        if parent is not None and alive and parent.block_table.length >= of_prompt:
            request.block_table = self.cache.fork(parent.block_table, of_prompt)
        elif not request.reports_prompt:
            request.block_table = self.cache.match(request.tokens, request.salt, request.digests) or request.block_table
        self.leave_window(request.block_table)

    def _look_ahead(self, request: Request) -> None:
        """While there is plenty, take all that a request will need at once, so that its blocks lie in a run."""
        allocator, length = self.cache.allocator, len(request.prompt) + request.params.max_tokens + self.max_tree
        if (
            self.window is None
            and allocator.missing(request.block_table, length) <= (allocator.num_free - len(allocator.idle)) // 2
        ):
            self.reserve(request.block_table, length)

    def _room(self, lower: Sequence[Request] = ()) -> int:
        """Blocks for one that would start, if ``lower`` gave theirs and the others get what they want."""
        allocator = self.cache.allocator
        given = sum(allocator.references[block] == 1 for each in lower for block in each.block_table.blocks)
        wanted = sum(max(self._missing(each) + 1, self._wanted(each)) for each in self.running if each not in lower)
        return allocator.num_free + given - wanted

    def _wanted(self, request: Request) -> int:
        """Blocks that a request should find: for its text, and a share of what it will need if it goes on to its end.

        Nobody knows when that is. Whoever starts where there is too little for all is soon preempted, or another one
        is, and read again; who waits for what nobody takes keeps the passes small. So the share follows what happens.
        """
        end = (
            self.cache.allocator.blocks_for(request.block_table.length + request.num_pending)
            - request.block_table.released
        )
        return self._missing(request) + int(self._share * max(0, self._most(request) - end))

    def _missing(self, request: Request) -> int:
        """Free blocks that a request's text and its next token need; below 0 if it has places for more."""
        allocator, block_table = self.cache.allocator, request.block_table
        length = request.num_pending + 1
        if self.window is not None:
            length = min(length, self.window + self.prefill_chunk + 1)
        held, needed = block_table.released + len(block_table.blocks), allocator.blocks_for(block_table.length + length)
        return allocator.missing(block_table, block_table.length + length) - max(0, held - needed)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.preempted.append(request)
        request.digests = max(request.digests, request.block_table.digests, key=len)
        self.cache.release(request.block_table)
        request.stats.preemptions += 1
        bisect.insort(self.waiting, request, key=_came)

    def _give_back(self, counts: Mapping[Request, int]) -> None:
        """Places for guesses, and for what is still far away, give way first; those that the pass needs stay."""
        for request in self.running:
            self.cache.trim(request.block_table, request.block_table.length + counts.get(request, 0))

    def _hold(self, request: Request, tokens: int, counts: Mapping[Request, int]) -> bool:
        """Take places for some tokens; those that come last give theirs, up to the request itself."""
        if request not in self.running:
            return False
        allocator, length = self.cache.allocator, request.block_table.length + tokens
        if allocator.missing(request.block_table, length) > allocator.num_free:
            self._give_back(counts)
        while allocator.missing(request.block_table, length) > allocator.num_free:
            last = self.running[-1]
            self._share = min(1.0, self._share + _MORE)
            self._preempt(last)
            if last is request:
                return False
        self.reserve(request.block_table, length)
        return True

    def _draft_tokens(self, requests: Sequence[Request]) -> dict[Request, int]:
        """Places for guesses behind the one pending token of each: as many as there may be, or a fair share.

        They are those of empty blocks. What is remembered gives way only to a block that a text will reach, where the
        rest of its last one is less than a block: the text will take it soon, and guesses have so much room at least.
        """
        allocator, size, draft_slots = self.cache.allocator, self.cache.block_size, dict[Request, int]()
        for number, request in enumerate(requests):
            block_table = request.block_table
            held = block_table.released + len(block_table.blocks)
            empty = (allocator.num_free - len(allocator.idle)) // (len(requests) - number)
            end = allocator.blocks_for(len(request.prompt) + request.params.max_tokens)
            if not empty and allocator.num_free and held * size - block_table.length <= size and held < end:
                empty = 1
            draft_slots[request] = max(0, min(self.max_tree, (held + empty) * size - block_table.length) - 1)
            self.reserve(block_table, block_table.length + 1 + draft_slots[request])
        return draft_slots

    def _most(self, request: Request) -> int:
        """Return the blocks that a request needs at its end, or at any time if there is a window."""
        return self.blocks_needed(len(request.prompt) + request.params.max_tokens)

    def _too_small(self, request: Request) -> str:
        needed, blocks, size = self._most(request), self.cache.allocator.num_blocks, self.cache.block_size
        return (
            f"the request needs room for {needed * size} tokens in the KV cache, which has {blocks * size}; "
            "raise kv_memory or lower max_tokens"
        )


def _came(request: Request) -> tuple[int, int]:
    return -request.priority, request.arrival


def _started(request: Request) -> tuple[int, int]:
    assert request.start is not None
    return -request.priority, request.start
