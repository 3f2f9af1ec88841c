"""Runner of modules that read the target's hidden states: multi-token and EAGLE-3 heads.

Such a module reads the output of one of the target's layers, one row per token, and attends to its
own keys and values of the earlier rows. These are in a
:class:`~pronk.drafting.shared.draft_cache.DraftCache` for each request, which can lack the last
tokens of the text::

    text         a b c d e       the target has computed a b c d, whose hidden states are saved
    cache        a b             the module must still run c and d

Rows of draft tokens follow the text. They stay in the cache if the draft tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pronk.base.arrays import Array
from pronk.base.errors import CacheFullError
from pronk.base.interrupts import uninterrupted
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import ModelConfig
from pronk.drafting.proposer import DraftContext
from pronk.drafting.shared.draft_cache import DraftCache, open_pool
from pronk.drafting.target import Target
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree

# Maximum number of rows per forward pass over a long text; bounds the memory for activations.
CHUNK = 512

# Callback ``apply(index, x)``: runs part ``index`` of a module on ``x`` ``[rows, size]``; returns
# the same shape.
Apply = Callable[[int, Array], Array]

# Callback ``forward(hidden, apply)``: runs all parts on hidden states ``[rows, size]``; returns
# ``[rows, …]``.
Forward = Callable[[Array, Apply], Array]

# Callback ``compile_part(index, program)``: appends the operations of part ``index`` of a module to
# a program.
CompilePart = Callable[[int, Program], None]


class ModuleRunner:
    """Runs a module for several requests in shared forward passes; owns its KV pool.

    The module has several *parts* (such as heads), each with at most one attention layer;
    ``compile_part`` makes their programs. The pool has the layers that ``config`` describes, one
    per part.

    Attributes:
        target: the model whose hidden states the module reads.
        pool: the module's KV pool.
        first: index in a text of the token of the module's first row, 0 or 1. Row ``i`` has the
            hidden state of token ``i`` and the embedding of token ``first + i``.
    """

    def __init__(
        self,
        target: Target,
        config: ModelConfig,
        compile_part: CompilePart,
        *,
        first: int = 0,
        pool: Callable[..., PagedCache] | None = None,
    ) -> None:
        """Create a runner; ``pool`` makes the KV pool, as in :func:`open_pool`."""
        self.target = target
        self.first = first
        self.pool = open_pool(target, config, pool=pool)
        self._compile_part = compile_part
        # by number of the part, for version ``_program_version`` of the KV pool
        self._programs: dict[int, Program] = {}
        self._program_version = self.pool.version

    def make_cache(self) -> DraftCache:
        """Return the empty cache of a new request."""
        return DraftCache(self.pool)

    def reserve(self, context: DraftContext[DraftCache], extra_rows: int) -> bool:
        """Drop cached tokens that differ from the text; allocate KV slots for the whole text.

        Slots are also allocated for ``extra_rows`` rows after the text. Return False if the pool is
        full.
        """
        return self._reserve(context, extra_rows, len(context.tokens))

    def _reserve(self, context: DraftContext[DraftCache], extra_rows: int, most: int) -> bool:
        """Implement :meth:`reserve`; keep at most ``most`` cached tokens."""
        cache = context.state
        first = self.first
        num_rows = context.block_table.length
        has_window = self.pool.config.window is not None
        with uninterrupted():
            # with a sliding window, cached prefixes could lack the first rows
            if not has_window and not cache.tokens:
                # The tokens before the first row have no row, but determine the rows, too.
                before = b"".join(
                    int(each).to_bytes(4, "little") for each in context.tokens[:first]
                )
                cache.match_prefix(context.tokens[first : first + num_rows], context.salt + before)
            cache.keep_common_prefix(context.tokens, first, most)
            # the text may end with draft tokens
            cache.num_committed = num_rows + 1 - first
            cache.num_final = 0 if has_window else num_rows
            cache.register_prefix()
            self._release_rows(context)
            return self._allocate(context, extra_rows)

    def _release_rows(self, context: DraftContext[DraftCache]) -> None:
        """Release the rows that later rows do not attend to."""
        cache = context.state
        num_cached = len(cache.tokens)
        window = self.pool.config.window
        num_released = context.block_table.num_released
        if window is None and not num_released:
            return
        # The target keeps no hidden states before its sliding window, so the module cannot run
        # these tokens.
        num_lost = num_released * self.target.cache.block_size
        if num_cached < num_lost:
            cache.skip_to(num_lost, context.tokens, self.first)
        elif window is None:
            # After a preemption the module would lack these rows, so no request attends to them.
            self.pool.release_before(cache.block_table, num_lost)
        else:
            # The next row is at position ``num_cached`` and sees the ``window - 1`` rows before it.
            self.pool.release_before(cache.block_table, max(0, num_cached + 1 - window))

    def _allocate(self, context: DraftContext[DraftCache], extra_rows: int) -> bool:
        """Allocate KV slots for the text and ``extra_rows``; return False if the pool is full."""
        num_slots = len(context.tokens) - self.first + extra_rows
        block_table = context.state.block_table
        num_blocks = block_table.num_released + len(block_table.blocks)
        if self.pool.config.window is None and num_slots > num_blocks * self.pool.block_size:
            # for all future tokens at once, to get consecutive blocks
            num_slots += context.max_future_tokens
        try:
            self.pool.prepare(block_table, num_slots)
        except CacheFullError:
            return False
        return True

    def reserve_again(self, context: DraftContext[DraftCache], extra_rows: int) -> bool:
        """Drop the last committed row, so that it is run again, and :meth:`reserve` slots.

        ``extra_rows`` is that of :meth:`reserve`. The row's output gives the first draft token.
        Return False if the pool is full, no draft token is allowed, or the target has no hidden
        state of the row.
        """
        block_table = context.block_table
        num_rows = block_table.length
        num_lost = 0
        if block_table.num_released:
            num_lost = block_table.num_released * self.target.cache.block_size
        if min(context.max_depth, context.max_nodes) < 1 or num_rows <= num_lost:
            return False
        return self._reserve(context, extra_rows, num_rows - 1)

    def program(self, part: int) -> Program:
        """Return the program of a part of the module.

        It is compiled once per version of the KV pool, because it has the addresses of the arrays.
        """
        if self._program_version != self.pool.version:
            self._programs.clear()
            self._program_version = self.pool.version
        if part not in self._programs:
            kernels = self.target.decoder.kernels
            hidden = self.pool.config.hidden_size
            program = Program(kernels, hidden, self.pool.dtype, self.pool)
            self._compile_part(part, program)
            self._programs[part] = program
        return self._programs[part]

    def run_texts(
        self,
        contexts: Sequence[DraftContext[DraftCache]],
        texts: Sequence[Sequence[int]],
        stops: Sequence[int],
        layer: int,
        forward: Forward,
    ) -> Array:
        """Run the module on each text's tokens that are not cached, before ``stops[i]``.

        At least one token per text must be left to run.

        ``layer`` (from 1) is the target's layer whose output the module reads. The target's cache
        must have this output for all tokens, and the caches need slots. Long texts are run in
        chunks. Returns the outputs of ``forward`` for the last tokens, ``[requests, …]``.
        """
        for context, text, stop in zip(contexts, texts, stops, strict=True):
            while stop - len(context.state.tokens) > CHUNK:
                start = len(context.state.tokens)
                self._run([context], [text[start : start + CHUNK]], layer, forward)
        new = [
            text[len(each.state.tokens) : stop]
            for each, text, stop in zip(contexts, texts, stops, strict=True)
        ]
        return self._run(contexts, new, layer, forward)

    def _run(
        self,
        contexts: Sequence[DraftContext[DraftCache]],
        tokens: Sequence[Sequence[int]],
        layer: int,
        forward: Forward,
    ) -> Array:
        """Run the next tokens of several requests in one forward pass.

        Return the outputs for the last tokens.
        """
        caches = [context.state for context in contexts]
        hidden = list[Array]()
        for context, cache, new in zip(contexts, caches, tokens, strict=True):
            start = len(cache.tokens)
            hidden.append(
                self.target.cache.read_feature(layer, context.block_table, start, start + len(new))
            )
        batch = ForwardBatch(
            [
                BatchEntry(cache.block_table, TokenTree.chain(new))
                for cache, new in zip(caches, tokens, strict=True)
            ]
        )

        def apply(index: int, x: Array) -> Array:
            out = x.copy()
            self.program(index).run(batch, out)
            return out

        outputs = forward(np.concatenate(hidden), apply)
        for cache, new in zip(caches, tokens, strict=True):
            cache.append(new)
        return outputs[np.cumsum(batch.row_counts) - 1]
