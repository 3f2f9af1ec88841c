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
from typing import Any

import torch
from torch import Tensor

from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.drafters.base import DraftContext, Target
from pronk.engine.interrupts import uninterrupted
from pronk.errors import CacheFullError
from pronk.model.attention import PagedAttention, Segment, padded
from pronk.model.config import ModelConfig
from pronk.model.decoder import Attend
from pronk.tree import TokenTree

__all__ = ["CHUNK", "Beside", "Forward", "Lane", "open_pool"]

# Rows in a pass over new text: a long prompt goes through in parts.
CHUNK = 512

# ``[rows, size]``, the rotations of a pass and its attention, to one row each of any shape. Rows beyond those given are
# padding.
Forward = Callable[[Tensor, tuple[Tensor, Tensor] | None, Attend], Tensor]


@dataclass
class Lane:
    """What a cache beside the target's holds of one request.

    Attributes:
        table: the places of the rows.
        tokens: the text that they belong to.
    """

    table: BlockTable = field(default_factory=BlockTable)
    tokens: list[int] = field(default_factory=list)


class Beside:
    """Runs a module over the target's outputs, for any number of requests at a time.

    Attributes:
        target: whose outputs, positions and memory they are.
        cache: the module's keys and values, one layer for each of its attentions.
    """

    def __init__(self, target: Target, config: ModelConfig) -> None:
        """``config`` is of the module's attention: layers, heads, their size, windows."""
        self.target = target
        self.cache = open_pool(target, config)

    def ready(self, lane: Lane, context: DraftContext[Any], room: int) -> bool:
        """Keep the rows of what the text still begins with, and find places for the rest and ``room`` tokens more.

        Returns:
            Whether there are places.
        """
        text, size = context.tokens, self.cache.block_size
        held = min(len(lane.tokens), len(text))
        if lane.tokens[:held] != list(text[:held]):
            held = next(i for i in range(held) if lane.tokens[i] != text[i])
        # What has left a sliding window cannot be read any more, and is seen by none of the later tokens.
        gone = context.table.released * self.target.cache.block_size
        window = self.cache.config.window
        with uninterrupted():
            lane.tokens[held:] = text[held:gone]
            lane.table.length = len(lane.tokens)
            # The next row is that behind those held, and looks back from there.
            self.cache.release_before(lane.table, gone if window is None or held < gone else max(0, held + 1 - window))
            if not lane.table.blocks:
                lane.table.released = gone // size
            if window is None:  # all that will follow at once, so that the blocks lie in a run
                room += max(context.max_depth, context.params.max_tokens - context.chooser.num_chosen)
            try:
                self.cache.prepare(lane.table, len(text) + room)
            except CacheFullError:
                return False
        return True

    def release(self, lane: Lane) -> None:
        """Give back what a lane holds."""
        with uninterrupted():
            self.cache.release(lane.table)
            lane.tokens.clear()

    def catch_up(
        self, lane: Lane, text: Sequence[int], table: BlockTable, layer: int, forward: Forward
    ) -> Tensor | None:
        """Run what the target's cache holds of ``text`` and the lane does not.

        Args:
            lane: after :meth:`ready`.
            text: the request's tokens.
            table: of the target's cache.
            layer: number of the layer whose outputs are read; they must have been kept.
            forward: the module.

        Returns:
            What it says after the last of these tokens, or ``None`` if there was none to run.
        """
        last = None
        for start in range(len(lane.tokens), table.length, CHUNK):
            stop = min(start + CHUNK, table.length)
            rows = self.target.cache.read_hidden(layer, table, start, stop)
            last = self.run([lane], [text[start:stop]], [rows], forward)[0][-1]
        return last

    @torch.inference_mode()
    def run(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], rows: Sequence[Tensor], forward: Forward
    ) -> list[Tensor]:
        """Add rows to the lanes, in one pass; there must be places for them.

        Args:
            lanes: of different requests.
            tokens: the text that the rows belong to, at least one for each lane.
            rows: ``[len(tokens), size]`` each.
            forward: the module.

        Returns:
            What the module says at each row.
        """
        segments = [Segment(lane.table, TokenTree.chain(new)) for lane, new in zip(lanes, tokens, strict=True)]
        x = torch.cat(list(rows))
        count = len(x)
        x = padded(x)
        places = [place for s in segments for place in range(s.table.length, s.table.length + s.rows)]
        positions = torch.tensor(places + [0] * (len(x) - count), device=x.device)
        rope = self.target.decoder.rope(positions, positions + 1, x.dtype)
        said = forward(x, rope, PagedAttention(self.cache.config, self.cache, segments, len(x)))[:count]
        with uninterrupted():
            for lane, new in zip(lanes, tokens, strict=True):
                lane.tokens += new
                lane.table.length = len(lane.tokens)
        return list(said.split([len(new) for new in tokens]))


def open_pool(target: Target, config: ModelConfig, dtype: torch.dtype | None = None) -> PagedCache:
    """A cache for a drafter, in the target's memory, and in its dtype unless said otherwise."""
    beside, dtype = target.cache, dtype or target.cache.dtype
    if target.budget is not None:
        return target.budget.add(config, dtype)
    return PagedCache(
        config,
        num_blocks=beside.allocator.num_blocks,
        block_size=beside.block_size,
        dtype=dtype,
        device=beside.device,
        poison=beside.poison,
    )
