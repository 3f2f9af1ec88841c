"""Executor that runs ranges of layers, and chains of draft tokens, as programs of a backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.checkpoint.rope import RopeTable
from pronk.kernels.structures import CDraftChain, OnToken
from pronk.models.decoder import Decoder
from pronk.models.forward_job import ForwardJob, LayerRange
from pronk.models.kernel_program import KernelProgram
from pronk.models.program import FIRST_CROSS_ROPE, CrossAttentionSource, Program
from pronk.models.program_rows import ProgramRows
from pronk.sampling.draft_token import DraftIds, DraftToken
from pronk.sampling.noise import seed_key
from pronk.sampling.sampler import Sampler


class LayerExecutor:
    """Runs ranges of layers as programs of the decoder's backend; each program is built once."""

    is_usable = True  # whether forward passes are possible; false after a worker process has been lost

    def __init__(self, decoder: Decoder, cache: PagedCache, cross_source: CrossAttentionSource | None) -> None:
        self.decoder, self.cache, self.cross_source = decoder, cache, cross_source
        self.communication_seconds = 0.0  # spent so far on communication with worker processes
        self.num_experts_read = 0  # experts whose weights this process has read, summed over layers and passes
        self._programs: dict[tuple[object, ...], Program] = {}
        self._version = (-1, -1)
        # RoPE tables of self-attention and, if there is a source, of cross-attention, by the numbers in programs.
        self._ropes = {number: RopeTable(rope) for number, rope in enumerate(decoder.config.ropes)}
        if cross_source is not None:
            ropes = enumerate(cross_source.decoder.config.ropes, FIRST_CROSS_ROPE)
            self._ropes |= {number: RopeTable(rope) for number, rope in ropes}
        # Whether a RoPE table has one entry per row, because rotations depend on the prompt's length.
        self.has_dynamic_rope = any(rope.dynamic for rope in self._ropes.values())

    def run(self, layer_range: LayerRange, rows: Array | None) -> tuple[Array, dict[int, Array], Array | None]:
        """Run a range of layers on the input ``rows``, ``[rows, hidden]``; ``None``: the token embeddings.

        ``rows`` may be overwritten. Returns the output of the last layer, the outputs of the layers in ``collect``, and
        the logits of ``logits_rows``, if any.
        """
        program, packed = self._program(layer_range), self._pack(layer_range, embedded=rows is not None)
        count, size = packed.count, self.decoder.config.hidden_size
        x = np.empty((count, size), self.cache.dtype) if rows is None else np.ascontiguousarray(rows)
        logits = collected = None
        if layer_range.logits_rows is not None:
            shape = packed.select_logits_rows(layer_range.logits_rows), self.decoder.config.vocab_size
            logits = np.empty(shape, np.float32)
        if layer_range.collect:
            collected = np.empty((len(layer_range.collect), count, size), self.cache.dtype)
        program.run(packed, x, logits, collected)
        self.num_experts_read += packed.touched.value
        outputs = {} if collected is None else dict(zip(layer_range.collect, collected, strict=True))
        return x, outputs, logits

    def draft_chain(
        self, job: ForwardJob, sampler: Sampler, max_tokens: int, on_token: Callable[[DraftToken], bool]
    ) -> int:
        """Implement :meth:`~pronk.models.model_runner.ModelRunner.draft_chain`."""
        config, jobs = self.decoder.config, [(job, job.segment)]
        layer_range = LayerRange(jobs, 0, len(self.decoder.layers), (), LayerRange.find_logits_rows(jobs))
        packed = self._pack(layer_range, extra_positions=max_tokens)
        assert layer_range.logits_rows is not None
        assert packed.select_logits_rows(layer_range.logits_rows) == 1
        x = np.empty((packed.count, config.hidden_size), self.cache.dtype)
        program, vocab_size = self._program(layer_range), config.vocab_size
        return draft_chain(program, packed, x, sampler, vocab_size=vocab_size, max_tokens=max_tokens, on_token=on_token)

    def _pack(self, layer_range: LayerRange, *, embedded: bool = False, extra_positions: int = 0) -> ProgramRows:
        jobs = [(segment.block_table, segment.tree, segment.num_computed) for _, segment in layer_range.jobs]
        tokens = None if embedded else [token for _, tree, computed in jobs for token in tree.tokens[computed:]]
        # A job that only measures a duration has no table in the cross-attention source.
        tables = [job.cross_block_table or BlockTable() for job, _ in layer_range.jobs]
        cross = None if self.cross_source is None else tables
        packed = ProgramRows().set_segments(jobs, tokens, cross)
        prompt_lengths = [job.prompt_length for job, _ in layer_range.jobs] if self.has_dynamic_rope else []
        for number, rope in self._ropes.items():
            packed.rotate(rope, number, prompt_lengths=prompt_lengths, num_extra=extra_positions)
        return packed

    def _program(self, layer_range: LayerRange) -> Program:
        has_logits = layer_range.logits_rows is not None and len(layer_range.logits_rows) > 0
        key = (layer_range.start, layer_range.stop, layer_range.collect, has_logits)
        return self._cached_program(key, lambda: self._compile(layer_range))

    def _cached_program(self, key: tuple[object, ...], make: Callable[[], Program]) -> Program:
        """Return the program of ``key``; ``make`` compiles it once per allocation of the KV pools."""
        version = (self.cache.version, -1 if self.cross_source is None else self.cross_source.cache.version)
        if version != self._version:
            self._programs, self._version = {}, version
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    def _compile(self, layer_range: LayerRange) -> Program:
        decoder, cache = self.decoder, self.cache
        program = decoder.backend.program(decoder.config.hidden_size, cache.dtype, cache, self.cross_source)
        if layer_range.start == 0:
            program.embed(decoder)
            if 0 in layer_range.collect:
                program.collect_hidden(layer_range.collect.index(0))
        for index in range(layer_range.start, layer_range.stop):
            decoder.layers[index].compile(program, index)
            if index + 1 in cache.hidden:
                program.store_hidden(index + 1)
            if index + 1 in layer_range.collect:
                program.collect_hidden(layer_range.collect.index(index + 1))
        if layer_range.logits_rows:
            program.linear(decoder.head, norm=decoder.norm, to="logits", only_logits_rows=True)
        return program


