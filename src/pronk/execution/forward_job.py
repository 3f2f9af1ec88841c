"""Input of a forward pass: one job per request, and the range of layers to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pronk.arrays import Array
from pronk.execution.segment import Segment
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.sampling.stateless import StatelessSampler

__all__ = ["CrossAttentionSource", "Executor", "ForwardJob", "LayerRange"]


class ForwardJob(NamedTuple):
    """One request's input to a forward pass."""

    segment: Segment
    logits_nodes: range  # indices of the tree nodes whose logits are needed
    prompt_length: int  # number of prompt tokens; dynamic RoPE scaling depends on it
    cross_block_table: BlockTable | None = None  # request's blocks in the cache of :class:`CrossAttentionSource`
    # True: worker processes return the logits of all ``logits_nodes``. False: a node's logits are sent when it is read.
    all_logits: bool = True
    stateless_sampler: StatelessSampler | None = None  # if set, workers sample tokens and send these, not logits


@dataclass(frozen=True)
class CrossAttentionSource:
    """Another model whose KV cache is read: layer ``i`` reads layer ``layers[i]`` (from 0) of that model."""

    decoder: Decoder
    cache: PagedCache
    layers: tuple[int, ...]


class LayerRange(NamedTuple):
    """Layers ``start .. stop - 1`` (from 0), and the rows of each job that they compute."""

    jobs: Sequence[tuple[ForwardJob, Segment]]  # each job, and the segment of its nodes that these layers compute
    start: int
    stop: int
    collect: tuple[int, ...]  # layer numbers (from 1) whose output is returned
    logits_rows: Sequence[int] | range | None  # see ``find_logits_rows``; ``None`` without the last layer

    @staticmethod
    def find_logits_rows(jobs: Sequence[tuple[ForwardJob, Segment]]) -> list[int] | range:
        """Return the indices of the rows of ``logits_nodes`` in the concatenated rows of all jobs."""
        if len(jobs) == 1:
            ((job, segment),) = jobs
            return range(job.logits_nodes.start - segment.num_computed, job.logits_nodes.stop - segment.num_computed)
        rows, start = list[int](), 0
        for job, segment in jobs:
            rows.extend(start + node - segment.num_computed for node in job.logits_nodes)
            start += segment.num_rows
        return rows

    def row_inputs(self) -> tuple[list[int], list[int], list[int]]:
        """Return three lists, one entry per row: token, position, and text length for dynamic RoPE."""
        tokens, positions, text_lengths = list[int](), list[int](), list[int]()
        for job, segment in self.jobs:
            length, computed = segment.block_table.length, segment.num_computed
            tokens.extend(segment.tree.tokens[computed:])
            row_positions = [length + depth for depth in segment.tree.depths[computed:]]
            positions.extend(row_positions)
            text_lengths.extend(max(job.prompt_length, position + 1) for position in row_positions)
        return tokens, positions, text_lengths


class Executor(Protocol):
    """Runner of ranges of layers: a backend in this process, or tensor-parallel processes."""

    @property
    def is_usable(self) -> bool:
        """Whether forward passes are possible; False once a process with a part of the model is lost."""
        ...

    @property
    def communication_seconds(self) -> float:
        """Seconds spent so far on communication with worker processes."""
        ...

    def run(self, layer_range: LayerRange, rows: Array | None) -> tuple[Array, dict[int, Array], Array | None]:
        """Run a range of layers on the input ``rows``, ``[rows, hidden]``; ``None``: the token embeddings.

        ``rows`` may be overwritten.
        Returns the output of the last layer, the outputs of the layers in ``collect``, and the logits of
        ``logits_rows``, if any.
        """
        ...
