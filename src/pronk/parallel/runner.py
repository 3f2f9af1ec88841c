"""Tree parallelism in the driver: forward passes whose token trees are split among processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.execution.forward_job import ForwardJob
from pronk.execution.model_runner import ForwardResult, ModelRunner
from pronk.interrupts import uninterrupted
from pronk.models.decoder import Decoder
from pronk.parallel.connection import ConnectionLostError, MessageKind, PeerConnection, PeerMessage
from pronk.parallel.mirrored_cache import MirroredCache, PartitionedTree
from pronk.parallel.result_assembly import AssembledResult, part_of
from pronk.parallel.tree_partition import TreePart, WorkerShare, deal
from pronk.parallel.work_request import WorkRequest, WorkRows
from pronk.parallel.worker_handle import WorkerHandle
from pronk.speculation.cost_model import CostCurve, CostModel

__all__ = ["TreeRunner"]

_log = logging.getLogger(__name__)

# Prior cost of a further row, as a multiple of the first row's.
_ROW = 0.1

# Steps over which the cost of sending missing KV rows is spread: rows are sent once and used in many steps.
_STEPS = 8

# Timeout of a worker's answer: _SLOWER times the driver's own forward pass plus _PATIENCE seconds.
_SLOWER, _PATIENCE = 10.0, 20.0


class TreeRunner(ModelRunner):
    """A model runner that splits the trees of a forward pass among this process (the driver) and workers.

    Results are bit-identical to those of one process, since the bits of a row depend on its own text alone. If a worker
    is lost, the driver computes the worker's share and goes on without the worker.

    Attributes:
        workers: connected workers.
        shared: number of forward passes that several processes computed.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: MirroredCache,
        peers: Sequence[PeerConnection],
        alive: Callable[[int], bool],
        lost: Callable[[int], None],
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Connect a model to its workers.

        Args:
            decoder: the model.
            cache: its KV cache, which tracks the copies of the workers.
            peers: connections to the workers.
            alive: returns whether the process of a rank runs, without communication.
            lost: callback with the rank of a worker that has failed.
            clock: returns seconds.
        """
        super().__init__(decoder, cache, clock=clock)
        self.mirrored, self.own = cache, CostModel()
        self.workers: list[WorkerHandle] = []
        self._waited, self.shared, self._turn = 0.0, 0, 0
        self._owing: list[WorkerHandle] = []
        self._alive, self._lost = alive, lost
        for peer in peers:
            self._join(peer)

    def _join(self, peer: PeerConnection) -> None:
        # Weak references: the closure must not keep the runner alive, so that workers end with their owner.
        runner, known = ref(self), list[ref[WorkerHandle]]()

        def fetch(slots: NDArray[np.int64]) -> Tensor | None:
            here, worker = runner(), known[0]()
            return None if here is None or worker is None else here._fetch(worker, slots)  # noqa: SLF001 - own instance

        worker = WorkerHandle(peer, self.mirrored.join(fetch))
        known.append(ref(worker))
        self.workers.append(worker)

    @property
    def waited(self) -> float:
        """Return the total seconds of communication and waiting beyond the driver's own forward passes."""
        return self._waited

    def forward(self, jobs: Sequence[ForwardJob], collect: frozenset[int] = frozenset()) -> ForwardResult:
        """Compute all jobs' trees, split among the processes that make it fastest."""
        shares = self._deal(jobs)
        if sum(bool(share.pieces) for share in shares) > 1:
            with uninterrupted():
                try:
                    return self._together(jobs, shares, collect)
                except _LostError as error:
                    self._drop(error.worker, error)
                    self._drain()
                except BaseException:
                    self._drain()
                    self.mirrored.begin_copies_anew()  # some data for them may not have been sent
                    raise
        result = super().forward(jobs, collect)
        self.own.learn(_rows(jobs), result.context, result.seconds)
        self.mirrored.dealt = {id(job.segment.block_table): PartitionedTree(job.segment.tree) for job in jobs}
        return result

    def _deal(self, jobs: Sequence[ForwardJob]) -> list[WorkerShare]:
        """Return the share of each process; the driver takes all if the trees cannot be split."""
        whole = [WorkerShare(tuple(TreePart(n, tuple(range(len(j.segment.tree))), 0) for n, j in enumerate(jobs)))]
        rows = _rows(jobs)
        pinned = any(job.segment.early is not None or job.segment.computed or job.beside is not None for job in jobs)
        if not self.workers or pinned or rows < 2:
            return whole
        context = sum(job.segment.block_table.length for job in jobs)
        costs = [_costs(self.own, context)]
        costs += [_costs(worker.times, context, costs[0]) for worker in self.workers]
        extra = [0.0, *(worker.exchange + self._lag(worker, jobs) for worker in self.workers)]
        for worker in self.workers:
            worker.idle += 1
        return deal([job.segment.tree for job in jobs], costs, extra)

    def _lag(self, worker: WorkerHandle, jobs: Sequence[ForwardJob]) -> float:
        """Return this step's share of the seconds to send a worker the KV rows that it lacks."""
        missing = sum(int((~worker.copy.has[self._certain(job)]).sum()) for job in jobs)
        return missing * self.cache.bytes_per_token * worker.byte / _STEPS

    def _certain(self, job: ForwardJob) -> NDArray[np.int64]:
        """Return the slots of the committed text that a forward pass reads."""
        block_table = job.segment.block_table
        begin = block_table.released * self.cache.block_size
        return (
            self.cache.slots(block_table, begin, block_table.length)
            if block_table.length > begin
            else np.zeros(0, np.int64)
        )

    def _together(
        self, jobs: Sequence[ForwardJob], shares: Sequence[WorkerShare], collect: frozenset[int]
    ) -> ForwardResult:
        began, context = self.clock(), sum(job.segment.block_table.length for job in jobs)
        self._turn += 1
        turn = self._turn
        made = AssembledResult(jobs, self, collect, self._recompute)
        busy = []
        for worker, share in zip(self.workers, shares[1:], strict=True):
            if share.pieces:
                work, recomputed = self._work(worker, jobs, share, collect)
                self._send(worker, work)
                self._owing.append(worker)
                busy.append((worker, share, recomputed))
        own = [part_of(jobs[piece.job], piece, ()) for piece in shares[0].pieces]
        result = super().forward([rows.job for rows in own], collect)
        self.own.learn(sum(len(rows.job.segment.tree) for rows in own), context, result.seconds)
        made.take_own(shares[0], result)
        longest = result.seconds
        for worker, share, recomputed in busy:
            message = self._answer(worker, turn, _SLOWER * result.seconds)
            longest = max(longest, self._done(worker, share, recomputed, message))
            ask = partial(self._logits, worker, turn)
            made.take(worker.copy, share, message.numbers[3:].tolist(), message.data, ask)
            for piece, recompute in zip(share.pieces, recomputed, strict=True):
                certain = self._certain(jobs[piece.job])
                worker.copy.has[certain[len(certain) - recompute :]] = True
        seconds = self.clock() - began
        for worker, _, _ in busy:
            worker.took(seconds, longest)
        self._waited, self.shared = self._waited + seconds - result.seconds, self.shared + 1
        self.mirrored.dealt = made.dealt
        return ForwardResult(made.logits, made.hidden, seconds, context, made.chosen)

    def _recompute(self, job: ForwardJob) -> Tensor:
        """Recompute a job in this process after the loss of a worker; return all its logits."""
        result = super().forward([job])
        self.mirrored.dealt[id(job.segment.block_table)] = PartitionedTree(job.segment.tree)
        return result.logits[0][:]

    def _work(
        self, worker: WorkerHandle, jobs: Sequence[ForwardJob], share: WorkerShare, collect: frozenset[int]
    ) -> tuple[WorkRequest, list[int]]:
        """Return a worker's request, and for each piece the number of text tokens that the worker recomputes."""
        rows, slots, recomputed = list[WorkRows](), list[NDArray[np.int64]](), list[int]()
        costs = _costs(worker.times, 0, _costs(self.own, 0))
        for piece in share.pieces:
            certain = self._certain(jobs[piece.job])
            missing = np.flatnonzero(~worker.copy.has[certain])
            recompute = len(certain) - int(missing[0]) if len(missing) else 0
            row = costs(share.rows + recompute) - costs(share.rows)
            # With a sliding window, blocks that a recomputed row would read may have been released.
            gone = jobs[piece.job].segment.block_table.released > 0
            # Without measured row costs the comparison is false, and the rows are sent.
            if gone or not row <= len(missing) * self.cache.bytes_per_token * worker.byte:
                slots.append(certain[missing])
                recompute = 0
            recomputed.append(recompute)
            lead = self.mirrored.tokens[certain[len(certain) - recompute :]].tolist() if recompute else []
            rows.append(part_of(jobs[piece.job], piece, lead))
        copy = worker.copy
        sent = np.concatenate(slots) if slots else np.zeros(0, np.int64)
        kept = self.cache.take(sent) if len(sent) else None
        copy.has[sent] = True
        moves, copy.moves = copy.moves, []
        return WorkRequest(self._turn, rows, moves, sent, kept, collect), recomputed

    def _send(self, worker: WorkerHandle, work: WorkRequest) -> None:
        if not self._alive(worker.peer.rank):
            raise _LostError(worker, ConnectionLostError(f"worker {worker.peer.rank} is gone"))
        try:
            if not worker.copy.told:
                pool = self.mirrored
                worker.peer.send(MessageKind.POOL, [self._turn, pool.allocator.num_blocks, *pool.hidden])
                self._answer(worker, self._turn, 0.0)
                worker.copy.told, worker.cold = True, True
            began = self.clock()
            worker.peer.send(MessageKind.WORK, work.numbers(), work.kept.flatten() if work.kept is not None else b"")
        except ConnectionLostError as error:
            raise _LostError(worker, error) from error
        if work.kept is not None:
            worker.sent(work.kept.nbytes, self.clock() - began)

    def _answer(self, worker: WorkerHandle, turn: int, patience: float) -> PeerMessage:
        """Return a worker's answer to request number ``turn``; skip answers to earlier requests."""
        while True:
            try:
                message = worker.peer.receive(_PATIENCE + patience)
            except ConnectionLostError as error:
                raise _LostError(worker, error) from error
            if message.kind == MessageKind.FAILED:
                raise _LostError(worker, ConnectionLostError(f"worker {worker.peer.rank} has failed: {message.text}"))
            if len(message.numbers) and int(message.numbers[0]) == turn:
                if worker in self._owing:
                    self._owing.remove(worker)
                return message

    def _drain(self) -> None:
        """Receive all outstanding answers of an aborted forward pass, since workers send before they receive."""
        while self._owing:
            worker = self._owing.pop()
            if worker in self.workers:
                try:
                    self._answer(worker, self._turn, _PATIENCE)
                except _LostError as error:
                    self._drop(worker, error)

    def _done(self, worker: WorkerHandle, share: WorkerShare, recomputed: Sequence[int], message: PeerMessage) -> float:
        """Record the cost of a worker's forward pass; return its seconds."""
        seconds, context = 1e-9 * int(message.numbers[1]), int(message.numbers[2])
        worker.times.learn(share.rows + sum(recomputed), context, seconds)
        return seconds

    def _fetch(self, worker: WorkerHandle, slots: NDArray[np.int64]) -> Tensor | None:
        """Fetch the contents of slots of a worker's pool; ``None`` if the worker is gone."""
        found = self._ask(worker, MessageKind.ROWS, slots.tolist())
        return None if found is None else found.view(len(slots), -1)

    def _logits(self, worker: WorkerHandle, turn: int, piece: int, places: Sequence[int]) -> Tensor | None:
        """Fetch logits of a worker's forward pass ``turn``; ``None`` if the worker is gone."""
        found = self._ask(worker, MessageKind.LOGITS, [turn, piece, *places])
        return None if found is None else found.view(torch.float32).view(len(places), -1)

    def _ask(self, worker: WorkerHandle, kind: MessageKind, numbers: Sequence[int]) -> Tensor | None:
        """Return the bytes of a worker's answer; ``None`` if the worker is gone."""
        if worker not in self.workers:
            return None
        began = self.clock()
        self._turn += 1
        try:
            with uninterrupted():
                worker.peer.send(kind, [self._turn, *numbers])
                found = self._answer(worker, self._turn, 0.0).data
        except (ConnectionLostError, _LostError) as error:
            self._drop(worker, error)
            return None
        self._waited += self.clock() - began
        return found

    def dismiss(self) -> None:
        """Continue without workers."""
        self.workers.clear()
        self.mirrored.copies.clear()

    def _drop(self, worker: WorkerHandle, error: Exception) -> None:
        _log.warning("%s; continuing without this worker", error)
        if worker in self.workers:
            self.workers.remove(worker)
            self.mirrored.copies.remove(worker.copy)
            self._lost(worker.peer.rank)


class _LostError(Exception):
    """A worker is lost during a forward pass."""

    def __init__(self, worker: WorkerHandle, error: Exception) -> None:
        super().__init__(str(error))
        self.worker = worker


def _rows(jobs: Sequence[ForwardJob]) -> int:
    return sum(job.segment.rows for job in jobs)


def _costs(times: CostModel, context: int, otherwise: Callable[[int], float] | None = None) -> Callable[[int], float]:
    """Return seconds by rows of a forward pass: measured, else ``otherwise``, else a prior (relative)."""
    found: CostCurve | None = times.costs(context)
    if found is not None:
        return found.at
    return otherwise or (lambda rows: 1.0 + _ROW * (rows - 1))