def draft_chain(
    program: Program,
    rows: ProgramRows,
    stream: Array,
    sampler: Sampler,
    *,
    vocab_size: int,
    max_tokens: int,
    on_token: Callable[[DraftToken], bool],
    ids: DraftIds | None = None,
) -> int:
    """Draft a chain for one request: run a program, sample a token, run the program for it, and so on.

    Returns the number of forward passes, as :meth:`~pronk.models.model_runner.ModelRunner.draft_chain`.

    Args:
        program: program of the kernels that ends with an LM head. It begins with an embedding, or reads features from
            the stream and leaves there the features of the next run.
        rows: rows of the first run, one of them with logits. Each later run has one row, the draft token before.
        stream: ``[rows, hidden]``; overwritten.
        sampler: sampler of the draft tokens, with a :attr:`~pronk.sampling.sampler.Sampler.stateless_sampler`.
        vocab_size: number of logits of the LM head.
        max_tokens: maximum number of draft tokens, at least 1.
        on_token: called with each draft token; returns whether to continue. Its exceptions end the chain.
        ids: the target's token of each logit; ``None``: 0, 1, ….
    """
    scores, logits = np.empty((max_tokens, vocab_size), FLOAT32), np.empty((1, vocab_size), FLOAT32)
    next_scores, errors = iter(scores), list[BaseException]()

    def callback(token: int, confidence: float) -> int:
        try:
            return int(on_token(DraftToken(token, confidence, next(next_scores), ids)))
        except BaseException as error:  # noqa: BLE001 - exceptions cannot cross the kernels
            errors.append(error)
            return 0

    stateless = sampler.stateless_sampler
    assert stateless is not None, "expected a sampler that drafts statelessly"
    assert isinstance(program, KernelProgram), "expected a program of the kernels, found another"
    params = CDraftChain(
        key=seed_key(stateless.seed),
        position=len(sampler.context),
        steps=max_tokens,
        temperature=stateless.temperature,
        ids=None if ids is None else ids.ctypes.data,
        scores=scores.ctypes.data,
        on_token=OnToken(callback),
    )
    num_passes = program.draft_chain(rows, stream, logits, params)
    if errors:
        raise errors[0]
    return num_passes
