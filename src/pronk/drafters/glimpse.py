"""Attention of a draft into the target's paged cache, which it reads in place and never writes.

The target's cache ends at the first token of the text that no pass of its has verified, ``t``. A row at position ``p``
sees the tokens before it that are there, in the window of the target's layer::

    p - window < k < min(p, t)

so all guesses of a step see the same tokens, as many as the first. Where that is none (a text of one token, or a row
whose window has been given back) the row gets zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.drafters.base import Target
from pronk.engine.runner import Runner
from pronk.model.attention import PagedAttention, Segment, Window, aligned
from pronk.model.glide import Glide
from pronk.model.rope import apply_rope

__all__ = ["Glimpse", "GlimpseAttention", "GlimpseRunner"]


@dataclass(frozen=True)
class Glimpse(Segment):
    """Rows of a draft that also see what the target has cached of the request's text, at ``beside``."""

    beside: BlockTable = field(default_factory=BlockTable)


@dataclass(frozen=True)
class _View:
    """What a segment's rows see in those target layers that share a window; ``some`` ``[rows, 1]`` do at all."""

    window: Window
    some: Tensor


class GlimpseAttention(PagedAttention):
    """A :class:`~pronk.model.glide.CrossAttend` for one pass."""

    def __init__(self, runner: GlimpseRunner, segments: Sequence[Segment], positions: Tensor, spans: Tensor) -> None:
        """Arguments are those of :meth:`~pronk.engine.runner.Runner.attention`."""
        super().__init__(runner.decoder.config, runner.cache, segments, len(positions))
        target = runner.target
        self.layers = [layer - 1 for layer in runner.layers]
        self.beside = target.cache
        self.target = target.decoder.config
        self.rotation = target.decoder.rope(positions, spans, target.cache.dtype)
        windows = {self.target.windows[layer] for layer in self.layers}
        self.views = [{window: self._view(segment, window) for window in windows} for segment in segments]

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """See :class:`~pronk.model.glide.CrossAttend`."""
        number = self.layers[layer]
        keys, values = self.beside.keys[number], self.beside.values[number]
        rows = q.to(keys.dtype)
        rows = rows if self.rotation is None else apply_rope(rows, *self.rotation)
        outputs = []
        for (start, stop), views in zip(self.bounds, self.views, strict=True):
            view = views[self.target.windows[number]]
            outputs.append(view.window.attend(self.target, rows[start:stop], keys, values) * view.some)
        out = torch.cat(outputs)
        return F.pad(out, (0, 0, 0, len(q) - len(out))).to(q.dtype)

    def _view(self, segment: Segment, span: int | None) -> _View:
        # Whoever has nothing there (a pass that is only timed) looks at a block of anybody's, under the mask.
        table = segment.beside if isinstance(segment, Glimpse) and segment.beside.blocks else BlockTable([0])
        seen, start = _seen(segment, table, span, self.beside.block_size)
        some = seen.any(1, keepdim=True)
        # A row that sees nothing looks at everything and forgets it: a softmax over nothing is not a number.
        window = Window.of(self.target, self.beside, table, start, seen | ~some)
        return _View(window, some.to(self.beside.device, self.beside.dtype))


class GlimpseRunner(Runner):
    """Runs GLIDE over packed rows, beside its target."""

    def __init__(self, module: Glide, cache: PagedCache, target: Target) -> None:
        super().__init__(module, cache)
        self.layers = module.cache_layers
        self.target = target

    def attention(self, segments: Sequence[Segment], positions: Tensor, spans: Tensor) -> PagedAttention:
        """See :class:`~pronk.engine.runner.Runner`; segments that are no :class:`Glimpse` see nothing beside."""
        return GlimpseAttention(self, segments, positions, spans)


def _seen(segment: Segment, table: BlockTable, span: int | None, block_size: int) -> tuple[Tensor, int]:
    """``[rows, tokens]``: which of the target's tokens from ``start`` on the rows see; and ``start``."""
    places = torch.tensor(segment.tree.depths[segment.computed :]) + segment.table.length
    oldest = table.released * block_size
    if span is not None:
        oldest = max(oldest, int(places.min()) - span + 1)
    start, stop = aligned(oldest, max(table.length, oldest + 1))
    tokens = torch.arange(start, stop)
    seen = (tokens < places[:, None]) & (tokens < table.length) & (tokens >= oldest)
    return (seen if span is None else seen & (tokens > places[:, None] - span)), start
