"""The forward pass: some requests' trees in, logits at the nodes that need them out.

A tree whose first nodes a drafter has taken through the first layers already (:class:`~pronk.tree.Early`) goes on where
they are: those rows join the pass at that layer, and nothing is computed twice. With ``s`` rows computed early up to
layer 2, and ``n`` others ::

    layers 0 1     rows of n
    layers 2 …     rows of s (from the cache), rows of n
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.cache.paged import PagedCache
from pronk.model.attention import ROW_ALIGNMENT, PagedAttention, Segment, padded
from pronk.model.decoder import Decoder

__all__ = ["Job", "PassResult", "Runner"]


@dataclass(frozen=True)
class Job:
    """One request's share of a pass.

    Attributes:
        segment: its rows.
        wanted: the nodes whose logits are needed, in order.
        prompt_length: tokens of its prompt, which is the length that *dynamic* RoPE scaling starts from.
    """

    segment: Segment
    wanted: range
    prompt_length: int


@dataclass(frozen=True)
class PassResult:
    """What a pass computed.

    Attributes:
        logits: one ``[len(job.wanted), vocab]`` per job, in the model's dtype.
        hidden: for each collected layer, one ``[rows, hidden]`` per job.
        seconds: the duration of the pass.
    """

    logits: list[Tensor]
    hidden: Mapping[int, list[Tensor]]
    seconds: float


class Runner:
    """Runs the decoder over packed rows. Holds no state of its own."""

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self.decoder = decoder
        self.cache = cache
        self.dtype = cache.keys[0].dtype
        self.device = cache.keys[0].device

    @torch.inference_mode()
    def forward(self, jobs: Sequence[Job], collect: frozenset[int] = frozenset()) -> PassResult:
        """One pass over all jobs' trees; their keys and values go to the slots behind each table's length.

        Args:
            jobs: at least one; their places in the cache have been prepared.
            collect: numbers of layers whose output is wanted: 1 is the first layer's. Of nodes that were computed early
                up to a later layer there is none.
        """
        began = perf_counter()
        early = {job.segment.tree.early.layers for job in jobs if job.segment.tree.early is not None}
        rows = [self.decoder.embedding.new_empty(0)] * len(jobs)
        hidden: dict[int, list[Tensor]] = {}
        for start, stop in pairwise(sorted({0, *early, len(self.decoder.layers)})):
            rows = self._run(jobs, rows, start, stop, collect, hidden)
        logits = self._logits(torch.cat(rows), jobs)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return PassResult(logits, hidden, perf_counter() - began)

    @torch.inference_mode()
    def begin(self, jobs: Sequence[Job], layers: int) -> list[Tensor]:
        """The first ``layers`` layers alone; returns their output ``[rows, hidden]`` per job.

        What they store lets :meth:`forward` go on from there.
        """
        return self._run(jobs, [self.decoder.embedding.new_empty(0)] * len(jobs), 0, layers, frozenset(), {})

    def attention(self, segments: Sequence[Segment], positions: Tensor, spans: Tensor) -> PagedAttention:  # noqa: ARG002
        """What the rows of a pass see; ``positions`` and RoPE ``spans`` are those of all rows, the padding's too."""
        return PagedAttention(self.decoder.config, self.cache, segments, len(positions))

    def _run(
        self,
        jobs: Sequence[Job],
        rows: Sequence[Tensor],
        start: int,
        stop: int,
        collect: frozenset[int],
        hidden: dict[int, list[Tensor]],
    ) -> list[Tensor]:
        """Layers ``start .. stop - 1``; ``rows`` are the states of each job's rows that have come so far."""
        parts = [_part(job.segment, start) for job in jobs]
        sizes = [part.rows for part in parts]
        here = [number for number, size in enumerate(sizes) if size]
        if not here:
            return list(rows)
        tokens, positions, spans = self._pack([(jobs[i], parts[i]) for i in here])
        attend = self.attention([parts[i] for i in here], positions, spans)
        if start:
            x = torch.cat([row for i in here for row in (self._early(jobs[i].segment, start), rows[i]) if len(row)])
            x = F.pad(x, (0, 0, 0, len(tokens) - len(x)))
        else:
            x = self.decoder.embed(tokens, positions, self.dtype)
        rope = self.decoder.rope(positions, spans, self.dtype)
        for layer, x in self.decoder.run(x, rope, attend, start, stop):  # noqa: B020 - the state goes through the layers
            self.cache.write_hidden(layer, attend.slots, x)
            if layer in collect:
                hidden[layer] = list(x[: sum(sizes)].split(sizes))
        return list(x[: sum(sizes)].split(sizes))

    def _early(self, segment: Segment, layer: int) -> Tensor:
        """The rows of a segment that join at this layer, ``[rows, hidden]``."""
        table, early = segment.table, segment.tree.early
        if early is None or early.layers != layer:
            return self.decoder.embedding.new_empty(0)
        return self.cache.read_hidden(layer, table, table.length, table.length + early.nodes)

    def _pack(self, jobs: Sequence[tuple[Job, Segment]]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and RoPE spans of all rows, padded to whole units of rows."""
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[int] = []
        for job, segment in jobs:
            length, computed = segment.table.length, segment.computed
            tokens.extend(segment.tree.tokens[computed:])
            places = [length + depth for depth in segment.tree.depths[computed:]]
            positions.extend(places)
            spans.extend(max(job.prompt_length, place + 1) for place in places)
        padding = -len(tokens) % ROW_ALIGNMENT
        rows = torch.tensor(
            [tokens + [0] * padding, positions + [0] * padding, spans + [1] * padding], dtype=torch.int64
        ).to(self.device)
        return rows[0], rows[1], rows[2]

    def _logits(self, x: Tensor, jobs: Sequence[Job]) -> list[Tensor]:
        """Head rows of the wanted nodes alone."""
        wanted: list[int] = []
        start = 0
        for job in jobs:
            wanted.extend(start + node - job.segment.computed for node in job.wanted)
            start += job.segment.rows
        if not wanted:
            return [x.new_empty(0, self.decoder.config.vocab_size) for _ in jobs]
        rows = padded(x[torch.tensor(wanted, device=self.device)])
        # The choice is made on the CPU, where the noise is the same whatever the device.
        logits = self.decoder.logits(rows)[: len(wanted)].cpu()
        return list(logits.split([len(job.wanted) for job in jobs]))


def _part(segment: Segment, layer: int) -> Segment:
    """What of a segment goes through layer number ``layer`` (from 0): not what was computed early beyond it."""
    early = segment.tree.early
    if early is None or layer >= early.layers or early.nodes <= segment.computed:
        return segment
    return replace(segment, computed=early.nodes)
