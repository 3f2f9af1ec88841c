"""Builds the programs of a model's layers, and runs them for batches and for chains of drafts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import FLOAT32, INT4, Array, address_of
from pronk.cache.paged import PagedCache, SavedFeature
from pronk.kernels.structures import CClusters, CDraftChain, OnToken
from pronk.models.decoder import Decoder
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.key_biases import find_key_biases
from pronk.models.linear import Linear
from pronk.models.program import Program
from pronk.sampling.draft_token import DraftIds, DraftToken
from pronk.sampling.sampler import Sampler
from pronk.sampling.verify import VerifiedPath


class LayersResult(NamedTuple):
    """Outputs of the layers and of the LM head for the rows of a batch."""

    hidden: dict[int, Array]  # output ``[rows, hidden]`` of each layer that was asked for
    # float32 ``[rows, vocab]`` of the rows of all ``logits_nodes``; ``None`` without the LM head
    logits: Array | None
    # number of experts that the pass read, summed over the layers; ``None`` if it was not counted
    experts_read: int | None
    # for each entry, the result of verifying its tree, if the pass has verified it
    paths: Sequence[VerifiedPath | None] | None = None


class LayersProgram(NamedTuple):
    """A program of layers, and the numbers of the layers whose outputs it collects, ascending."""

    program: Program
    collected: tuple[int, ...] = ()


class ChainJob(NamedTuple):
    """A chain of draft tokens to draft after the text of one request.

    Attributes:
        entry: the tokens that the model has not read, a chain; ``logits_nodes`` is the last one.
            The cache has slots for ``max_tokens - 1`` rows after them.
        sampler: sampler of the draft tokens, which supports chains.
        max_tokens: maximum number of draft tokens, at least 1.
        on_token: called with each draft token; returns whether to continue. Its exceptions end the
            chain.
    """

    entry: BatchEntry
    sampler: Sampler
    max_tokens: int
    on_token: Callable[[DraftToken], bool]


_version_of = attrgetter("version")


class LayerExecutor:
    """Runs all layers, or the first ones, as programs, which are built once."""

    # whether forward passes are possible; false after a worker process has been lost
    is_usable = True

    def __init__(
        self, decoder: Decoder, cache: PagedCache, other_caches: Sequence[PagedCache] = ()
    ) -> None:
        """Create an executor for the layers of ``decoder``, which use the KV cache ``cache``.

        ``other_caches`` are KV caches of other models that the layers read.
        """
        self.decoder = decoder
        self.cache = cache
        self.other_caches = other_caches
        if cache.kv_dtype == INT4:
            cache.key_biases = find_key_biases(decoder)
        # seconds spent so far on communication with worker processes
        self.communication_seconds = 0.0
        self._programs: dict[tuple[object, ...], LayersProgram] = {}
        self._caches = (cache, *other_caches)
        # ``version`` of each KV cache when the programs were built; they contain addresses of its
        # memory
        self._versions: tuple[int, ...] = ()
        # Whether the last layers store nothing, so that rows without logits may end before them.
        config = decoder.config
        self._has_layers_without_keys = config.num_storing_layers < config.num_layers
        # Whether rotations depend on the prompt's length, so that each row has its own.
        self.has_dynamic_rope = any(each.config.has_dynamic_rope for each in (cache, *other_caches))

    def run(
        self, batch: ForwardBatch, num_layers: int, collect: Sequence[int] = ()
    ) -> LayersResult:
        """Run rows through the first layers, and store their keys and values.

        Args:
            batch: the rows, whose KV slots are allocated.
            num_layers: number of layers, at least 1; after all layers of the model, the LM head
                runs.
            collect: numbers (from 1; 0: the embedding), ascending, of the layers whose output is
                returned, in the dtype of the cache.
        """
        decoder = self.decoder
        if self._has_layers_without_keys and self._can_shorten(batch, num_layers, collect):
            return self._run_shortened(batch, collect)
        states = np.empty((batch.num_rows, decoder.config.hidden_size), self.cache.dtype)
        logits = None
        has_logits = False
        if num_layers == len(decoder.layers):
            logits = np.empty((len(batch.logits_rows), decoder.config.vocab_size), np.float32)
            has_logits = len(logits) > 0
        program, collected = self._program(num_layers, collect, has_logits=has_logits)
        outputs = None
        if collected:
            outputs = np.empty((len(collected), *states.shape), states.dtype)
        choices = batch.make_choices() if has_logits else None
        experts_read = program.run(batch, states, logits, outputs, choices)
        hidden = _wanted(collect, collected, outputs) if collect else {}
        paths = None if choices is None else choices.results()
        return LayersResult(hidden, logits, experts_read, paths)

    def _collected(self, num_layers: int, collect: Sequence[int]) -> tuple[int, ...]:
        """Return the layers whose outputs a program of the first ``num_layers`` layers collects.

        They are those that the caller wants, ``collect``, and those that computed features read
        after later layers.
        """
        features = self.cache.computed_features
        if not features:
            return tuple(collect)
        layers = set(collect)
        for feature in features:
            last = max(feature.layers)
            if last <= num_layers:
                layers.update(layer for layer in feature.layers if layer < last)
        return tuple(sorted(layers))

    def _can_shorten(self, batch: ForwardBatch, num_layers: int, collect: Sequence[int]) -> bool:
        """Return whether rows without logits may end after the last layer that stores anything.

        Later layers compute nothing that other rows read. Their outputs must not be collected, and
        no feature may depend on them, except one of rows with logits.
        """
        config = self.decoder.config
        last = config.num_storing_layers
        saved = [_last_of_all_rows(feature) for feature in self.cache.features]
        return (
            num_layers == config.num_layers
            and len(batch.logits_rows) < batch.num_rows
            and max((*collect, *saved), default=0) <= last
            and self.decoder.has_uniform_activations
        )

    def _run_shortened(self, batch: ForwardBatch, collect: Sequence[int]) -> LayersResult:
        """Run all rows through the layers that store keys, and those with logits through the rest.

        Most rows of a prompt have no logits. The bits of the others do not depend on them.
        """
        config = self.decoder.config
        last = config.num_storing_layers
        states = np.empty((batch.num_rows, config.hidden_size), self.cache.dtype)
        program, collected = self._program(last, collect, has_logits=False)
        outputs = None
        if collected:
            outputs = np.empty((len(collected), *states.shape), states.dtype)
        experts_read = program.run(batch, states, None, outputs)
        hidden = _wanted(collect, collected, outputs)
        logits = np.empty((len(batch.logits_rows), config.vocab_size), np.float32)
        entries, rows = batch.without_unread()
        if entries:
            rest, _ = self._cached_program(("rest",), self._compile_rest)
            given = states[rows]
            experts_read += rest.run(ForwardBatch(entries), given.copy(), logits, given[None])
        return LayersResult(hidden, logits, experts_read)

    def draft_chains(self, jobs: Sequence[ChainJob]) -> list[int]:
        """Implement :meth:`~pronk.models.model_runner.ModelRunner.draft_chains` for one job."""
        (job,) = jobs
        config = self.decoder.config
        assert not self.cache.computed_features, "expected a draft model, whose cache has none"
        program, _ = self._program(len(self.decoder.layers), (), has_logits=True)
        stream = np.empty((job.entry.num_rows, config.hidden_size), self.cache.dtype)
        return [draft_chain(program, stream, job, vocab_size=config.vocab_size)]

    def _program(
        self, num_layers: int, collect: Sequence[int], *, has_logits: bool
    ) -> LayersProgram:
        """Return the program of the first ``num_layers`` layers, compiled at first use.

        It ends with the LM head if ``has_logits``, and collects the outputs of the layers
        ``collect``.
        """
        key = (num_layers, tuple(collect), has_logits)
        program = self._programs.get(key)
        if program is not None and self._versions == tuple(map(_version_of, self._caches)):
            return program
        return self._cached_program(
            key, lambda: self._compile(num_layers, collect, has_logits=has_logits)
        )

    def _cached_program(
        self, key: tuple[object, ...], make: Callable[[], LayersProgram]
    ) -> LayersProgram:
        """Return the program of ``key``, compiled by ``make`` at its first use.

        A new allocation of a KV cache makes all programs invalid, because they contain addresses.
        """
        versions = tuple(map(_version_of, self._caches))
        if versions != self._versions:
            self._programs = {}
            self._versions = versions
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = make()
        return program

    def _compile(
        self, num_layers: int, wanted: Sequence[int], *, has_logits: bool
    ) -> LayersProgram:
        decoder = self.decoder
        cache = self.cache
        collect = self._collected(num_layers, wanted)
        hidden = decoder.config.hidden_size
        program = Program(decoder.kernels, hidden, cache.dtype, cache, self.other_caches)
        program.keeps_states = num_layers == len(decoder.layers)
        program.embed(decoder)
        if decoder.layer_inputs is not None:
            program.layer_inputs(decoder)
        self._keep_output(program, 0, collect)
        for index in range(num_layers):
            decoder.layers[index].compile(program, index)
            self._keep_output(program, index + 1, collect)
        if has_logits:
            program.linear(decoder.head, norm=decoder.norm, to="logits", only_logits_rows=True)
        return LayersProgram(program, collect)

    def _keep_output(self, program: Program, layer: int, collect: Sequence[int]) -> None:
        """Append what keeps the output of ``layer`` (0: the embedding), and the features of it.

        The outputs of the layers ``collect`` are collected, in this order.
        """
        if layer in self.cache.features:
            program.store_feature(layer)
        if layer in collect:
            program.collect_hidden(collect.index(layer))
        for feature in self.cache.computed_features:
            if max(feature.layers) == layer:
                sources = {each: collect.index(each) for each in feature.layers if each < layer}
                feature.compile(program, sources)

    def _compile_rest(self) -> LayersProgram:
        """Compile the layers after the last one that stores keys; they read ``collected[0]``."""
        decoder = self.decoder
        config = decoder.config
        cache = self.cache
        program = Program(
            decoder.kernels, config.hidden_size, cache.dtype, cache, self.other_caches
        )
        if decoder.layer_inputs is not None:
            program.embed(decoder)
            program.layer_inputs(decoder)
        program.norm(None, source=0)
        for index in range(config.num_storing_layers, config.num_layers):
            decoder.layers[index].compile(program, index)
            self._keep_output(program, index + 1, ())
        program.linear(decoder.head, norm=decoder.norm, to="logits", only_logits_rows=True)
        return LayersProgram(program)


def _wanted(
    collect: Sequence[int], collected: Sequence[int], outputs: Array | None
) -> dict[int, Array]:
    """Return the outputs of the layers ``collect``, a part of ``outputs`` of ``collected``."""
    if outputs is None:
        return {}
    return {layer: outputs[collected.index(layer)] for layer in collect}


def _last_of_all_rows(feature: SavedFeature) -> int:
    """Return the last layer that all rows must run for a feature, also those without logits."""
    if isinstance(feature, int):
        return feature
    return 0 if feature.only_logits_rows else max(feature.layers)


@dataclass(frozen=True, eq=False)
class HeadClusters:
    """Second stage of an LM head whose tokens are divided into clusters.

    Attributes:
        program: computes the logits of the first cluster from the stream.
        linears: rows of the LM head, by cluster.
        tokens: the token ids of each cluster, ``[clusters, size]``.
        num_best: number of clusters whose tokens get logits.
    """

    program: Program
    linears: Sequence[Linear]
    tokens: DraftIds
    num_best: int

    @property
    def num_logits(self) -> int:
        """Number of tokens that get logits."""
        return self.num_best * self.tokens.shape[1]

    @cached_property
    def _weights(self) -> NDArray[np.uintp]:
        """Address of the packed weights (``pronk_weights``) of each cluster."""
        structs = [linear.packed.struct for linear in self.linears]
        return np.array([ctypes.addressof(struct) for struct in structs], np.uintp)

    def for_kernels(self, logits: Array, ids: Array) -> CClusters:
        """Return the clusters as a C structure.

        Args:
            logits: float32 ``[num_logits]``, overwritten in each pass.
            ids: int32 ``[passes, num_logits]``, filled with the token ids of the logits.
        """
        return CClusters(
            op=self.program.first_op(),
            clusters=address_of(self._weights),
            tokens=address_of(self.tokens),
            num_clusters=len(self.tokens),
            num_best=self.num_best,
            logits=address_of(logits),
            ids=address_of(ids),
        )


def draft_chain(
    program: Program,
    stream: Array,
    job: ChainJob,
    *,
    vocab_size: int,
    ids: DraftIds | HeadClusters | None = None,
) -> int:
    """Draft a chain for one request: run a program, sample a token, run it again, and so on.

    Returns the number of forward passes, as
    :meth:`~pronk.models.model_runner.ModelRunner.draft_chains`.

    Args:
        program: program of the kernels that ends with an LM head. It begins with an embedding, or
            reads features from the stream and leaves there the features of the next run.
        stream: ``[rows of the job's entry, hidden]``; overwritten.
        job: the chain, with the rows of the first run. Each later run has one row, the draft token
            before. The sampler has a :attr:`~pronk.sampling.sampler.Sampler.library_sampler`.
        vocab_size: number of logits of the LM head.
        ids: the target's token of each logit; ``None``: 0, 1, …; or the second stage of the LM
            head, whose clusters have the program's logits as scores.
    """
    batch = ForwardBatch([job.entry])
    max_tokens = job.max_tokens
    logits = np.empty((1, vocab_size), FLOAT32)
    second: CClusters | None = None
    ids_of_steps: Iterator[DraftIds | None]
    clusters = ids if isinstance(ids, HeadClusters) else None
    own = None if isinstance(ids, HeadClusters) else ids
    if clusters is None:
        scores = np.empty((max_tokens, vocab_size), FLOAT32)
        ids_of_steps = repeat(own)
    else:
        scores = np.empty((max_tokens, clusters.num_logits), FLOAT32)
        step_ids = np.empty((max_tokens, clusters.num_logits), np.int32)
        ids_of_steps = iter(step_ids)
        cluster_logits = np.empty(clusters.num_logits, FLOAT32)
        second = clusters.for_kernels(cluster_logits, step_ids)
    next_scores = iter(scores)
    errors = list[BaseException]()

    def callback(token: int, confidence: float) -> int:
        try:
            own_ids = next(ids_of_steps)
            return int(job.on_token(DraftToken(token, confidence, next(next_scores), own_ids)))
        except BaseException as error:  # noqa: BLE001 - exceptions cannot cross the kernels
            errors.append(error)
            return 0

    in_library = job.sampler.library_sampler
    assert in_library is not None, "expected a sampler in the library"
    head_ids = own if clusters is None else clusters.tokens
    assert in_library.counts_all(vocab_size, head_ids), "expected logits of the target's vocabulary"
    assert len(batch.logits_rows) == 1, "expected the logits of the last row"
    params = CDraftChain(
        sampling=ctypes.pointer(in_library.options),
        position=len(job.sampler.context),
        steps=max_tokens,
        ids=None if own is None else address_of(own),
        scores=address_of(scores),
        clusters=None if second is None else ctypes.pointer(second),
        on_token=OnToken(callback),
    )
    num_passes = program.draft_chain(batch, stream, logits, params)
    if errors:
        raise errors[0]
    return num_passes
