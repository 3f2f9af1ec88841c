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

__all__ = ["Ask", "AssembledResult", "ScatteredLogits", "part_of", "wanted_of"]

# ``ask(piece, places)`` fetches the logits of some wanted rows of a worker's piece, float32 ``[len(places), vocab]``;
# ``None`` if the worker is gone.
Ask = Callable[[int, Sequence[int]], Tensor | None]


def wanted_of(job: ForwardJob, piece: TreePart) -> list[int]:
    """Return the piece's own nodes whose logits are needed."""
    return [node for node in piece.own if node in job.wanted]


def part_of(job: ForwardJob, piece: TreePart, lead: Sequence[int]) -> WorkRows:
    """Return the rows of a piece, after ``lead``: tokens at the text's end that the worker recomputes."""
    segment, above = job.segment, len(lead)
    tree, block_table = segment.tree, segment.block_table
    if piece.nodes == tuple(range(len(tree))) and not piece.above and not lead:
        return WorkRows(job, 0)
    places = {node: above + place for place, node in enumerate(piece.nodes)}
    tokens = (*lead, *(tree.tokens[node] for node in piece.nodes))
    below = (above - 1 if node == 0 else places[tree.parents[node]] for node in piece.nodes)
    # Only the driver needs to know which nodes can be accepted.
    verify = (True,) + (False,) * (len(tokens) - 1)
    part = TokenTree(tokens, (*range(-1, above - 1), *below), verify)
    if lead:
        held = BlockTable(list(block_table.blocks), block_table.released, block_table.length - above)
        held.changed()
        block_table = held
    wanted = wanted_of(job, piece)
    first = places[wanted[0]] if wanted else len(tokens)
    assert [*range(first, len(tokens))] == [places[node] for node in wanted]
    rows = job._replace(segment=Segment(block_table, part), wanted=range(first, len(tokens)))
    return WorkRows(rows, above + piece.above)


class _RemoteRow(NamedTuple):
    """Location of a row of logits: the worker's ``ask``, the number of the piece, and the row in it."""

    ask: Ask
    piece: int
    place: int


class ScatteredLogits:
    """Logits of one job, ``[wanted, vocab]``, whose remote rows are fetched at the first access.

    Attributes:
        rows: logits, undefined in rows that are still remote.
        away: remote rows to their locations.
    """

    def __init__(self, rows: Tensor, again: Callable[[], Tensor]) -> None:
        """``again`` recomputes all rows in this process, if a worker with some of them is gone."""
        self.rows, self.away = rows, dict[int, _RemoteRow]()
        self._again = again

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: int | slice | list[int], /) -> Tensor:
        """Return rows as float32; fetch remote ones first."""
        asked = rows if isinstance(rows, list) else range(len(self))[rows]
        self._fetch([asked] if isinstance(asked, int) else asked)
        return self.rows[rows]

    def _fetch(self, rows: Sequence[int]) -> None:
        lacking = dict[tuple[Ask, int], dict[int, int]]()
        for row in rows:
            if row in self.away:
                ask, piece, place = self.away[row]
                lacking.setdefault((ask, piece), {})[row] = place
        for (ask, piece), places in lacking.items():
            found = ask(piece, list(places.values()))
            if found is None:
                self.rows = self._again()
                self.away.clear()
                return
            self.rows[list(places)] = found
            for row in places:
                del self.away[row]


class AssembledResult:
    """The result of a forward pass, assembled from all processes.

    Attributes:
        logits: logits of each job.
        chosen: for each job, wanted rows to the tokens that workers sampled after them.
        hidden: layer number to the layer's outputs for each job, ``[rows, hidden]``.
    """

    def __init__(
        self,
        jobs: Sequence[ForwardJob],
        runner: ModelRunner,
        collect: frozenset[int],
        again: Callable[[ForwardJob], Tensor],
    ) -> None:
        """Begin without results; ``again`` recomputes a job's logits in this process after a worker's failure."""
        config, cache = runner.decoder.config, runner.cache
        self.jobs, self.collect = jobs, sorted(collect)
        vocab = config.vocab_size
        self.logits = [ScatteredLogits(torch.empty(len(job.wanted), vocab), partial(again, job)) for job in jobs]
        self.chosen = [dict[int, int]() for _ in jobs]
        sizes = [(len(job.segment.tree), config.hidden_size) for job in jobs]
        self.hidden = {layer: [torch.empty(size, dtype=cache.dtype) for size in sizes] for layer in self.collect}
        self._here: dict[int, dict[int, int]] = {number: {} for number in range(len(jobs))}
        self._away: dict[int, list[tuple[RemoteCopy, dict[int, int]]]] = {number: [] for number in range(len(jobs))}

    @property
    def dealt(self) -> dict[int, PartitionedTree]:
        """Return the partitioned trees by the ``id`` of their block table."""
        segments = [job.segment for job in self.jobs]
        return {
            id(segment.block_table): PartitionedTree(segment.tree, self._here[number], tuple(self._away[number]))
            for number, segment in enumerate(segments)
        }

    def take_own(self, share: WorkerShare, result: ForwardResult) -> None:
        """Add the result of this process."""
        for number, piece in enumerate(share.pieces):
            self._here[piece.job] = {node: place for place, node in enumerate(piece.nodes)}
            self._put(piece, result.logits[number][:])
            for layer in self.collect:
                self.hidden[layer][piece.job][list(piece.own)] = result.hidden[layer][number][piece.above :]

    def take(self, copy: RemoteCopy, share: WorkerShare, chosen: Sequence[int], data: Tensor, ask: Ask) -> None:
        """Add the result of a worker.

        Args:
            copy: record of the worker's pool.
            share: share that the worker computed.
            chosen: sampled tokens of the pieces with a stateless sampler; -1 where logits are not finite.
            data: logits of the pieces that need all of them, then each collected layer's outputs of own nodes.
            ask: fetches the other logits.
        """
        begin, tokens = 0, iter(chosen)

        def some(like: Tensor, rows: int) -> Tensor:
            nonlocal begin
            size = rows * like.shape[-1] * like.itemsize
            begin += size
            return data[begin - size : begin].clone().view(like.dtype).view(rows, like.shape[-1])

        for number, piece in enumerate(share.pieces):
            job, logits, places = self.jobs[piece.job], self.logits[piece.job], self._places(piece)
            if job.whole:
                self._put(piece, some(logits.rows, len(places)))
            else:
                logits.away |= {row: _RemoteRow(ask, number, place) for place, row in enumerate(places)}
            if job.stateless_sampler is not None:
                # A token of -1 is dropped: reading its logits reports that they are not finite.
                samples = zip(places, islice(tokens, len(places)), strict=True)
                self.chosen[piece.job] |= {row: token for row, token in samples if token >= 0}
            first = job.segment.block_table.length
            self._away[piece.job].append((copy, {node: first + place for place, node in enumerate(piece.nodes)}))
        for layer in self.collect:
            for piece in share.pieces:
                self.hidden[layer][piece.job][list(piece.own)] = some(self.hidden[layer][piece.job], len(piece.own))

    def _places(self, piece: TreePart) -> list[int]:
        job = self.jobs[piece.job]
        return [node - job.wanted.start for node in wanted_of(job, piece)]

    def _put(self, piece: TreePart, rows: Tensor) -> None:
        places = self._places(piece)
        if places:
            self.logits[piece.job].rows[places] = rows
