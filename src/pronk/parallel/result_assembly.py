"""Rows that each process computes in a forward pass, and the assembly of all processes' results.

Shares and pieces are defined in :mod:`~pronk.parallel.tree_partition`; a *job* is one request's tree. *Logits rows* are
the rows of a job's logits, one for each node whose logits are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from pronk.execution.attention import Segment
from pronk.execution.forward_job import ForwardJob
from pronk.execution.model_runner import ForwardResult, ModelRunner
from pronk.kv_cache.blocks import BlockTable
from pronk.parallel.mirrored_cache import PartitionedTree, RemoteCopy
from pronk.parallel.tree_partition import TreePiece, WorkerShare
from pronk.parallel.work_request import WorkRows
from pronk.speculation.tree import TokenTree

__all__ = ["AssembledResult", "FetchLogits", "ScatteredLogits", "make_work_rows", "own_logits_nodes"]

# ``fetch(piece, rows)`` fetches logits rows of a piece (index in the worker's share), float32 ``[len(rows), vocab]``;
# ``None`` if the worker is gone.
FetchLogits = Callable[[int, Sequence[int]], Tensor | None]


def own_logits_nodes(job: ForwardJob, piece: TreePiece) -> list[int]:
    """Return the piece's own nodes whose logits are needed."""
    return [node for node in piece.own if node in job.logits_nodes]


def make_work_rows(job: ForwardJob, piece: TreePiece, lead: Sequence[int]) -> WorkRows:
    """Return the rows of a piece, after ``lead``: last committed tokens, which the worker recomputes."""
    segment, num_lead = job.segment, len(lead)
    tree, block_table = segment.tree, segment.block_table
    if piece.nodes == tuple(range(len(tree))) and not piece.num_ancestors and not lead:
        return WorkRows(job, 0)
    new_nodes = {node: num_lead + place for place, node in enumerate(piece.nodes)}
    tokens = (*lead, *(tree.tokens[node] for node in piece.nodes))
    parents = (num_lead - 1 if node == 0 else new_nodes[tree.parents[node]] for node in piece.nodes)
    # Only the driver verifies; a worker needs no flags of the nodes to verify.
    verify = (True,) + (False,) * (len(tokens) - 1)
    part = TokenTree(tokens, (*range(-1, num_lead - 1), *parents), verify)
    if lead:
        worker_table = BlockTable(list(block_table.blocks), block_table.num_released, block_table.length - num_lead)
        worker_table.update_derived()
        block_table = worker_table
    wanted = own_logits_nodes(job, piece)
    first = new_nodes[wanted[0]] if wanted else len(tokens)
    assert [*range(first, len(tokens))] == [new_nodes[node] for node in wanted]
    rows = job._replace(segment=Segment(block_table, part), logits_nodes=range(first, len(tokens)))
    return WorkRows(rows, num_lead + piece.num_ancestors)


class _RemoteRow(NamedTuple):
    """Location of a logits row: the worker's ``fetch``, the index of the piece, and the row in the piece."""

    fetch: FetchLogits
    piece: int
    row: int


class ScatteredLogits:
    """Logits of one job, ``[logits rows, vocab]``. Rows in a worker are fetched at the first access.

    Attributes:
        rows: logits, undefined in rows that are still in a worker.
        remote_rows: location of each logits row that is still in a worker.
    """

    def __init__(self, rows: Tensor, recompute: Callable[[], Tensor]) -> None:
        """``recompute`` recomputes all rows in this process, if a worker with some of them is gone."""
        self.rows, self.remote_rows = rows, dict[int, _RemoteRow]()
        self._recompute = recompute

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: int | slice | list[int], /) -> Tensor:
        """Return logits rows as float32, and fetch them from workers first."""
        indices = rows if isinstance(rows, list) else range(len(self))[rows]
        self._fetch([indices] if isinstance(indices, int) else indices)
        return self.rows[rows]

    def _fetch(self, rows: Sequence[int]) -> None:
        missing = dict[tuple[FetchLogits, int], dict[int, int]]()
        for row in rows:
            if row in self.remote_rows:
                fetch, piece, piece_row = self.remote_rows[row]
                missing.setdefault((fetch, piece), {})[row] = piece_row
        for (fetch, piece), piece_rows in missing.items():
            found = fetch(piece, list(piece_rows.values()))
            if found is None:
                self.rows = self._recompute()
                self.remote_rows.clear()
                return
            self.rows[list(piece_rows)] = found
            for row in piece_rows:
                del self.remote_rows[row]


