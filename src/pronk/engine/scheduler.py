"""The scheduler: selects the requests of the next forward pass, their tokens and their draft slots.

Each step is scheduled anew. KV blocks for pending tokens and draft tokens are reserved before the
step, so that no allocation can fail during it. When blocks are short, requests get fewer slots for
draft tokens, waiting requests stay queued, and at last running requests are preempted, beginning
with the last started one of the lowest priority. A *preempted* request frees its blocks, returns to
its old place in the queue and is prefilled again later. Prefilling computes the same keys and
values, so the request's tokens do not change.

Priorities are strict: requests of low priority may wait forever. Among equal priorities, the least
served tenant starts first, and within a tenant the first arrival. Running requests are ordered by
their first start, and this order never changes. For lack of blocks, a request preempts only
requests that started later. The first running request therefore always advances, and two requests
cannot preempt each other in turns.

**Turns.** Whatever other tenants do, a tenant waits at most ``max_wait`` seconds: if none of its
requests was in a forward pass for so long, one is in the next pass. Its blocks and its part of the
prompt tokens are reserved first, and where the batch or the cache is full, requests of other
tenants are preempted, first those of the tenant with the most of them. Then that request has a
*turn* of ``max_wait`` seconds, in which neither priorities nor lack of blocks preempt it. So
priorities hold within a tenant without limit, and between tenants up to ``max_wait``. If two
tenants do not fit into the batch or the cache together, their turns alternate. A turn lasts at
least until its request has generated a token, or to the end of an embedding; otherwise two large
requests would preempt each other for ever.

A request that has waited for ``max_wait`` also takes the place of a request of no higher priority
whose tenant has at least two more requests in the batch than its own.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from math import inf
from time import perf_counter
from typing import NamedTuple

from pronk.base.errors import CacheFullError, DeadlineError
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.engine.block_plan import BlockPlan, BlockPlanner, max_length
from pronk.engine.disk_reads import DiskReads
from pronk.engine.fair_share import FairShare
from pronk.engine.options import MAX_WAIT
from pronk.engine.request import AdmissionRefusal, Request
from pronk.models.cost_model import CostModel

# The *reserve* is a fraction, 0..1: so much of the blocks that running requests may still need is
# kept free when a request starts. It is increased by 1/8 after each preemption for lack of blocks,
# and multiplied by 0.99 in each step.
_RESERVE_INCREASE = 1 / 8
_RESERVE_DECAY = 0.99


class ScheduledRequest(NamedTuple):
    """A request in the next forward pass, with its number of tokens."""

    request: Request
    num_tokens: int  # number of pending tokens that the forward pass computes
    # number of KV slots reserved for draft tokens, after those of the pending tokens
    num_draft_slots: int = 0

    @property
    def includes_last_token(self) -> bool:
        """Whether the forward pass includes the last pending token, which gives a new one."""
        return self.num_tokens == self.request.num_pending


@dataclass
class Scheduler:
    """Queues of waiting and running requests, and the KV blocks of the running ones."""

    cache: PagedCache
    # Largest sliding window of a layer in tokens; ``None`` if a layer has full attention, so that a
    # request keeps all its blocks.
    window: int | None
    max_batch: int  # maximum number of requests per forward pass
    # Maximum number of prompt tokens per forward pass. Each decoding request lowers it by 1, but
    # not below the half: ``max(prefill_chunk - num_decoding, prefill_chunk // 2)``.
    prefill_chunk: int
    max_tree: int  # maximum number of rows per decoding request and forward pass
    costs: CostModel = field(default_factory=CostModel)  # measured durations of forward passes
    waiting: list[Request] = field(default_factory=list)  # sorted by priority, then by arrival
    running: list[Request] = field(default_factory=list)  # sorted by priority, then by first start
    # requests preempted by the last ``schedule``
    preempted: list[Request] = field(default_factory=list)
    fair_share: FairShare = field(default_factory=FairShare)
    # Seconds, at least 0, after which a waiting tenant gets a turn; ``inf`` disables turns.
    max_wait: float = MAX_WAIT
    clock: Callable[[], float] = perf_counter  # time in seconds, for ``max_wait`` and for deadlines
    # reads the KV blocks of some running requests from disk; these requests wait meanwhile
    disk_reads: DiskReads = field(init=False)
    blocks: BlockPlanner = field(init=False)
    _arrivals: Iterator[int] = field(default_factory=count)
    _starts: Iterator[int] = field(default_factory=count)
    _reserve_share: float = 0.0

    def __post_init__(self) -> None:
        self.disk_reads = DiskReads(self.cache, self.costs)
        self.blocks = BlockPlanner(self.cache, self.window, self.prefill_chunk, self.max_tree)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raise ``CacheFullError`` if the request does not fit into the empty KV cache.
        """
        if self.blocks.max_blocks(request) > self.cache.allocator.num_blocks:
            raise CacheFullError(self._cache_too_small(request))
        request.queueing.arrival = next(self._arrivals)
        if request.queueing.since is None:
            request.queueing.since = self.clock()
        self.fair_share.join(request.tenant, request.queueing.since)
        bisect.insort(self.waiting, request, key=_arrival_order)

    def schedule(self) -> list[ScheduledRequest]:
        """Return the requests of the next forward pass, with their KV slots reserved."""
        self._reserve_share *= _RESERVE_DECAY
        self.preempted.clear()
        for request in self.running:
            self._charge_tenant(request)
        now = self.clock()
        self.fair_share.end_pass(now)
        for request in [*self.running]:
            if request.paused or not self.cache.has_states(request.block_table):
                self._preempt(request)
        self.disk_reads.read_parts()
        first = self._give_turns(now)
        if self.waiting:
            self._admit(now)
        while self.disk_reads.all_wait(self.running):
            self.disk_reads.read_parts()
        tokens_by_request = self._allocate_tokens(first)
        self.fair_share.begin_pass({request.tenant for request in tokens_by_request})
        drafting = [
            request
            for request in tokens_by_request
            if request.num_pending == 1 and request.needs_draft_slots
        ]
        draft_slots = self._reserve_draft_slots(drafting) if drafting else {}
        return [
            ScheduledRequest(request, num_tokens, draft_slots.get(request, 0))
            for request, num_tokens in tokens_by_request.items()
        ]

    def remove(self, request: Request) -> bool:
        """Remove a request and free its blocks; return False if the request is in no queue."""
        queue = next((queue for queue in (self.running, self.waiting) if request in queue), None)
        if queue is None:
            return False
        queue.remove(request)
        self.disk_reads.stop(request)
        self.cache.release(request.block_table)
        self._charge_tenant(request)
        self.fair_share.leave(request.tenant)
        if not self.running and not self.waiting:
            # A KeyboardInterrupt between an allocation and its entry in the block table may have
            # leaked blocks.
            self.cache.reset()
        return True

    def expire(self) -> bool:
        """End requests whose deadline has passed with an error; return whether there are any.

        The caller removes them.
        """
        now = self.clock()
        has_expired = False
        for request in (*self.running, *self.waiting):
            if request.deadline is not None and now > request.deadline and not request.ended:
                waited = now - request.start_time
                request.result.fail(
                    DeadlineError(f"the request was not done by its deadline, after {waited:.1f} s")
                )
                has_expired = True
        return has_expired

    def _charge_tenant(self, request: Request) -> None:
        """Add newly generated tokens of a request to its tenant's counter of served tokens."""
        num_generated = request.num_generated
        generated = num_generated - request.queueing.num_charged
        self.fair_share.serve(request.tenant, generated=generated)
        request.queueing.num_charged = num_generated

    def _give_turns(self, now: float) -> list[Request]:
        """Give a turn to one request of each tenant that has waited for ``max_wait`` seconds.

        Return all requests that have a turn, new ones first: they are scheduled before others.
        """
        first = list[Request]()
        for tenant in self.fair_share.waiting_since(now - self.max_wait):
            request = self._next_request(tenant, now)
            if request is not None:
                request.queueing.turn_end = now + self.max_wait
                request.queueing.turn_start = request.num_generated
                first.append(request)
        for request in self.running:
            if request.queueing.turn_end > now and request not in first:
                first.append(request)
        return first

    def _next_request(self, tenant: str, now: float) -> Request | None:
        """Return the request that gets the turn of a tenant: a running one, or else start one.

        ``None`` if the tenant has no request that can start.
        """
        for request in self.running:
            if (
                request.tenant == tenant
                and not request.ended
                and not self.disk_reads.is_reading(request)
            ):
                return request
        waiting = [each for each in self.waiting if each.tenant == tenant and each.is_startable]
        for request in sorted(waiting, key=self._queue_order):
            if not self._waits_for_blocks_of_others(request) and self._try_start(
                request, self._victims(request, now)
            ):
                return request
        return None

    def _victims(self, request: Request, now: float) -> list[Request]:
        """Return the requests that may be preempted for ``request``, the first choice first."""
        victims = [each for each in reversed(self.running) if each.priority < request.priority]
        victims = [
            each for each in victims if each.tenant == request.tenant or not each.has_turn(now)
        ]
        if request.queueing.since is not None and now - request.queueing.since >= self.max_wait:
            victims += self._larger_shares(request, now, victims)
        return victims

    def _larger_shares(
        self, request: Request, now: float, taken: Collection[Request]
    ) -> list[Request]:
        """Return requests to preempt for ``request``, of tenants with more requests in the batch.

        Requests in ``taken`` are victims already and left out. The first victims are of the tenant
        with the most requests; among equal numbers, of the most served tenant. If no request of the
        own tenant is running, even the only request of another tenant may be preempted, unless it
        has a turn and has generated no token in it.
        """
        counters = self.fair_share.counters
        victims = list[Request]()
        # requests of each tenant, in the order of ``running``
        by_tenant: dict[str, list[Request]] = {}
        for each in self.running:
            if each not in taken:
                by_tenant.setdefault(each.tenant, []).append(each)
        num_own = len(by_tenant.pop(request.tenant, []))
        if num_own:
            by_tenant = {
                tenant: [
                    each
                    for each in group
                    if each.priority <= request.priority and not each.has_turn(now)
                ]
                for tenant, group in by_tenant.items()
            }
        while by_tenant:
            tenant = max(by_tenant, key=lambda each: (len(by_tenant[each]), counters[each]))
            group = by_tenant[tenant]
            may_take_last = not num_own and not group[-1].has_new_turn
            if len(group) >= num_own + 2 or may_take_last:
                victims.append(group.pop())
            else:
                group.clear()
            if not group:
                del by_tenant[tenant]
        return victims

    def _admit(self, now: float) -> None:
        """Start waiting requests in queue order until one must wait for KV blocks."""
        waiting = [request for request in self.waiting if request.is_startable]
        while waiting:
            request = min(waiting, key=self._queue_order)
            waiting.remove(request)
            num_blocks = self.blocks.max_blocks(request)
            if not self.running and num_blocks > self.cache.allocator.num_blocks:
                # The cache has shrunk since the request was added: a new draft model has taken
                # memory.
                request.result.fail(CacheFullError(self._cache_too_small(request)))
                continue
            if self._waits_for_blocks_of_others(request):
                continue
            if not self._try_start(request, self._victims(request, now)):
                return

    def _queue_order(self, request: Request) -> tuple[int, int, int]:
        return -request.priority, self.fair_share.counters[request.tenant], request.queueing.arrival

    def _waits_for_blocks_of_others(self, request: Request) -> bool:
        """Return whether a request should wait to share blocks that are being read or computed.

        Blocks are read from disk for another request with the same prefix, or computed for
        ``parent``, the first sample of the same prompt.
        """
        if self.disk_reads.reads_for(request):
            return True
        parent = request.parent
        if parent not in self.running or request.num_generated:
            return False
        return parent.block_table.length < len(request.prompt) - 1

    def _try_start(self, request: Request, victims: list[Request]) -> bool:
        """Move a waiting request to the running ones; return False if it must wait.

        If necessary, running requests are preempted, in the order of ``victims``.
        """
        if len(self.running) >= self.max_batch and not victims:
            return False
        runs_alone = len(self.running) == len(victims)
        if not runs_alone and self._is_still_refused(request, victims):
            return False
        self._match_prefix(request)
        wanted = self._num_wanted(self.blocks.plan(request))
        if not runs_alone and wanted > self._num_available_blocks(victims):
            cached_blocks = [*request.block_table.blocks]
            next_digest = next(iter(request.digests[len(cached_blocks) :]), b"")
            request.queueing.refusal = AdmissionRefusal(
                cached_blocks, next_digest, self.cache.version
            )
            self.cache.release(request.block_table)
            return False
        request.queueing.refusal = None
        allocator = self.cache.allocator
        if wanted > allocator.num_free:
            self._release_reserved_blocks({})
        for victim in victims:
            if len(self.running) < self.max_batch and wanted <= allocator.num_free:
                break
            self._preempt(victim)
        # reserved together, the blocks are consecutive if possible
        if self.blocks.can_reserve_all(request):
            self.cache.prepare(request.block_table, max_length(request) + self.max_tree)
        self.disk_reads.start(request)
        self.cache.release_outside_window(request.block_table)
        if request.queueing.start_order is None:
            request.queueing.start_order = next(self._starts)
            self.fair_share.serve(request.tenant, prefilled=self.disk_reads.num_to_compute(request))
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_start_order)
        return True

    def _is_still_refused(self, request: Request, victims: Sequence[Request]) -> bool:
        """Return whether a request that could not start before still lacks blocks.

        Saves a new lookup in the prefix cache while the request's cached prefix is unchanged.
        """
        refusal = request.queueing.refusal
        if refusal is None or self.window is not None or request.parent is not None:
            return False
        if refusal.cache_version != self.cache.version:
            return False
        num_shared = sum(
            self.cache.allocator.references[block] > 0 for block in refusal.cached_blocks
        )
        wanted = self._num_wanted(self.blocks.plan(request))
        if wanted - num_shared <= self._num_available_blocks(victims):
            return False
        return not self.cache.has_cached_block(refusal.next_digest)

    def _match_prefix(self, request: Request) -> None:
        """Give a request the KV blocks of its longest prefix that is computed already.

        They come from the first sample of its prompt or from the prefix cache. The last token is
        never included, because its logits are needed.
        """
        parent = request.parent
        prefix = len(request.prompt) - 1
        forked: BlockTable | None = None
        if (
            parent is not None
            and not parent.ended
            and not parent.block_table.num_released
            and parent.block_table.blocks
            and parent.block_table.length >= prefix
        ):
            forked = self.cache.fork(parent.block_table, prefix)
        if forked is not None:
            request.block_table = forked
        elif not request.computes_whole_prompt:
            cached = self.cache.match_prefix(request.tokens, request.cache_salt, request.digests)
            request.block_table = cached or request.block_table
        request.block_table.adapter = -1 if request.adapter is None else request.adapter.number
        self.cache.release_outside_window(request.block_table)

    def _num_available_blocks(self, victims: Sequence[Request]) -> int:
        """Count the blocks that a starting request may take.

        These are the free blocks, and those that preempting ``victims`` would free, minus the
        blocks that the other running requests will need.
        """
        allocator = self.cache.allocator
        references = Counter(block for each in victims for block in each.block_table.blocks)
        released = sum(allocator.references[block] == count for block, count in references.items())
        plans = [self.blocks.plan(each) for each in self.running if each not in victims]
        reserved = sum(max(plan.num_new_blocks + 1, self._num_wanted(plan)) for plan in plans)
        return allocator.num_free + released - reserved

    def _num_wanted(self, plan: BlockPlan) -> int:
        """Return the number of blocks for the text so far, plus a reserve for later tokens.

        The final length is unknown. Too small a reserve causes preemptions, too large a reserve
        keeps batches small. The reserve therefore grows with each preemption and decays with each
        step. With a reserve of 1, the number is that of ``max_tokens`` tokens.
        """
        return plan.with_reserve(self._reserve_share)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.disk_reads.stop(request)
        self.preempted.append(request)
        request.digests = max(request.digests, request.block_table.digests, key=len)
        self.cache.release(request.block_table)
        request.stats.preemptions += 1
        request.queueing.since = self.clock()
        request.queueing.turn_end = -inf
        bisect.insort(self.waiting, request, key=_arrival_order)

    def _release_reserved_blocks(self, tokens_by_request: Mapping[Request, int]) -> None:
        """Release the blocks that running requests hold for tokens of later steps.

        ``tokens_by_request`` has the number of tokens of each request in this step.
        """
        for request in self.running:
            self.cache.trim(
                request.block_table, request.block_table.length + tokens_by_request.get(request, 0)
            )

    def _allocate_tokens(self, first: Sequence[Request]) -> dict[Request, int]:
        """Reserve KV slots for the pending tokens of a pass; return their number by request.

        ``first`` are the requests that have a turn.
        """
        ready = [
            each for each in self.running if not each.ended and not self.disk_reads.is_reading(each)
        ]
        prompt_tokens: dict[Request, int] = {}
        for request in ready:
            if request.num_pending > 1:
                prompt_tokens = self._share_prompt_tokens(ready, first)
                break
        in_order = ready
        if first:
            in_order = [each for each in first if each in ready]
            in_order += [each for each in ready if each not in first]
        tokens_by_request: dict[Request, int] = {}
        for request in in_order:
            # 0 for a request preempted in this step: its tokens are pending again, and get no part
            tokens = 1 if request.num_pending == 1 else prompt_tokens.get(request, 0)
            if tokens and self._allocate(request, tokens, tokens_by_request, first):
                tokens_by_request[request] = tokens
        return tokens_by_request

    def _share_prompt_tokens(
        self, ready: Sequence[Request], first: Sequence[Request]
    ) -> dict[Request, int]:
        """Return how many prompt tokens of each request a pass computes.

        Requests that have a turn come first, then those of higher priorities. Tenants of one
        priority have equal parts, and within a tenant the earlier starts come first.
        """
        shares = dict[Request, int]()
        in_order = [*first, *[each for each in ready if each not in first]] if first else ready
        prompts = [each for each in in_order if each.num_pending > 1]
        num_decoding = sum(request.num_pending == 1 for request in self.running)
        left = max(self.prefill_chunk - num_decoding, self.prefill_chunk // 2)
        for _, level in groupby(prompts, key=lambda each: inf if each in first else each.priority):
            by_tenant: dict[str, list[Request]] = {}
            for request in level:
                by_tenant.setdefault(request.tenant, []).append(request)
            wanted = {
                tenant: sum(each.num_pending for each in group)
                for tenant, group in by_tenant.items()
            }
            for number, tenant in enumerate(sorted(by_tenant, key=wanted.__getitem__)):
                part = left // (len(by_tenant) - number)
                for request in by_tenant[tenant]:
                    shares[request] = min(request.num_pending, part)
                    part -= shares[request]
                    left -= shares[request]
        return shares

    def _allocate(
        self,
        request: Request,
        num_tokens: int,
        tokens_by_request: Mapping[Request, int],
        first: Sequence[Request],
    ) -> bool:
        """Reserve KV slots for pending tokens, if necessary by preempting requests.

        Requests with a turn (``first``) are never preempted. A request without a turn preempts only
        requests that started later. If that does not free enough blocks, ``request`` itself is
        preempted, and the result is False. ``tokens_by_request`` has the requests already scheduled
        for this pass.
        """
        if request not in self.running:
            return False
        allocator = self.cache.allocator
        length = request.block_table.length + num_tokens
        if allocator.num_missing(request.block_table, length) > allocator.num_free:
            self._release_reserved_blocks(tokens_by_request)
            while allocator.num_missing(request.block_table, length) > allocator.num_free:
                self._reserve_share = min(1.0, self._reserve_share + _RESERVE_INCREASE)
                victim = self._next_victim(request, first)
                self._preempt(victim)
                if victim is request:
                    return False
        self.cache.prepare(request.block_table, length)
        if request.block_table.states is not None:
            # The same prompt again can take over all tokens but its last.
            end = len(request.prompt)
            self.cache.want_checkpoints(
                request.block_table,
                (*request.branch_positions, end - 1, end),
                end - 1 if request.has_samples else None,
            )
        return True

    def _next_victim(self, request: Request, first: Sequence[Request]) -> Request:
        """Return the request to preempt so that ``request`` gets blocks, or ``request`` itself.

        It has the lowest priority; among equal priorities it belongs to the tenant with the most
        running requests, and of these it started last. Requests with a turn (``first``) are spared.
        """
        later = self.running if request in first else self.running[self.running.index(request) :]
        victims = [each for each in later if each not in first and not each.has_new_turn]
        num_running = Counter(each.tenant for each in self.running)
        return min(
            reversed(victims),
            key=lambda each: (each.priority, -num_running[each.tenant]),
            default=request,
        )

    def _reserve_draft_slots(self, requests: Sequence[Request]) -> dict[Request, int]:
        """Reserve KV slots for draft tokens after each request's pending token.

        Return the number of reserved slots of each request, which may be 0.
        """
        draft_slots = dict[Request, int]()
        num_free_updates = self.cache.num_free_updates
        for number, request in enumerate(requests):
            table = request.block_table
            num_slots = self.blocks.num_draft_slots(request, len(requests) - number)
            if num_free_updates is not None:
                # Recurrent layers need a slot per row for the change of their state. The forward
                # pass may free such slots, but only after the draft tokens have got theirs. A
                # drafter that runs the target's first layers needs one slot more.
                num_slots = max(0, min(num_slots, num_free_updates // len(requests) - 1))
            draft_slots[request] = num_slots
            self.cache.prepare(table, table.length + 1 + draft_slots[request])
        return draft_slots

    def _cache_too_small(self, request: Request) -> str:
        needed = self.blocks.max_blocks(request)
        blocks = self.cache.allocator.num_blocks
        size = self.cache.block_size
        return (
            f"expected a request of at most {blocks * size} tokens, the size of the KV cache, "
            f"found {needed * size}; "
            "raise kv_memory or lower max_tokens"
        )


def _arrival_order(request: Request) -> tuple[int, int]:
    return -request.priority, request.queueing.arrival


def _start_order(request: Request) -> tuple[int, int]:
    assert request.queueing.start_order is not None
    return -request.priority, request.queueing.start_order
