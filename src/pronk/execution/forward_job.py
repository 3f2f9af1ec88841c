"""Input of a forward pass: one job per request, and the range of layers to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pronk.arrays import Array
from pronk.execution.segment import Segment
from pronk.kv_cache.blocks import BlockTable
from pronk.sampling.stateless import StatelessSampler


class ForwardJob(NamedTuple):
    """One request's input to a forward pass."""

    segment: Segment
    logits_nodes: range  # indices of the tree nodes whose logits are needed
    prompt_length: int  # number of prompt tokens; dynamic RoPE scaling depends on it
    cross_block_table: BlockTable | None = None  # request's blocks in the cache that cross-attention reads
    # True: worker processes return the logits of all ``logits_nodes``. False: a node's logits are sent when it is read.
    all_logits: bool = True
    stateless_sampler: StatelessSampler | None = None  # if set, workers sample tokens and send these, not logits


class LayerRange(NamedTuple):
    """Layers ``start .. stop - 1`` (from 0), and the rows of each job that they compute."""

    jobs: Sequence[tuple[ForwardJob, Segment]]  # each job, and the segment of its nodes that these layers compute
    start: int
    stop: int
    collect: tuple[int, ...]  # layer numbers (from 1; 0: the embedding) whose output is returned
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

    @property
    def num_experts_read(self) -> int:
        """Number of experts read so far by mixtures of experts, over all layers and forward passes."""
        ...

    def run(self, layer_range: LayerRange, rows: Array | None) -> tuple[Array, dict[int, Array], Array | None]:
        """Run a range of layers on the input ``rows``, ``[rows, hidden]``; ``None``: the token embeddings.

        ``rows`` may be overwritten.
        Returns the output of the last layer, the outputs of the layers in ``collect``, and the logits of
        ``logits_rows``, if any.
        """
        ...
