"""Executor that runs ranges of layers as kernel programs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pronk.architecture.rope import RopeTable
from pronk.execution.forward_job import CrossAttentionSource, ForwardJob, LayerRange
from pronk.kernels.library import Kernels
from pronk.kernels.structures import Hear
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.models.program import Program, ProgramRows
from pronk.sampling.sampler import DraftToken, Sampler

__all__ = ["KernelExecutor"]


class KernelExecutor:
    """Run ranges of layers as kernel programs; each program is compiled once."""

    usable = True

    def __init__(
        self, kernels: Kernels, decoder: Decoder, cache: PagedCache, beside: CrossAttentionSource | None
    ) -> None:
        self.kernels, self.decoder, self.cache, self.beside, self.waited = kernels, decoder, cache, beside, 0.0
        self._programs: dict[tuple[object, ...], Program] = {}
        self._version = (-1, -1)
        self._rope = RopeTable(decoder.config.rope)
        self._cross_rope = None if beside is None else RopeTable(beside.decoder.config.rope)

    @property
    def dynamic(self) -> bool:
        """Whether RoPE rotations depend on the prompt's length, so that each row has its own."""
        return self._rope.dynamic or (self._cross_rope is not None and self._cross_rope.dynamic)

    def run(self, layer_range: LayerRange, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Run rows ``[rows, hidden]`` through a range of layers; ``None`` starts from embeddings."""
        program, packed = self._program(layer_range), self._pack(layer_range, embedded=rows is not None)
        count, size = packed.count, self.decoder.config.hidden_size
        x = torch.empty(count, size, dtype=self.cache.dtype) if rows is None else rows.contiguous()
        logits = collected = None
        if layer_range.wanted is not None:
            logits = torch.empty(packed.want(layer_range.wanted), self.decoder.config.vocab_size)
        if layer_range.collect:
            collected = torch.empty(len(layer_range.collect), count, size, dtype=self.cache.dtype)
        program.run(packed, x, logits, collected)
        made = {} if collected is None else dict(zip(layer_range.collect, collected, strict=True))
        return x, made, logits

    def grow(self, job: ForwardJob, sampler: Sampler, steps: int, hear: Callable[[DraftToken], bool]) -> int:
        """Draft a chain in the kernels; return the number of forward passes."""
        c, jobs = self.decoder.config, [(job, job.segment)]
        layer_range = LayerRange(jobs, 0, len(self.decoder.layers), (), LayerRange.wanted_of(jobs))
        packed = self._pack(layer_range, more=steps)
        assert layer_range.wanted is not None
        assert packed.want(layer_range.wanted) == 1
        scores = np.empty((steps, c.vocab_size), dtype=np.float32)
        raised: list[BaseException] = []
        next_scores = iter(scores)

        def on_token(token: int, confidence: float) -> int:
            try:
                return int(hear(DraftToken(token, confidence, next(next_scores))))
            except BaseException as error:  # noqa: BLE001 - exceptions cannot cross the kernels
                raised.append(error)
                return 0

        growth = sampler.growth(steps, scores)
        growth.on_token = Hear(on_token)
        x, logits = torch.empty(packed.count, c.hidden_size, dtype=self.cache.dtype), torch.empty(1, c.vocab_size)
        passes = self._program(layer_range).grow(packed, x, logits, growth)
        if raised:
            raise raised[0]
        return passes

    def _pack(self, layer_range: LayerRange, *, embedded: bool = False, more: int = 0) -> ProgramRows:
        jobs = [(segment.block_table, segment.tree, segment.computed) for _, segment in layer_range.jobs]
        tokens = None if embedded else [token for _, tree, computed in jobs for token in tree.tokens[computed:]]
        packed = ProgramRows().add(jobs, tokens, self._tables(layer_range))
        for number, table in enumerate((self._rope, self._cross_rope)):
            if table is None or table.config is None:
                continue
            if table.dynamic:
                _, positions, spans = layer_range.places()
                packed.rotate(number, table.lines(positions, spans), by_row=True)
            else:
                stop = max(segment.block_table.length + len(segment.tree) for _, segment in layer_range.jobs)
                packed.rotate(number, table.upto(stop + more))
        return packed

    def _program(self, layer_range: LayerRange) -> Program:
        key = (
            layer_range.start,
            layer_range.stop,
            layer_range.collect,
            layer_range.wanted is not None and len(layer_range.wanted) > 0,
        )
        return self._known(key, lambda: self._compile(layer_range))

    def _known(self, key: tuple[object, ...], make: Callable[[], Program]) -> Program:
        """Return a cached program; the cache is cleared when a KV pool is reallocated."""
        version = (self.cache.version, -1 if self.beside is None else self.beside.cache.version)
        if version != self._version:
            self._programs, self._version = {}, version
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    def _compile(self, layer_range: LayerRange) -> Program:
        decoder, cache, beside = self.decoder, self.cache, self.beside
        other = None if beside is None else (beside.decoder.config, beside.cache)
        layers = () if beside is None else beside.layers
        c = decoder.config
        program = Program(self.kernels, c.hidden_size, cache.dtype, cache, other, layers)
        if layer_range.start == 0:
            program.embed(decoder)
        for index in range(layer_range.start, layer_range.stop):
            decoder.layers[index].compile(program, index)
            if index + 1 in cache.hidden:
                program.keep(index + 1)
            if index + 1 in layer_range.collect:
                program.collect(layer_range.collect.index(index + 1))
        if layer_range.wanted:
            program.linear(decoder.head, norm=decoder.norm, to="logits", wanted=True)
        return program

    def _tables(self, layer_range: LayerRange) -> list[BlockTable] | None:
        """Return the tables for cross-attention; empty tables for a forward pass that is only timed."""
        if self.beside is None:
            return None
        return [job.beside or BlockTable() for job, _ in layer_range.jobs]
