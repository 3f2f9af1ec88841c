"""Parts of a pass: the rows of a worker's share, and what all shares have computed, put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pronk.cache.blocks import BlockTable
from pronk.parallel.dealing import Piece, Share
from pronk.parallel.mirrored import Copy, Dealt
from pronk.parallel.work import Rows
from pronk.passes.attention import Segment
from pronk.passes.runner import PassResult, Runner
from pronk.passes.stage import Job
from pronk.tree import TokenTree

__all__ = ["Made", "part_of", "wanted_of"]


def wanted_of(job: Job, piece: Piece) -> list[int]:
    """A piece's own nodes whose logits are needed."""
    return [node for node in piece.own if node in job.wanted]


def part_of(job: Job, piece: Piece, lead: Sequence[int]) -> Rows:
    """The rows of a piece, below some tokens of the text that are rows as well."""
    segment, above = job.segment, len(lead)
    tree, table = segment.tree, segment.table
    if piece.nodes == tuple(range(len(tree))) and not piece.above and not lead:
        return Rows(job, 0)
    places = {node: above + place for place, node in enumerate(piece.nodes)}
    tokens = (*lead, *(tree.tokens[node] for node in piece.nodes))
    below = (above - 1 if node == 0 else places[tree.parents[node]] for node in piece.nodes)
    # Who computes need not know which of them may be accepted.
    verify = (True,) + (False,) * (len(tokens) - 1)
    part = TokenTree(tokens, (*range(-1, above - 1), *below), verify)
    if lead:
        held = BlockTable(list(table.blocks), table.released, table.length - above)
        held.changed()
        table = held
    wanted = wanted_of(job, piece)
    first = places[wanted[0]] if wanted else len(tokens)
    assert [*range(first, len(tokens))] == [places[node] for node in wanted]
    return Rows(Job(Segment(table, part), range(first, len(tokens)), job.prompt_length), above + piece.above)


class Made:
    """What a pass has computed, put together from its parts.

    Attributes:
        logits: of each job, float32 ``[wanted, vocab]``.
        hidden: by layer, of each job ``[rows, hidden]``.
        dealt: who has which rows, by the table's ``id``.
    """

    def __init__(self, jobs: Sequence[Job], runner: Runner, collect: frozenset[int]) -> None:
        config, cache = runner.decoder.config, runner.cache
        self.jobs, self.collect = jobs, sorted(collect)
        self.logits = [torch.empty(len(job.wanted), config.vocab_size) for job in jobs]
        sizes = [(len(job.segment.tree), config.hidden_size) for job in jobs]
        self.hidden = {layer: [torch.empty(size, dtype=cache.dtype) for size in sizes] for layer in self.collect}
        self._here: dict[int, dict[int, int]] = {number: {} for number in range(len(jobs))}
        self._away: dict[int, list[tuple[Copy, dict[int, int]]]] = {number: [] for number in range(len(jobs))}

    @property
    def dealt(self) -> dict[int, Dealt]:
        """Who has which rows."""
        segments = [job.segment for job in self.jobs]
        return {
            id(segment.table): Dealt(segment.tree, self._here[number], tuple(self._away[number]))
            for number, segment in enumerate(segments)
        }

    def take_own(self, share: Share, result: PassResult) -> None:
        """What this process has computed."""
        for number, piece in enumerate(share.pieces):
            self._here[piece.job] = {node: place for place, node in enumerate(piece.nodes)}
            self._put_logits(piece, result.logits[number])
            for layer in self.collect:
                self.hidden[layer][piece.job][list(piece.own)] = result.hidden[layer][number][piece.above :]

    def take(self, copy: Copy, share: Share, data: Tensor) -> None:
        """What a worker has computed: logits of all its pieces, then each layer's outputs of its own nodes."""
        begin = 0

        def some(like: Tensor, rows: int) -> Tensor:
            nonlocal begin
            size = rows * like.shape[-1] * like.itemsize
            begin += size
            return data[begin - size : begin].clone().view(like.dtype).view(rows, like.shape[-1])

        for piece in share.pieces:
            self._put_logits(piece, some(self.logits[piece.job], len(wanted_of(self.jobs[piece.job], piece))))
            first = self.jobs[piece.job].segment.table.length
            self._away[piece.job].append((copy, {node: first + place for place, node in enumerate(piece.nodes)}))
        for layer in self.collect:
            for piece in share.pieces:
                self.hidden[layer][piece.job][list(piece.own)] = some(self.hidden[layer][piece.job], len(piece.own))

    def _put_logits(self, piece: Piece, rows: Tensor) -> None:
        job = self.jobs[piece.job]
        wanted = wanted_of(job, piece)
        if wanted:
            self.logits[piece.job][[node - job.wanted.start for node in wanted]] = rows
