"""Forward passes over the draft trees of a batch of requests, through all layers or the first ones.

The layers and the LM head are one program of the backend (:mod:`pronk.models.layer_executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array, split_rows
from pronk.cache.paged import PagedCache
from pronk.models.cost_model import CostModel
from pronk.models.decoder import Decoder, expert_costs
from pronk.models.forward_job import ForwardJob
from pronk.models.layer_executor import LayerExecutor
from pronk.models.program import Program
from pronk.models.program_rows import ProgramRows
from pronk.sampling.draft_token import DraftToken
from pronk.sampling.sampler import Sampler
from pronk.sampling.stateless import Logits

# The first forward pass of a draft chain has one row per uncached token, and each later pass has
# one row. If the first has at most 4 rows, the mean duration of these passes is recorded as the
# cost of a pass of one row.
_MAX_CHAIN_ROWS = 4


class ForwardResult(NamedTuple):
    """Result of a forward pass over several jobs."""

    logits: Sequence[Logits]  # ``[len(logits_nodes), vocab]`` per job: float32
    # layer number (from 1) to the output ``[rows, hidden]`` of each job
    hidden: Mapping[int, list[Array]]
    seconds: float  # duration of the forward pass
    context: int  # number of committed tokens in the cache, over all jobs
    # Per job: maps the index of a row of logits to the token that a worker process sampled from it;
    # may be empty.
    sampled: Sequence[Mapping[int, int]] = ()
    # Experts that the pass read, relative to a pass of one row; ``None``: no experts, or not
    # counted (several workers)
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
        other_caches: Sequence[PagedCache] = (),
        *,
        executor: LayerExecutor | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Create a runner; without ``executor`` this process computes. ``clock`` returns seconds.

        ``other_caches`` are those of other models that layers read; their jobs have
        ``other_tables``.
        """
        self.decoder = decoder
        self.cache = cache
        self.clock = clock
        self.cost_model = (
            CostModel() if decoder.config.mixture is None else CostModel(*expert_costs(decoder))
        )
        self.dtype = cache.dtype
        self.exact = decoder.backend.exact  # whether a row's logits are bit-equal in every batch
        self._num_layers = len(decoder.layers)
        self._executor = executor or LayerExecutor(decoder, cache, other_caches)
        # Whether :meth:`draft_chain` is available: not if an executor splits each forward pass
        # among several processes.
        is_alone = executor is None and not self._executor.has_dynamic_rope
        self.supports_draft_chain = decoder.backend.drafts_chains and is_alone
        self._final_norm: Program | None = None  # built by :meth:`final_norm`

    def forward(
        self, jobs: Sequence[ForwardJob], collect: frozenset[int] = frozenset()
    ) -> ForwardResult:
        """Run one forward pass over all jobs.

        Keys and values are stored after each job's committed tokens.

        Args:
            jobs: at least one job; :meth:`PagedCache.prepare` has allocated the slots of its rows.
            collect: numbers (from 1) of the layers whose output is returned.
        """
        start_time = self.clock()
        context = sum(job.segment.block_table.length for job in jobs)
        num_read_before = self._executor.num_experts_read
        projections = self.cache.projections
        layers = collect.union(*[projection.layers for projection in projections])
        outputs, logits = self._executor.run(jobs, self._num_layers, sorted(layers))
        assert logits is not None
        for projection in projections:
            states = projection.project([outputs[layer] for layer in projection.layers])
            self.cache.write_projection(projection, self._slots(jobs), states)
        mixture = self.decoder.config.mixture
        num_read = self._executor.num_experts_read - num_read_before
        seconds = self.clock() - start_time
        return ForwardResult(
            split_rows(logits, [len(job.logits_nodes) for job in jobs]),
            {layer: _split_by_job(rows, jobs) for layer, rows in outputs.items()},
            seconds,
            context,
            # As multiples of the experts that a forward pass of one row reads.
            touched=None if mixture is None else num_read / (mixture.per_row * sum(mixture.layers)),
        )

    def _slots(self, jobs: Sequence[ForwardJob]) -> NDArray[np.int64]:
        parts = [
            (job.segment.block_table, job.segment.num_computed, len(job.segment.tree))
            for job in jobs
        ]
        return np.concatenate(
            [self.cache.slots(t, t.length + first, t.length + stop) for t, first, stop in parts]
        )

    def run_first_layers(self, jobs: Sequence[ForwardJob], num_layers: int) -> list[Array]:
        """Run rows through the first layers only; return their output, ``[rows, hidden]`` per job.

        The rows attend to the committed tokens and to earlier nodes of their tree, as in
        :meth:`forward`. Their keys and values of these layers are stored in their slots after the
        committed tokens, and so are outputs that the cache keeps (:meth:`PagedCache.keep_hidden`).
        A later call can read them (``Segment.num_computed``); :meth:`forward` computes and stores
        all of them again.

        Args:
            jobs: at least one job, as in :meth:`forward`; no logits are computed.
            num_layers: number of layers, at least 1.
        """
        outputs, _ = self._executor.run(jobs, num_layers, [num_layers])
        return _split_by_job(outputs[num_layers], jobs)

    def final_norm(self, rows: Array) -> Array:
        """Apply the final norm to outputs of the last layer, ``[rows, hidden]``, in their dtype."""
        if self._final_norm is None:
            self._final_norm = self.decoder.backend.program(
                self.decoder.config.hidden_size, self.dtype
            )
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
        """Seconds spent so far on communication with worker processes.

        See :class:`.LayerExecutor`.
        """
        return self._executor.communication_seconds

    def draft_chain(
        self,
        job: ForwardJob,
        sampler: Sampler,
        max_tokens: int,
        on_token: Callable[[DraftToken], bool],
    ) -> int:
        """Draft a chain for one request: one kernel call runs a forward pass per draft token.

        The other arguments are those of :func:`pronk.models.layer_executor.draft_chain`. ``job`` is
        the input of the first forward pass; ``logits_nodes`` is the last node.
        :meth:`PagedCache.prepare` has allocated slots for all rows. Returns the number of forward
        passes. The last one gives no draft token if it allows none or has non-finite logits.
        """
        start_time = self.clock()
        num_passes = self._executor.draft_chain(job, sampler, max_tokens, on_token)
        rows = len(job.segment.tree)
        seconds = self.clock() - start_time
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
        if num_unread > _MAX_CHAIN_ROWS * len(jobs):
            self.cost_model.learn_prompt(rows, seconds)
        elif all(job.logits_nodes for job in jobs):  # short embeddings have no LM head
            self.cost_model.learn(rows, context, seconds, plain=plain, touched=touched)


def _split_by_job(rows: Array, jobs: Sequence[ForwardJob]) -> list[Array]:
    return split_rows(rows, [job.segment.num_rows for job in jobs])
