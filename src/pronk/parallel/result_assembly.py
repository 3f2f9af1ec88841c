"""Splitting a forward pass into workers' rows, and assembling the results of all processes."""

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
from pronk.parallel.tree_partition import TreePart, WorkerShare
from pronk.parallel.work_request import WorkRows
from pronk.speculation.tree import TokenTree

__all__ = ["AssembledResult", "FetchLogits", "ScatteredLogits", "make_work_rows", "own_logits_nodes"]

# ``fetch(piece, rows)`` fetches the logits of some logits rows of a worker's piece, float32 ``[len(rows), vocab]``;
# ``None`` if the worker is gone.
FetchLogits = Callable[[int, Sequence[int]], Tensor | None]


def own_logits_nodes(job: ForwardJob, piece: TreePart) -> list[int]:
    """Return the piece's own nodes whose logits are needed."""
    return [node for node in piece.own if node in job.logits_nodes]


def make_work_rows(job: ForwardJob, piece: TreePart, lead: Sequence[int]) -> WorkRows:
    """Return the rows of a piece, after ``lead``: tokens at the text's end that the worker recomputes."""
    segment, num_lead = job.segment, len(lead)
    tree, block_table = segment.tree, segment.block_table
    if piece.nodes == tuple(range(len(tree))) and not piece.num_ancestors and not lead:
        return WorkRows(job, 0)
    new_nodes = {node: num_lead + offset for offset, node in enumerate(piece.nodes)}
    tokens = (*lead, *(tree.tokens[node] for node in piece.nodes))
    parents = (num_lead - 1 if node == 0 else new_nodes[tree.parents[node]] for node in piece.nodes)
    # Acceptance matters to the driver only.
    verify = (True,) + (False,) * (len(tokens) - 1)
    part = TokenTree(tokens, (*range(-1, num_lead - 1), *parents), verify)
    if lead:
        worker_table = BlockTable(list(block_table.blocks), block_table.num_released, block_table.length - num_lead)
        worker_table.update_derived()
        block_table = worker_table
    logits_nodes = own_logits_nodes(job, piece)
    first = new_nodes[logits_nodes[0]] if logits_nodes else len(tokens)
    assert [*range(first, len(tokens))] == [new_nodes[node] for node in logits_nodes]
    rows = job._replace(segment=Segment(block_table, part), logits_nodes=range(first, len(tokens)))
    return WorkRows(rows, num_lead + piece.num_ancestors)


class _RemoteRow(NamedTuple):
    """Location of a row of logits: the worker's ``fetch``, the number of the piece, and the row in it."""

    fetch: FetchLogits
    piece: int
    row: int


