"""Input of a forward pass: the rows of some requests, and the layers to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from pronk.execution.attention import Segment
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.sampling.stateless import StatelessSampler

__all__ = ["CrossAttentionSource", "Executor", "ForwardJob", "LayerRange"]


class ForwardJob(NamedTuple):
    """One request's share of a forward pass."""

    segment: Segment
    logits_nodes: range  # nodes whose logits are needed, in order
    prompt_length: int  # tokens of the prompt; start of *dynamic* RoPE scaling
    cross_block_table: BlockTable | None = None  # in the other model's cache, for cross-attention
    # Whether the logits of all ``logits_nodes`` will be read; otherwise a worker process keeps them until requested.
    all_logits: bool = True
    stateless_sampler: StatelessSampler | None = None  # a worker process may apply this sampler to its logits


@dataclass(frozen=True)
class CrossAttentionSource:
    """Another model's cache to read; ``layers[i]`` is the layer (from 0) that layer ``i`` reads."""

    decoder: Decoder
    cache: PagedCache
    layers: tuple[int, ...]


class LayerRange(NamedTuple):
    """Consecutive layers and the rows that go through them."""

    jobs: Sequence[tuple[ForwardJob, Segment]]  # each with the part of its segment that these layers compute
    start: int
    stop: int  # last layer + 1
    collect: tuple[int, ...]  # layer numbers (from 1) whose output is returned
    logits_rows: Sequence[int] | range | None  # in order; ``None`` unless the last layer is included

    @staticmethod
    def find_logits_rows(jobs: Sequence[tuple[ForwardJob, Segment]]) -> list[int] | range:
        """Return the rows, among all rows of ``jobs``, of the nodes whose logits are needed."""
        if len(jobs) == 1:
            ((job, segment),) = jobs
            return range(job.logits_nodes.start - segment.computed, job.logits_nodes.stop - segment.computed)
        rows, start = list[int](), 0
        for job, segment in jobs:
            rows.extend(start + node - segment.computed for node in job.logits_nodes)
            start += segment.rows
        return rows

    def row_inputs(self) -> tuple[list[int], list[int], list[int]]:
        """Return token, position and RoPE span of every row."""
        tokens, positions, spans = list[int](), list[int](), list[int]()
        for job, segment in self.jobs:
            length, computed = segment.block_table.length, segment.computed
            tokens.extend(segment.tree.tokens[computed:])
            row_positions = [length + depth for depth in segment.tree.depths[computed:]]
            positions.extend(row_positions)
            spans.extend(max(job.prompt_length, position + 1) for position in row_positions)
        return tokens, positions, spans


class Executor(Protocol):
    """Backend that runs ranges of layers."""

    @property
    def usable(self) -> bool:
        """Whether forward passes are possible; False once a worker process with a part of the model is gone."""
        ...

    @property
    def communication_seconds(self) -> float:
        """Seconds spent so far on communication with worker processes."""
        ...

    def run(self, layer_range: LayerRange, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Run rows ``[rows, hidden]`` through a range of layers; ``None`` starts from embeddings.

        Returns the rows' state after it, the outputs of the collected layers, and the logits of the logits rows.
        """
        ...
