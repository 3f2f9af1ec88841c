"""The forward pass: some requests' trees in, logits at the nodes that need them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.cache.paged import PagedCache
from pronk.model.attention import ROW_ALIGNMENT, PagedAttention, Segment
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
            collect: numbers of layers whose output is wanted: 1 is the first layer's.
        """
        began = perf_counter()
        tokens, positions, spans = self._pack(jobs)
        attend = PagedAttention(self.decoder.config, self.cache, [job.segment for job in jobs], len(tokens))
        x = self.decoder.embed(tokens, positions, self.dtype)
        rope = self.decoder.rope(positions, spans, self.dtype)
        collected: dict[int, Tensor] = {}
        for layer, x in self.decoder.run(x, rope, attend):  # noqa: B020 - the state is threaded through the layers
            if layer in collect:
                collected[layer] = x
        logits = self._logits(x, jobs)
        sizes = [job.segment.rows for job in jobs]
        hidden = {layer: list(rows[: sum(sizes)].split(sizes)) for layer, rows in collected.items()}
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return PassResult(logits, hidden, perf_counter() - began)

    def _pack(self, jobs: Sequence[Job]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and RoPE spans of all rows, padded to whole units of rows."""
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[int] = []
        for job in jobs:
            length, computed = job.segment.table.length, job.segment.computed
            tokens.extend(job.segment.tree.tokens[computed:])
            places = [length + depth for depth in job.segment.tree.depths[computed:]]
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
        rows = x[torch.tensor(wanted, device=self.device)]
        rows = F.pad(rows, (0, 0, 0, -len(wanted) % ROW_ALIGNMENT))
        # The choice is made on the CPU, where the noise is the same whatever the device.
        logits = self.decoder.logits(rows)[: len(wanted)].cpu()
        return list(logits.split([len(job.wanted) for job in jobs]))