class ScatteredLogits:
    """Logits of one job, ``[logits rows, vocab]``, whose remote rows are fetched at the first access.

    Attributes:
        rows: logits, undefined in rows that are still remote.
        remote_rows: remote rows to their locations.
    """

    def __init__(self, rows: Tensor, recompute: Callable[[], Tensor]) -> None:
        """``recompute`` recomputes all rows in this process, if a worker with some of them is gone."""
        self.rows, self.remote_rows = rows, dict[int, _RemoteRow]()
        self._recompute = recompute

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: int | slice | list[int], /) -> Tensor:
        """Return rows as float32; fetch remote ones first."""
        selected = rows if isinstance(rows, list) else range(len(self))[rows]
        self._fetch([selected] if isinstance(selected, int) else selected)
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
        sampled: for each job, logits rows to the tokens that workers sampled after them.
        hidden: layer number to the layer's outputs for each job, ``[rows, hidden]``.
    """

    def __init__(
        self,
        jobs: Sequence[ForwardJob],
        runner: ModelRunner,
        collect: frozenset[int],
        recompute: Callable[[ForwardJob], Tensor],
    ) -> None:
        """Begin without results; after a worker's failure, ``recompute`` computes a job's logits here."""
        config, cache = runner.decoder.config, runner.cache
        self.jobs, self.collect = jobs, sorted(collect)
        vocab = config.vocab_size
        self.logits = [
            ScatteredLogits(torch.empty(len(job.logits_nodes), vocab), partial(recompute, job)) for job in jobs
        ]
        self.sampled = [dict[int, int]() for _ in jobs]
        sizes = [(len(job.segment.tree), config.hidden_size) for job in jobs]
        self.hidden = {layer: [torch.empty(size, dtype=cache.dtype) for size in sizes] for layer in self.collect}
        self._driver_nodes: dict[int, dict[int, int]] = {number: {} for number in range(len(jobs))}
        self._worker_nodes: dict[int, list[tuple[RemoteCopy, dict[int, int]]]] = {
            number: [] for number in range(len(jobs))
        }

    @property
    def partitioned(self) -> dict[int, PartitionedTree]:
        """Return the partitioned trees by the ``id`` of their block table."""
        segments = [job.segment for job in self.jobs]
        return {
            id(segment.block_table): PartitionedTree(
                segment.tree, self._driver_nodes[number], tuple(self._worker_nodes[number])
            )
            for number, segment in enumerate(segments)
        }

    def add_driver_result(self, share: WorkerShare, result: ForwardResult) -> None:
        """Add the result of this process."""
        for number, piece in enumerate(share.pieces):
            self._driver_nodes[piece.job] = {node: offset for offset, node in enumerate(piece.nodes)}
            self._set_logits(piece, result.logits[number][:])
            for layer in self.collect:
                self.hidden[layer][piece.job][list(piece.own)] = result.hidden[layer][number][piece.num_ancestors :]

    def add_worker_result(
        self, copy: RemoteCopy, share: WorkerShare, sampled: Sequence[int], data: Tensor, fetch: FetchLogits
    ) -> None:
        """Add the result of a worker.

        Args:
            copy: record of the worker's pool.
            share: share that the worker computed.
            sampled: sampled tokens of the pieces with a stateless sampler; -1 where logits are not finite.
            data: logits of the pieces that need all of them, then each collected layer's outputs of own nodes.
            fetch: fetches the other logits.
        """
        begin, tokens = 0, iter(sampled)

        def next_rows(like: Tensor, rows: int) -> Tensor:
            nonlocal begin
            size = rows * like.shape[-1] * like.itemsize
            begin += size
            return data[begin - size : begin].clone().view(like.dtype).view(rows, like.shape[-1])

        for number, piece in enumerate(share.pieces):
            job, logits, logits_rows = self.jobs[piece.job], self.logits[piece.job], self._logits_rows(piece)
            if job.all_logits:
                self._set_logits(piece, next_rows(logits.rows, len(logits_rows)))
            else:
                logits.remote_rows |= {row: _RemoteRow(fetch, number, offset) for offset, row in enumerate(logits_rows)}
            if job.stateless_sampler is not None:
                # A token of -1 is dropped: reading its logits reports that they are not finite.
                samples = zip(logits_rows, islice(tokens, len(logits_rows)), strict=True)
                self.sampled[piece.job] |= {row: token for row, token in samples if token >= 0}
            first = job.segment.block_table.length
            self._worker_nodes[piece.job].append(
                (copy, {node: first + offset for offset, node in enumerate(piece.nodes)})
            )
        for layer in self.collect:
            for piece in share.pieces:
                self.hidden[layer][piece.job][list(piece.own)] = next_rows(
                    self.hidden[layer][piece.job], len(piece.own)
                )

    def _logits_rows(self, piece: TreePart) -> list[int]:
        job = self.jobs[piece.job]
        return [node - job.logits_nodes.start for node in own_logits_nodes(job, piece)]

    def _set_logits(self, piece: TreePart, rows: Tensor) -> None:
        logits_rows = self._logits_rows(piece)
        if logits_rows:
            self.logits[piece.job].rows[logits_rows] = rows
