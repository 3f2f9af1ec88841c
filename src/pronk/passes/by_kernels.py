"""Stages of a pass as programs for the kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pronk.architecture.rope import RopeTable
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.choosing.chooser import Chooser, Guess
from pronk.kernels.library import Kernels
from pronk.kernels.structures import Hear
from pronk.model.decoder import Decoder
from pronk.model.program import Program, Rows
from pronk.passes.stage import Beside, Job, Stage

__all__ = ["KernelPasses"]


class KernelPasses:
    """Stages as programs for the kernels, each made once."""

    usable = True

    def __init__(self, kernels: Kernels, decoder: Decoder, cache: PagedCache, beside: Beside | None) -> None:
        self.kernels, self.decoder, self.cache, self.beside, self.waited = kernels, decoder, cache, beside, 0.0
        self._programs: dict[tuple[object, ...], Program] = {}
        self._version = (-1, -1)
        self._rope = RopeTable(decoder.config.rope)
        self._cross_rope = None if beside is None else RopeTable(beside.decoder.config.rope)

    @property
    def dynamic(self) -> bool:
        """Whether every row has rotations of its own."""
        return self._rope.dynamic or (self._cross_rope is not None and self._cross_rope.dynamic)

    def run(self, stage: Stage, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Rows ``[rows, hidden]`` through a stage; ``None`` where they begin as embeddings."""
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
        """Run a chain, a guess after it, a pass over that, and so on; returns the number of passes."""
        c, jobs = self.decoder.config, [(job, job.segment)]
        stage = Stage(jobs, 0, len(self.decoder.layers), (), Stage.wanted_of(jobs))
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
        key = (stage.start, stage.stop, stage.collect, stage.wanted is not None and len(stage.wanted) > 0)
        return self._known(key, lambda: self._compile(stage))

    def _known(self, key: tuple[object, ...], make: Callable[[], Program]) -> Program:
        """A program, made once for as long as the pools are where they are."""
        version = (self.cache.version, -1 if self.beside is None else self.beside.cache.version)
        if version != self._version:
            self._programs, self._version = {}, version
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    def _compile(self, stage: Stage) -> Program:
        decoder, cache, beside = self.decoder, self.cache, self.beside
        other = None if beside is None else (beside.decoder.config, beside.cache)
        layers = () if beside is None else beside.layers
        c = decoder.config
        program = Program(self.kernels, c.hidden_size, cache.dtype, cache, other, layers)
        if stage.start == 0:
            program.embed(decoder)
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
