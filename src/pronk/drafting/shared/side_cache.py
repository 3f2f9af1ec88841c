"""KV cache of modules that read the target's hidden states: Kangaroo, multi-token and EAGLE-3 heads.

Such a module reads the output of one of the target's layers, one row per token, and attends to its own keys and values
of the earlier rows. A *lane* is the module's KV cache of one request. A lane can lack the last tokens of the text::

    text         a b c d e       the target has computed a b c d and kept their hidden states, but not yet e
    lane         a b             the module must still run c and d

Rows of draft tokens follow the text. They stay in the cache if the draft tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pronk.base.arrays import Array, DType
from pronk.base.errors import CacheFullError
from pronk.base.interrupts import uninterrupted
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import RopeTable
from pronk.drafting.proposer import DraftContext
from pronk.drafting.target import Target
from pronk.models.backend import Backend
from pronk.models.program import Program
from pronk.models.program_rows import ProgramRows
from pronk.sampling.tree import TokenTree

# Maximum number of rows per forward pass over a long text; bounds the memory for activations.
CHUNK = 512

_BLOCK = 256  # number of tokens that :func:`common_prefix_length` compares at once

# Callback ``apply(index, x)``: runs part ``index`` of a module on ``x`` ``[rows, size]``; returns the same shape.
Apply = Callable[[int, Array], Array]

# Callback ``forward(hidden, apply)``: runs all parts on hidden states ``[rows, size]``; returns ``[rows, …]``.
Forward = Callable[[Array, Apply], Array]

# Callback ``compile_part(index, program)``: appends the operations of part ``index`` of a module to a program.
CompilePart = Callable[[int, Program], None]


@dataclass
class SideLane:
    """The KV cache that a module has for one request, and the cached tokens."""

    block_table: BlockTable = field(default_factory=BlockTable)  # KV slots of ``tokens``
    tokens: list[int] = field(default_factory=list)  # cached tokens: text, then draft tokens
    num_committed: int = 0  # number of committed tokens at the last proposal
    num_final: int = 0  # number of leading ``tokens`` that cannot change; only these may enter the prefix cache
    salt: bytes = b""  # the request's salt for prefix caching

    def append(self, new: Sequence[int]) -> None:
        """Record tokens whose keys and values a forward pass has just written to the lane's KV slots."""
        with uninterrupted():
            self.tokens += new
            self.block_table.length = len(self.tokens)

    def cut(self, length: int) -> None:
        """Drop the tokens after the first ``length``, to run them again; keep their blocks."""
        with uninterrupted():
            del self.tokens[length:]
            self.block_table.length = min(self.block_table.length, length)

    def match_prefix(self, cache: PagedCache, text: Sequence[int], salt: bytes) -> None:
        """Fill an empty lane with the longest prefix of ``text`` in the prefix cache."""
        self.salt = salt
        is_empty = not (self.block_table.blocks or self.tokens)
        if is_empty and (cached := cache.match_prefix(text, salt)) is not None:
            self.block_table, self.tokens = cached, list(text[: cached.length])

    def register_prefix(self, cache: PagedCache) -> None:
        """Add the final tokens to the prefix cache."""
        cache.cache_blocks(self.block_table, self.tokens, self.salt, self.num_final)

    def release(self, cache: PagedCache) -> None:
        """Free the KV blocks, and clear the lane."""
        with uninterrupted():
            self.register_prefix(cache)
            cache.release(self.block_table)
            self.tokens.clear()


class SideLanes:
    """Owns the KV pool of a module with this configuration, and allocates the slots of its lanes."""

    def __init__(self, target: Target, config: ModelConfig, compile_part: CompilePart) -> None:
        self.target, self._compile_part = target, compile_part
        self.cache = open_pool(target, config)
        self.rope = RopeTable(config.rope)
        self._programs: dict[tuple[int, int], Program] = {}  # by part, and version of the KV pool

    def reserve(self, context: DraftContext[SideLane], extra_rows: int) -> bool:
        """Drop the cached tokens that differ from the text, and allocate KV slots for the whole text.

        Slots are also allocated for ``extra_rows`` rows after the text. Return False if the cache is full.
        """
        lane, text, num_rows = context.state, context.tokens, context.block_table.length
        window = self.cache.config.window
        if window is None and not lane.tokens:  # with a sliding window, cached prefixes could lack the first rows
            with uninterrupted():
                lane.match_prefix(self.cache, text[:num_rows], context.salt)
        num_kept = common_prefix_length(lane.tokens, text, lane.num_committed)
        lane.num_committed = num_rows + 1  # ``text`` may end with draft tokens
        lane.num_final = num_rows if window is None else 0
        # The target keeps no hidden states before its sliding window. The module cannot run the tokens there, so they
        # count as cached.
        num_released = context.block_table.num_released * self.target.cache.block_size
        with uninterrupted():
            lane.tokens[num_kept:] = text[num_kept:num_released]
            self.cache.rollback(lane.block_table, len(lane.tokens))
            lane.register_prefix(self.cache)
            # The next row is at position ``num_kept`` and sees the ``window - 1`` rows before it.
            first = num_released if window is None or num_kept < num_released else max(0, num_kept + 1 - window)
            self.cache.release_before(lane.block_table, first)
            if not lane.block_table.blocks:
                lane.block_table.num_released = num_released // self.cache.block_size
            if window is None:  # allocate for all future tokens at once, to get consecutive blocks
                extra_rows += max(context.max_depth, context.params.max_tokens - context.sampler.context.num_generated)
            try:
                self.cache.prepare(lane.block_table, len(text) + extra_rows)
            except CacheFullError:
                return False
        return True

    def reserve_again(self, context: DraftContext[SideLane], extra_rows: int) -> bool:
        """Do :meth:`reserve`, and drop the last committed row, whose output gives the first draft token.

        Also return False if no draft token is allowed, or the target has no hidden state of the last row.
        """
        num_rows = context.block_table.length
        num_released = context.block_table.num_released * self.target.cache.block_size
        if min(context.max_depth, context.max_nodes) < 1 or num_rows <= num_released:
            return False
        context.state.cut(num_rows - 1)
        return self.reserve(context, extra_rows)

    def program(self, part: int) -> Program:
        """Return the program of a part of the module; compile it once per version of the KV pool."""
        key = (part, self.cache.version)
        if key not in self._programs:
            backend = self.target.decoder.backend
            program = backend.program(self.cache.config.hidden_size, self.cache.dtype, self.cache)
            self._compile_part(part, program)
            self._programs = {old: kept for old, kept in self._programs.items() if old[1] == self.cache.version}
            self._programs[key] = program
        return self._programs[key]


