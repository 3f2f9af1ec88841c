"""The forward pass: some requests' trees in, logits at the nodes that need them out.

A tree whose first nodes a drafter has taken through the first layers already (:class:`~pronk.tree.Early`) goes on where
they are: those rows join the pass at that layer, and nothing is computed twice. With ``s`` rows computed early up to
layer 2, and ``n`` others ::

    layers 0 1     rows of n
    layers 2 …     rows of s (from the cache), rows of n

Where the model's weights are packed for the kernels, each range of layers is one call (:class:`KernelPasses`); the
other path is the same in torch (:class:`TorchPasses`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pronk.architecture.rope import RopeTable
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.choosing.chooser import Chooser, Guess
from pronk.kernels.library import Hear, Kernels
from pronk.model.decoder import Decoder
from pronk.model.program import Program, Rows
from pronk.passes.attention import CrossAttention, PagedAttention, Segment

__all__ = ["Beside", "Job", "PassResult", "Runner"]


class Job(NamedTuple):
    """One request's share of a pass.

    Attributes:
        segment: its rows.
        wanted: the nodes whose logits are needed, in order.
        prompt_length: tokens of its prompt, which is the length that *dynamic* RoPE scaling starts from.
        beside: where cross-attention finds the request's text in another model's cache.
    """

    segment: Segment
    wanted: range
    prompt_length: int
    beside: BlockTable | None = None


class PassResult(NamedTuple):
    """What a pass computed.

    Attributes:
        logits: one ``[len(job.wanted), vocab]`` per job: float32 from the kernels, else in the model's dtype.
        hidden: for each collected layer, one ``[rows, hidden]`` per job.
        seconds: the duration of the pass.
    """

    logits: list[Tensor]
    hidden: Mapping[int, list[Tensor]]
    seconds: float


@dataclass(frozen=True)
class Beside:
    """Another model's cache, which a model with cross-attention reads and never writes.

    Attributes:
        decoder: the other model.
        cache: its keys and values.
        layers: for each layer of the reading model the number, from 0, of the layer that it reads.
    """

    decoder: Decoder
    cache: PagedCache
    layers: tuple[int, ...]


class Stage(NamedTuple):
    """Some layers over some rows.

    Attributes:
        jobs: those that have rows here, with the part of their segment that these layers compute.
        start: first layer.
        stop: the layer behind the last one.
        collect: numbers of layers whose output is wanted.
        wanted: rows whose logits are wanted, in order; ``None`` if this is not the end of the model.
    """

    jobs: Sequence[tuple[Job, Segment]]
    start: int
    stop: int
    collect: tuple[int, ...]
    wanted: Sequence[int] | range | None

    def places(self) -> tuple[list[int], list[int], list[int]]:
        """Token, position and RoPE span of every row."""
        tokens, positions, spans = list[int](), list[int](), list[int]()
        for job, segment in self.jobs:
            length, computed = segment.table.length, segment.computed
            tokens.extend(segment.tree.tokens[computed:])
            places = [length + depth for depth in segment.tree.depths[computed:]]
            positions.extend(places)
            spans.extend(max(job.prompt_length, place + 1) for place in places)
        return tokens, positions, spans


class Passes(Protocol):
    """Who computes the stages of a pass."""

    def run(self, stage: Stage, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Rows ``[rows, hidden]`` through a stage; ``None`` where they begin as embeddings.

        Returns:
            Their state afterwards, the collected layers' outputs, and the logits of the wanted rows.
        """
        ...


