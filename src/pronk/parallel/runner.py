"""Passes whose trees are dealt to several processes."""

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

# A row more is believed to cost so much of the first one, before it is known.
_ROW = 0.1

# What a worker lacks of a text it is sent once; so many steps have something of it, or so it is believed.
_STEPS = 8

# How long a worker may take: so many times what this process took for its own part, and so many seconds more.
_SLOWER, _PATIENCE = 10.0, 20.0


class TreeRunner(ModelRunner):
    """Deals the trees of a pass to this process and some workers.

    What a pass computes is the same to the bit, since a row's bits depend on its own text alone. A worker that is gone
    is done without: what it should have computed is computed here.

    Attributes:
        workers: those that are there.
        shared: passes that several processes made.
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
        """A model with workers.

        Args:
            decoder: the model.
            cache: its pool here.
            peers: the workers.
            alive: whether the process of a rank is there, as far as can be told without asking it.
            lost: is told the rank of one that is gone, or of no use any more.
            clock: gives seconds.
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
        # Both know it no longer than others do, so that workers end with whoever has begun them.
        runner, known = ref(self), list[ref[WorkerHandle]]()

        def fetch(slots: NDArray[np.int64]) -> Tensor | None:
            here, worker = runner(), known[0]()
            return None if here is None or worker is None else here._fetch(worker, slots)  # noqa: SLF001 - this one

        worker = WorkerHandle(peer, self.mirrored.join(fetch))
        known.append(ref(worker))
        self.workers.append(worker)

    @property
    def waited(self) -> float:
        """Seconds of sending, waiting and receiving beyond this process's own passes, so far."""
        return self._waited

    def forward(self, jobs: Sequence[ForwardJob], collect: frozenset[int] = frozenset()) -> ForwardResult:
        """One pass over all jobs' trees, by whom it is fastest."""
        shares = self._deal(jobs)
        if sum(bool(share.pieces) for share in shares) > 1:
            with uninterrupted():
                try:
                    return self._together(jobs, shares, collect)
                except _LostError as error:
                    self._drop(error.worker, error)
                    self._hear_out()
                except BaseException:
                    self._hear_out()
                    self.mirrored.begin_copies_anew()  # of what was meant for them some may never have been sent
                    raise
        result = super().forward(jobs, collect)
        self.own.learn(_rows(jobs), result.context, result.seconds)
        self.mirrored.dealt = {id(job.segment.block_table): PartitionedTree(job.segment.tree) for job in jobs}
        return result

    def _deal(self, jobs: Sequence[ForwardJob]) -> list[WorkerShare]:
        """Who is to compute what; where nothing can be dealt, it is all for this process."""
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
        """Seconds until a worker has what it lacks of the texts, which is sent if nothing else; this step's share."""
        lacks = sum(int((~worker.copy.has[self._certain(job)]).sum()) for job in jobs)
        return lacks * self.cache.bytes_per_token * worker.byte / _STEPS

    def _certain(self, job: ForwardJob) -> NDArray[np.int64]:
        """The slots of a text that a pass reads."""
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
        made = AssembledResult(jobs, self, collect, self._again)
        asked = []
        for worker, share in zip(self.workers, shares[1:], strict=True):
            if share.pieces:
                work, rides = self._work(worker, jobs, share, collect)
                self._send(worker, work)
                self._owing.append(worker)
                asked.append((worker, share, rides))
        own = [part_of(jobs[piece.job], piece, ()) for piece in shares[0].pieces]
        result = super().forward([rows.job for rows in own], collect)
        self.own.learn(sum(len(rows.job.segment.tree) for rows in own), context, result.seconds)
        made.take_own(shares[0], result)
        longest = result.seconds
        for worker, share, rides in asked:
            message = self._answer(worker, turn, _SLOWER * result.seconds)
            longest = max(longest, self._done(worker, share, rides, message))
            ask = partial(self._logits, worker, turn)
            made.take(worker.copy, share, message.numbers[3:].tolist(), message.data, ask)
            for piece, ride in zip(share.pieces, rides, strict=True):
                certain = self._certain(jobs[piece.job])
                worker.copy.has[certain[len(certain) - ride :]] = True
        seconds = self.clock() - began
        for worker, _, _ in asked:
            worker.took(seconds, longest)
        self._waited, self.shared = self._waited + seconds - result.seconds, self.shared + 1
        self.mirrored.dealt = made.dealt
        return ForwardResult(made.logits, made.hidden, seconds, context, made.chosen)

    def _again(self, job: ForwardJob) -> Tensor:
        """A job's logits, all computed here, as a worker is gone that had some; so are its keys and values."""
        result = super().forward([job])
        self.mirrored.dealt[id(job.segment.block_table)] = PartitionedTree(job.segment.tree)
        return result.logits[0][:]

    def _work(
        self, worker: WorkerHandle, jobs: Sequence[ForwardJob], share: WorkerShare, collect: frozenset[int]
    ) -> tuple[WorkRequest, list[int]]:
        """What a worker is to do, and how many rows of each piece's text ride along."""
        rows, slots, rides = list[WorkRows](), list[NDArray[np.int64]](), list[int]()
        costs = _costs(worker.times, 0, _costs(self.own, 0))
        for piece in share.pieces:
            certain = self._certain(jobs[piece.job])
            lacks = np.flatnonzero(~worker.copy.has[certain])
            ride = len(certain) - int(lacks[0]) if len(lacks) else 0
            row = costs(share.rows + ride) - costs(share.rows)
            # What a row of the text would read before the window may have been given back.
            gone = jobs[piece.job].segment.block_table.released > 0
            # Where nobody knows what rows cost, the comparison is false, and they are sent.
            if gone or not row <= len(lacks) * self.cache.bytes_per_token * worker.byte:
                slots.append(certain[lacks])
                ride = 0
            rides.append(ride)
            lead = self.mirrored.tokens[certain[len(certain) - ride :]].tolist() if ride else []
            rows.append(part_of(jobs[piece.job], piece, lead))
        copy = worker.copy
        sent = np.concatenate(slots) if slots else np.zeros(0, np.int64)
        kept = self.cache.take(sent) if len(sent) else None
        copy.has[sent] = True
        moves, copy.moves = copy.moves, []
        return WorkRequest(self._turn, rows, moves, sent, kept, collect), rides

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
        """What a worker answers to what it was last asked; what it says of earlier turns nobody waits for."""
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

    def _hear_out(self) -> None:
        """A pass is given up: those who were asked answer before they listen again."""
        while self._owing:
            worker = self._owing.pop()
            if worker in self.workers:
                try:
                    self._answer(worker, self._turn, _PATIENCE)
                except _LostError as error:
                    self._drop(worker, error)

    def _done(self, worker: WorkerHandle, share: WorkerShare, rides: Sequence[int], message: PeerMessage) -> float:
        """The seconds of a worker's pass."""
        seconds, context = 1e-9 * int(message.numbers[1]), int(message.numbers[2])
        worker.times.learn(share.rows + sum(rides), context, seconds)
        return seconds

    def _fetch(self, worker: WorkerHandle, slots: NDArray[np.int64]) -> Tensor | None:
        """What a worker's pool has at some slots; ``None`` if the worker is gone."""
        found = self._ask(worker, MessageKind.ROWS, slots.tolist())
        return None if found is None else found.view(len(slots), -1)

    def _logits(self, worker: WorkerHandle, turn: int, piece: int, places: Sequence[int]) -> Tensor | None:
        """Logits that a worker has kept of a pass; ``None`` if the worker is gone."""
        found = self._ask(worker, MessageKind.LOGITS, [turn, piece, *places])
        return None if found is None else found.view(torch.float32).view(len(places), -1)

    def _ask(self, worker: WorkerHandle, kind: MessageKind, numbers: Sequence[int]) -> Tensor | None:
        """The bytes that a worker answers with; ``None`` if it is gone."""
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
        """Do without workers from now on."""
        self.workers.clear()
        self.mirrored.copies.clear()

    def _drop(self, worker: WorkerHandle, error: Exception) -> None:
        """A worker is gone: what it did is done here from now on."""
        _log.warning("%s; the others go on without it", error)
        if worker in self.workers:
            self.workers.remove(worker)
            self.mirrored.copies.remove(worker.copy)
            self._lost(worker.peer.rank)


class _LostError(Exception):
    """A worker is gone in the middle of a pass."""

    def __init__(self, worker: WorkerHandle, error: Exception) -> None:
        super().__init__(str(error))
        self.worker = worker


def _rows(jobs: Sequence[ForwardJob]) -> int:
    return sum(job.segment.rows for job in jobs)


def _costs(times: CostModel, context: int, otherwise: Callable[[int], float] | None = None) -> Callable[[int], float]:
    """Seconds of a pass by its rows, as far as anybody knows."""
    found: CostCurve | None = times.costs(context)
    if found is not None:
        return found.at
    return otherwise or (lambda rows: 1.0 + _ROW * (rows - 1))
