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
from pronk.checkpoint.config import ModelConfig
from pronk.drafting.proposer import DraftContext
from pronk.drafting.shared.common_prefix import common_prefix_length
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
        cache: the module's KV pool.
    """

    def __init__(self, target: Target, config: ModelConfig, compile_part: CompilePart) -> None:
        self.target = target
        self.cache = open_pool(target, config)
        self._compile_part = compile_part
        # by number of the part, and by version of the KV pool
        self._programs: dict[tuple[int, int], Program] = {}

    def make_cache(self) -> DraftCache:
        """Return the empty cache of a new request."""
        return DraftCache(self.cache)

    def reserve(self, context: DraftContext[DraftCache], extra_rows: int) -> bool:
        """Drop cached tokens that differ from the text; allocate KV slots for the whole text.

        Slots are also allocated for ``extra_rows`` rows after the text. Return False if the pool is
        full.
        """
        cache = context.state
        text = context.tokens
        pool = self.cache
        num_rows = context.block_table.length
        window = pool.config.window
        # with a sliding window, cached prefixes could lack the first rows
        if window is None and not cache.tokens:
            with uninterrupted():
                cache.match_prefix(text[:num_rows], context.salt)
        num_kept = common_prefix_length(cache.tokens, text, cache.num_committed)
        cache.num_committed = num_rows + 1  # ``text`` may end with draft tokens
        cache.num_final = num_rows if window is None else 0
        # The target keeps no hidden states before its sliding window. The module cannot run the
        # tokens there, so they count as cached.
        num_released = context.block_table.num_released * self.target.cache.block_size
        with uninterrupted():
            cache.tokens[num_kept:] = text[num_kept:num_released]
            cache.rollback(len(cache.tokens))
            cache.register_prefix()
            # The next row is at position ``num_kept`` and sees the ``window - 1`` rows before it.
            first = (
                num_released
                if window is None or num_kept < num_released
                else max(0, num_kept + 1 - window)
            )
            pool.release_before(cache.block_table, first)
            if not cache.block_table.blocks:
                cache.block_table.num_released = num_released // pool.block_size
            if window is None:  # allocate for all future tokens at once, to get consecutive blocks
                extra_rows += max(
                    context.max_depth,
                    context.params.max_tokens - context.sampler.context.num_generated,
                )
            try:
                pool.prepare(cache.block_table, len(text) + extra_rows)
            except CacheFullError:
                return False
        return True

    def reserve_again(self, context: DraftContext[DraftCache], extra_rows: int) -> bool:
        """Drop the last committed row, so that it is run again, and :meth:`reserve` slots.

        The output of this row gives the first draft token. Return False if the pool is full, no
        draft token is allowed, or the target has no hidden state of the row.
        """
        num_rows = context.block_table.length
        num_released = context.block_table.num_released * self.target.cache.block_size
        if context.max_tokens < 1 or num_rows <= num_released:
            return False
        context.state.rollback(num_rows - 1)
        return self.reserve(context, extra_rows)

    def program(self, part: int) -> Program:
        """Return the program of a part of the module.

        Compile it once per version of the KV pool.
        """
        key = (part, self.cache.version)
        if key not in self._programs:
            backend = self.target.decoder.backend
            program = backend.program(self.cache.config.hidden_size, self.cache.dtype, self.cache)
            self._compile_part(part, program)
            self._programs = {
                old: kept for old, kept in self._programs.items() if old[1] == self.cache.version
            }
            self._programs[key] = program
        return self._programs[key]

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
