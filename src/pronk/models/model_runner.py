"""Forward passes over the draft trees of a batch of requests.

Each range of layers is one program of the backend (:mod:`pronk.models.layer_executor`). A drafter may already have
computed the first layers of a tree's leading nodes, the early rows: then only the later layers are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array, split_rows
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.models.cost_model import CostCurve, CostModel
from pronk.models.decoder import Decoder, expert_costs
from pronk.models.forward_job import EarlyRows, EarlyTokens, ForwardJob, LayerRange, Segment
from pronk.models.layer_executor import LayerExecutor
from pronk.models.program import CrossAttentionSource, Program
from pronk.models.program_rows import ProgramRows
from pronk.sampling.draft_token import DraftToken
from pronk.sampling.sampler import Sampler
from pronk.sampling.stateless import Logits
from pronk.sampling.tree import TokenTree

# The first forward pass of a draft chain has one row per uncached token, and each later pass has one row. If the first
# has at most 4 rows, the mean duration of these passes is recorded as the cost of a pass of one row.
_MAX_CHAIN_ROWS = 4


class ForwardResult(NamedTuple):
    """Result of a forward pass over several jobs."""

    logits: Sequence[Logits]  # ``[len(logits_nodes), vocab]`` per job: float32
    hidden: Mapping[int, list[Array]]  # layer number (from 1) to the output ``[rows, hidden]`` of each job
    seconds: float  # duration of the forward pass
    context: int  # number of committed tokens in the cache, over all jobs
    # Per job: maps the index of a row of logits to the token that a worker process sampled from it; may be empty.
    sampled: Sequence[Mapping[int, int]] = ()
    # Experts that the pass read, relative to a pass of one row; ``None``: no experts, or not counted (several workers)
    touched: float | None = None

    def job_result(self, index: int) -> JobResult:
        """Return the result of one job, by its index in the list of jobs."""
        hidden = {layer: rows[index] for layer, rows in self.hidden.items()}
        return JobResult(self.logits[index], hidden, self.sampled[index] if self.sampled else {})


class JobResult(NamedTuple):
    """Result of one job; see :class:`ForwardResult` for the fields."""

    logits: Logits
    hidden: Mapping[int, Array]
    sampled: Mapping[int, int]


class ModelRunner:
    """Runs forward passes of one model and measures their durations."""

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        cross_source: CrossAttentionSource | None = None,
        *,
        executor: LayerExecutor | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Create a runner; without ``executor`` this process computes. ``clock`` returns seconds."""
        self.decoder, self.cache, self.clock = decoder, cache, clock
        self.cost_model = CostModel() if decoder.config.mixture is None else CostModel(*expert_costs(decoder))
        # Tokens whose first layers a drafter has computed in this step, by ``id`` of the request's block table.
        self.early_tokens: dict[int, EarlyTokens] = {}
        self.dtype = cache.dtype
        self.exact = decoder.backend.exact  # whether a row's logits are bit-equal in every batch
        self._num_layers = len(decoder.layers)
        self._executor = executor or LayerExecutor(decoder, cache, cross_source)
        # Whether :meth:`draft_chain` is available: not if an executor splits each forward pass among several processes.
        is_alone = executor is None and not self._executor.has_dynamic_rope
        self.supports_draft_chain = decoder.backend.drafts_chains and is_alone
        self._final_norm: Program | None = None  # built by :meth:`final_norm`

    def forward(self, jobs: Sequence[ForwardJob], collect: frozenset[int] = frozenset()) -> ForwardResult:
        """Run one forward pass over all jobs; keys and values are stored after each job's committed tokens.

        Args:
            jobs: at least one job; :meth:`PagedCache.prepare` has allocated the slots of its rows.
            collect: numbers (from 1) of the layers whose output is returned, without the rows of nodes for which a
                drafter has already computed the layer.
        """
        start_time, context = self.clock(), sum(job.segment.block_table.length for job in jobs)
        num_read_before = self._executor.num_experts_read
        early_layers = {job.segment.early.num_layers for job in jobs if job.segment.early is not None}
        rows: list[Array | None] = [None] * len(jobs)
        hidden: dict[int, list[Array]] = {}
        logits: Array | None = None
        projections = self.cache.projections
        collect = collect.union(*[projection.layers for projection in projections])
        for start, stop in pairwise(sorted({0, *early_layers, self._num_layers})):
            logits = self._run(jobs, rows, start, stop, collect, hidden)
        assert logits is not None
        for projection in projections:
            outputs = [np.concatenate(hidden[layer]) for layer in projection.layers]
            self.cache.write_projection(projection, self._slots(jobs), projection.project(outputs))
        mixture, num_read = self.decoder.config.mixture, self._executor.num_experts_read - num_read_before
        seconds = self.clock() - start_time
        return ForwardResult(
            split_rows(logits, [len(job.logits_nodes) for job in jobs]),
            hidden,
            seconds,
            context,
            # As multiples of the experts that a forward pass of one row reads.
            touched=None if mixture is None else num_read / (mixture.per_row * sum(mixture.layers)),
        )

    def early_rows(self, block_table: BlockTable, tree: TokenTree, hidden: Sequence[int]) -> EarlyRows | None:
        """Return the leading nodes of ``tree`` whose first layers a drafter has computed, or ``None``.

        ``hidden`` are the numbers (from 1) of the layers whose output the request's drafter reads. If the forward pass
        would skip one of these layers, or one that a projection reads, the result is ``None``, so that it computes all
        layers of all nodes.
        """
        early = EarlyRows.of(self.early_tokens.get(id(block_table)), tree)
        if early is None:
            return None
        read = (*hidden, *(layer for projection in self.cache.projections for layer in projection.layers))
        return None if min(read, default=early.num_layers + 1) <= early.num_layers else early

    def _slots(self, jobs: Sequence[ForwardJob]) -> NDArray[np.int64]:
        parts = [(job.segment.block_table, job.segment.num_computed, len(job.segment.tree)) for job in jobs]
        return np.concatenate([self.cache.slots(t, t.length + first, t.length + stop) for t, first, stop in parts])

    def run_first_layers(self, jobs: Sequence[ForwardJob], num_layers: int) -> list[Array]:
        """Run only the first ``num_layers`` layers; return the last one's output, ``[rows, hidden]`` per job.

        If the cache keeps this output (:meth:`PagedCache.keep_hidden`), :meth:`forward` can continue from it.
        """
        rows: list[Array | None] = [None] * len(jobs)
        self._run(jobs, rows, 0, num_layers, frozenset(), {})
        return [row for row in rows if row is not None]

    def final_norm(self, rows: Array) -> Array:
        """Apply the final norm to outputs of the last layer, ``[rows, hidden]``, in their dtype."""
        if self._final_norm is None:
            self._final_norm = self.decoder.backend.program(self.decoder.config.hidden_size, self.dtype)
            self._final_norm.norm(self.decoder.norm)
        states = np.array(rows, order="C")  # a copy, which the program overwrites
        self._final_norm.run(ProgramRows.without_segments(len(states)), states)
        return states

    @property
    def is_usable(self) -> bool:
        """Whether forward passes are possible; see :class:`.LayerExecutor`."""
        return self._executor.is_usable

    @property
    def communication_seconds(self) -> float:
        """Seconds spent so far on communication with worker processes; see :class:`.LayerExecutor`."""
        return self._executor.communication_seconds

    def draft_chain(
        self, job: ForwardJob, sampler: Sampler, max_tokens: int, on_token: Callable[[DraftToken], bool]
    ) -> int:
        """Draft a chain for one request: one kernel call runs a forward pass per draft token.

        The arguments are those of :func:`pronk.models.layer_executor.draft_chain`. ``job`` is the input of the first
        forward pass; ``logits_nodes`` is the last node. :meth:`PagedCache.prepare` has allocated slots for all rows.
        Returns the number of forward passes. The last one gives no draft token if it allows none or has non-finite
        logits.
        """
        start_time = self.clock()
        num_passes = self._executor.draft_chain(job, sampler, max_tokens, on_token)
        rows, seconds = len(job.segment.tree), self.clock() - start_time
        one_row = self.cost_model.costs(job.segment.block_table.length)
        if rows <= _MAX_CHAIN_ROWS:
            self.cost_model.learn(1, job.segment.block_table.length, seconds / num_passes)
        elif one_row is not None:
            self.cost_model.learn_prompt(rows, max(0.0, seconds - (num_passes - 1) * one_row.at(1)))
        return num_passes

    def record_duration(
        self,
        jobs: Sequence[ForwardJob],
        context: int,
        seconds: float,
        *,
        plain: bool | None = None,
        touched: float | None = None,
    ) -> None:
        """Record the duration of a forward pass over ``jobs``, or of a step without its time in drafters.

        ``plain`` and ``touched`` are those of :meth:`CostModel.learn`.
        """
        rows = sum(job.segment.num_rows for job in jobs)
        num_unread = sum(job.logits_nodes.start for job in jobs)
        fraction = self._early_fraction(jobs)
        if num_unread > _MAX_CHAIN_ROWS * len(jobs):
            self.cost_model.learn_prompt(rows, seconds)
        elif fraction is not None and all(job.logits_nodes for job in jobs):  # short embeddings have no LM head
            self.cost_model.learn(
                rows, context, seconds, plain=plain, early=fraction, touched=None if fraction else touched
            )

    def costs_for(self, jobs: Sequence[ForwardJob], costs: CostCurve) -> CostCurve:
        """Return ``costs``, a cost curve for all layers, without the layers that drafters have computed."""
        fraction = self._early_fraction(jobs)
        return costs.rest(fraction) if fraction else costs

    def _early_fraction(self, jobs: Sequence[ForwardJob]) -> float | None:
        """Return the fraction of layers, 0..1, that early rows skip; ``None`` if jobs differ in it."""
        skipped = {0 if job.segment.early is None else job.segment.early.num_layers for job in jobs}
        return skipped.pop() / self._num_layers if len(skipped) == 1 else None

    def _run(
        self,
        jobs: Sequence[ForwardJob],
        rows: list[Array | None],
        start: int,
        stop: int,
        collect: frozenset[int],
        hidden: dict[int, list[Array]],
    ) -> Array | None:
        """Run layers ``start .. stop - 1``; after the last layer of the model, return the logits.

        ``rows`` holds the input ``[rows, hidden]`` of each job and is replaced by the output. The outputs of the layers
        in ``collect`` are added to ``hidden``.
        """
        segments = [_without_early_rows(job.segment, start) for job in jobs]
        active = [number for number, segment in enumerate(segments) if segment.num_rows]
        if not active:
            return None
        active_jobs = [(jobs[number], segments[number]) for number in active]
        first = start + 1 if start else 0  # 0 is the embedding
        collected_layers = tuple(sorted(layer for layer in collect if first <= layer <= stop)) if collect else ()
        layer_range = LayerRange(
            active_jobs,
            start,
            stop,
            collected_layers,
            LayerRange.find_logits_rows(active_jobs) if stop == self._num_layers else None,
        )
        x = None
        if start:
            inputs = [(self._read_early_input(jobs[number].segment, start), rows[number]) for number in active]
            x = np.concatenate([array for pair in inputs for array in pair if array is not None])
        out, collected, logits = self._executor.run(layer_range, x)
        outputs = split_rows(out, [segment.num_rows for _, segment in active_jobs])
        for number, output in zip(active, outputs, strict=True):
            rows[number] = output
        for layer, values in collected.items():
            hidden[layer] = split_rows(values, [segment.num_rows for segment in segments])
        return logits

    def _read_early_input(self, segment: Segment, layer: int) -> Array | None:
        """Return the input ``[rows, hidden]`` of early rows that start with ``layer`` (from 0), if any."""
        block_table, early = segment.block_table, segment.early
        if early is None or early.num_layers != layer:
            return None
        return self.cache.read_hidden(layer, block_table, block_table.length, block_table.length + early.num_nodes)


def _without_early_rows(segment: Segment, layer: int) -> Segment:
    """Return ``segment`` without the rows of nodes for which a drafter has computed ``layer`` (from 0)."""
    early = segment.early
    if early is None or layer >= early.num_layers or early.num_nodes <= segment.num_computed:
        return segment
    return segment._replace(num_computed=early.num_nodes)
