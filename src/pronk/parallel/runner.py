"""Tree parallelism in the driver: forward passes whose token trees are split among processes.

A *step* is one forward pass of the model, in which each process computes its shard of the token
trees. An *exchange* is the communication with one worker in a step: a request to the worker, and
its answer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from weakref import WeakMethod

import numpy as np
from numpy.typing import NDArray

from pronk.backends import BatchEntry, Decoder, ForwardBatch, ForwardResult, ModelRunner
from pronk.base import ConnectionLostError, uninterrupted
from pronk.base.arrays import Array
from pronk.drafting import CostCurve, CostModel
from pronk.parallel.connection import MessageKind, PeerConnection, PeerMessage
from pronk.parallel.mirrored_cache import MirroredCache, PartitionedTree, RemotePool
from pronk.parallel.result_assembly import AssembledResult
from pronk.parallel.tree_partition import ProcessShard, count_rows, partition_trees
from pronk.parallel.wire_format import WorkRequest, WorkRows
from pronk.parallel.work_rows import make_work_rows

_log = logging.getLogger(__name__)

# Estimated cost of each row after the first, divided by the cost of a pass of one row, before the
# first measurement.
_PRIOR_COST_PER_ROW = 0.1
# The cost of sending KV rows is spread over this number of steps, because KV rows are sent once and
# used many times.
_AMORTIZATION_STEPS = 8
# Time limit of a worker's answer: _TIMEOUT seconds plus _TIMEOUT_FACTOR times the seconds of the
# driver's forward pass.
_TIMEOUT = 20.0
_TIMEOUT_FACTOR = 10.0
# Seconds of a request to a worker and its answer, before the first measurement.
_PRIOR_EXCHANGE_SECONDS = 1e-3
_PRIOR_SECONDS_PER_BYTE = 1e-9  # estimated seconds to send a byte before the first measurement
# Messages with fewer bytes are not measured, because their time is mostly latency.
MIN_TIMED_BYTES = 2**18
NUM_TIMINGS = 9  # an estimate is the median of this number of recent measurements
# The estimated exchange time of an unused worker halves after this number of steps, so that the
# worker is used and measured again some day.
IDLE_HALF_LIFE = 256


@dataclass(eq=False)
class WorkerHandle:
    """A worker with a copy of the model, as seen by the driver."""

    peer: PeerConnection
    pool: RemotePool  # record of the contents of the worker's KV pool
    # Measured durations of the worker's forward passes.
    cost_model: CostModel = field(default_factory=CostModel)
    # Communication time of recent steps in seconds: duration of the step minus the computation time
    # of the slowest process.
    exchange_times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMINGS))
    idle_steps: int = 0  # number of steps since the worker last computed nodes
    # Whether the worker has computed nothing since its pool was resized. The first step with a
    # resized pool is not measured.
    has_new_pool: bool = True
    # Seconds per byte of recent messages to the worker.
    byte_times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMINGS))

    @property
    def exchange_seconds(self) -> float:
        """Estimated seconds of an exchange with the worker: a request and its answer.

        The estimate halves with every ``IDLE_HALF_LIFE`` steps in which the worker is not used.
        """
        measured = median(self.exchange_times) if self.exchange_times else _PRIOR_EXCHANGE_SECONDS
        return measured * 0.5 ** (self.idle_steps / IDLE_HALF_LIFE)

    @property
    def seconds_per_byte(self) -> float:
        """Estimated seconds per byte to send a large message to the worker."""
        return median(self.byte_times) if self.byte_times else _PRIOR_SECONDS_PER_BYTE

    def record_send(self, size: int, seconds: float) -> None:
        """Record the seconds of sending ``size`` bytes; small messages are ignored."""
        if size >= MIN_TIMED_BYTES and not self.has_new_pool:
            self.byte_times.append(seconds / size)

    def record_step(self, seconds: float, longest_pass: float) -> None:
        """Record the duration of a forward pass in which this worker computed nodes.

        Args:
            seconds: duration of the step.
            longest_pass: seconds of the forward pass of the slowest process in the step.
        """
        if not self.has_new_pool:
            self.exchange_times.append(max(0.0, seconds - longest_pass))
        self.has_new_pool = False
        self.idle_steps = 0


class TreeRunner(ModelRunner):
    """Model runner that divides the trees of a forward pass among the driver and its workers.

    Results are bit-identical to those of one process, because the bits of a row depend only on the
    row's token and the tokens before it. If a worker is lost, the driver repeats the forward pass
    alone, and goes on without that worker.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: MirroredCache,
        peers: Sequence[PeerConnection],
        is_alive: Callable[[int], bool],
        on_lost: Callable[[int], None],
    ) -> None:
        """Connect a model to its workers.

        Args:
            decoder: the model.
            cache: the driver's KV pool.
            peers: connections to the workers.
            is_alive: returns whether the worker with a rank is running, without a message to it.
            on_lost: called with the rank of a worker that has ended, failed or not answered in
                time.
        """
        super().__init__(decoder, cache)
        self.mirrored = cache
        self.driver_costs = CostModel()
        self.workers = [WorkerHandle(peer, cache.add_remote_pool()) for peer in peers]
        # Number of forward passes that were divided among several processes.
        self.num_shared_passes = 0
        self._message_number = 0
        self._unanswered: list[WorkerHandle] = []
        self._is_alive = is_alive
        self._on_lost = on_lost
        # A weak reference avoids a cycle, so that the workers end when the runner is deleted.
        cache.fetch = WeakMethod(self._fetch_kv_rows)

    def forward(self, batch: ForwardBatch, collect: frozenset[int] = frozenset()) -> ForwardResult:
        """Compute the trees of all requests.

        Several processes share the work if the measured costs say that this is faster.
        """
        shards = self._partition(batch)
        if sum(bool(process_shard) for process_shard in shards) > 1:
            with uninterrupted():
                try:
                    return self._forward_shared(batch, shards, collect)
                except _LostWorkerError as error:
                    self._drop_worker(error.worker, error)
                    self._drain()
                except BaseException:
                    self._drain()
                    # The records of the workers' pools may claim KV rows that have not been sent.
                    self.mirrored.reset_remote_pools()
                    raise
        result = super().forward(batch, collect)
        self.driver_costs.learn(batch.num_rows, batch.num_committed, result.seconds, plain=True)
        self.mirrored.partitioned_trees = {
            id(entry.block_table): PartitionedTree(entry.tree) for entry in batch.entries
        }
        return result

    def _partition(self, batch: ForwardBatch) -> list[ProcessShard]:
        """Return the shards of all processes, the driver first.

        The list is empty if only the driver can compute this batch.
        """
        # Only the driver has the KV rows of nodes that an earlier pass computed (num_computed), and
        # the caches of other models (other_tables).
        needs_driver = any(entry.num_computed > 0 or entry.other_tables for entry in batch.entries)
        if not self.workers or needs_driver or batch.num_rows < 2:
            return []
        context = batch.num_committed
        costs = [_cost_function(self.driver_costs, context)]
        costs += [
            _cost_function(worker.cost_model, context, default=costs[0]) for worker in self.workers
        ]
        communication = [0.0]
        for worker in self.workers:
            communication.append(worker.exchange_seconds + self._sync_seconds(worker, batch))
            worker.idle_steps += 1
        return partition_trees([entry.tree for entry in batch.entries], costs, communication)

    def _sync_seconds(self, worker: WorkerHandle, batch: ForwardBatch) -> float:
        """Return one step's part of the seconds to send the KV rows that a worker lacks.

        The seconds are divided by ``_AMORTIZATION_STEPS``, because later steps use the rows, too.
        """
        missing = 0
        for entry in batch.entries:
            missing += int((~worker.pool.valid[self._committed_slots(entry)]).sum())
        return missing * self.cache.bytes_per_token * worker.seconds_per_byte / _AMORTIZATION_STEPS

    def _committed_slots(self, entry: BatchEntry) -> NDArray[np.int64]:
        """Return the slots of a request's committed tokens, without those in released blocks."""
        block_table = entry.block_table
        begin = block_table.num_released * self.cache.block_size
        return self.cache.slots(block_table, begin, block_table.length)

    def _forward_shared(
        self, batch: ForwardBatch, shards: Sequence[ProcessShard], collect: frozenset[int]
    ) -> ForwardResult:
        start_time = self.clock()
        entries = batch.entries
        self._message_number += 1
        assembled = AssembledResult(entries, self, collect, self._recompute)
        # For each worker with nodes of a draft tree: the worker, its part of the batch, and for
        # each tree in this part the number of committed tokens that it has to recompute.
        assignments = []
        for worker, process_shard in zip(self.workers, shards[1:], strict=True):
            if process_shard:
                request, recomputed = self._make_request(worker, entries, process_shard, collect)
                self._send(worker, request)
                self._unanswered.append(worker)
                assignments.append((worker, process_shard, recomputed))
        own_batch = ForwardBatch(
            [make_work_rows(entries[shard.entry], shard, ()).entry for shard in shards[0]]
        )
        result = super().forward(own_batch, collect)
        self.driver_costs.learn(own_batch.num_rows, batch.num_committed, result.seconds, plain=True)
        assembled.add_driver_result(shards[0], result)
        longest_pass = result.seconds
        for worker, process_shard, recomputed in assignments:
            message = self._receive_answer(
                worker, self._message_number, _TIMEOUT_FACTOR * result.seconds
            )
            nanoseconds, worker_context, *sampled = message.values[1:]
            rows = count_rows(process_shard) + sum(recomputed)
            worker.cost_model.learn(rows, worker_context, 1e-9 * nanoseconds, plain=True)
            longest_pass = max(longest_pass, 1e-9 * nanoseconds)
            fetch = partial(self._fetch_logits, worker, self._message_number)
            assembled.add_worker_result(worker.pool, process_shard, sampled, message.data, fetch)
            for shard, num_recomputed in zip(process_shard, recomputed, strict=True):
                committed_slots = self._committed_slots(entries[shard.entry])
                worker.pool.valid[committed_slots[len(committed_slots) - num_recomputed :]] = True
        seconds = self.clock() - start_time
        for worker, _, _ in assignments:
            worker.record_step(seconds, longest_pass)
        self._executor.communication_seconds += seconds - result.seconds
        self.num_shared_passes += 1
        self.mirrored.partitioned_trees = assembled.partitioned_trees
        return ForwardResult(assembled.logits, assembled.hidden, seconds, assembled.sampled)

    def _recompute(self, entry: BatchEntry) -> Array:
        """Recompute an entry in this process after the loss of a worker.

        Return all logits of the entry.
        """
        result = super().forward(ForwardBatch([entry]))
        self.mirrored.partitioned_trees[id(entry.block_table)] = PartitionedTree(entry.tree)
        return result.logits[0][:]

    def _make_request(
        self,
        worker: WorkerHandle,
        entries: Sequence[BatchEntry],
        process_shard: ProcessShard,
        collect: frozenset[int],
    ) -> tuple[WorkRequest, list[int]]:
        """Return the request to a worker, and the numbers of committed tokens to recompute.

        The second result has a number for each tree shard. KV rows that the worker lacks are either
        sent with the request or recomputed, whichever is estimated to be faster.
        """
        rows = list[WorkRows]()
        slots = list[NDArray[np.int64]]()
        recomputed = list[int]()
        costs = _cost_function(worker.cost_model, 0, default=_cost_function(self.driver_costs, 0))
        for shard in process_shard:
            entry = entries[shard.entry]
            committed_slots = self._committed_slots(entry)
            missing = np.flatnonzero(~worker.pool.valid[committed_slots])
            num_recomputed = len(committed_slots) - int(missing[0]) if len(missing) else 0
            recompute_seconds = costs(count_rows(process_shard) + num_recomputed) - costs(
                count_rows(process_shard)
            )
            # After the release of blocks (sliding window), recomputed tokens cannot attend to the
            # tokens in them.
            has_released = entry.block_table.num_released > 0
            send_seconds = len(missing) * self.cache.bytes_per_token * worker.seconds_per_byte
            # ``not <=`` is also true for NaN: costs() is inf beyond the measured numbers of rows,
            # and inf - inf is NaN.
            if has_released or not recompute_seconds <= send_seconds:
                slots.append(committed_slots[missing])
                num_recomputed = 0
            recomputed.append(num_recomputed)
            lead = self.mirrored.tokens[
                committed_slots[len(committed_slots) - num_recomputed :]
            ].tolist()
            rows.append(make_work_rows(entry, shard, lead))
        sent = np.concatenate(slots) if slots else np.zeros(0, np.int64)
        kv_rows = self.cache.export_slots(sent) if len(sent) else None
        worker.pool.valid[sent] = True
        moves = worker.pool.moves
        worker.pool.moves = []
        return WorkRequest(self._message_number, rows, moves, sent, kv_rows, collect), recomputed

    def _send(self, worker: WorkerHandle, request: WorkRequest) -> None:
        if not self._is_alive(worker.peer.rank):
            raise _LostWorkerError(
                worker, ConnectionLostError(f"worker {worker.peer.rank} is gone")
            )
        try:
            if not worker.pool.pool_sent:
                num_blocks = self.mirrored.allocator.num_blocks
                worker.peer.send(
                    MessageKind.POOL, [self._message_number, num_blocks, *self.mirrored.features]
                )
                self._receive_answer(worker, self._message_number, 0.0)
                worker.pool.pool_sent = True
                worker.has_new_pool = True
            start_time = self.clock()
            data = b"" if request.kv_rows is None else request.kv_rows.reshape(-1)
            worker.peer.send(MessageKind.WORK, request.serialize(), data)
        except ConnectionLostError as error:
            raise _LostWorkerError(worker, error) from error
        if request.kv_rows is not None:
            worker.record_send(request.kv_rows.nbytes, self.clock() - start_time)

    def _receive_answer(
        self, worker: WorkerHandle, number: int, extra_timeout: float
    ) -> PeerMessage:
        """Return the answer to request ``number``; discard the answers to aborted requests."""
        while True:
            try:
                message = worker.peer.receive(_TIMEOUT + extra_timeout)
            except ConnectionLostError as error:
                raise _LostWorkerError(worker, error) from error
            if message.kind == MessageKind.FAILED:
                failure = ConnectionLostError(
                    f"worker {worker.peer.rank} has failed: {message.text}"
                )
                raise _LostWorkerError(worker, failure)
            if message.values[:1] == [number]:
                if worker in self._unanswered:
                    self._unanswered.remove(worker)
                return message

    def _drain(self) -> None:
        """Receive and discard the answers to an aborted forward pass.

        Otherwise the workers would wait until the driver receives them.
        """
        while self._unanswered:
            worker = self._unanswered.pop()
            if worker in self.workers:
                try:
                    self._receive_answer(worker, self._message_number, _TIMEOUT)
                except _LostWorkerError as error:
                    self._drop_worker(worker, error)

    def _fetch_kv_rows(self, pool: RemotePool, slots: NDArray[np.int64]) -> Array | None:
        """Fetch KV rows from a worker for ``MirroredCache.fetch``, uint8 ``[slots, bytes]``.

        Returns ``None`` if the worker is lost.
        """
        worker = next((worker for worker in self.workers if worker.pool is pool), None)
        data = None if worker is None else self._request(worker, MessageKind.ROWS, slots.tolist())
        return None if data is None else data.reshape(len(slots), -1)

    def _fetch_logits(
        self, worker: WorkerHandle, number: int, shard_index: int, rows: Sequence[int]
    ) -> Array | None:
        """Fetch logits rows that a worker computed for request ``number``, ``[rows, vocab]``.

        Returns ``None`` if the worker is lost.
        """
        data = self._request(worker, MessageKind.LOGITS, [number, shard_index, *rows])
        return None if data is None else data.view(np.float32).reshape(len(rows), -1)

    def _request(
        self, worker: WorkerHandle, kind: MessageKind, values: Sequence[int]
    ) -> Array | None:
        """Send a message to a worker, and return the bytes of the answer.

        Returns ``None`` if the worker is lost.
        """
        if worker not in self.workers:
            return None
        start_time = self.clock()
        self._message_number += 1
        try:
            with uninterrupted():
                worker.peer.send(kind, [self._message_number, *values])
                data = self._receive_answer(worker, self._message_number, 0.0).data
        except (ConnectionLostError, _LostWorkerError) as error:
            self._drop_worker(worker, error)
            return None
        self._executor.communication_seconds += self.clock() - start_time
        return data

    def drop_workers(self) -> None:
        """Run all later forward passes in this process alone."""
        self.workers.clear()
        self.mirrored.remote_pools.clear()

    def _drop_worker(self, worker: WorkerHandle, error: Exception) -> None:
        _log.warning("%s; continuing without this worker", error)
        if worker in self.workers:
            self.workers.remove(worker)
            self.mirrored.remote_pools.remove(worker.pool)
            self._on_lost(worker.peer.rank)


class _LostWorkerError(Exception):
    """Error that a worker has ended, failed or not answered in time."""

    def __init__(self, worker: WorkerHandle, error: Exception) -> None:
        super().__init__(str(error))
        self.worker = worker


def _cost_function(
    cost_model: CostModel, context: int, *, default: Callable[[int], float] | None = None
) -> Callable[[int], float]:
    """Return a function from a number of rows to the measured seconds of a forward pass.

    Before the first measurement, the function is ``default``, or for ``None`` an estimate in units
    of a pass of one row.
    """
    curve: CostCurve | None = cost_model.costs(context)
    if curve is not None:
        return curve.at
    return default or (lambda rows: 1.0 + _PRIOR_COST_PER_ROW * (rows - 1))
