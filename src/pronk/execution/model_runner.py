"""The forward pass: some requests' trees in, logits at the nodes that need them out.

A tree whose first nodes a drafter has taken through the first layers already goes on where they are
(:class:`~pronk.execution.early_rows.EarlyRows`): those rows join the pass at that layer, and nothing is computed twice. With
``s`` rows computed early up to layer 2, and ``n`` others ::

    layers 0 1     rows of n
    layers 2 …     rows of s (from the cache), rows of n

Where the model's weights are packed for the kernels, each range of layers is one call (:mod:`pronk.execution.kernel_executor`);
the other path is the same in torch (:mod:`pronk.execution.torch_executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from pronk.execution.attention import Segment
from pronk.execution.early_rows import EarlyRows, StartedTables
from pronk.execution.forward_job import CrossAttentionSource, Executor, ForwardJob, LayerRange
from pronk.execution.kernel_executor import KernelExecutor
from pronk.execution.torch_executor import TorchExecutor
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.sampling.sampler import DraftToken, Sampler
from pronk.sampling.stateless import Logits
from pronk.speculation.cost_model import CostCurve, CostModel
from pronk.speculation.tree import TokenTree

__all__ = ["CrossAttentionSource", "ForwardJob", "ForwardResult", "JobResult", "ModelRunner"]

# Rows of text that a draft reads with its first guess, up to which that pass is like those that follow.
_FEW = 4


class ForwardResult(NamedTuple):
    """What a pass computed.

    Attributes:
        logits: one ``[len(job.wanted), vocab]`` per job: float32 from the kernels, else in the model's dtype.
        hidden: for each collected layer, one ``[rows, hidden]`` per job.
        seconds: the duration of the pass.
        context: positions before its rows, of all texts together.
        chosen: for each job, tokens that were chosen already, by their place among those wanted; or nothing at all.
    """

    logits: Sequence[Logits]
    hidden: Mapping[int, list[Tensor]]
    seconds: float
    context: int
    chosen: Sequence[Mapping[int, int]] = ()

    def of(self, number: int) -> JobResult:
        """Return the part of job ``number``, from 0."""
        hidden = {layer: rows[number] for layer, rows in self.hidden.items()}
        return JobResult(self.logits[number], hidden, self.chosen[number] if self.chosen else {})


class JobResult(NamedTuple):
    """One job's part of a :class:`ForwardResult`; the fields are the same."""

    logits: Logits
    hidden: Mapping[int, Tensor]
    chosen: Mapping[int, int]