class AssembledResult:
    """The result of a forward pass, assembled from all processes.

    Attributes:
        logits: logits of each job.
        sampled: for each job, the token that a worker sampled after a logits row, by the row.
        hidden: by layer number, the layer's outputs for each job, ``[rows, hidden]``.
    """

    def __init__(
        self,
        jobs: Sequence[ForwardJob],
        runner: ModelRunner,
        collect: frozenset[int],
        recompute: Callable[[ForwardJob], Tensor],
    ) -> None:
        """Begin without results. ``recompute`` computes a job's logits in this process if a worker is gone."""
        config, cache = runner.decoder.config, runner.cache
        self.jobs, self.collect = jobs, sorted(collect)
        vocab = config.vocab_size
        self.logits = [
            ScatteredLogits(torch.empty(len(job.logits_nodes), vocab), partial(recompute, job)) for job in jobs
        ]
        self.sampled = [dict[int, int]() for _ in jobs]
        sizes = [(len(job.segment.tree), config.hidden_size) for job in jobs]
        self.hidden = {layer: [torch.empty(size, dtype=cache.dtype) for size in sizes] for layer in self.collect}
        self._driver_nodes = [dict[int, int]() for _ in jobs]
        self._worker_nodes = [list[tuple[RemoteCopy, dict[int, int]]]() for _ in jobs]

    @property
    def partitioned(self) -> dict[int, PartitionedTree]:
        """Return the jobs' trees and the processes of their nodes, by the ``id`` of the block table."""
        return {
            id(job.segment.block_table): PartitionedTree(job.segment.tree, driver_nodes, tuple(worker_nodes))
            for job, driver_nodes, worker_nodes in zip(self.jobs, self._driver_nodes, self._worker_nodes, strict=True)
        }

    def add_driver_result(self, share: WorkerShare, result: ForwardResult) -> None:
        """Add the result of this process."""
        for number, piece in enumerate(share.pieces):
            self._driver_nodes[piece.job] = {node: place for place, node in enumerate(piece.nodes)}
            self._set_logits(piece, result.logits[number][:])
            for layer in self.collect:
                self.hidden[layer][piece.job][list(piece.own)] = result.hidden[layer][number][piece.num_ancestors :]

    def add_worker_result(
        self, copy: RemoteCopy, share: WorkerShare, sampled: Sequence[int], data: Tensor, fetch: FetchLogits
    ) -> None:
        """Add the result of a worker.

        Args:
            copy: record of the worker's pool.
            share: nodes that the worker computed.
            sampled: sampled tokens of the jobs with a stateless sampler; -1 if the logits are not finite.
            data: logits of the jobs that need all their logits, then each collected layer's outputs of own nodes.
            fetch: fetches logits that ``data`` lacks.
        """
        begin, tokens = 0, iter(sampled)

        def next_rows(like: Tensor, rows: int) -> Tensor:  # of the dtype and width of `like`
            nonlocal begin
            size = rows * like.shape[-1] * like.itemsize
            begin += size
            return data[begin - size : begin].clone().view(like.dtype).view(rows, like.shape[-1])

        for number, piece in enumerate(share.pieces):
            job, logits, logits_rows = self.jobs[piece.job], self.logits[piece.job], self._logits_rows(piece)
            if job.all_logits:
                self._set_logits(piece, next_rows(logits.rows, len(logits_rows)))
            else:
                logits.remote_rows |= {row: _RemoteRow(fetch, number, place) for place, row in enumerate(logits_rows)}
            if job.stateless_sampler is not None:
                # Drop tokens of -1: the sampler then reads the logits and reports that they are not finite.
                samples = zip(logits_rows, islice(tokens, len(logits_rows)), strict=True)
                self.sampled[piece.job] |= {row: token for row, token in samples if token >= 0}
            first = job.segment.block_table.length
            self._worker_nodes[piece.job].append(
                (copy, {node: first + place for place, node in enumerate(piece.nodes)})
            )
        for layer in self.collect:
            for piece in share.pieces:
                self.hidden[layer][piece.job][list(piece.own)] = next_rows(
                    self.hidden[layer][piece.job], len(piece.own)
                )

    def _logits_rows(self, piece: TreePiece) -> list[int]:
        job = self.jobs[piece.job]
        return [node - job.logits_nodes.start for node in own_logits_nodes(job, piece)]

    def _set_logits(self, piece: TreePiece, rows: Tensor) -> None:
        logits_rows = self._logits_rows(piece)
        if logits_rows:
            self.logits[piece.job].rows[logits_rows] = rows
