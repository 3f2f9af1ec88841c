"""Attention of a drafter's own over what the target makes of the text: a cache beside the target's.

Such a drafter reads outputs of the target's layers, one row per token, instead of tokens, and attends to its own keys
and values of all rows before. A lane holds those of one request's text, row by row at the tokens' positions::

    text         a b c d | e f        a b c d are in the target's cache, whose outputs it keeps; e f are not yet
    lane         a b                  c and d are what it has to catch up with

Rows of guesses are added behind them, and stay if the guesses become text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.architecture.rope import RopeTable
from pronk.errors import CacheFullError
from pronk.execution.attention import PagedAttention, Segment
from pronk.interrupts import uninterrupted
from pronk.kernels.library import Kernels
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Attend
from pronk.models.program import Program, ProgramRows
from pronk.speculation.proposer import DraftContext
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree

__all__ = ["CHUNK", "AttendingModule", "Forward", "SideCache", "SideLane", "open_pool", "shared_prefix"]

# Rows in a pass over new text: a long prompt goes through in parts.
CHUNK = 512

# Runs part number ``i`` of a module on ``[rows, size]``.
Apply = Callable[[int, Tensor], Tensor]

# From rows ``[rows, size]`` and a way to run the module's parts, to one row each of any shape.
Forward = Callable[[Tensor, Apply], Tensor]


class AttendingModule(Protocol):
    """A module whose parts attend, each to its own layer of a cache, from ``[rows, size]`` to the same shape."""

    config: ModelConfig

    def part(self, index: int, x: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:
        """One part, in torch."""
        ...

    def compile_part(self, index: int, program: Program) -> None:
        """Describe it to the kernels."""
        ...


@dataclass
class SideLane:
    """What a cache beside the target's holds of one request.

    Attributes:
        block_table: the places of the rows.
        tokens: the text that they belong to.
        certain: number of leading tokens that were certain at the last proposal, and so are the same now.
        salt: of the request.
    """

    block_table: BlockTable = field(default_factory=BlockTable)
    tokens: list[int] = field(default_factory=list)
    certain: int = 0
    salt: bytes = b""


class SideCache:
    """Runs a module over the target's outputs, for any number of requests at a time.

    Attributes:
        target: whose outputs, positions and memory they are.
        module: whose keys and values are kept beside the target's.
        cache: these, one layer for each part.
    """

    def __init__(self, target: Target, module: AttendingModule) -> None:
        self.target = target
        self.module = module
        self.cache = open_pool(target, module.config)
        self._programs: dict[tuple[int, int], Program] = {}
        self._rope = RopeTable(target.decoder.config.rope)

    def ready(self, lane: SideLane, context: DraftContext[Any], room: int) -> bool:
        """Keep the rows of what the text still begins with, and find places for the rest and ``room`` tokens more.

        Returns:
            Whether there are places.
        """
        text, size = context.tokens, self.cache.block_size
        self._recall(lane, context)
        held = shared_prefix(lane.tokens, text, lane.certain)
        lane.certain = context.block_table.length + 1  # what follows may be guesses, which come and go
        # What has left a sliding window cannot be read any more, and is seen by none of the later tokens.
        gone = context.block_table.released * self.target.cache.block_size
        window = self.cache.config.window
        with uninterrupted():
            lane.tokens[held:] = text[held:gone]
            self.cache.rollback(lane.block_table, len(lane.tokens))
            self._learn(lane)
            # The next row is that behind those held, and looks back from there.
            self.cache.release_before(
                lane.block_table, gone if window is None or held < gone else max(0, held + 1 - window)
            )
            if not lane.block_table.blocks:
                lane.block_table.released = gone // size
            if window is None:  # all that will follow at once, so that the blocks lie in a run
                room += max(context.max_depth, context.params.max_tokens - context.sampler.context.num_chosen)
            try:
                self.cache.prepare(lane.block_table, len(text) + room)
            except CacheFullError:
                return False
        return True

    def _recall(self, lane: SideLane, context: DraftContext[Any]) -> None:
        """Let a new lane begin with what the cache has of its text, but for the last row of the target's."""
        lane.salt = context.salt
        if lane.block_table.blocks or lane.tokens or self.cache.config.window is not None:
            return
        with uninterrupted():
            found = self.cache.match(context.tokens[: context.block_table.length], lane.salt)
            if found is not None:
                lane.block_table, lane.tokens = found, list(context.tokens[: found.length])

    def _learn(self, lane: SideLane) -> None:
        """Remember the rows of certain tokens.

        Not behind a window: a lane may begin where the target's did not hold the first rows any more.
        """
        if self.cache.config.window is None:
            self.cache.learn(lane.block_table, lane.tokens, lane.salt, max(0, lane.certain - 1))

    def release(self, lane: SideLane) -> None:
        """Give back what a lane holds."""
        with uninterrupted():
            self._learn(lane)
            self.cache.release(lane.block_table)
            lane.tokens.clear()

    def catch_up(
        self, lane: SideLane, text: Sequence[int], block_table: BlockTable, layer: int, forward: Forward
    ) -> Tensor | None:
        """Run what the target's cache holds of ``text`` and the lane does not.

        Args:
            lane: after :meth:`ready`.
            text: the request's tokens.
            block_table: of the target's cache.
            layer: number of the layer whose outputs are read; they must have been kept.
            forward: what to make of its parts.

        Returns:
            What it says after the last of these tokens, or ``None`` if there was none to run.
        """
        last = None
        for start in range(len(lane.tokens), block_table.length, CHUNK):
            stop = min(start + CHUNK, block_table.length)
            rows = self.target.cache.read_hidden(layer, block_table, start, stop)
            last = self.run([lane], [text[start:stop]], [rows], forward)[0][-1]
        return last

    @torch.inference_mode()
    def run(
        self, lanes: Sequence[SideLane], tokens: Sequence[Sequence[int]], rows: Sequence[Tensor], forward: Forward
    ) -> list[Tensor]:
        """Add rows to the lanes, in one pass; there must be places for them.

        Args:
            lanes: of different requests.
            tokens: the text that the rows belong to, at least one for each lane.
            rows: ``[len(tokens), size]`` each.
            forward: what to make of the module's parts.

        Returns:
            What it says at each row.
        """
        segments = [Segment(lane.block_table, TokenTree.chain(new)) for lane, new in zip(lanes, tokens, strict=True)]
        said = forward(torch.cat(list(rows)), self._apply(segments))
        with uninterrupted():
            for lane, new in zip(lanes, tokens, strict=True):
                lane.tokens += new
                lane.block_table.length = len(lane.tokens)
        return list(said.split([len(new) for new in tokens]))

    def _apply(self, segments: Sequence[Segment]) -> Apply:
        """How the module's parts are run over these rows."""
        places = [place for s in segments for place in range(s.block_table.length, s.block_table.length + s.rows)]
        kernels = self.cache.kernels
        if kernels is None:
            positions = torch.tensor(places, device=self.cache.device)
            rope = self.target.decoder.rope(positions, positions + 1, self.cache.dtype)
            attend = PagedAttention(self.cache.config, self.cache, segments)
            return lambda index, x: self.module.part(index, x, rope, attend)
        packed = ProgramRows().add([(segment.block_table, segment.tree, 0) for segment in segments])
        if self._rope.dynamic:
            packed.rotate(0, self._rope.lines(places, [place + 1 for place in places]), by_row=True)
        elif self._rope.config is not None:
            packed.rotate(0, self._rope.upto(max(places) + 1))

        def apply(index: int, x: Tensor) -> Tensor:
            out = x.clone()
            self._program(index).run(packed, out)
            return out

        return apply

    def _program(self, index: int) -> Program:
        key = (index, self.cache.version)
        if key not in self._programs:
            assert self.cache.kernels is not None
            size = self.cache.config.hidden_size
            program = Program(self.cache.kernels, size, self.cache.dtype, self.cache)
            self.module.compile_part(index, program)
            self._programs = {known: each for known, each in self._programs.items() if known[1] == key[1]}
            self._programs[key] = program
        return self._programs[key]


def open_pool(
    target: Target, config: ModelConfig, dtype: torch.dtype | None = None, kernels: Kernels | None = None
) -> PagedCache:
    """A cache for a drafter, in the target's memory; of its dtype and for its kernels, unless a dtype is given.

    It remembers prefixes if the target's does.
    """
    beside = target.cache
    remembers = beside.prefix is not None
    if dtype is None:
        dtype, kernels = beside.dtype, beside.kernels
    if target.budget is not None:
        with target.lock:  # the others shrink
            return target.budget.add(config, dtype, kernels, share_prefixes=remembers)
    return PagedCache(
        config,
        num_blocks=beside.allocator.num_blocks,
        block_size=beside.block_size,
        dtype=dtype,
        device=beside.device,
        poison=beside.poison,
        kernels=kernels,
        share_prefixes=remembers,
    )


def shared_prefix(held: Sequence[int], text: Sequence[int], start: int) -> int:
    """The number of tokens that both begin with; the first ``start`` are known to be the same."""
    stop = min(len(held), len(text))
    return next((i for i in range(min(start, stop), stop) if held[i] != text[i]), stop)