class ModelRunner:
    """Runs a decoder over packed rows; all that it remembers is what that took.

    Attributes:
        decoder: the model.
        cache: its keys and values.
        dtype: of the rows.
        device: where they are.
        exact: whether a row's bits depend on its own text alone.
        clock: gives seconds.
        times: what its passes have taken.
        started: rows of this step that a drafter has taken through the first layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        beside: CrossAttentionSource | None = None,
        *,
        passes: Executor | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """``passes`` computes the stages, if that is not this process alone."""
        self.decoder = decoder
        self.cache = cache
        self.clock = clock
        self.times = CostModel()
        self.started = StartedTables()
        self.dtype = cache.dtype
        self.device = cache.device
        self.exact = decoder.kernels is not None
        self._layers = len(decoder.layers)
        self._kernels = None
        if decoder.kernels is not None and passes is None:
            self._kernels = KernelExecutor(decoder.kernels, decoder, cache, beside)
        self._passes: Executor = passes or self._kernels or TorchExecutor(decoder, cache, beside)

    def forward(self, jobs: Sequence[ForwardJob], collect: frozenset[int] = frozenset()) -> ForwardResult:
        """One pass over all jobs' trees; their keys and values go to the slots behind each table's length.

        Args:
            jobs: at least one; their places in the cache have been prepared.
            collect: numbers of layers whose output is wanted: 1 is the first layer's. Of nodes that were computed early
                up to a later layer there is none.
        """
        began, context = self.clock(), sum(job.segment.block_table.length for job in jobs)
        early = {job.segment.early.layers for job in jobs if job.segment.early is not None}
        rows: list[Tensor | None] = [None] * len(jobs)
        hidden: dict[int, list[Tensor]] = {}
        logits: Tensor | None = None
        for start, stop in pairwise(sorted({0, *early, self._layers})):
            logits = self._run(jobs, rows, start, stop, collect, hidden)
        assert logits is not None
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        seconds = self.clock() - began
        return ForwardResult(_split(logits, [len(job.wanted) for job in jobs]), hidden, seconds, context)

    def early_rows(self, block_table: BlockTable, tree: TokenTree, hidden: Sequence[int]) -> EarlyRows | None:
        """Return the nodes of ``tree`` that join the forward pass late, if a drafter has started them.

        The output of the skipped layers is not computed again, so there are none if ``hidden``, the numbers of the
        layers whose output a drafter reads, has one of them.
        """
        early = EarlyRows.of(self.started.get(block_table), tree)
        return None if early is not None and min(hidden, default=early.layers + 1) <= early.layers else early

    def begin(self, jobs: Sequence[ForwardJob], layers: int) -> list[Tensor]:
        """The first ``layers`` layers alone; returns their output ``[rows, hidden]`` per job.

        What they store lets :meth:`forward` go on from there.
        """
        rows: list[Tensor | None] = [None] * len(jobs)
        self._run(jobs, rows, 0, layers, frozenset(), {})
        return [row for row in rows if row is not None]

    @property
    def usable(self) -> bool:
        """Whether passes can be made at all: not where processes that have a part of the model are gone."""
        return self._passes.usable

    @property
    def waited(self) -> float:
        """Seconds that went into other processes that compute the model, so far; see :class:`Executor`."""
        return self._passes.waited

    @property
    def grows(self) -> bool:
        """Whether :meth:`grow` can be asked."""
        return self._kernels is not None and not self._kernels.dynamic

    def grow(self, job: ForwardJob, sampler: Sampler, steps: int, hear: Callable[[DraftToken], bool]) -> int:
        """A pass over one request's chain, a guess after its last row, a pass over that, and so on, in one call.

        Args:
            job: the rows of the first pass; the logits of the last one are wanted, and there must be places for
                ``steps`` rows more.
            sampler: who guesses; one that :attr:`~pronk.sampling.sampler.Sampler.drafts_statelessly`.
            steps: most guesses, at least 1.
            hear: is told of each guess, and whether to go on is what it returns.

        Returns:
            The number of passes: one more than there are guesses, if there is none after the last one.
        """
        assert self._kernels is not None
        began = self.clock()
        passes = self._kernels.grow(job, sampler, steps, hear)
        if len(job.segment.tree) <= _FEW:
            self.times.learn(1, job.segment.block_table.length, (self.clock() - began) / passes)
        return passes

    def learn(self, jobs: Sequence[ForwardJob], context: int, seconds: float) -> None:
        """Remember what a pass took.

        Args:
            jobs: of the pass.
            context: as the result has it.
            seconds: of the pass, and of whatever else there is to every pass.
        """
        rows = sum(len(job.segment.tree) - job.segment.computed for job in jobs)
        share = self._early_share(jobs)
        if share == 0.0:
            self.times.learn(rows, context, seconds)
        elif share is not None:
            self.times.learn_rest(share, rows, context, seconds)

    def costs_of(self, jobs: Sequence[ForwardJob], costs: CostCurve) -> CostCurve:
        """What a pass over these jobs costs by its rows, where whole ones cost ``costs``."""
        share = self._early_share(jobs)
        return self.times.rest(costs, share) if share else costs

    def _early_share(self, jobs: Sequence[ForwardJob]) -> float | None:
        """Of the layers, how many its first nodes have been through; ``None`` if the jobs differ."""
        early = {0 if job.segment.early is None else job.segment.early.layers for job in jobs}
        return early.pop() / self._layers if len(early) == 1 else None

    def _run(
        self,
        jobs: Sequence[ForwardJob],
        rows: list[Tensor | None],
        start: int,
        stop: int,
        collect: frozenset[int],
        hidden: dict[int, list[Tensor]],
    ) -> Tensor | None:
        """Layers ``start .. stop - 1``; ``rows`` are the states of each job's rows, which go on.

        Returns the logits of the wanted nodes, if these layers are the last ones.
        """
        parts = [_part(job.segment, start) for job in jobs]
        here = [number for number, part in enumerate(parts) if part.rows]
        if not here:
            return None
        present = [(jobs[number], parts[number]) for number in here]
        between = tuple(sorted(layer for layer in collect if start < layer <= stop)) if collect else ()
        layer_range = LayerRange(
            present, start, stop, between, LayerRange.wanted_of(present) if stop == self._layers else None
        )
        x = None
        if start:
            held = [row for i in here for row in (self._early(jobs[i].segment, start), rows[i]) if row is not None]
            x = torch.cat(held)
        out, collected, logits = self._passes.run(layer_range, x)
        for number, own in zip(here, _split(out, [part.rows for _, part in present]), strict=True):
            rows[number] = own
        for layer, values in collected.items():
            hidden[layer] = _split(values, [part.rows for part in parts])
        return logits

    def _early(self, segment: Segment, layer: int) -> Tensor | None:
        """The rows of a segment that join at this layer, ``[rows, hidden]``."""
        block_table, early = segment.block_table, segment.early
        if early is None or early.layers != layer:
            return None
        return self.cache.read_hidden(layer, block_table, block_table.length, block_table.length + early.nodes)


def _split(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [rows] if len(sizes) == 1 else list(rows.split(list(sizes)))


def _part(segment: Segment, layer: int) -> Segment:
    """What of a segment goes through layer number ``layer`` (from 0): not what was computed early beyond it."""
    early = segment.early
    if early is None or layer >= early.layers or early.nodes <= segment.computed:
        return segment
    return segment._replace(computed=early.nodes)