class Runner:
    """Runs a decoder over packed rows. Holds no state of its own.

    Attributes:
        decoder: the model.
        cache: its keys and values.
        dtype: of the rows.
        device: where they are.
        exact: whether a row's bits depend on its own text alone.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache, beside: Beside | None = None) -> None:
        self.decoder = decoder
        self.cache = cache
        self.dtype = cache.dtype
        self.device = cache.device
        self.exact = decoder.kernels is not None
        self._layers = len(decoder.layers)
        self._kernels = None
        if decoder.kernels is not None:
            self._kernels = KernelPasses(decoder.kernels, decoder, cache, beside)
        self._passes: Passes = self._kernels or TorchPasses(decoder, cache, beside)

    def forward(self, jobs: Sequence[Job], collect: frozenset[int] = frozenset()) -> PassResult:
        """One pass over all jobs' trees; their keys and values go to the slots behind each table's length.

        Args:
            jobs: at least one; their places in the cache have been prepared.
            collect: numbers of layers whose output is wanted: 1 is the first layer's. Of nodes that were computed early
                up to a later layer there is none.
        """
        began = perf_counter()
        early = {job.segment.tree.early.layers for job in jobs if job.segment.tree.early is not None}
        rows: list[Tensor | None] = [None] * len(jobs)
        hidden: dict[int, list[Tensor]] = {}
        logits: Tensor | None = None
        for start, stop in pairwise(sorted({0, *early, self._layers})):
            logits = self._run(jobs, rows, start, stop, collect, hidden)
        assert logits is not None
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return PassResult(_split(logits, [len(job.wanted) for job in jobs]), hidden, perf_counter() - began)

    def begin(self, jobs: Sequence[Job], layers: int) -> list[Tensor]:
        """The first ``layers`` layers alone; returns their output ``[rows, hidden]`` per job.

        What they store lets :meth:`forward` go on from there.
        """
        rows: list[Tensor | None] = [None] * len(jobs)
        self._run(jobs, rows, 0, layers, frozenset(), {})
        return [row for row in rows if row is not None]

    @property
    def grows(self) -> bool:
        """Whether :meth:`grow` can be asked."""
        return self._kernels is not None and not self._kernels.dynamic

    def grow(self, job: Job, chooser: Chooser, steps: int, hear: Callable[[Guess], bool]) -> int:
        """A pass over one request's chain, a guess after its last row, a pass over that, and so on, in one call.

        Args:
            job: the rows of the first pass; the logits of the last one are wanted, and there must be places for
                ``steps`` rows more.
            chooser: who guesses; one that :attr:`~pronk.choosing.chooser.Chooser.guesses_alone`.
            steps: most guesses, at least 1.
            hear: is told of each guess, and whether to go on is what it returns.

        Returns:
            The number of passes: one more than there are guesses, if there is none after the last one.
        """
        assert self._kernels is not None
        return self._kernels.grow(job, chooser, steps, hear)

    def _run(
        self,
        jobs: Sequence[Job],
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
        stage = Stage(present, start, stop, between, _wanted(present) if stop == self._layers else None)
        x = None
        if start:
            held = [row for i in here for row in (self._early(jobs[i].segment, start), rows[i]) if row is not None]
            x = torch.cat(held)
        out, collected, logits = self._passes.run(stage, x)
        for number, own in zip(here, _split(out, [part.rows for _, part in present]), strict=True):
            rows[number] = own
        for layer, values in collected.items():
            hidden[layer] = _split(values, [part.rows for part in parts])
        return logits

    def _early(self, segment: Segment, layer: int) -> Tensor | None:
        """The rows of a segment that join at this layer, ``[rows, hidden]``."""
        table, early = segment.table, segment.tree.early
        if early is None or early.layers != layer:
            return None
        return self.cache.read_hidden(layer, table, table.length, table.length + early.nodes)


class KernelPasses:
    """Stages as programs for the kernels, each made once."""

    def __init__(self, kernels: Kernels, decoder: Decoder, cache: PagedCache, beside: Beside | None) -> None:
        self.kernels, self.decoder, self.cache, self.beside = kernels, decoder, cache, beside
        self._programs: dict[tuple[object, ...], Program] = {}
        self._version = (-1, -1)
        self._rope = RopeTable(decoder.config.rope)
        self._cross_rope = None if beside is None else RopeTable(beside.decoder.config.rope)

    @property
    def dynamic(self) -> bool:
        """Whether every row has rotations of its own."""
        return self._rope.dynamic or (self._cross_rope is not None and self._cross_rope.dynamic)

    def run(self, stage: Stage, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """See :class:`Passes`."""
        program, packed = self._program(stage), self._pack(stage, embedded=rows is not None)
        count, size = packed.count, self.decoder.config.hidden_size
        x = torch.empty(count, size, dtype=self.cache.dtype) if rows is None else rows.contiguous()
        logits = collected = None
        if stage.wanted is not None:
            logits = torch.empty(packed.want(stage.wanted), self.decoder.config.vocab_size)
        if stage.collect:
            collected = torch.empty(len(stage.collect), count, size, dtype=self.cache.dtype)
        program.run(packed, x, logits, collected)
        made = {} if collected is None else dict(zip(stage.collect, collected, strict=True))
        return x, made, logits

    def grow(self, job: Job, chooser: Chooser, steps: int, hear: Callable[[Guess], bool]) -> int:
        """See :class:`Runner`."""
        c, jobs = self.decoder.config, [(job, job.segment)]
        stage = Stage(jobs, 0, len(self.decoder.layers), (), _wanted(jobs))
        packed = self._pack(stage, more=steps)
        assert stage.wanted is not None
        assert packed.want(stage.wanted) == 1
        scores = np.empty((steps, c.vocab_size), dtype=np.float32)
        raised: list[BaseException] = []
        heard = iter(scores)

        def tell(token: int, confidence: float) -> int:
            try:
                return int(hear(Guess(token, confidence, next(heard))))
            except BaseException as error:  # noqa: BLE001 - nothing can be raised through the kernels
                raised.append(error)
                return 0

        growth = chooser.growth(steps, scores)
        growth.hear = Hear(tell)
        x, logits = torch.empty(packed.count, c.hidden_size, dtype=self.cache.dtype), torch.empty(1, c.vocab_size)
        passes = self._program(stage).grow(packed, x, logits, growth)
        if raised:
            raise raised[0]
        return passes

    def _pack(self, stage: Stage, *, embedded: bool = False, more: int = 0) -> Rows:
        """The rows of a stage, and rotations for ``more`` behind them."""
        jobs = [(segment.table, segment.tree, segment.computed) for _, segment in stage.jobs]
        tokens = None if embedded else [token for _, tree, computed in jobs for token in tree.tokens[computed:]]
        packed = Rows().add(jobs, tokens, self._tables(stage))
        for number, table in enumerate((self._rope, self._cross_rope)):
            if table is None or table.config is None:
                continue
            if table.dynamic:
                _, positions, spans = stage.places()
                packed.rotate(number, table.lines(positions, spans), by_row=True)
            else:
                stop = max(segment.table.length + len(segment.tree) for _, segment in stage.jobs)
                packed.rotate(number, table.upto(stop + more))
        return packed

    def _program(self, stage: Stage) -> Program:
        version = (self.cache.version, -1 if self.beside is None else self.beside.cache.version)
        if version != self._version:
            self._programs, self._version = {}, version
        key = (stage.start, stage.stop, stage.collect, stage.wanted is not None and len(stage.wanted) > 0)
        if key not in self._programs:
            self._programs[key] = self._compile(stage)
        return self._programs[key]

    def _compile(self, stage: Stage) -> Program:
        decoder, cache, beside = self.decoder, self.cache, self.beside
        other = None if beside is None else (beside.decoder.config, beside.cache)
        layers = () if beside is None else beside.layers
        c = decoder.config
        program = Program(self.kernels, c.hidden_size, cache.dtype, cache, other, layers)
        if stage.start == 0:
            program.embed(decoder.embedding, decoder.positions)
        for index in range(stage.start, stage.stop):
            decoder.layers[index].compile(program, index)
            if index + 1 in cache.hidden:
                program.keep(index + 1)
            if index + 1 in stage.collect:
                program.collect(stage.collect.index(index + 1))
        if stage.wanted:
            program.linear(decoder.head, norm=decoder.norm, to="logits", wanted=True)
        return program

    def _tables(self, stage: Stage) -> list[BlockTable] | None:
        """Where cross-attention looks; a pass that is only timed looks nowhere."""
        if self.beside is None:
            return None
        return [job.beside or BlockTable() for job, _ in stage.jobs]


class TorchPasses:
    """Stages in torch."""

    def __init__(self, decoder: Decoder, cache: PagedCache, beside: Beside | None) -> None:
        self.decoder, self.cache, self.beside = decoder, cache, beside

    @torch.inference_mode()
    def run(self, stage: Stage, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """See :class:`Passes`."""
        decoder, cache = self.decoder, self.cache
        tokens, positions, spans = torch.tensor(stage.places(), dtype=torch.int64, device=cache.device)
        segments = [segment for _, segment in stage.jobs]
        attend = PagedAttention(decoder.config, cache, segments)
        if self.beside is not None:
            other = self.beside
            tables = [job.beside or BlockTable() for job, _ in stage.jobs]
            attend = CrossAttention(
                decoder.config,
                cache,
                segments,
                (other.decoder.config, other.cache, other.layers),
                tables,
                other.decoder.rope(positions, spans, other.cache.dtype),
            )
        x = decoder.embed(tokens, positions, cache.dtype) if rows is None else rows
        rope = decoder.rope(positions, spans, cache.dtype)
        collected: dict[int, Tensor] = {}
        for layer, x in decoder.run(x, rope, attend, stage.start, stage.stop):  # noqa: B020 - the state goes through
            cache.write_hidden(layer, attend.slots, x)
            if layer in stage.collect:
                collected[layer] = x
        if stage.wanted is None:
            return x, collected, None
        # The choice is made on the CPU, where the noise is the same whatever the device.
        logits = decoder.logits(x[torch.tensor(list(stage.wanted), dtype=torch.int64, device=x.device)]).cpu()
        return x, collected, logits


def _split(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [rows] if len(sizes) == 1 else list(rows.split(list(sizes)))


def _part(segment: Segment, layer: int) -> Segment:
    """What of a segment goes through layer number ``layer`` (from 0): not what was computed early beyond it."""
    early = segment.tree.early
    if early is None or layer >= early.layers or early.nodes <= segment.computed:
        return segment
    return segment._replace(computed=early.nodes)


def _wanted(jobs: Sequence[tuple[Job, Segment]]) -> list[int] | range:
    """The rows of the wanted nodes."""
    if len(jobs) == 1:
        ((job, segment),) = jobs
        return range(job.wanted.start - segment.computed, job.wanted.stop - segment.computed)
    rows, start = list[int](), 0
    for job, segment in jobs:
        rows.extend(start + node - segment.computed for node in job.wanted)
        start += segment.rows
    return rows