class SideCache(SideLanes):
    """Runs a module of several *parts* (such as heads), each with at most one attention layer.

    The KV pool has one layer per part.
    """

    def run_texts(
        self,
        contexts: Sequence[DraftContext[SideLane]],
        texts: Sequence[Sequence[int]],
        stops: Sequence[int],
        layer: int,
        forward: Forward,
    ) -> Array:
        """Run the module on the tokens before ``stops[i]`` of each text that its lane lacks, at least one.

        ``layer`` (from 1) is the target's layer whose output the module reads. The target's cache must have this output
        for all tokens, and the lanes need slots. Long texts are run in chunks. Returns the outputs of ``forward`` for
        the last tokens, ``[requests, …]``.
        """
        for context, text, stop in zip(contexts, texts, stops, strict=True):
            while stop - len(context.state.tokens) > CHUNK:
                start = len(context.state.tokens)
                self._run([context], [text[start : start + CHUNK]], layer, forward)
        new = [text[len(each.state.tokens) : stop] for each, text, stop in zip(contexts, texts, stops, strict=True)]
        return self._run(contexts, new, layer, forward)

    def _run(
        self, contexts: Sequence[DraftContext[SideLane]], tokens: Sequence[Sequence[int]], layer: int, forward: Forward
    ) -> Array:
        """Run the next tokens of several requests in one forward pass; return the outputs for the last tokens."""
        lanes, hidden = [context.state for context in contexts], list[Array]()
        for context, lane, new in zip(contexts, lanes, tokens, strict=True):
            start = len(lane.tokens)
            hidden.append(self.target.cache.read_hidden(layer, context.block_table, start, start + len(new)))
        segments = [(lane.block_table, TokenTree.chain(new), 0) for lane, new in zip(lanes, tokens, strict=True)]
        packed = ProgramRows().set_segments(segments)
        packed.rotate(self.rope)

        def apply(index: int, x: Array) -> Array:
            out = x.copy()
            self.program(index).run(packed, out)
            return out

        outputs = forward(np.concatenate(hidden), apply)
        for lane, new in zip(lanes, tokens, strict=True):
            lane.append(new)
        return outputs[np.cumsum([len(new) for new in tokens]) - 1]


def open_pool(
    target: Target, config: ModelConfig, dtype: DType | None = None, backend: Backend | None = None
) -> PagedCache:
    """Return a new KV pool for a drafter, within the memory budget that it shares with the target's pool.

    ``dtype`` and ``backend`` are by default those of the target.
    """
    target_cache, backend = target.cache, backend or target.decoder.backend
    dtype, share_prefixes = dtype or target_cache.dtype, target_cache.prefix_cache is not None
    if target.budget is not None:
        with target.lock:  # the other KV pools shrink, so no step may run meanwhile
            return target.budget.add(config, dtype, backend.make_cache, share_prefixes=share_prefixes)
    return backend.make_cache(
        config,
        num_blocks=target_cache.allocator.num_blocks,
        block_size=target_cache.block_size,
        dtype=dtype,
        poison=target_cache.poison,
        share_prefixes=share_prefixes,
    )


def common_prefix_length(cached: Sequence[int], text: Sequence[int], known: int, start: int = 0) -> int:
    """Return how many tokens of ``cached`` agree with ``text`` from ``start`` on; ``known`` of them do."""
    stop = min(len(cached), len(text) - start)
    first = max(0, min(known, stop))
    # Blocks are ten times as fast as one token after the other.
    while first + _BLOCK <= stop and cached[first : first + _BLOCK] == text[start + first : start + first + _BLOCK]:
        first += _BLOCK
    return next((i for i in range(first, stop) if cached[i] != text[start + i]), stop)
